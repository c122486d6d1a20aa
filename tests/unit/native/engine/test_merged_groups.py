"""Requests that came together and wait as one: who leaves takes nothing from those who stay."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from servers.native.engine.batcher import Batcher
from servers.native.shared.errors import RefusedError
from servers.native.shared.interface import QueuedRequest
from tests.unit.native.both_processes import BothProcesses, Copying

GATE = threading.Event()


class Gated(Copying):
    """No batch is executed before the gate is open."""

    def warm_up(self, _batch_sizes: object) -> None:
        """Nothing to prepare."""

    def ready(self) -> bool:
        return GATE.is_set()


@pytest.fixture
def both() -> Iterator[BothProcesses]:
    GATE.clear()
    processes = BothProcesses(Gated)
    yield processes
    GATE.set()
    processes.stop()


def submit(both: BothProcesses, value: float, rows: int = 1) -> QueuedRequest:
    array = both.memory.placed(np.full((rows, 4), value, np.float32))
    queued = QueuedRequest({"x": array}, rows, [("x", (4,))], None, None)
    both.client.submit(0, queued)
    return queued


def batcher_of(both: BothProcesses) -> Batcher:
    batcher = both.server._side.hosts[0].batcher
    assert batcher is not None
    return batcher


async def waiting(both: BothProcesses, count: int) -> None:
    while batcher_of(both).waiting != count:
        await asyncio.sleep(0.001)


async def check_who_leaves(both: BothProcesses, places: tuple[int, ...]) -> None:
    flying = []
    for value in (100.0, 101.0):
        flying.append(submit(both, value, rows=8))
        while len(batcher_of(both)._running) < len(flying):
            await asyncio.sleep(0.001)
    together = [submit(both, float(value)) for value in range(5)]
    await waiting(both, 5)
    came_ns = batcher_of(both)._waiting_requests[0].enqueued_ns
    later = [submit(both, float(value)) for value in (5, 6)]
    await waiting(both, 7)
    for left, place in enumerate(places, start=1):
        both.client.withdraw(0, together[place])
        await waiting(both, 7 - left)
    queue = [
        (number, request.enqueued_ns)
        for request in batcher_of(both)._waiting_requests
        if not request.taken
        for number in both.channel.groups.get(request.number, [request.number])
    ]
    stay = [request for place, request in enumerate(together) if place not in places]
    assert [number for number, _ in queue] == [request.number for request in (*stay, *later)]
    assert {since for _, since in queue[: len(stay)]} == ({came_ns} if stay else set())
    GATE.set()
    for queued in (*flying, *together, *later):
        while not queued.complete:
            await asyncio.sleep(0.001)
    for place in places:
        error = together[place].error
        assert isinstance(error, RefusedError)
        assert error.reason == "expired"
    for value, queued in zip((100, 101, *range(7)), (*flying, *together, *later), strict=True):
        if queued.error is None:
            assert queued.outputs is not None
            np.testing.assert_array_equal(queued.outputs["y"], np.full((queued.rows, 4), value))
    assert not both.channel.requests
    assert not both.channel.groups


@pytest.mark.parametrize("places", [(0,), (2,), (4,), (1, 3), (3, 1, 2), (0, 1, 2, 3, 4)])
def test_those_who_stay_keep_their_place_and_their_time(both: BothProcesses, places: tuple[int, ...]) -> None:
    both.run(check_who_leaves(both, places))
