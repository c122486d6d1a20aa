"""Looks for the highest rate that holds a bound: doubled while it holds, halved while it does not, then bisected.

As MLPerf's Server scenario finds its score. The search knows nothing of servers: it names a rate, is told whether it
held, and names the next, until the highest rate that held and the lowest that did not lie within the resolution.

A trial may fail for a moment's reason, a stall of the machine, and one such trial would cap the whole search far below
the truth. So the lowest rate that failed is tried once more at the end; where it holds then, the search goes on upwards
from there. That happens at most `RETRIES` times.
"""

from __future__ import annotations

import math
from typing import Literal

RESOLUTION = 0.05
RETRIES = 6
Ended = Literal["found", "highest", "none"]


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
