"""Real FastAPI and LitServe servers: the protocol's answers, malformed bodies, merged batches, and a comparison."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as http_client

from servers.protocol.tensors import Array
from tests.integration.loadgen.conftest import UNWATCHED_ABSERVE
from tests.integration.native.conftest import free_port, wait_until

LIBRARY = pytest.mark.skipif(find_spec("litserve") is None, reason="the extra litserve is not installed")
KINDS = ["fastapi", pytest.param("litserve", marks=LIBRARY)]
MODULE = """
import torch
from servers.models import Input, Output, UserModel


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.factor * x, torch.full((len(x), 1), float(len(x)))


def rows():
    outputs = [Output("y", "FP32", ["batch", "size"]), Output("rows", "FP32", ["batch", 1])]
    inputs = [Input("x", "FP32", ["batch", "size"])]
    return UserModel(Rows().eval(), inputs, outputs, item="row", sizes={"size": (5, 16)})


def scores():
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).eval()
    return UserModel(module, [Input("x", "FP32", ["batch", 16])], [Output("y", "FP32", ["batch", 10], "logits")])
"""


@dataclass
class Plain:
    """A ready server; it executes `rows`, whose second output is the number of rows of the whole batch."""

    url: str
    model: str
    title: str
    process: subprocess.Popen[bytes]

    def infer(self, x: Array) -> tuple[Array, int]:
        with http_client.InferenceServerClient(self.url.removeprefix("http://")) as client:
            given = http_client.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
            answer = client.infer(self.model, [given], request_id="7")
        assert answer.get_response()["id"] == "7"
        return answer.as_numpy("y"), int(answer.as_numpy("rows")[0, 0])

    def post(self, body: bytes, length: str | None = None) -> tuple[int, Any]:
        headers = {} if length is None else {"Inference-Header-Content-Length": length}
        request = urllib.request.Request(f"{self.url}/v2/models/{self.model}/infer", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def document(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return json.loads(answer.read() or b"{}")


def launch(kind: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*UNWATCHED_ABSERVE, "serve", kind, "--http-port", str(free_port()), *options, "--print-launch"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=60)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "mine.py").write_text(MODULE)
    options = ("--model", "mine.py:rows", "--max-batch-size", "8", "--max-queue-delay-us", "500000", "--device", "cpu")
    done = launch(request.param, folder, *options)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["grpc_address"] is None
    assert plan["cannot_pad"].endswith("server does not pad")
    with running(plan, folder) as (found, children):
        assert any("spawn_main" in " ".join(one.cmdline()) for one in children) == (request.param == "litserve")
        yield found


@contextmanager
def running(plan: dict[str, Any], folder: Path) -> Iterator[tuple[Plain, list[psutil.Process]]]:
    """A ready server with its other processes, none of which is left."""
    process = subprocess.Popen(plan["argv"], cwd=folder)
    found = Plain(plan["http_url"], plan["model"], plan["title"], process)

    def ready() -> bool:
        assert process.poll() is None, "the server has exited"
        try:
            return found.document("/v2/health/ready") == {}
        except OSError:
            return False

    wait_until(ready, "ready", 90)
    children = psutil.Process(process.pid).children(recursive=True)
    yield found, children
    process.terminate()
    _, alive = psutil.wait_procs([psutil.Process(process.pid), *children], timeout=30)
    for one in alive:
        one.kill()
    process.wait()
    assert not alive, "SIGTERM ends the workers, too"


def test_fastapi_is_ready_when_all_its_workers_are(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    options = ("--model", "mine.py:rows", "--device", "cpu", "--threads", "1", "--workers", "2")
    plan = json.loads(launch("fastapi", tmp_path, *options).stdout)
    with running(plan, tmp_path) as (found, children):
        assert sum("spawn_main" in " ".join(one.cmdline()) for one in children) == 2
        assert found.document(f"/v2/models/{found.model}/config")["instance_group"][0]["count"] == 2
        x = np.arange(6, dtype=np.float32).reshape(1, 6)
        assert np.array_equal(found.infer(x)[0], 2.0 * x)


@LIBRARY
def test_litserve_has_one_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    done = launch("litserve", tmp_path, "--model", "mine.py:rows", "--workers", "2")
    assert done.returncode != 0
    assert "--workers is for FastAPI" in done.stderr


def body_of(tensor: dict[str, Any], data: bytes) -> tuple[bytes, str]:
    header = json.dumps({"inputs": [tensor]}).encode()
    return header + data, str(len(header))


def test_it_describes_itself_truly(server: Plain) -> None:
    kind = server.document("/v2")["name"]
    assert server.title == {"fastapi": "FastAPI torch fp32", "litserve": "LitServe torch fp32"}[kind]
    tensors = server.document(f"/v2/models/{server.model}")
    assert tensors["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    config = server.document(f"/v2/models/{server.model}/config")
    values = {name: value["string_value"] for name, value in config["parameters"].items()}
    assert (values["engine"], values["precision"], values["device"]) == ("torch", "fp32", "cpu")
    assert (config["max_batch_size"], config["dynamic_batching"]) == (8, {"max_queue_delay_microseconds": 500_000})
    runtime = server.document("/gpu-info")["runtime"]
    assert runtime["placement"]["params_by_device"] == {"cpu": 1}


def test_requests_that_wait_together_are_one_batch_and_each_gets_its_own_answer(server: Plain) -> None:
    with ThreadPoolExecutor(4) as pool:
        inputs = [np.full((2, 5), number, "f4") for number in range(4)]
        answers = list(pool.map(server.infer, inputs))
    for given, (y, _) in zip(inputs, answers, strict=True):
        np.testing.assert_array_equal(y, 2 * given)
    assert max(rows for _, rows in answers) > 2, "no two requests were merged"
    assert max(rows for _, rows in answers) <= 8


def test_a_size_of_0_is_for_the_model_to_judge(server: Plain) -> None:
    assert server.infer(np.zeros((2, 0), "f4"))[0].shape == (2, 0)


def test_more_than_the_largest_batch_and_other_shapes_are_not_merged(server: Plain) -> None:
    shapes = [(6, 3), (6, 3), (2, 4), (1, 3)]
    with ThreadPoolExecutor(4) as pool:
        inputs = [np.full(shape, number, "f4") for number, shape in enumerate(shapes)]
        answers = list(pool.map(server.infer, inputs))
    for given, (y, rows) in zip(inputs, answers, strict=True):
        np.testing.assert_array_equal(y, 2 * given)
        assert rows <= 8
    assert answers[2][1] == 2, "a request of another size was merged"


GOOD = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        pytest.param(GOOD | {"name": "z"}, bytes(8), id="another-name"),
        pytest.param(GOOD | {"datatype": "INT32"}, bytes(8), id="another-datatype"),
        pytest.param(GOOD | {"shape": [1, 2, 1]}, bytes(8), id="another-rank"),
        pytest.param(GOOD | {"shape": [0, 2]}, bytes(8), id="no-rows"),
        pytest.param(GOOD | {"shape": [9, 2], "parameters": {"binary_data_size": 72}}, bytes(72), id="too-many-rows"),
        pytest.param(GOOD | {"shape": [1, 17], "parameters": {"binary_data_size": 68}}, bytes(68), id="too-long"),
        pytest.param(GOOD | {"shape": ["1", 2]}, bytes(8), id="text-as-size"),
        pytest.param(GOOD, bytes(7), id="too-few-bytes"),
        pytest.param(GOOD, bytes(9), id="too-many-bytes"),
        pytest.param(GOOD | {"parameters": {"binary_data_size": 4}}, bytes(8), id="another-size"),
        pytest.param({}, b"", id="no-tensor"),
    ],
)
def test_a_malformed_tensor_gets_400(server: Plain, tensor: dict[str, Any], data: bytes) -> None:
    status, answer = server.post(*body_of(tensor, data))
    assert status == 400, answer
    assert set(answer) == {"error"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"{}", b'{"inputs": 1}', b'{"inputs": []}', b"\xff" * 40])
def test_a_body_without_a_request_gets_400_and_the_next_one_an_answer(server: Plain, body: bytes) -> None:
    assert server.post(body)[0] == 400
    assert server.post(body, "1000")[0] == 400
    assert server.post(body, "two")[0] == 400
    assert server.post(body, "-1")[0] == 400
    begun = time.monotonic()
    assert server.post(*body_of(GOOD, np.ones(2, "<f4").tobytes()))[0] == 200
    assert time.monotonic() - begun < 10


def test_another_model_gets_404(server: Plain) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.document("/v2/models/nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--payloads", "jpeg"), "a plain server decodes no JPEG files; use --payloads uint8, or serve native"),
        (("--max-length", "64"), "--max-length is for language models, such as --model language:demo"),
        (("--payloads", "fp32,uint8"), "a plain server serves one payload"),
        (("--precision", "fp16", "--device", "cpu"), "does not offer precision fp16 on cpu"),
        (("--model", "nothing"), "unknown model 'nothing'"),
    ],
)
def test_what_it_does_not_serve_is_refused_at_once(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = launch("fastapi", tmp_path, *options)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.skipif(find_spec("litserve") is not None, reason="the extra litserve is installed")
def test_without_litserve_the_message_names_the_extra(tmp_path: Path) -> None:
    done = launch("litserve", tmp_path)
    assert done.returncode == 1
    assert "pip install 'abserve[servers,litserve]'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_with_the_native_server(tmp_path: Path, kind: str) -> None:
    """Equal answers before and under load, of equal weights, and the arm is described as it runs."""
    (tmp_path / "mine.py").write_text(MODULE)
    load = ("--rounds", "1", "--requests", "8", "--concurrency", "4", "--threads", "1")
    arms = ("--a", "native", "--b", kind, "--model", "mine.py:scores", "--scenarios", "single,concurrent")
    out = tmp_path / "run"
    done = subprocess.run(
        [*UNWATCHED_ABSERVE, "compare", "--out", str(out), *arms, *load],
        capture_output=True, text=True, timeout=220, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    result = json.loads((out / "result.json").read_bytes())
    assert result["parity"]["ok"], result["parity"]
    states = {check["name"]: check["state"] for check in result["checks"]}
    same = ("answers_under_load", "same_precision", "same_weights", "same_model", "same_device")
    assert {states[name] for name in same} == {"passed"}, states
    assert not any(summary["errors"] for summary in result["summaries"])
    (arm,) = [one for one in result["arms"] if one["label"] == "b"]
    assert (arm["target"], arm["in_effect"]["engine"], arm["in_effect"]["threads"]) == (kind, "torch", "1")


def test_grpc_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    command = [*UNWATCHED_ABSERVE, "compare", "--a", "native", "--b", "fastapi", "--transport", "grpc"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "--b fastapi serves HTTP only; use --transport http" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", ["fastapi_server.py", "litserve_server.py"])
def test_each_server_is_one_short_file(name: str) -> None:
    import servers.plain

    assert len((Path(servers.plain.__path__[0]) / name).read_text().splitlines()) <= 180  # with several workers
