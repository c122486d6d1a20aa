"""Bodies are charged as they arrive: what happens to one that is half in when the budget has no room left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import uvloop

from servers.native.http.connection import HttpFrontEnd
from servers.native.shared.memory import ALIGNMENT, Arena, ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from tests.unit.native.conftest import served, specification_of

VALUES = 1_000_000
SPECIFICATION = specification_of("UINT8", VALUES, VALUES)
CONTENT = np.random.default_rng(0).integers(0, 256, VALUES, np.uint8).tobytes()
HEADER = json.dumps(
    {
        "inputs": [
            {"name": "x", "datatype": "UINT8", "shape": [1, VALUES], "parameters": {"binary_data_size": VALUES}}
        ],
        "parameters": {"binary_data_output": True},
    }
).encode()
HEAD = (
    f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(HEADER) + VALUES}\r\n"
    f"Inference-Header-Content-Length: {len(HEADER)}\r\n\r\n"
).encode()
BODY = HEADER + CONTENT
LIMIT = int(1.5 * len(BODY))


class WatchedBudget(ByteBudget):
    """Notes the most that was held."""

    most = 0

    def hold(self, count: int) -> bool:
        held = super().hold(count)
        self.most = max(self.most, self.held)
        return held


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = next(int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: "))
        return int(head.split(b" ")[1]), await self.reader.readexactly(size)


@dataclass
class Served:
    budget: WatchedBudget
    front_end: HttpFrontEnd
    port: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    @property
    def waiting(self) -> int:
        """Connections whose body waits for room."""
        return len(self._waiting())

    def tick(self) -> None:
        """Look for room at once, as happens a few times a second."""
        for connection in self._waiting():
            connection.expire()

    def _waiting(self) -> list[Any]:
        return [connection for connection in self.front_end.connections if connection.waits_for_room]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def with_server(test: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        settings = NativeSettings(max_batch_size=8, max_queue_delay_us=0)
        budget = WatchedBudget(LIMIT)
        memory = RequestMemory(Arena(1, LIMIT, settings.max_body_bytes + ALIGNMENT), budget)
        async with served(SPECIFICATION, settings, memory=memory) as server:
            await test(Served(budget, server.server.http, server.port))
        await until(lambda: budget.held == 0)
        assert budget.most <= LIMIT

    uvloop.run(run())


def test_what_has_arrived_is_charged_and_what_was_announced_is_not() -> None:
    async def test(served: Served) -> None:
        async with served.client() as first, served.client() as second, served.client() as third:
            first.writer.write(HEAD + BODY[:10])
            await until(lambda: served.budget.held == 10)
            first.writer.write(BODY[10:200_010])
            await until(lambda: served.budget.held == 200_010)
            second.writer.write(HEAD + BODY)
            assert (await second.answer())[0] == 200
            first.writer.write(BODY[200_010:-10])
            await until(lambda: served.budget.held == len(BODY) - 10)
            third.writer.write(HEAD + BODY)  # cannot fit any more
            assert (await third.answer())[0] == 503
            first.writer.write(BODY[-10:])
            assert (await first.answer())[0] == 200

    with_server(test)


@pytest.mark.parametrize("step", [1_000, 70_000, LIMIT])
def test_a_body_without_room_goes_on_in_order_when_there_is_some(step: int) -> None:
    async def test(served: Served) -> None:
        async with served.client() as client:
            client.writer.write(HEAD + BODY[:300_000])
            await until(lambda: served.budget.held == 300_000)
            others = served.budget.left
            assert served.budget.hold(others)
            client.writer.write(BODY[300_000:] + HEAD + BODY)  # and a pipelined request
            await until(lambda: served.waiting == 1)
            assert served.budget.left == 0
            while others:
                released = min(step, others)
                served.budget.release(released)
                others -= released
                served.tick()
                await asyncio.sleep(0)
            for _ in range(2):
                status, body = await client.answer()
                assert (status, body[-VALUES:]) == (200, CONTENT)

    with_server(test)


def test_a_body_that_finds_no_room_is_refused_and_its_connection_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        async with served.client() as client:
            client.writer.write(HEAD + BODY[:300_000])
            await until(lambda: served.budget.held == 300_000)
            others = served.budget.left
            assert served.budget.hold(others)
            client.writer.write(BODY[300_000:])
            status, body = await client.answer()
            assert status == 503
            assert b"memory for requests" in body
            assert served.budget.held == others
            served.budget.release(others)
            client.writer.write(HEAD + BODY)
            assert (await client.answer())[0] == 200

    monkeypatch.setattr("servers.native.http.connection.ROOM_WAIT_S", 0.6)
    with_server(test)


def test_of_two_bodies_that_outgrow_the_budget_together_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        async with served.client() as first, served.client() as second:
            for client in (first, second):
                client.writer.write(HEAD + BODY[:500_000])
            await until(lambda: served.budget.held == 1_000_000)
            first.writer.write(BODY[500_000:-100])
            await until(lambda: served.budget.held == len(BODY) - 100 + 500_000)
            second.writer.write(BODY[500_000:])
            await until(lambda: served.waiting == 1)
            first.writer.write(BODY[-100:])
            statuses = [(await client.answer())[0] for client in (first, second)]
            assert sorted(statuses) == [200, 503]

    monkeypatch.setattr("servers.native.http.connection.ROOM_WAIT_S", 0.6)
    with_server(test)


def test_a_client_that_leaves_gives_back_what_had_arrived() -> None:
    async def test(served: Served) -> None:
        async with served.client() as client:
            client.writer.write(HEAD + BODY[:300_000])
            await until(lambda: served.budget.held == 300_000)
        await until(lambda: served.budget.held == 0)

    with_server(test)
