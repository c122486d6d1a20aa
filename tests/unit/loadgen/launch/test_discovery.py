"""The model of two URLs when none was named: real answers over HTTP of servers that list models in different ways."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from loadgen.base.headers import read_headers
from loadgen.client.endpoint import Endpoint, EndpointError
from loadgen.launch import deployment
from loadgen.launch.deployment import DeploymentError, RemoteDeployment
from loadgen.launch.discovery import find_models
from loadgen.records.run import Access, ArmRequest
from tests.hostile_server import hostile_server

Serve = Callable[..., str]
ODD_NAMES = ["team/res net", "half50%", "größe?#", "a%2Fb"]
KINDS = ["index", "kserve", "openvino"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with these models, ready or not, and returns its URL."""
    servers = []

    def start(
        *models: str, unready: Sequence[str] = (), lists: str = "index", states: bool = True, versions: int = 1
    ) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = self.path.split("/")
                if self.path == "/v2/health/live" and lists != "nothing of V2":
                    self.answer({})
                elif self.path == "/v2/models" and lists == "kserve":
                    self.answer({"models": [*models, *unready]})
                elif self.path == "/v1/config" and lists == "openvino":
                    self.answer({name: {"model_version_status": []} for name in (*models, *unready)})
                elif len(parts) == 5 and parts[4] == "ready" and unquote(parts[3]) in models:
                    self.answer({})
                else:
                    self.answer({"error": "not found"}, 404)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/v2/repository/index" or lists != "index":
                    self.answer({"error": "not found"}, 404)
                    return
                rows = [{"name": name, "version": str(v + 1)} for name in models for v in range(versions)]
                rows = [{**row, "state": "READY"} for row in rows] if states else rows
                self.answer([*rows, *({"name": name} for name in unready)])

            def answer(self, document: Any, status: int = 200) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def found(*urls: str, preferred: str = "default", **models: str) -> tuple[Mapping[str, str], tuple[str, ...]]:
    arms = [
        ArmRequest(label=label, target=url, model=models.get(label)) for label, url in zip("abc", urls, strict=False)
    ]
    return find_models(arms, preferred)


def refusal(*urls: str, **models: str) -> str:
    with pytest.raises(DeploymentError) as caught:
        found(*urls, **models)
    return str(caught.value)


@pytest.mark.parametrize("lists", KINDS)
@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_only_common_model_is_taken_whatever_its_name(serve: Serve, lists: str, name: str) -> None:
    names, notes = found(serve(name, "another"), serve(name, "third", unready=["another"], lists=lists))
    assert names == {"a": name, "b": name}
    assert "the only one" in notes[0]


def test_several_common_models_come_with_the_command_that_names_one(serve: Serve) -> None:
    a, b = serve("m1", "m 2", "only here"), serve("m1", "m 2")
    assert refusal(a, b).splitlines()[1:] == [
        f"  abserve compare --a {a} --b {b} --model 'm 2'",
        f"  abserve compare --a {a} --b {b} --model m1",
    ]


def test_servers_without_a_common_model_are_listed_with_the_options(serve: Serve) -> None:
    a, b = serve("m1"), serve("m2", "m3")
    said = refusal(a, b)
    assert f"A {a} serves m1\n" in said
    assert f"B {b} serves m2, m3\n" in said
    assert said.endswith(f"abserve compare --a {a} --b {b} --a-model m1 --b-model m2")


def test_a_model_named_on_one_arm_is_looked_for_on_the_other(serve: Serve) -> None:
    a, b = serve("m1", "m2"), serve("m1", "m2")
    assert found(a, b, a="m2")[0] == {"a": "m2", "b": "m2"}
    assert found(a, serve("other"), a="m2")[0] == {"a": "m2", "b": "other"}
    assert found(a, b, preferred="m1") == ({"a": "m1", "b": "m1"}, ())


def test_a_server_that_lists_nothing_is_asked_for_the_models_of_the_others(serve: Serve) -> None:
    silent = serve("m2", lists="none")
    assert found(serve("m1", "m2"), silent)[0] == {"a": "m2", "b": "m2"}
    assert "--b-model NAME" in refusal(serve("m1"), silent)
    assert "--a-model NAME" in refusal(silent, silent)


def test_a_listed_model_without_a_state_is_asked_whether_it_is_ready(serve: Serve) -> None:
    """As Triton lists its repository before anything is loaded."""
    assert found(serve("m1", unready=["m2"], states=False), serve("m1", "m2"))[0] == {"a": "m1", "b": "m1"}
    said = refusal(serve("m1"), serve(unready=["m1"]))
    assert said.startswith("--b: ")
    assert "m1 (not loaded)" in said


def test_two_versions_are_noted(serve: Serve) -> None:
    _, (note,) = found(serve("m1", versions=2), serve("m1"), preferred="m1")
    assert "versions 1, 2 of m1" in note
    assert "--a-version" in note


def test_other_servers_are_refused_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not one of the Open Inference Protocol" in refusal(serve("m1"), serve(lists="nothing of V2"))
    monkeypatch.setattr(deployment, "RUNNING_READY_SECONDS", 0.1)
    assert "Connection refused" in refusal(serve("m1"), "http://127.0.0.1:1")


def test_a_server_that_wants_a_key_is_named_at_once(serve: Serve) -> None:
    with hostile_server() as server:
        server.answers["/v2/health/live"] = (401, {}, b'{"error": "no key"}')
        said = refusal(serve("m1"), server.url)
    assert "--b: the server at" in said
    assert "GET /v2/health/live answers 401 (no key)); add --b-header" in said


def test_a_key_that_is_refused_is_to_be_checked_by_the_option_that_gave_it() -> None:
    access = Access(header=read_headers({"Authorization": "Bearer wrong"}))
    with hostile_server() as server:
        server.answers["/v2/health/live"] = (401, {}, b"")
        asked = RemoteDeployment(server.url, access=access, model_option="arms.model-b.model")
        with pytest.raises(DeploymentError, match=r"check the value of arms\.model-b\.header$"):
            asked.wait_live()


def test_one_server_alone_takes_its_only_model(serve: Serve) -> None:
    assert Endpoint(serve("größe?#", unready=["m2"])).only_model("default") == "größe?#"
    assert Endpoint(serve("default", "m2")).only_model("default") == "default"
    for url, word in (
        (serve("m 1", "m2"), "--model 'm 1'"),
        (serve(), "load one"),
        (serve(lists="none"), "--model NAME"),
    ):
        with pytest.raises(EndpointError, match=word):
            Endpoint(url).only_model("default")
