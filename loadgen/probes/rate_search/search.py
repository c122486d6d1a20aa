"""How a search for a rate and a ramp choose their next trial; pure functions.

The search looks for the highest rate that holds a bound: doubled while it holds, halved while it does not, then
bisected, as MLPerf's Server scenario finds its score, until the highest rate that held and the lowest that failed are
within the resolution.

A trial may fail because the machine stalls for a moment, and one such trial would cap the whole search far below the
truth. So the lowest rate that failed is tried once more at the end; if it holds then, the search goes on upwards from
there. That happens at most `RETRIES` times.

The ramp doubles the users, 1, 2, 4, 8 …. A step gains when its throughput is at least 5 % above the best one before it.
The ramp ends after two steps in a row that do not gain while the median latency grows: then the server is saturated and
only its queue grows. The saturation throughput is the best of all steps, and the knee the first step that no later one
exceeds by 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.probes.rate_search.records import Ended, RampRung

RESOLUTION = 0.05
RETRIES = 6
GAIN = 0.05
IDLE_RUNGS = 2


class RateSearch:
    """One search between `lowest` and `highest` requests per second.

    `next_rate` is the rate to try, None when the search has ended; `held` the highest rate that held, `failed` the
    lowest that did not.
    """

    def __init__(self, start: float, *, lowest: float = 0.1, highest: float = 100_000.0) -> None:
        """Raises `ValueError` for rates that are not positive or not in order."""
        if not 0.0 < lowest <= highest or not start > 0.0:
            raise ValueError(f"no search from {start} between {lowest} and {highest}")
        self.held: float | None = None
        self.failed: float | None = None
        self.next_rate: float | None = min(max(start, lowest), highest)
        self._lowest = lowest
        self._highest = highest
        self._retries = 0
        self._confirming = False

    @property
    def ended(self) -> Ended | None:
        """How the search ended: `found`, `highest` if every rate held, `none` if none did; None before the end."""
        if self.next_rate is not None:
            return None
        if self.held is None:
            return "none"
        return "highest" if self.failed is None else "found"

    def record(self, held: bool) -> None:
        """Record whether `next_rate` held."""
        rate = self.next_rate
        if rate is None:
            raise ValueError("the search has ended")
        if held:
            self.held = rate if self.held is None else max(rate, self.held)
            if self._confirming:
                self.failed = None
        else:
            self.failed = rate if self.failed is None else min(rate, self.failed)
        confirmed, self._confirming = self._confirming and not held, False
        self.next_rate = self._choose()
        if self.next_rate is None and self.failed is not None and not confirmed and self._retries < RETRIES:
            self.next_rate, self._confirming = self.failed, True
            self._retries += 1

    def _choose(self) -> float | None:
        if self.failed is None:
            assert self.held is not None
            return None if self.held >= self._highest else min(2.0 * self.held, self._highest)
        if self.held is None:
            return None if self.failed <= self._lowest else max(self.failed / 2.0, self._lowest)
        return None if self.failed / self.held <= 1.0 + RESOLUTION else math.sqrt(self.held * self.failed)


def next_concurrency(rungs: Sequence[RampRung], most: int) -> int | None:
    """Users of a ramp's next step, `most` at the most; None when it has ended."""
    if not rungs:
        return 1
    last = rungs[-1].concurrency
    return None if is_saturated(rungs) or last >= most else min(2 * last, most)


def is_saturated(rungs: Sequence[RampRung]) -> bool:
    """Whether the last steps raised only the latency."""
    if len(rungs) <= IDLE_RUNGS:
        return False
    for place in range(-IDLE_RUNGS, 0):
        now, before = rungs[place].p50_ms, rungs[place - 1].p50_ms
        best_before = max(rung.throughput_per_s for rung in rungs[:place])
        gains = rungs[place].throughput_per_s >= best_before * (1.0 + GAIN)
        if gains or (now is not None and before is not None and now <= before):
            return False
    return True


def knee(rungs: Sequence[RampRung]) -> RampRung | None:
    """The first step that no later one exceeds by the gain; None without steps."""
    best = max((rung.throughput_per_s for rung in rungs), default=0.0)
    return next((rung for rung in rungs if rung.throughput_per_s * (1.0 + GAIN) > best), None)
