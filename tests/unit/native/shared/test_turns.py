"""Work that waits for its turn is done in order, for a bounded time in each turn of the event loop."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from servers.native.shared import limits
from servers.native.shared.limits import Turns


@pytest.mark.parametrize(("most_ns", "work_ns", "turns"), [(0, 1, 6), (1000, 1, 1), (20, 15, 3), (20, 25, 6)])
def test_each_turn_does_some_of_the_work(
    monkeypatch: pytest.MonkeyPatch, most_ns: int, work_ns: int, turns: int
) -> None:
    now_ns = 0
    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns))
    done: list[tuple[int, int]] = []
    turn = 0

    async def pass_turns() -> None:
        nonlocal turn
        work = Turns(most_ns)

        def do(number: int) -> None:
            nonlocal now_ns
            now_ns += work_ns
            done.append((turn, number))

        for number in range(6):
            work.add(partial(do, number))
        while len(done) < 6:
            turn += 1
            await asyncio.sleep(0)

    asyncio.run(pass_turns())
    assert [number for _, number in done] == list(range(6))
    assert len({turn for turn, _ in done}) == turns


def test_work_that_adds_work_leaves_the_turn_to_others() -> None:
    async def pass_turns() -> int:
        work, done = Turns(10**12), 0

        def again() -> None:
            nonlocal done
            done += 1
            work.add(again)

        work.add(again)
        for _ in range(5):
            await asyncio.sleep(0)
        return done

    assert 4 <= asyncio.run(pass_turns()) <= 6
