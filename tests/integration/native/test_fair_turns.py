"""Cheap bytes from one client never keep the event loop from the others."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from servers.models.registry import get_specification
from servers.native.http.connection import PIECES_PER_TURN
from servers.native.http.parser import HttpRequest, RequestHead, RequestParser
from servers.native.shared.limits import MAX_INFLATING
from servers.native.shared.settings import NativeSettings
from tests.again import again
from tests.integration.native.conftest import FRONTS
from tests.integration.native.health_probe import probed
from tests.integration.native.raw_client import (
    MIB,
    PATH,
    PIXELS,
    check_well,
    connected,
    head,
    is_closed,
    read_answer,
    send_all,
)
from tests.unit.native.conftest import served

SLOWEST_S = 2.0
"""The attacks delayed others by 3 to 19 s; a busy machine alone takes some tenths of a second."""


@contextlib.contextmanager
def attacked(attack: Callable[[int], None], connections: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(connections) as pool:
        attacks = [pool.submit(attack, index) for index in range(connections)]
        yield pool
        for attempt in attacks:
            attempt.result()


def slowest_health_s(server, requests: int = 10) -> float:
    slowest = 0.0
    for _ in range(requests):
        began = time.perf_counter()
        assert server.request("GET", "/v2/health/live").status == 200
        slowest = max(slowest, time.perf_counter() - began)
    return slowest


@pytest.mark.parametrize(
    ("data", "connections", "message"),
    [
        (b"\r\n" * 2**19, 32, "empty line"),
        (head("Transfer-Encoding: chunked") + b"1\r\n \r\n" * 65_000, 8, "64 bytes on average"),
    ],
    ids=["empty lines", "tiny chunks"],
)
@again
def test_a_flood_is_refused_and_others_are_answered_at_once(null_server, data, connections, message) -> None:
    def flood(_: int) -> None:
        for _ in range(3):
            with connected(null_server) as connection:
                send_all(connection, data)
                with contextlib.suppress(ConnectionResetError):
                    status, _headers, body = read_answer(connection)
                    assert status == 400
                    assert message in json.loads(body)["error"]

    with attacked(flood, connections):
        assert slowest_health_s(null_server) < SLOWEST_S
    check_well(null_server)


@again
def test_a_scrape_costs_little_more_than_any_other_answer(null_server) -> None:
    """It cost many times as much, on the event loop: clients that scrape and never read held it for seconds."""

    def cpu_s(path: str) -> float:
        before = spent_s()
        with connected(null_server) as connection:
            for _ in range(1000):
                connection.sendall(head(method="GET", path=path))
                assert read_answer(connection)[0] == 200
        return spent_s() - before

    processes = null_server.processes

    def spent_s() -> float:
        times = [process.cpu_times() for process in processes]
        return sum(used.user + used.system for used in times)

    for path in ("/metrics", "/v2/health/live"):
        cpu_s(path)
    assert cpu_s("/metrics") < 5 * cpu_s("/v2/health/live")


@pytest.mark.parametrize("fronts", [0, pytest.param(2, marks=pytest.mark.slow)])
@again
def test_pipelined_scrapes_keep_nobody_waiting(tmp_path, native_starter, fronts) -> None:
    """Each of 200 clients per front end asks 100 times at once and does not read."""
    server = native_starter(tmp_path, "--engine", "null", "--fronts", str(fronts))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(200 * max(1, fronts))]
        with probed(server.port) as health:
            for client in clients:
                client.sendall(head(method="GET", path="/metrics") * 100)
            time.sleep(3)
    assert health.median_s < 0.1, str(health)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["all bare", "the last bare"])
def test_a_head_with_bare_line_feeds_is_refused_at_once(null_server, line_end) -> None:
    """Not only when an empty line ends it at last, or the time is over."""
    with connected(null_server) as connection:
        connection.settimeout(10)  # the read timeout is 30 s
        connection.sendall(b"GET /v2/health/live HTTP/1.1" + line_end + b"Host: x\n\n")
        status, _headers, body = read_answer(connection)
        assert status == 400
        assert "CR LF" in json.loads(body)["error"]
        assert is_closed(connection)


def test_one_empty_line_before_a_request_is_taken(null_server) -> None:
    with connected(null_server) as connection:
        for _ in range(3):
            connection.sendall(b"\r\n" + head(method="GET", path="/v2/health/live"))
            assert read_answer(connection)[0] == 200


def test_compressed_bodies_do_not_keep_plain_ones_waiting(null_server) -> None:
    """60 of some KiB kept one of plain JSON waiting for 18.7 s; now a few are read and the others sent away."""
    packed = gzip.compress(b'{"inputs": [' + b"0," * (12 * MIB) + b"0]}", 1)
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224], "data": [0.5] * PIXELS.size}
    plain = json.dumps({"inputs": [tensor]}).encode()
    request = head("Content-Encoding: gzip", f"Content-Length: {len(packed)}") + packed
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(null_server)) for _ in range(60)]
        for connection in connections:
            connection.sendall(request)
        began = time.perf_counter()
        assert null_server.request("POST", PATH, plain).status == 200
        assert time.perf_counter() - began < 2 * SLOWEST_S
        refused = [answer for answer in map(read_answer, connections) if answer[0] != 400]
    # Each front end inflates so many, and some were read before the last ones had come.
    assert len(refused) >= 60 - 2 * MAX_INFLATING * max(1, FRONTS)
    assert {(status, headers.get("retry-after")) for status, headers, _ in refused} == {(503, "1")}
    check_well(null_server)


async def turns_of(data: bytes) -> Counter[int]:
    """How many pieces were read in each turn of the event loop, of one client that sends `data` and reads answers."""
    loop = asyncio.get_running_loop()
    turn = 0

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    pieces: Counter[int] = Counter()
    parse = RequestParser.parse

    def counted(
        self: RequestParser, data: bytearray, start: int, end: int
    ) -> tuple[int, HttpRequest | RequestHead | None]:
        pieces[turn] += 1
        return parse(self, data, start, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestParser, "parse", counted)
        async with served(get_specification("openclip_vit_b32"), NativeSettings()) as server:
            next_turn()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            writer.write_eof()
            await reader.read()
            writer.close()
    return pieces


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (head(method="GET") * 3000, 3000),
        (head("Transfer-Encoding: chunked") + (b"40\r\n" + b" " * 64 + b"\r\n") * 9000 + b"0\r\n\r\n", 200),
    ],
    ids=["pipelined requests", "small chunks"],
)
def test_a_connection_has_a_bounded_share_of_each_turn(data, least) -> None:
    pieces = uvloop.run(turns_of(data))
    assert sum(pieces.values()) >= least
    assert max(pieces.values()) <= 2 * PIECES_PER_TURN  # what was left of the last turn, and what has come in this one
