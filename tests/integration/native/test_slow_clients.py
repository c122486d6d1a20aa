"""Clients that send slowly, never read, leave or ask for too much: what they hold is bounded, nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.again import again
from tests.integration.native.raw_client import (
    MIB,
    PATH,
    PIXELS,
    check_well,
    connected,
    golden,
    head,
    read_answer,
    send_all,
)
from tests.integration.native.test_held_memory import PENDING, row_request


@pytest.mark.parametrize(
    "start",
    [b"", head()[:-4] + b"\r\nX-Slow: ", head("Content-Length: 1000000"), head("Transfer-Encoding: chunked")],
    ids=["nothing", "head", "body", "chunks"],
)
@again
def test_slow_clients_are_cut_off_and_others_do_not_notice(native, start) -> None:
    server = native("--read-timeout-s", "1", "--keep-alive-timeout-s", "1")
    server.wait_ready()
    with ThreadPoolExecutor(8) as pool:

        def drip(_: int) -> tuple[float, bytes]:
            with connected(server) as connection:
                connection.sendall(start)
                began = time.perf_counter()
                connection.settimeout(0.2)
                received = b""
                while time.perf_counter() - began < 15:
                    try:
                        part = connection.recv(65536)
                        if not part:
                            break
                        received += part
                    except TimeoutError:
                        with contextlib.suppress(OSError):
                            connection.send(b"1" if start else b"")
                    except ConnectionResetError:
                        break
                return time.perf_counter() - began, received

        clients = [pool.submit(drip, index) for index in range(8)]
        slowest = 0.0
        while not all(client.done() for client in clients):
            began = time.perf_counter()
            assert server.request("GET", "/v2/health/live").status == 200
            slowest = max(slowest, time.perf_counter() - began)
        seconds, answers = zip(*(client.result() for client in clients), strict=True)
    assert max(seconds) < 10
    assert slowest < 1
    if start:
        assert all(answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 400")) for answer in answers)
    if b"Content-Length" in start:
        assert server.metric('abserve_native_requests_failure_total{model="openclip_vit_b32",reason="slow_client"') == 8


def test_a_client_that_does_not_read_is_not_answered_for_ever(native) -> None:
    """It asks and asks and never reads: its requests stop being taken, and at last it is cut off."""
    server = native("--read-timeout-s", "1")
    server.wait_ready()
    before = server.memory_bytes
    with connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.5)
        began = time.monotonic()
        question = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100
        cut_off = False
        while not cut_off and time.monotonic() - began < 20:
            try:
                connection.send(question)
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                cut_off = True
        assert cut_off
    assert server.memory_bytes - before < 32 * MIB
    check_well(server)


def test_clients_that_leave_in_the_middle_are_counted_as_that(null_server) -> None:
    counter = "abserve_native_client_disconnects_total"
    before, failed = null_server.metric(counter), null_server.model_stats()["inference_stats"]["fail"]["count"]
    data = golden()
    for index, cut in enumerate((200, 1000, 70_000, len(data) - 1)):
        with connected(null_server) as connection:
            connection.sendall(data[:cut])
            if index % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    null_server.wait_until(lambda: null_server.metric(counter) == before + 4, "all four are counted")
    assert null_server.model_stats()["inference_stats"]["fail"]["count"] == failed
    check_well(null_server)


def test_a_million_chunks_leave_no_memory_behind(null_server) -> None:
    data = head("Transfer-Encoding: chunked", "Content-Type: application/json") + b"1\r\n \r\n" * 1_000_000
    refused = 0

    def attack() -> None:
        nonlocal refused
        with connected(null_server) as connection:
            send_all(connection, data)
            refused += read_answer(connection)[0] == 400

    for _ in range(3):
        attack()
    before = null_server.memory_bytes
    for _ in range(25):
        attack()
    assert refused == 28
    assert null_server.memory_bytes - before < MIB
    check_well(null_server)


def test_what_all_requests_hold_together_is_bounded_and_given_back(native) -> None:
    data = golden()
    server = native("--max-held-bytes", str(2 * PIXELS.nbytes))
    server.wait_ready()
    cut = len(data) - 10
    with connected(server) as first, connected(server) as second, connected(server) as third:
        first.sendall(data[:cut])
        refused: list[Any] = []

        def does_not_fit() -> bool:  # beside the first, once that has arrived
            second.sendall(data)
            status, *answer = read_answer(second)
            refused.extend([answer] * (status == 503))
            time.sleep(0 if refused else 0.3)  # the first may wait for room, which is looked for every 0.25 s
            return status == 503

        server.wait_until(does_not_fit, "the first has arrived")
        headers, body = refused[0]
        assert headers["retry-after"]
        assert "memory" in json.loads(body)["error"]
        assert server.status("/v2/health/ready") == 200
        first.sendall(data[cut:])
        assert read_answer(first)[0] == 200

        def answered() -> bool:  # the first one's bytes come back just after its answer has left
            second.sendall(data)
            return read_answer(second)[0] == 200

        server.wait_until(answered, "the second fits, and its connection has survived")
        third.sendall(data[:cut])
    server.wait_until(
        lambda: (
            server.request("GET", "/metrics").body.count(b"client_disconnects_total") > 0
            and server.metric("abserve_native_client_disconnects_total") == 1
        ),
        "the third has left",
    )
    check_well(server)


@again
def test_a_long_body_in_json_delays_nobody_for_long(null_server) -> None:
    data = np.random.default_rng(0).random(8 * PIXELS.size).astype("f4").tolist()
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [8, 3, 224, 224], "data": data}
    body = json.dumps({"inputs": [tensor]}).encode()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(null_server.request, "POST", PATH, body)
        waited, began = [], time.perf_counter()
        while not long.done():
            asked = time.perf_counter()
            assert null_server.request("GET", "/v2/health/live").status == 200
            waited.append(time.perf_counter() - asked)
        took = time.perf_counter() - began
    assert long.result().status == 200
    assert len(waited) > 10
    assert max(waited) < 0.5 * took, "on the event loop, one answer would have waited for most of it"


@pytest.mark.parametrize("fronts", [0, 2])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("timeout", [False, True], ids=["plain", "as a task"])
def test_a_client_that_closes_its_half_is_answered_and_one_that_leaves_is_not_executed(
    controlled, fronts, count, timeout
) -> None:
    """A half-closed client got the answer of a GET, but none of an inference."""
    server = controlled("--fronts", str(fronts), "--max-batch-size", "1", "--max-queue-delay-us", "0")
    server.open("load")
    server.wait_ready()
    request = row_request(4, timeout=timeout)
    with connected(server) as half, connected(server) as first:
        first.sendall(request)
        server.wait_until((server.folder / "infer-reached").exists, "the engine has one")
        half.sendall(request * count)
        half.shutdown(socket.SHUT_WR)
        server.wait_until(lambda: server.metric(PENDING) == 1, "it waits")
        with connected(server) as leaving:
            leaving.sendall(request)
            server.wait_until(lambda: server.metric(PENDING) == 2, "the other one waits, too")
        server.wait_until(lambda: server.metric("abserve_native_client_disconnects_total") == 1, "it has left")
        server.open("infer")
        assert read_answer(first)[0] == 200
        received = b"".join(iter(lambda: half.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK") == count
    assert received.count(np.ones(4, "<f4").tobytes()) == count
    assert server.model_stats()["inference_count"] == count + 1


@pytest.mark.slow
def test_a_body_that_never_ends_does_not_hold_up_the_end(native) -> None:
    server = native()
    server.wait_ready()
    with connected(server) as connection, connected(server) as finishing:
        connection.sendall(golden()[:5000])
        finishing.sendall(golden()[:5000])
        began = time.monotonic()
        server.process.terminate()
        server.wait_until(lambda: server.status("/v2/health/live") is None, "new connections are refused")
        finishing.sendall(golden()[5000:])  # it had begun before the signal
        assert read_answer(finishing)[0] == 200
        assert server.process.wait(60) == 0
    assert time.monotonic() - began < 15
