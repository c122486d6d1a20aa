"""What requests hold in memory stays within the budget, whatever clients announce, withdraw or never finish."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.integration.native.raw_client import MIB, UnfinishedCall, check_well, connected, head, read_answer

PENDING = "abserve_native_pending_requests"
ROWS_PATH = "/v2/models/rows/infer"
VALUES = 2 * MIB
"""Of one row: 8 MiB."""


def row_request(values: int, *, timeout: bool = False, chunked: bool = False) -> bytes:
    """One row of ones in binary. With a timeout it is handled by a task of its own."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, values], "parameters": {"binary_data_size": 4 * values}}
    parameters = {"binary_data_output": True, **({"timeout": 600_000_000} if timeout else {})}
    header = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    body = header + np.ones(values, "<f4").tobytes()
    lines = [f"Inference-Header-Content-Length: {len(header)}"]
    if not chunked:
        return head(*lines, f"Content-Length: {len(body)}", path=ROWS_PATH) + body
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return head(*lines, "Transfer-Encoding: chunked", path=ROWS_PATH) + framed


@contextlib.contextmanager
def http_request(server, data: bytes) -> Iterator[None]:
    with connected(server) as connection:
        connection.sendall(data)
        yield


@contextlib.contextmanager
def grpc_request(server) -> Iterator[None]:
    with triton.InferenceServerClient(server.grpc_address) as client:
        item = triton.InferInput("x", [1, VALUES], "FP32")
        item.set_data_from_numpy(np.ones((1, VALUES), np.float32))
        call = client.async_infer("rows", [item], lambda **_: None)
        yield
        call.cancel()


def resident(server) -> int:
    return server.memory_bytes


@pytest.fixture
def wide(controlled, tmp_path) -> Callable[..., object]:
    """Starts a ready server that takes rows of any size, and whose engine waits for the gate `infer`."""

    def start(*options: str):
        (tmp_path / "wide").touch()
        server = controlled("--max-queue-delay-us", "0", *options, grpc=True)
        server.open("load")
        server.wait_ready()
        return server

    return start


def test_withdrawn_requests_give_their_memory_back_at_once(wide) -> None:
    budget = 64 * MIB
    server = wide("--max-held-bytes", str(budget))
    ways = {
        "plain": lambda: http_request(server, row_request(VALUES)),
        "as a task": lambda: http_request(server, row_request(VALUES, timeout=True)),
        "chunked": lambda: http_request(server, row_request(VALUES, chunked=True)),
        "gRPC": lambda: grpc_request(server),
    }
    growth = {}
    with connected(server) as first:
        first.sendall(row_request(4))
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        for name, sent in ways.items():
            before = resident(server)
            for _ in range(16):  # 128 MiB
                with sent():
                    server.wait_until(lambda: server.metric(PENDING) == 1, "it waits")
                server.wait_until(lambda: server.metric(PENDING) == 0, "it is withdrawn")
            growth[name] = (resident(server) - before) / MIB
        server.open("infer")
        assert read_answer(first)[0] == 200
    assert {name for name, grown in growth.items() if grown > 1.5 * budget / MIB} == set(), growth
    assert server.model_stats()["inference_count"] == 1
    answer = json.loads(server.infer([2.0, 3.0, 4.0, 5.0]).body)
    assert answer["outputs"][0]["data"] == [2.0, 3.0, 4.0, 5.0]


def test_announced_bytes_hold_nothing_and_a_body_that_does_not_come_is_given_up(native) -> None:
    """70 heads of 64 bytes announced more than the whole budget, which nobody else had for 90 seconds."""
    server = native("--max-held-bytes", str(120 * MIB), "--read-timeout-s", "2")
    server.wait_ready()
    before = resident(server)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(70)]
        for client in clients:
            client.sendall(head(f"Content-Length: {60 * MIB}") + b"x")
        check_well(server)
        assert (resident(server) - before) / MIB < 32
        assert {read_answer(client)[0] for client in clients} == {408}
    assert server.metric('abserve_native_requests_failure_total{model="openclip_vit_b32",reason="slow_client"') == 70


def test_a_body_must_arrive_at_the_least_rate(native) -> None:
    """Two bodies of 16 MiB that a client sends for more than the read timeout: one at the rate, one below it."""
    server = native("--read-timeout-s", "1", "--min-body-bytes-per-s", str(2 * MIB))
    server.wait_ready()
    with connected(server) as steady, connected(server) as slow:
        for client in (steady, slow):
            client.sendall(head(f"Content-Length: {16 * MIB}"))
        began = time.monotonic()
        for index in range(16):
            steady.sendall(bytes(MIB))
            if index < 4:
                slow.sendall(bytes(1024))
            time.sleep(0.15)
        assert time.monotonic() - began > 2
        assert read_answer(slow)[0] == 408
        assert read_answer(steady)[0] == 400  # all of it arrived: it is no request of the model


def test_unfinished_grpc_messages_are_bounded_and_others_are_served(wide) -> None:
    """Twelve clients send 15 of 16 MiB each; two messages at a time may arrive, and each for half a second at most."""
    limits = ("--max-body-bytes", str(16 * MIB), "--max-held-bytes", str(72 * MIB), "--read-timeout-s", "0.5")
    server = wide(*limits, "--keep-alive-timeout-s", "1")
    server.open("infer")
    before = most = resident(server)
    calls = [UnfinishedCall(server.grpc_port, 15 * MIB) for _ in range(12)]
    item = triton.InferInput("x", [1, 4], "FP32")
    item.set_data_from_numpy(np.ones((1, 4), np.float32))
    for call in calls:
        call.advance()
    with triton.InferenceServerClient(server.grpc_address) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.infer, "rows", [item], client_timeout=60)
        while not answer.done():
            for call in calls:
                call.advance()
            assert client.is_server_live()
            assert server.status("/v2/health/live") == 200
            most = max(most, resident(server))
        assert answer.result().as_numpy("y").tolist() == [[1.0] * 4]
        server.wait_until(lambda: all_ended(calls), "all are cut off")
        streams = [UnfinishedCall(server.grpc_port, 15 * MIB, "ModelStreamInfer") for _ in range(6)]
        server.wait_until(lambda: all_ended(streams), "four are refused, and two wait for their message too long")
        most = max(most, resident(server))
        assert client.infer("rows", [item], client_timeout=60).as_numpy("y").tolist() == [[1.0] * 4]
    for call in calls + streams:
        call.close()
    assert (most - before) / MIB < 120  # what is held and the heap around it; of all messages, 180


def all_ended(calls: list[UnfinishedCall]) -> bool:
    for call in calls:
        call.advance()
    return all(call.ended for call in calls)
