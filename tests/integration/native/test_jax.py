"""`abserve serve native --engine jax`: the command enters the second environment, and the server answers there."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from servers.engines.factory import environment_of, second_interpreter
from servers.engines.settings import EngineError
from servers.models.registry import get_variant
from servers.models.weights import RandomWeights
from tests.integration.native.conftest import free_port, wait_until

MODEL = """
import torch
from servers.models import Input, Output, UserModel


def doubled():
    torch.manual_seed(0)
    values = Input("values", "FP32", ("batch", 4))
    return UserModel(torch.nn.Linear(4, 3), [values], [Output("scores", "FP32", ("batch", 3))], max_batch_size=8)
"""


def missing() -> str:
    try:
        environment_of("jax")
    except EngineError as exc:
        return str(exc)
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:doubled"


@pytest.fixture
def serve(tmp_path: Path, model: str) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> tuple[subprocess.Popen[bytes], int]:
        port = free_port()
        command = [sys.executable, "-P", "-m", "loadgen.entry", "serve", "native", "--engine", "jax", "--model", model]
        ports = ["--http-port", str(port), "--grpc-port", "0", "--device", "cpu"]
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen([*command, *ports, *options], stderr=log, stdout=log))
        return started[-1], port

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def asked(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("fronts", [0, 1])
def test_every_batch_size_gets_the_models_own_answers(serve, model: str, tmp_path: Path, fronts: int) -> None:
    process, port = serve("--fronts", str(fronts), "--threads", "1")

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            return asked(port, "GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    wait_until(ready, "ready", 120)
    other = second_interpreter()
    if other is not None:  # the same process as was started, now with the other interpreter
        assert psutil.Process(process.pid).cmdline()[0] == str(other)
    specification = get_variant(model, "")
    module = specification.load_module(RandomWeights(0))
    import torch

    for rows in (1, 2, 3, 5, 8):
        values = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        sent = {"name": "values", "datatype": "FP32", "shape": [rows, 4], "data": values.ravel().tolist()}
        status, body = asked(port, "POST", f"/v2/models/{specification.name}/infer", {"inputs": [sent]})
        assert status == 200, body
        (output,) = json.loads(body)["outputs"]
        with torch.no_grad():
            expected = module(torch.from_numpy(values)).numpy()
        assert output["shape"] == [rows, 3]
        np.testing.assert_allclose(np.reshape(output["data"], (rows, 3)), expected, rtol=1e-5, atol=1e-6)
    described = json.loads(asked(port, "GET", f"/v2/models/{specification.name}")[1])
    assert '"jax"' in json.dumps(described)
