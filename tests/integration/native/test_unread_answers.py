"""Answers that clients do not read count as held, and large ones delay nobody else."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.again import again
from tests.integration.native.controlled_server import LARGE_VALUES
from tests.integration.native.health_probe import probed, slowest_quiet_s
from tests.integration.native.raw_client import MIB, connected, head, read_answer
from tests.integration.native.raw_grpc import DATA, END_STREAM, MOST_WINDOW, RawGrpc, frame, prefixed, rows_message

BUDGET = 160 * MIB
SLACK = 256 * MIB
CLIENTS = 20
"""Each asks for an answer of 32 MiB: more than the budget and its slack together."""
ROWS_PATH = "/v2/models/rows/infer"


def rows_request(values: list[float], *, binary: bool) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": values}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary}}).encode()
    return head(f"Content-Length: {len(body)}", path=ROWS_PATH) + body


@pytest.fixture(params=[0, pytest.param(2, marks=pytest.mark.slow)], ids=["fronts 0", "fronts 2"])
def large(request, controlled, tmp_path) -> Callable[..., object]:
    """Starts a ready server whose answers have 32 MiB."""

    def start(*options: str):
        (tmp_path / "large").touch()
        limits = ("--max-batch-size", "1", "--max-queue-delay-us", "0", "--max-held-bytes", str(BUDGET))
        server = controlled("--fronts", str(request.param), *limits, *options, grpc=True)
        server.open("load", "infer")
        server.wait_ready()
        return server

    return start


@contextlib.contextmanager
def http_client(server, request: bytes) -> Iterator[None]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(request)
        yield


@contextlib.contextmanager
def grpc_client(server, window: int) -> Iterator[RawGrpc]:
    with RawGrpc(server.grpc_port, window=window) as client:
        if window == MOST_WINDOW:
            client.widen(0, MOST_WINDOW - 65535)
        client.open(1)
        client.send(frame(DATA, END_STREAM, 1, prefixed(rows_message([1.0, 2.0, 3.0, 4.0]))))
        yield client


WAYS = {
    "HTTP": lambda server: http_client(server, rows_request([1.0, 2.0, 3.0, 4.0], binary=True)),
    "HTTP, JSON": lambda server: http_client(server, rows_request([1.0, 2.0, 3.0, 4.0], binary=False)),
    "gRPC, small windows": lambda server: grpc_client(server, 65535),
    "gRPC, large windows": lambda server: grpc_client(server, MOST_WINDOW),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == "HTTP, JSON" else ()) for way in WAYS]
)
def test_unread_answers_are_held_bytes(large, way) -> None:
    """40 clients that sent some 300 bytes and did not read their answers made the server hold all of these, 1.3 GB."""
    server = large()
    before = server.memory_bytes
    asked = np.array([5.0, 6.0, 7.0, 8.0], "<f4")

    def ended() -> float:
        statistics = server.model_stats()["inference_stats"]
        return statistics["success"]["count"] + statistics["fail"]["count"]

    with contextlib.ExitStack() as stack:
        for count in range(CLIENTS):
            stack.enter_context(WAYS[way](server))
            server.wait_until(lambda count=count: ended() > count, "it is answered or refused")
        grown = server.memory_bytes - before
        assert server.status("/v2/health/ready") == 200
    assert grown < BUDGET + SLACK
    assert 0 < server.model_stats()["inference_stats"]["success"]["count"] < CLIENTS

    def answered() -> bool:
        with connected(server) as client:
            client.sendall(rows_request(asked.tolist(), binary=True))
            status, headers, body = read_answer(client)
        if status == 200:
            values = np.frombuffer(body[int(headers["inference-header-content-length"]) :], "<f4")
            assert values.size == LARGE_VALUES
            assert values[:4].tolist() == asked.tolist()
        return status == 200

    server.wait_until(answered, "the memory is given back when the clients have left")
    server.wait_until(lambda: server.memory_bytes - before < SLACK, "the system has it back")


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_a_slow_client_that_goes_on_reading_gets_its_whole_answer(large, protocol) -> None:
    """It was cut off after `read_timeout_s`, however much it had taken by then."""
    server = large("--read-timeout-s", "0.5", "--min-body-bytes-per-s", str(MIB))
    with contextlib.ExitStack() as stack:
        if protocol == "HTTP":
            client = stack.enter_context(connected(server))
            client.sendall(rows_request([1.0, 2.0, 3.0, 4.0], binary=True))
        else:
            client = stack.enter_context(grpc_client(server, MOST_WINDOW)).socket
        received = 0
        while received < 4 * LARGE_VALUES:
            part = client.recv(MIB)
            assert part, f"cut off after {received} bytes"
            received += len(part)
            time.sleep(len(part) / (12 * MIB))


@pytest.mark.parametrize("kind", ["JSON", pytest.param("JSON with NaN", marks=pytest.mark.slow), "binary"])
@again
def test_large_answers_delay_nobody_else(large, kind) -> None:
    """8 million numbers in JSON kept everybody waiting for 0.2 s, with NaN in them for 3 to 6 s."""
    server = large("--max-held-bytes", str(2**30))
    limit_s = 0.1 + 3 * slowest_quiet_s(server.port)
    request = rows_request([13.0 if "NaN" in kind else 1.0, 2.0, 3.0, 4.0], binary=kind == "binary")
    with probed(server.port) as health, connected(server) as first, connected(server) as second:
        for client in (first, second):  # one for each front end
            client.sendall(request)
        answers = [read_answer(client) for client in (first, second)]
    assert {status for status, *_ in answers} == {200}
    if kind != "binary":
        data = json.loads(answers[0][2])["outputs"][0]["data"]
        assert np.array_equal(np.array(data[4:], "<f4"), np.arange(4, LARGE_VALUES, dtype="<f4") / 7)
    assert health.slowest_s < limit_s
