"""Climbs 1, 2, 4, 8 … users until more of them bring no more throughput, and says where the knee of the curve is.

The rule. A rung gains when its throughput is at least 5 % above the best one below it. The climb ends after two rungs
in a row that do not gain while the median latency grows: then the server is saturated and its queue does the growing.
The saturation throughput is the best of all rungs, and the knee the first rung from which no later one is 5 % better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.05
IDLE_RUNGS = 2


@dataclass(frozen=True, slots=True)
class Rung:
    """One step: so many users, what they got, how long they waited in the median."""

    concurrency: int
    throughput_per_s: float
    p50_ms: float | None


class ConcurrencyLadder:
    """One climb, up to `most` users."""

    def __init__(self, most: int) -> None:
        """Raises `ValueError` for a number below 1."""
        if most < 1:
            raise ValueError(f"a ladder of {most} users has no rung")
        self.rungs: list[Rung] = []
        self._most = most

    @property
    def next_concurrency(self) -> int | None:
        """Users of the next rung; None when the climb has ended."""
        if not self.rungs:
            return 1
        last = self.rungs[-1].concurrency
        return None if self.saturated or last >= self._most else min(2 * last, self._most)

    @property
    def saturated(self) -> bool:
        """Whether it ended because more users brought nothing."""
        return is_saturated(self.rungs)

    def record(self, throughput_per_s: float, p50_ms: float | None) -> None:
        """What the next rung got."""
        concurrency = self.next_concurrency
        if concurrency is None:
            raise ValueError("the climb has ended")
        self.rungs.append(Rung(concurrency, throughput_per_s, p50_ms))


def is_saturated(rungs: Sequence[Rung]) -> bool:
    """Whether the last rungs, in ascending order, brought nothing but latency."""
    if len(rungs) <= IDLE_RUNGS:
        return False
    return all(not _gains(rungs, place) and _slower(rungs, place) for place in range(-IDLE_RUNGS, 0))


def knee(rungs: Sequence[Rung]) -> Rung | None:
    """The first rung from which no later one is better by the gain; None without any."""
    best = max((rung.throughput_per_s for rung in rungs), default=0.0)
    return next((rung for rung in rungs if rung.throughput_per_s * (1.0 + GAIN) > best), None)


def _gains(rungs: Sequence[Rung], place: int) -> bool:
    best_below = max(rung.throughput_per_s for rung in rungs[:place])
    return rungs[place].throughput_per_s >= best_below * (1.0 + GAIN)


def _slower(rungs: Sequence[Rung], place: int) -> bool:
    now, before = rungs[place].p50_ms, rungs[place - 1].p50_ms
    return now is None or before is None or now > before
