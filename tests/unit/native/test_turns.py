"""Work that waits for its turn is done in order, for a bounded time in each turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from servers.native.limits import Turns


@pytest.mark.parametrize(("most_ns", "work_s", "turns"), [(0, 0.0, 6), (10**12, 0.0, 1), (20_000_000, 0.015, 3)])
def test_each_turn_does_some_of_the_work(most_ns: int, work_s: float, turns: int) -> None:
    done: list[tuple[int, int]] = []
    turn = 0

    async def pass_turns() -> None:
        nonlocal turn
        work = Turns(most_ns)

        def do(number: int) -> None:
            time.sleep(work_s)
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
