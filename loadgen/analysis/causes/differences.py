"""Differences of mean request times in ms, measured in pairs, and what can be computed with them.

Means, because the mean of a sum is the sum of the means: shares of a difference add up only in means. The unit is the
pair of adjacent blocks. Assumption: the differences of the pairs are independent and about normal (Student's t). Sums
of independent differences have the degrees of freedom of Welch and Satterthwaite (Biometrics Bulletin 2, 1946).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadgen.analysis.summaries import BlockSummary
from loadgen.statistics.ratios import SIGNIFICANCE, critical_t

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """`variance` is that of the mean, None where one pair shows no spread."""

    mean_ms: float
    variance: float | None
    degrees: float
    pairs: int

    @property
    def ci95_ms(self) -> tuple[float, float] | None:
        """Student's t interval; None with fewer than two pairs."""
        if self.variance is None:
            return None
        if self.variance == 0.0:
            return (self.mean_ms, self.mean_ms)
        half = critical_t(max(1, math.floor(self.degrees)), SIGNIFICANCE) * math.sqrt(self.variance)
        return (self.mean_ms - half, self.mean_ms + half)

    @property
    def seen(self) -> bool:
        """Whether the interval excludes 0; never without an interval."""
        bounds = self.ci95_ms
        return bounds is not None and (bounds[0] > 0.0 or bounds[1] < 0.0)


NOTHING = Difference(0.0, 0.0, math.inf, 0)
"""Known to be 0 without measuring."""


def difference(pairs: Pairs) -> Difference | None:
    """Second minus first over the pairs; None without any."""
    values = [second - first for first, second in pairs]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Difference(mean, None, 0.0, 1)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Difference(mean, spread / len(values), len(values) - 1.0, len(values))


def combine(parts: Iterable[tuple[float, Difference]]) -> Difference:
    """Σ weight · difference, taken as independent."""
    mean, variance, denominator, pairs = 0.0, 0.0, 0.0, 0
    known = True
    for weight, part in parts:
        mean += weight * part.mean_ms
        pairs = max(pairs, part.pairs)
        if part.variance is None:
            known = False
            continue
        own = weight * weight * part.variance
        variance += own
        if own > 0.0:
            denominator += own * own / part.degrees
    degrees = variance * variance / denominator if denominator > 0.0 else math.inf
    return Difference(mean, variance if known else None, degrees if math.isfinite(degrees) else 1e9, pairs)


def mean_pairs(cell: str, blocks: Sequence[BlockSummary]) -> list[tuple[float, float]]:
    """Mean request times in ms of each complete pair of a cell, a first."""
    means = {
        (block.pair, block.label): block.latency.mean_ms
        for block in blocks
        if block.cell == cell and block.complete and block.latency.mean_ms is not None
    }
    pairs = []
    for number in sorted({pair for pair, _ in means}):
        a, b = means.get((number, "a")), means.get((number, "b"))
        if a is not None and b is not None:
            pairs.append((a, b))
    return pairs
