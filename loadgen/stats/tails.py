"""Interval and tests of the ratio of a high percentile, from the raw samples of all rounds together.

The mean of the rounds' percentiles is not the run's percentile: with 1.2 % slow requests the p99 of a small block is
usually fast, and more rounds only make that more certain. So each arm's samples are pooled, and the interval of its
percentile is made of order statistics, which are valid for any distribution.

Requests of one round share conditions. The variance over rounds of the share of samples at or below the percentile
(Woodruff, JASA 47, 1952) gives the number of independent samples that the pool is worth. What it exceeds that of
independent samples by lies between the rounds, and grows with their correlation (`ratios.widening`). The exact binomial
interval of that many samples (Korn and Graubard, Survey Methodology 24, 1998) selects the order statistics. The two
arms' intervals are combined by the method of variance estimates recovery (Donner and Zou, Stat. Methods Med. Res. 21,
2012) on the log scale, as if they were independent, which can only make the interval wider.

A drifting machine would smear both pools alike, so every sample is first divided by its round's speed: the geometric
mean of both arms' medians in that round.

An arm may still be faster or slower in a round than both arms together are. If that varies more than the arm's latency
within a round, its pool is worth only as many samples as there are rounds. If that is fewer than the percentile needs,
each sample is divided by the median of its own arm and round instead, if that is worth more. The percentiles of these
pools are the arms' shapes, and the ratio is that of the rounds' medians (Student's t) times that of the shapes. The
three intervals are combined as above, and the range of the rounds' ratios is added in full, since the percentile of all
rounds together may lie anywhere in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.stats.distributions import beta_quantile, normal_quantile
from loadgen.stats.estimates import SIGNIFICANCE, Estimate, critical_t
from loadgen.stats.percentiles import samples_needed
from loadgen.stats.ratios import (
    MIN_LOG_SPREAD,
    MOST_LOG,
    RatioEstimate,
    Values,
    allowed_correlation,
    error_of_mean,
    widening,
)

_LEAST_P = 1e-12
_MOST = math.exp(MOST_LOG / 2.0)
_DIGITS = 6
"""Digits kept of the logs of samples: a millionth, well above the resolution of the clock."""


@dataclass(frozen=True, slots=True)
class Round:
    """Samples of both arms from one round, none below 0. `unit` numbers the independent unit: the round itself, or its
    start of the servers."""

    a: Values
    b: Values
    unit: int

    @property
    def ratio_of_medians(self) -> float:
        """B over A; not a number without samples or where A's median is 0."""
        middle = float(np.median(self.a)) if len(self.a) and len(self.b) else 0.0
        return float(np.median(self.b)) / middle if middle else math.nan


@dataclass(frozen=True, slots=True)
class _ArmPool:
    """One arm's samples: their logs in ascending order, and how many independent ones they are worth."""

    logs: Values
    quantile: float
    centre: float
    worth: float
    degrees: float

    def tail(self, speed: float, *, exact: bool) -> Estimate:
        """The percentile at a log speed; with an interval only if the speed adds nothing to it (`exact`) and there are
        enough samples beyond it."""
        low, high = self.interval(SIGNIFICANCE) if self.degrees > 0.0 and exact else (-math.inf, math.inf)
        bounds = low + speed, high + speed
        return Estimate.of(self.centre + speed, bounds if _known(bounds) else None).exp()

    def interval(self, significance: float) -> tuple[float, float]:
        """Logs of the order statistics around the percentile; infinite beyond the pool."""
        count = len(self.logs)
        normal = normal_quantile(1.0 - significance / 2.0)
        worth = self.worth * (normal / critical_t(self.degrees, significance)) ** 2
        below = self.quantile * worth
        low = beta_quantile(significance / 2.0, below, worth - below + 1.0)
        high = beta_quantile(1.0 - significance / 2.0, below + 1.0, worth - below)
        first, last = math.floor(low * count) - 1, math.ceil(high * count)
        return (
            float(self.logs[first]) if first >= 0 else -math.inf,
            float(self.logs[last]) if last < count else math.inf,
        )


@dataclass(frozen=True, slots=True)
class _RoundMedians:
    """The rounds' medians, B over A as logs: their mean, its standard error, and the range of rounds about it."""

    centre: float
    error: float
    degrees: float
    lowest: float
    highest: float


_NOTHING = _RoundMedians(0.0, 0.0, 1.0, 0.0, 0.0)
"""Used if the pools contain the rounds' medians already."""


def estimate_tail_ratio(
    rounds: Sequence[Round], quantile: float, margin: float, correlation: float = 0.0, *, looks: bool = False
) -> tuple[RatioEstimate, tuple[Estimate, Estimate] | None]:
    """The ratio of B's percentile over A's, and both percentiles at the run's mean speed, whose ratio it is.

    `correlation` is that of successive rounds; see `ratios.error_of_mean`. With `looks` the interval and the p values
    stay valid after every round: the n-th look spends 1/(n(n+1)) of the significance, which adds up to all of it
    (union bound). `ratio` is None without samples; without an interval there is a `reason`.
    """
    spent = 1.0 / (len(rounds) * (len(rounds) + 1.0)) if looks and rounds else 1.0
    units = len({pair.unit for pair in rounds})
    if not rounds or any(len(pair.a) == 0 or len(pair.b) == 0 for pair in rounds):
        return RatioEstimate(len(rounds), reason="there is no complete pair of blocks"), None
    if not all(((part >= 0.0) & (part < _MOST)).all() for pair in rounds for part in (pair.a, pair.b)):
        return RatioEstimate(len(rounds), reason="a block has a value below 0 or without a limit"), None
    medians = [(float(np.median(pair.a)), float(np.median(pair.b))) for pair in rounds]
    if any(0.0 in pair for pair in medians):  # such as the gaps of answers whose tokens were read at once
        return RatioEstimate(len(rounds), reason="half of a block's values are 0"), None
    middles = np.log(medians)
    speeds = middles.mean(axis=1)
    a, b = _pools(rounds, speeds, speeds, quantile, correlation)
    a_speed = b_speed = float(speeds.mean())
    between = _NOTHING
    if units > 1 and min(a.worth, b.worth) < samples_needed(quantile):
        shapes = _pools(rounds, middles[:, 0], middles[:, 1], quantile, correlation)
        apart = _between(rounds, middles[:, 1] - middles[:, 0], correlation)
        if apart is not None and min(shape.worth for shape in shapes) > min(a.worth, b.worth):
            (a, b), between = shapes, apart
            a_speed, b_speed = (float(speed) for speed in middles.mean(axis=0))
    a_log, b_log = a.centre + a_speed, b.centre + b_speed
    if not (_known((a_log, b_log)) and abs(b_log - a_log) <= MOST_LOG):
        return RatioEstimate(len(rounds), reason="the percentiles have no ratio"), None
    values = a.tail(a_speed, exact=between is _NOTHING), b.tail(b_speed, exact=between is _NOTHING)
    ratio = values[1].value / values[0].value
    if units < 2:
        reason = "one pair shows no spread; at least 2 are needed"
        return RatioEstimate(len(rounds), ratio, reason=reason), values
    low, high = _interval(a, b, between, SIGNIFICANCE * spent)
    if not _known((low, high)):
        reason = "too few independent samples beyond the percentile for an interval"
        return RatioEstimate(len(rounds), ratio, reason=reason), values
    bound = math.log1p(margin)
    error = (high - low) / 2.0 / critical_t(a.degrees, SIGNIFICANCE * spent)
    estimate = RatioEstimate(
        pairs=len(rounds),
        ratio=ratio,
        ci95=(math.exp(low), math.exp(high)),
        p_value=min(1.0, _smallest(lambda level: _excludes(_interval(a, b, between, level), 0.0)) / spent),
        p_equivalence=min(1.0, _smallest(lambda level: _within(_interval(a, b, between, 2.0 * level), bound)) / spent),
        correlation=allowed_correlation(correlation),
        error_log=error,
        degrees=a.degrees,
    )
    return estimate, values


def percentile_of_rounds(rounds: Sequence[Values], quantile: float) -> tuple[float, tuple[float, float]]:
    """The percentile of all rounds' values together, none below 0, and its 95 % interval: from 0 or to infinity where
    the values do not reach far enough. Raises `ValueError` without values."""
    parts = [Round(values, values, number) for number, values in enumerate(rounds) if len(values)]
    if not parts:
        raise ValueError("there is no percentile of no values")
    with np.errstate(divide="ignore"):
        pool = _pool([np.log(part.a) for part in parts], parts, quantile, 0.0)
    low, high = pool.interval(SIGNIFICANCE) if pool.degrees > 0.0 else (-math.inf, math.inf)
    return math.exp(pool.centre), (math.exp(low), math.exp(high))


def _pools(
    rounds: Sequence[Round], a_speeds: Values, b_speeds: Values, quantile: float, correlation: float
) -> tuple[_ArmPool, _ArmPool]:
    """Divide each arm's samples by the speeds of its rounds, which are logs."""
    with np.errstate(divide="ignore"):  # a value of 0 is below all others
        a = [np.log(pair.a) - speed for pair, speed in zip(rounds, a_speeds, strict=True)]
        b = [np.log(pair.b) - speed for pair, speed in zip(rounds, b_speeds, strict=True)]
    return _pool(a, rounds, quantile, correlation), _pool(b, rounds, quantile, correlation)


def _pool(parts: Sequence[Values], rounds: Sequence[Round], quantile: float, correlation: float) -> _ArmPool:
    logs = np.concatenate(parts).round(_DIGITS)
    units = np.concatenate([np.full(len(part), pair.unit) for part, pair in zip(parts, rounds, strict=True)])
    order = np.argsort(logs, kind="stable")
    logs, units = logs[order], np.unique(units[order], return_inverse=True)[1]
    count, kinds = len(logs), int(units.max()) + 1
    sizes = np.bincount(units, minlength=kinds)
    place = max(1, math.ceil(quantile * count))
    first, last = (int(np.searchsorted(logs, logs[place - 1], side)) for side in ("left", "right"))
    # Of equal samples at the percentile every unit has its share below it.
    tied = np.bincount(units[first:last], minlength=kinds) * ((place - first) / (last - first))
    below = np.bincount(units[:first], minlength=kinds) + tied
    apart = below - sizes * (float(below.sum()) / count)
    alone = quantile * (1.0 - quantile) / count
    variance = alone
    if kinds > 1:
        between = kinds / (kinds - 1) * float(np.sum(apart**2)) / count**2 - alone
        variance += max(between, 0.0) * widening(kinds, correlation)
    centre = float(np.quantile(logs, quantile, method="median_unbiased"))
    return _ArmPool(logs, quantile, centre, count * alone / variance, kinds - 1.0)


def _between(rounds: Sequence[Round], logs: Values, correlation: float) -> _RoundMedians | None:
    """Summarise the log ratios of the rounds' medians; None without a spread."""
    units = np.unique([pair.unit for pair in rounds], return_inverse=True)[1]
    means = np.bincount(units, weights=logs) / np.bincount(units)
    apart = means - means.mean()
    spread = float(np.std(means, ddof=1))
    if spread < MIN_LOG_SPREAD:
        return None
    error, degrees = error_of_mean(means, correlation)
    return _RoundMedians(float(means.mean()), error, degrees, float(apart.min()), float(apart.max()))


def _interval(a: _ArmPool, b: _ArmPool, between: _RoundMedians, significance: float) -> tuple[float, float]:
    """The interval of the log ratio."""
    (a_low, a_high), (b_low, b_high) = a.interval(significance), b.interval(significance)
    half = critical_t(between.degrees, significance) * between.error if between.error else 0.0
    centre = b.centre - a.centre + between.centre
    low = centre - math.hypot(b.centre - b_low, a_high - a.centre, half) + between.lowest
    return low, centre + math.hypot(b_high - b.centre, a.centre - a_low, half) + between.highest


def _known(interval: tuple[float, float]) -> bool:
    return all(abs(end) <= MOST_LOG for end in interval)


def _excludes(interval: tuple[float, float], value: float) -> bool:
    return not interval[0] <= value <= interval[1]


def _within(interval: tuple[float, float], bound: float) -> bool:
    return -bound <= interval[0] and interval[1] <= bound


def _smallest(shown: Callable[[float], bool]) -> float:
    """The smallest significance at which something is shown, by bisection on the log scale; 1 if it never is."""
    low, high = math.log(_LEAST_P), math.log(0.499)
    if not shown(math.exp(high)):
        return 1.0
    if shown(math.exp(low)):
        return _LEAST_P
    for _ in range(24):
        middle = (low + high) / 2.0
        low, high = (low, middle) if shown(math.exp(middle)) else (middle, high)
    return math.exp(high)
