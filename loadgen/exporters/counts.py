"""Durations counted in buckets, as workers send them to their master: small, and added up without loss."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

BOUNDS_S = tuple(10 ** (-4.5 + step / 12) for step in range(75))
"""Upper bounds from 32 µs to 47 s, twelve a decade, as on the native server: quantiles of both can be compared."""


class DurationCounts:
    """How many durations fell into each bucket, and their sum. The bucket after the last bound has none."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def take(self) -> dict[str, object]:
        """What was counted since the last `take`, as plain data: only the buckets that hold something."""
        taken = {
            "counts": {str(index): count for index, count in enumerate(self.counts) if count},
            "total_s": self.total_s,
        }
        self.counts = [0] * len(self.counts)
        self.total_s = 0.0
        return taken

    def merge(self, taken: Mapping[str, object]) -> None:
        """Add what another process took. Raises `TypeError`, `KeyError` for anything else."""
        counts, total_s = taken["counts"], taken["total_s"]
        if not isinstance(counts, Mapping) or not isinstance(total_s, int | float):
            raise TypeError(f"not a count of durations: {taken!r}")
        for index, count in counts.items():
            self.counts[int(index)] += int(count)
        self.total_s += total_s

    def cumulated(self) -> Iterator[tuple[str, float]]:
        """(upper bound, durations up to it), as a Prometheus histogram wants them."""
        total = 0
        for bound_s, count in zip(BOUNDS_S, self.counts, strict=False):
            total += count
            yield f"{bound_s:.6g}", total
        yield "+Inf", total + self.counts[-1]
