"""How a search for a rate and a ramp decide on their next trial: pure, told what was measured.

The search looks for the highest rate that holds a bound: doubled while it holds, halved while it does not, then
bisected, as MLPerf's Server scenario finds its score. It knows nothing of servers: it names a rate, is told whether it
held, and names the next, until the highest rate that held and the lowest that did not lie within the resolution.

A trial may fail for a moment's reason, a stall of the machine, and one such trial would cap the whole search far below
the truth. So the lowest rate that failed is tried once more at the end; where it holds then, the search goes on upwards
from there. That happens at most `RETRIES` times.

The ramp climbs 1, 2, 4, 8 … users until more of them bring no more throughput, and says where the knee of the curve is.

The rule. A rung gains when its throughput is at least 5 % above the best one below it. The climb ends after two rungs
in a row that do not gain while the median latency grows: then the server is saturated and its queue does the growing.
The saturation throughput is the best of all rungs, and the knee the first rung from which no later one is 5 % better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.studies.rate_search.records import Ended, RampRung

RESOLUTION = 0.05
RETRIES = 6


class RateSearch:
    """One search. `lowest` and `highest` bound it: rates a second beyond which it gives up."""

    def __init__(
        self, start: float, *, lowest: float = 0.1, highest: float = 100_000.0, resolution: float = RESOLUTION
    ) -> None:
        """Raises `ValueError` for rates that are none."""
        if not 0.0 < lowest <= highest or resolution <= 0.0 or not start > 0.0:
            raise ValueError(f"no search from {start} between {lowest} and {highest} to within {resolution}")
        self.held: float | None = None
        """The highest rate that held."""
        self.failed: float | None = None
        """The lowest rate that did not."""
        self._next: float | None = min(max(start, lowest), highest)
        self._lowest = lowest
        self._highest = highest
        self._resolution = resolution
        self._retries = 0
        self._confirming = False

    @property
    def next_rate(self) -> float | None:
        """What to try; None when the search has ended."""
        return self._next

    @property
    def ended(self) -> Ended | None:
        """How: `found`, or `highest` where all that may be tried held, or `none` where nothing did."""
        if self._next is not None:
            return None
        if self.held is None:
            return "none"
        return "highest" if self.failed is None else "found"

    def record(self, held: bool) -> None:
        """What became of `next_rate`."""
        rate = self._next
        if rate is None:
            raise ValueError("the search has ended")
        if held:
            self.held = rate if self.held is None else max(rate, self.held)
            if self._confirming:
                self.failed = None
        else:
            self.failed = rate if self.failed is None else min(rate, self.failed)
        confirmed, self._confirming = self._confirming and not held, False
        self._next = self._choose()
        if self._next is None and self.failed is not None and not confirmed and self._retries < RETRIES:
            self._next, self._confirming = self.failed, True
            self._retries += 1

    def _choose(self) -> float | None:
        if self.failed is None:
            assert self.held is not None
            return None if self.held >= self._highest else min(2.0 * self.held, self._highest)
        if self.held is None:
            return None if self.failed <= self._lowest else max(self.failed / 2.0, self._lowest)
        if self.failed / self.held <= 1.0 + self._resolution:
            return None
        return math.sqrt(self.held * self.failed)


GAIN = 0.05
IDLE_RUNGS = 2


class ConcurrencyLadder:
    """One climb, up to `most` users."""

    def __init__(self, most: int) -> None:
        """Raises `ValueError` for a number below 1."""
        if most < 1:
            raise ValueError(f"a ladder of {most} users has no rung")
        self.rungs: list[RampRung] = []
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
        self.rungs.append(
            RampRung(concurrency=concurrency, throughput_per_s=throughput_per_s, p50_ms=p50_ms, p99_ms=None)
        )


def is_saturated(rungs: Sequence[RampRung]) -> bool:
    """Whether the last rungs, in ascending order, brought nothing but latency."""
    if len(rungs) <= IDLE_RUNGS:
        return False
    return all(not _gains(rungs, place) and _slower(rungs, place) for place in range(-IDLE_RUNGS, 0))


def knee(rungs: Sequence[RampRung]) -> RampRung | None:
    """The first rung from which no later one is better by the gain; None without any."""
    best = max((rung.throughput_per_s for rung in rungs), default=0.0)
    return next((rung for rung in rungs if rung.throughput_per_s * (1.0 + GAIN) > best), None)


def _gains(rungs: Sequence[RampRung], place: int) -> bool:
    best_below = max(rung.throughput_per_s for rung in rungs[:place])
    return rungs[place].throughput_per_s >= best_below * (1.0 + GAIN)


def _slower(rungs: Sequence[RampRung], place: int) -> bool:
    now, before = rungs[place].p50_ms, rungs[place - 1].p50_ms
    return now is None or before is None or now > before
