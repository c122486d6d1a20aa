"""A length that the engine is not prepared for is refused at once, and keeps no request of another model waiting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.native.conftest import Answer, Server, _starter, _stop
from tests.integration.native.two_models_server import PREPARED, PREPARED_S


@pytest.fixture(params=["0", "2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In one process, and with two front ends."""
    servers: list[Server] = []
    module = "tests.integration.native.two_models_server"
    start = _starter(tmp_path_factory.mktemp("prepared"), lambda port: ["-m", module, str(port)], servers)
    started = start("--fronts", request.param, "--max-queue-delay-us", "0")
    started.wait_ready()
    yield started
    _stop(servers)


def infer(server: Server, model: str, length: int) -> Answer:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, length], "data": [1.5] * length}
    return server.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())


def test_no_model_waits_for_a_length_of_another_one(server: Server) -> None:
    slowest_s = 0.0
    done = threading.Event()

    def others() -> None:
        nonlocal slowest_s
        while not done.is_set():
            started = time.monotonic()
            assert infer(server, "rows", 4).status == 200
            slowest_s = max(slowest_s, time.monotonic() - started)

    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(others)
        for length in (1, PREPARED - 1, PREPARED):
            answer = infer(server, "lengths", length)
            assert json.loads(answer.body)["outputs"][0]["data"] == [1.5] * length
        for length in (PREPARED + 1, 40, 64):
            answer = infer(server, "lengths", length)
            assert answer.status == 400
            assert f"start the server with --pad-to {PREPARED},{length}" in json.loads(answer.body)["error"]
        done.set()
        going_on.result(60)
    assert slowest_s < PREPARED_S / 2
    assert infer(server, "lengths", PREPARED).status == 200
    assert "Traceback" not in (server.folder / f"log-{server.port}").read_text()
