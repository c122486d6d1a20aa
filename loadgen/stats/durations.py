"""Durations counted in buckets, for the histograms of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

BOUNDS_S = tuple(10 ** (-4.5 + step / 12) for step in range(75))
"""Upper bounds of the latency buckets, 32 µs to 47 s, twelve per decade, as on the native server."""


class DurationCounts:
    """How many durations fell into each bucket, by its number, and their sum; adding up loses nothing."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def take(self) -> dict[str, Any]:
        taken = {"counts": {str(index): count for index, count in self.counts.items()}, "total_s": self.total_s}
        self.counts, self.total_s = Counter(), 0.0
        return taken

    def merge(self, taken: Mapping[str, Any]) -> None:
        self.counts.update({int(index): count for index, count in taken["counts"].items()})
        self.total_s += taken["total_s"]

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, durations up to it) for a Prometheus histogram."""
        total, rows = 0, []
        for index, bound in enumerate([*(f"{bound_s:.6g}" for bound_s in BOUNDS_S), "+Inf"]):
            total += self.counts[index]
            rows.append((bound, float(total)))
        return rows
