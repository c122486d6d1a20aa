"""A figure with its interval: the one record of all that is measured over pairs, rounds or starts, and Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from loadgen.stats.distributions import student_quantile

SIGNIFICANCE = 0.05


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure with the ends of its interval: at 95 % unless its source says otherwise, None where it has none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both bounds, or None where one is missing."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @classmethod
    def of(cls, value: float, interval: tuple[float, float] | None) -> Estimate:
        """From a value and both bounds, or none."""
        return cls(value, *(interval or ()))

    def scaled(self, factor: float) -> Estimate:
        """In another unit, or at another speed of the machine; the factor is positive."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Estimate(self.value * factor, low, high)

    def inverted(self, factor: float = 1.0) -> Estimate:
        """`factor` divided by it; a bound at or below 0 gives no bound."""
        low, high = (None if bound is None or bound <= 0.0 else factor / bound for bound in (self.high, self.low))
        return Estimate(factor / self.value, low, high)

    def exp(self) -> Estimate:
        """The figure whose logarithm this is."""
        low, high = (None if bound is None else math.exp(bound) for bound in (self.low, self.high))
        return Estimate(math.exp(self.value), low, high)


def critical_t(degrees: float, significance: float) -> float:
    """Two-sided critical value of Student's t."""
    return student_quantile(significance / 2.0, degrees)


def t_estimate(mean: float, error: float, degrees: float, significance: float = SIGNIFICANCE) -> Estimate:
    """A mean with Student's t interval, from its standard error; of logs, `exp` gives that of the geometric mean."""
    half = critical_t(degrees, significance) * error
    return Estimate(mean, mean - half, mean + half)


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """The places of the points that no other point beats: none is as low in both values and lower in one."""
    front: set[int] = set()
    best = float("inf")
    at_best: tuple[float, float] | None = None
    for place in sorted(range(len(points)), key=points.__getitem__):
        _, second = point = points[place]
        if second < best or point == at_best:
            front.add(place)
            best, at_best = second, point
    return front
