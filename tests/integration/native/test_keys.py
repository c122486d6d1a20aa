"""A server with keys answers nothing but health without one of them, and reads only the head of such a request."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from servers.native.shared.keys import VARIABLE
from tests.again import again
from tests.grpc_streams import stream
from tests.integration.native.conftest import Server, free_port, status_of, wait_until
from tests.integration.native.health_probe import probed
from tests.integration.native.raw_grpc import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RawGrpc,
    block,
    frame,
    prefixed,
)
from tests.integration.native.test_processes import front_ends

KEY, OTHER, WRONG = "first-key-0123456789", "other-key-0123456789", "wrong-key-0123456789"
FEW = "few-requests-key-0123"
"""The key of a client that may have two requests at a time."""
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
INFER = "/v2/models/rows/infer"
Begin = Callable[..., Server]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def key_file(folder: Path) -> Path:
    return folder / "keys"


@pytest.fixture(params=["0", "2"])
def begin(request: pytest.FixtureRequest, tmp_path: Path, controlled: Begin) -> Begin:
    """Starts a ready server with the key of a file, in one process and in several."""

    def start(*options: str) -> Server:
        key_file(tmp_path).write_text(f"# for tests\n\n{KEY}  # the first\n{FEW} requests=2\n")
        keys = ("--api-key-file", str(key_file(tmp_path)))
        server = controlled("--fronts", request.param, *keys, *options, grpc=True)
        server.open("load", "infer")
        server.wait_ready(int(request.param))
        return server

    return start


@pytest.fixture
def grpc_client(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[Server], tritonclient.grpc.InferenceServerClient]]:
    clients: list[tritonclient.grpc.InferenceServerClient] = []

    def connect(server: Server) -> tritonclient.grpc.InferenceServerClient:
        clients.append(tritonclient.grpc.InferenceServerClient(server.grpc_address))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def rows() -> list[tritonclient.grpc.InferInput]:
    tensor = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    return [tensor]


def test_a_hangup_before_the_server_listens_does_not_end_it(tmp_path: Path) -> None:
    key_file(tmp_path).write_text(KEY)
    settings = {"http_port": free_port(), "grpc_port": 0, "engine": "null", "api_key_file": str(key_file(tmp_path))}
    program = """if True:
        import os, signal, sys
        import servers.native.server
        from servers.native.__main__ import main
        servers.native.server.run = lambda *_: os.kill(os.getpid(), signal.SIGHUP) or 7
        sys.exit(main())"""
    assert subprocess.run([sys.executable, "-c", program, json.dumps(settings)], timeout=100).returncode == 7


def test_every_route_but_health_needs_a_key(begin: Begin) -> None:
    server = begin()
    for path in ("/", "/v2", "/docs", "/metrics", "/gpu-info", "/openapi.json", "/v2/models/rows/ready", "/nothing"):
        refused = server.request("GET", path)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        assert server.request("GET", path, headers=bearer(KEY)).status in (200, 404), path
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert server.status(path) == 200
        assert server.status(path + "/") == 401
    assert server.request("POST", INFER, BODY, bearer(KEY)).status == 200
    assert server.request("POST", INFER, BODY, {"authorization": f"bearer  {KEY}"}).status == 200
    for value in (KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer {WRONG}"):
        assert server.request("POST", INFER, BODY, {"Authorization": value}).status == 401, value


def test_two_authorization_headers_are_none(begin: Begin) -> None:
    server = begin()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        twice = f"Authorization: Bearer {WRONG}\r\nAuthorization: Bearer {KEY}\r\n"
        client.sendall(f"GET /v2 HTTP/1.1\r\nHost: a\r\n{twice}\r\n".encode())
        assert client.makefile("rb").readline().split()[1] == b"401"


def test_every_call_but_health_needs_a_key(begin: Begin, grpc_client: Callable[..., object]) -> None:
    client = grpc_client(begin())
    assert isinstance(client, tritonclient.grpc.InferenceServerClient)
    assert client.is_server_live()
    assert client.is_server_ready()
    for headers in ({}, {"authorization": KEY}, {"authorization": f"Bearer {WRONG}"}):
        for call in (client.get_server_metadata, client.get_inference_statistics):
            with pytest.raises(InferenceServerException) as caught:
                call(headers=headers)
            assert status_of(caught) == "UNAUTHENTICATED"
        with pytest.raises(InferenceServerException) as caught:
            client.infer("rows", rows(), headers=headers)
        assert status_of(caught) == "UNAUTHENTICATED"
    good = {"authorization": f"Bearer {KEY}"}
    assert client.get_server_metadata(headers=good).name
    assert client.infer("rows", rows(), headers=good).as_numpy("y").shape == (1, 4)


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_wrong_key_is_refused_before_its_body_comes(begin: Begin, expect: str) -> None:
    server = begin()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {WRONG}\r\n{expect}"
        client.sendall(f"{head}Content-Length: {32 * 2**20}\r\n\r\n".encode())
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer
    # Nothing was counted as an inference, held or taken.
    stats = json.loads(server.request("GET", "/v2/models/stats", headers=bearer(KEY)).body)["model_stats"][0]
    assert stats["inference_stats"]["fail"]["count"] == 0


def test_a_body_behind_a_wrong_key_is_cut_off(begin: Begin) -> None:
    server = begin()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {WRONG}\r\n"
        client.sendall(f"{head}Content-Length: {60 * 2**20}\r\n\r\n".encode())
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(bytes(60 * 2**20))
    assert server.request("POST", INFER, BODY, bearer(KEY)).status == 200


def test_bytes_behind_a_call_with_a_wrong_key_are_bounded(begin: Begin) -> None:
    server, mib = begin(), bytes(2**20)
    with RawGrpc(server.grpc_port) as client:
        client.open(1)
        assert client.answer(1).status == 16
        client.send(frame(DATA, 0, 1, mib))
        assert client.call(3, b"", "ServerLive").status == 0
        client.send(frame(DATA, 0, 1, b"x"))
        client.open(5, "ServerLive")
        assert (client.answer(5).reset, client.goaway) == (7, 0)
        client.send(frame(DATA, 0, 1, mib[:-1]), *[frame(DATA, 0, 1, mib)] * 7)  # what was under way when it was told
        client.send(frame(PING, 0, 0, bytes(8)))
        while not client.pings:
            client.read()
        client.send(frame(DATA, 0, 1, length=1))
        client.read_until_closed()
        assert client.goaway == 11
    with RawGrpc(server.grpc_port) as client:
        for stream in (1, 5, 9):
            client.open(stream)
            client.send(frame(DATA, 0, stream, mib))
            client.send(
                frame(HEADERS, END_HEADERS, stream + 2, block("ModelMetadata", [("authorization", f"Bearer {KEY}")]))
            )
            client.send(frame(DATA, END_STREAM, stream + 2, prefixed(b"")))
            assert client.answer(stream).status == 16
            assert client.answer(stream + 2).status is not None
        assert client.goaway is None


def test_curl_gets_the_refusal_of_a_large_body(begin: Begin, tmp_path: Path) -> None:
    server = begin()
    (tmp_path / "large").write_bytes(bytes(8 * 2**20))
    (tmp_path / "headers").write_text(f"Authorization: Bearer {WRONG}\n")
    options = ["-s", "-o", str(tmp_path / "out"), "-w", "%{http_code}", "-H", f"@{tmp_path / 'headers'}"]
    body = ["--expect100-timeout", "60", "--data-binary", f"@{tmp_path / 'large'}"]
    command = ["curl", *options, *body, f"http://{server.address}{INFER}"]
    assert subprocess.run(command, capture_output=True, check=False).stdout == b"401"


def test_metrics_may_be_open(begin: Begin) -> None:
    server = begin("--open-metrics", "true")
    assert (server.status("/metrics"), server.status("/gpu-info"), server.status("/v2")) == (200, 200, 401)


def test_keys_change_at_a_hangup_and_no_request_is_lost(begin: Begin, tmp_path: Path, grpc_client: Begin) -> None:
    server, file = begin(), key_file(tmp_path)
    calls = grpc_client(server)
    assert isinstance(calls, tritonclient.grpc.InferenceServerClient)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def status(key: str) -> int:
        connection.request("POST", INFER, BODY, bearer(key))
        response = connection.getresponse()
        response.read()
        return response.status

    def called(key: str) -> str:
        try:
            calls.infer("rows", rows(), headers={"authorization": f"Bearer {key}"})
        except InferenceServerException as error:
            return str(error.status()).removeprefix("StatusCode.")
        return "OK"

    assert (called(OTHER), called(KEY)) == ("UNAUTHENTICATED", "OK")
    for change in range(100):
        file.with_suffix(".new").write_text(f"{KEY}\n" + (f"{OTHER}\n" if change % 2 else ""))
        file.with_suffix(".new").rename(file)
        os.kill(server.process.pid, signal.SIGHUP)
        assert (status(KEY), called(KEY)) == (200, "OK")
    wait_until(lambda: (status(OTHER), called(OTHER)) == (200, "OK"), "the other key is known")
    file.write_text(OTHER)
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: (status(KEY), called(KEY)) == (401, "UNAUTHENTICATED"), "the first key is gone")
    file.write_text("short")  # not a key: those before are kept
    os.kill(server.process.pid, signal.SIGHUP)
    log = tmp_path / f"log-{server.port}"
    wait_until(lambda: "the keys before are kept" in log.read_text(), "the file is refused")
    assert (status(OTHER), called(OTHER)) == (200, "OK")
    connection.close()
    assert not {"short", KEY, OTHER} & set(log.read_text().split())


def test_a_front_end_that_is_started_again_has_the_keys_of_the_last_hangup(controlled: Begin, tmp_path: Path) -> None:
    key_file(tmp_path).write_text(KEY)
    server = controlled("--fronts", "1", "--api-key-file", str(key_file(tmp_path)))
    server.open("load", "infer")
    server.wait_ready()
    key_file(tmp_path).write_text(OTHER)
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: server.request("GET", "/v2", headers=bearer(OTHER)).status == 200, "the other key is known")
    key_file(tmp_path).write_text("short")
    (front_end,) = front_ends(server)
    front_end.kill()
    wait_until(lambda: server.status("/v2") == 401, "another front end answers")
    assert server.request("GET", "/v2", headers=bearer(OTHER)).status == 200


def test_keys_of_the_environment_are_in_no_argument_of_a_process(
    controlled: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{KEY}\n{OTHER}")
    server = controlled("--fronts", "1")
    server.open("load")
    server.wait_ready()
    assert [server.request("GET", "/v2", headers=bearer(key)).status for key in (KEY, OTHER, WRONG)] == [200, 200, 401]
    assert not [process for process in server.processes if KEY in " ".join(process.cmdline())]


@contextlib.contextmanager
def held(server: Server) -> Iterator[None]:
    """The engine of a server waits inside."""
    (server.folder / "infer").unlink()
    try:
        yield
    finally:
        server.open("infer")


@contextlib.contextmanager
def asked(server: Server, key: str) -> Iterator[http.client.HTTPConnection]:
    """A connection on which a request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", INFER, BODY, bearer(key))
        yield connection
    finally:
        connection.close()


def over_limit(server: Server) -> float:
    return server.metric('abserve_native_requests_failure_total{model="rows",reason="over_limit"')


def test_one_key_cannot_hold_all(begin: Begin) -> None:
    server = begin("--open-metrics", "true")
    with held(server), contextlib.ExitStack() as stack:
        flood = [stack.enter_context(asked(server, FEW)) for _ in range(20)]
        # Two wait, of all connections and processes; the others are answered at once. Of two that come to two front
        # ends at the same time both may be refused.
        wait_until(lambda: over_limit(server) >= 18, "the others are refused")
        other = stack.enter_context(asked(server, KEY))
        server.open("infer")
        answers = [connection.getresponse() for connection in flood]
        assert other.getresponse().status == 200
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) in (18, 19)
    assert {answer.getheader("Retry-After") for answer in refused} == {"1"}
    assert {answer.status for answer in answers} == {200, 429}
    wait_until(lambda: status_with(server, FEW) == 200, "its requests have ended")


@contextlib.contextmanager
def headed(server: Server, key: str, count: int) -> Iterator[None]:
    """So many requests whose bodies do not come."""
    lines = (f"POST {INFER} HTTP/1.1", "Host: a", f"Authorization: Bearer {key}", "Content-Length: 1000")
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            client.sendall("\r\n".join((*lines, "Expect: 100-continue", "", "")).encode())
            assert client.recv(100).split()[1] == b"100"
        yield


@contextlib.contextmanager
def begun(server: Server, key: str, count: int) -> Iterator[None]:
    """So many requests whose bodies do not come; every request more of this key is refused."""
    with headed(server, key, count):
        wait_until(lambda: status_with(server, key) == 429, "no more than these")
        yield


def status_with(server: Server, key: str) -> int:
    return server.request("POST", INFER, BODY, bearer(key)).status


def test_a_request_counts_from_its_head_until_its_client_leaves(begin: Begin, grpc_client: Begin) -> None:
    server = begin()
    calls = grpc_client(server)
    assert isinstance(calls, tritonclient.grpc.InferenceServerClient)
    few = {"authorization": f"Bearer {FEW}"}
    with begun(server, FEW, 2):
        with pytest.raises(InferenceServerException, match="requests=2") as caught:
            calls.infer("rows", rows(), headers=few)
        assert status_of(caught) == "RESOURCE_EXHAUSTED"
        assert status_with(server, KEY) == 200
        assert server.request("GET", "/v2", headers=bearer(FEW)).status == 200
    wait_until(lambda: status_with(server, FEW) == 200, "both have left")
    for _ in range(5):  # one after the other
        assert calls.infer("rows", rows(), headers=few).as_numpy("y").shape == (1, 4)


def test_a_client_that_waits_for_its_answer_is_never_over_the_limit(begin: Begin, grpc_client: Begin) -> None:
    """Also if another front end takes its next request before the first one goes on."""
    server = begin()
    calls, few = grpc_client(server), {"authorization": f"Bearer {FEW}"}
    assert isinstance(calls, tritonclient.grpc.InferenceServerClient)
    with headed(server, FEW, 1):  # of two
        for _ in range(100):
            assert status_with(server, FEW) == 200
            assert calls.infer("rows", rows(), headers=few).as_numpy("y").shape == (1, 4)


def test_messages_of_a_stream_count_each(begin: Begin) -> None:
    server = begin()
    with stream(server.grpc_address, {"authorization": f"Bearer {FEW}"}) as (client, arrived):
        with begun(server, FEW, 2):
            client.async_stream_infer("rows", rows(), request_id="seven")
            assert "requests=2" in str(arrived.get(timeout=60))
        wait_until(lambda: status_with(server, FEW) == 200, "both have left")
        for _ in range(5):  # it goes on, one after the other
            client.async_stream_infer("rows", rows())
            assert isinstance(arrived.get(timeout=60), tritonclient.grpc.InferResult)


def test_limits_change_at_a_hangup(begin: Begin, tmp_path: Path) -> None:
    server = begin()
    key_file(tmp_path).write_text(f"{KEY}\n{FEW} requests=1\n")
    os.kill(server.process.pid, signal.SIGHUP)
    with begun(server, FEW, 1):
        assert status_with(server, KEY) == 200


def test_the_requests_of_a_front_end_that_dies_count_no_more(controlled: Begin, tmp_path: Path) -> None:
    key_file(tmp_path).write_text(f"{KEY}\n{FEW} requests=1\n")
    server = controlled("--fronts", "1", "--api-key-file", str(key_file(tmp_path)))
    server.open("load", "infer")
    server.wait_ready()
    with begun(server, FEW, 1):
        (front_end,) = front_ends(server)
        front_end.kill()
        wait_until(lambda: server.status("/v2/health/ready") == 200, "another front end answers")
        assert status_with(server, FEW) == 200


WRONG_REQUEST = f"GET /v2 HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {WRONG}\r\n\r\n".encode()


def knock(server: Server, ended: threading.Event, refused: list[int]) -> None:
    """Send wrong keys over HTTP, each on a connection of its own, and over gRPC, until the event."""
    calls = [frame(HEADERS, END_HEADERS | END_STREAM, 0, block("ModelMetadata", [("authorization", WRONG)]))]
    with RawGrpc(server.grpc_port) as client:
        for stream_number in itertools.count(1, 2):
            if ended.is_set():
                return
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(WRONG_REQUEST)
                refused[0] += connection.recv(1000).startswith(b"HTTP/1.1 401")
            client.send(calls[0][:5] + stream_number.to_bytes(4, "big") + calls[0][9:])
            refused[1] += client.answer(stream_number).status == 16


@again
@pytest.mark.parametrize("count", [300, pytest.param(5_000, marks=pytest.mark.slow)])
def test_wrong_keys_at_a_high_rate_leave_health_and_honest_clients(begin: Begin, count: int) -> None:
    server, ended, refused = begin(), threading.Event(), [0, 0]
    with ThreadPoolExecutor(4) as threads:
        knocking = [threads.submit(knock, server, ended, refused) for _ in range(4)]
        try:
            with probed(server.port, 20) as health:
                while min(refused) < count:
                    assert status_with(server, KEY) == 200
        finally:
            ended.set()
        for each in knocking:
            each.result(60)
    assert health.slowest_s < 0.1, health


def test_a_hangup_with_ten_thousand_keys_loses_no_request(begin: Begin, tmp_path: Path) -> None:
    server = begin()
    many = "".join(f"key-of-a-client-{number:06} requests={1 + number % 9}\n" for number in range(10_000))
    with ThreadPoolExecutor(2) as threads:
        ended = threading.Event()

        def ask() -> list[int]:
            statuses = []
            while not ended.is_set():
                statuses.append(status_with(server, KEY))
            return statuses

        def have_changed(there: str, gone: str) -> bool:
            return [status_with(server, key) for key in (there, gone)] == [200, 401]

        asking = [threads.submit(ask) for _ in range(2)]
        try:
            for change in range(20):
                key_file(tmp_path).with_suffix(".new").write_text(f"{KEY}\n{OTHER if change % 2 else FEW}\n{many}")
                key_file(tmp_path).with_suffix(".new").rename(key_file(tmp_path))
                os.kill(server.process.pid, signal.SIGHUP)
                there, gone = (OTHER, FEW) if change % 2 else (FEW, OTHER)
                wait_until(partial(have_changed, there, gone), "the file is read")
        finally:
            ended.set()
        assert {status for each in asking for status in each.result(60)} == {200}
    assert status_with(server, "key-of-a-client-009999") == 200


def test_independent_clients_with_a_key(begin: Begin, tmp_path: Path) -> None:
    server = begin()
    (tmp_path / "headers").write_text(f"Authorization: Bearer {KEY}\n")
    (tmp_path / "body").write_bytes(BODY)
    curl = ["curl", "-sS", "-H", f"@{tmp_path / 'headers'}", "--data-binary", f"@{tmp_path / 'body'}"]
    done = subprocess.run([*curl, f"http://{server.address}{INFER}"], capture_output=True, check=False)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [1, 2, 3, 4], done.stderr
    tensor = tritonclient.http.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    with contextlib.closing(tritonclient.http.InferenceServerClient(server.address)) as client:
        with pytest.raises(InferenceServerException, match="401"):
            client.infer("rows", [tensor])
        assert client.infer("rows", [tensor], headers=bearer(KEY)).as_numpy("y").shape == (1, 4)
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            stub.ServerMetadata(service_pb2.ServerMetadataRequest())
        metadata = [("authorization", f"Bearer {KEY}")]
        assert stub.ServerMetadata(service_pb2.ServerMetadataRequest(), metadata=metadata).name


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_scrapes_with_a_key(controlled: Begin, tmp_path: Path) -> None:
    key_file(tmp_path).write_text(KEY)
    server = controlled("--api-key-file", str(key_file(tmp_path)))
    server.open("load", "infer")
    server.wait_ready()
    target = {"static_configs": [{"targets": [server.address]}], "scrape_interval": "100ms", "scrape_timeout": "100ms"}
    keyed = {"job_name": "keyed", "authorization": {"credentials_file": str(key_file(tmp_path))}, **target}
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(json.dumps({"scrape_configs": [keyed, {"job_name": "keyless", **target}]}))
    port = free_port()
    command = ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL) as scraper:
        try:

            def health() -> dict[str, str]:
                try:
                    with urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=60) as answer:
                        found = json.load(answer)["data"]["activeTargets"]
                except OSError:
                    return {}
                return {target["labels"]["job"]: target["health"] for target in found}

            wait_until(lambda: health() == {"keyed": "up", "keyless": "down"}, "both were scraped")
        finally:
            scraper.terminate()
