"""Interval, tests and sensitivity of a ratio that was measured in pairs; pure functions of numbers.

The unit of replication is the pair of adjacent blocks, and above it the restart of the servers (Kalibera and Jones,
ISMM 2013), never the request: requests of one block share conditions, pairs of one restart share a memory layout.
Assumptions: the log ratios of the pairs are about normal, and successive pairs follow a first-order autoregression.
Ratios of positive means are closer to normal on the log scale, where A over B and B over A are the same statement. A
slow drift of the machine alternates in sign in ABBA order, so it widens the interval without moving it. What cannot be
computed is None with a reason, never significant.

**Checked after every pair.** The interval is then a t-mixture confidence sequence. Under a mean log ratio μ and an
unknown spread, the Bayes factor of "the standardised effect is normal with variance 1/c²" against "the mean is μ",
with the right Haar prior on the spread, is a non-negative martingale that starts at 1:

    BF(μ) = √(c²/(w+c²)) · [ (w+c²)·V / ((w+c²)·V − S²) ]^(n/2),    w = Σaᵢ²,  S = Σaᵢ(yᵢ − aᵢμ),  V = Σ(yᵢ − aᵢμ)²

(Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", Sequential
Analysis 2025; the statistic goes back to Lai, Ann. Statist. 4, 1976). By Ville's inequality the chance that it ever
reaches 1/α is at most α, so {μ : BF(μ) < 1/α} covers the truth at all times at once, whatever the stopping rule.

The yᵢ are the log ratios after `ratios.whiten`, and the aᵢ the weights of the mean in them: 1 without a correlation.
The theorem holds for independent, about normal log ratios, and for a correlation that is known beforehand. Here each
check estimates it anew from the pairs so far and allows for more (`ratios.plausible_correlation`), for which there is
no theorem: `tests/truth/test_one_run_in_twenty.py` shows by simulation that false winners stay below 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.stats.distributions import chi_square_quantiles, normal_cdf, root, student_tail
from loadgen.stats.estimates import SIGNIFICANCE, critical_t, t_estimate

Values = npt.NDArray[np.float64]
POWER = 0.80
MOST_CORRELATION = 0.9
CORRELATION_SPREAD = 0.5
"""Standard deviation about 0 of the correlation of successive pairs before a run has shown any: five times that
between the published runs, 0.10. An interval allows for one standard deviation above what the run makes likely
(`tests/truth/test_one_run_in_twenty.py` shows what that holds)."""
OWN_CORRELATION_SPREAD = 0.25
"""The part of that by which workloads and comparisons of one run differ. Chosen by simulation: with less, one
correlated workload among five names false winners; with more, small differences are missed."""
MIN_LOG_SPREAD = 1e-9
"""Spread of log ratios below which they are copies of one number: a clock tick is 1e-9 of a block."""
MOST_LOG = 700.0
"""A ratio whose logarithm is larger does not fit into a float, and neither does its inverse."""


class RatioEstimate(msgspec.Struct, frozen=True):
    """Geometric mean ratio of an arm over the baseline. `ci95`, `p_value` and `p_equivalence` are None together, with a
    `reason`."""

    pairs: int
    ratio: float | None = None
    """The arm's value over the baseline's."""
    ci95: tuple[float, float] | None = None
    p_value: float | None = None
    p_equivalence: float | None = None
    """p value of two one-sided tests against ±δ; not adjusted."""
    reason: str | None = None
    """Why the ratio, the interval or the verdict is missing."""
    correlation: float = 0.0
    """Correlation of successive pairs that the interval allows for, see `allowed_correlation`."""
    error_log: float | None = None
    """Standard error of the log ratio, as wide as the interval."""
    degrees: float = 0.0
    """Degrees of freedom of Student's t for that error."""


def has_log(value: float) -> bool:
    """Whether a figure can be part of a ratio, and a ratio of an interval: positive, and neither too small nor too
    large for its inverse."""
    return math.exp(-MOST_LOG) <= value <= math.exp(MOST_LOG)


def lag_one(ratios: Sequence[float]) -> float | None:
    """Correlation of each log ratio with the next, with the bias of few pairs (see `plausible_correlation`); None for
    fewer than 3 or without spread."""
    if len(ratios) < 3 or any(value <= 0.0 or not math.isfinite(value) for value in ratios):
        return None
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    apart = logs - logs.mean()
    whole = float(np.sum(apart**2))
    if whole < len(logs) * MIN_LOG_SPREAD**2:
        return None
    return float(np.sum(apart[1:] * apart[:-1])) / whole


def unbiased(count: int, correlation: float) -> float:
    """The first-order autoregression's φ whose expected `lag_one` over `count` pairs is this. Taking the mean out
    lowers the expectation to φ − (1 + 4φ)/n (Kendall, Biometrika 41, 1954; Marriott and Pope, same volume), which up to
    4 pairs does not depend on φ any more."""
    return (correlation + 1.0 / count) / (1.0 - 4.0 / count) if count > 4 else 0.0


def plausible_correlation(
    seen: Sequence[tuple[int, float]], alone: tuple[int, float] | None = None
) -> tuple[float, float]:
    """The correlation of successive pairs of one comparison. `seen` has the length and `lag_one` of independent series
    of the run, such as its workloads; `alone` has those of the comparison.

    First what an interval allows for: the mean given the pairs and one standard deviation, 0 to `MOST_CORRELATION`;
    then the standard deviation of that over runs of the same plan.

    Before the run the correlation is taken as normal (`CORRELATION_SPREAD`): a part that the run's series share and a
    part of each series (`OWN_CORRELATION_SPREAD`). `lag_one` is taken as normal about its expectation (`unbiased`) with
    the variance it has without any correlation, (n−2)²/(n²(n−1)) (Moran, Biometrika 35, 1948). The larger of the
    comparison's own and the shared correlation counts. Without a series of more than 4 pairs it is 0.5.
    """
    certainty = weighted = noise = 0.0
    for count, correlation in seen:
        information = _information(count)
        weight = information / (1.0 + information * OWN_CORRELATION_SPREAD**2)
        certainty += weight
        weighted += weight * unbiased(count, correlation)
        noise += weight**2 / information if information else 0.0
    precision = 1.0 / (CORRELATION_SPREAD**2 - OWN_CORRELATION_SPREAD**2) + certainty
    mean = weighted / precision
    count, correlation = alone or (0, 0.0)
    information = _information(count)
    trust = information * OWN_CORRELATION_SPREAD**2 / (1.0 + information * OWN_CORRELATION_SPREAD**2)
    error = math.sqrt((1.0 - trust) ** 2 / precision + OWN_CORRELATION_SPREAD**2 * (1.0 - trust))
    of_it = (1.0 - trust) * mean + trust * unbiased(count, correlation) + error
    scatter = math.hypot((1.0 - trust) * math.sqrt(noise) / precision, trust / math.sqrt(information or 1.0))
    return allowed_correlation(max(of_it, mean + 1.0 / math.sqrt(precision))), scatter


def _information(count: int) -> float:
    """1 over the variance of `unbiased` of so many pairs without a correlation; 0 up to 4 pairs."""
    return ((count - 4.0) ** 2 * (count - 1.0)) / (count - 2.0) ** 2 if count > 4 else 0.0


def allowed_correlation(correlation: float) -> float:
    """What an interval allows for: a negative correlation counts as none, and the largest is `MOST_CORRELATION`."""
    return min(max(correlation, 0.0), MOST_CORRELATION)


def whiten(values: Values, phi: float) -> tuple[Values, Values]:
    """Independent combinations of the values of a first-order autoregression about a mean, in their order, and the
    weight of the mean in each: x(t) − φ·x(t−1), and √(1−φ²)·x(1) for the first (Prais and Winsten, Cowles Commission
    paper 383, 1954)."""
    weights = np.full(len(values), 1.0 - phi)
    weights[0] = first = math.sqrt(1.0 - phi**2)
    return np.append(first * values[0], values[1:] - phi * values[:-1]), weights


def error_of_mean(values: Sequence[float] | Values, correlation: float = 0.0) -> tuple[float, float]:
    """Standard error of the mean of at least two values in their order, and its degrees of freedom: that of a
    first-order autoregression with this correlation. The spread comes from the whitened values, which are independent,
    so it keeps count − 1 degrees of freedom. Where the true correlation is weaker, the error is too large."""
    count, phi = len(values), allowed_correlation(correlation)
    whitened, weights = whiten(np.asarray(values, dtype=np.float64), phi)
    apart = whitened - weights * float(weights @ whitened) / float(weights @ weights)
    variance = float(apart @ apart) / (count - 1) / (1.0 - phi**2)
    return math.sqrt(variance * variance_inflation(count, phi) / count), count - 1.0


def variance_inflation(count: int, phi: float) -> float:
    """k = (1+φ)/(1−φ) − 2φ(1−φⁿ)/(n(1−φ)²), by which the variance of the mean of a first-order autoregression exceeds
    σ²/n (Anderson, The Statistical Analysis of Time Series, 1971, section 8.3)."""
    return (1.0 + phi) / (1.0 - phi) - 2.0 * phi * (1.0 - phi**count) / (count * (1.0 - phi) ** 2)


def widening(count: int, correlation: float) -> float:
    """Factor between the squared standard error of the mean by the plain spread of `count` values and the true one. The
    variance of the mean is k·σ²/n with k of `variance_inflation`, and the sample variance is too low by (1 −
    k/n)·n/(n−1)."""
    k = variance_inflation(count, allowed_correlation(correlation))
    return k / ((1.0 - k / count) * count / (count - 1.0))


def estimate_ratio(ratios: Sequence[float], margin: float, correlation: float = 0.0) -> RatioEstimate:
    """Student's t on the log ratios of the pairs, and two one-sided tests against ±`margin`, widened for the
    correlation of successive pairs.

    `p_value` tests "the ratio is 1" (two-sided); `p_equivalence` is the larger p of the two one-sided tests of
    "outside [1/(1+margin), 1+margin]" (Schuirmann, J. Pharmacokin. Biopharm. 15, 1987). Identical ratios have no
    spread, so they get no interval.
    """
    usable = [value for value in ratios if value > 0.0 and math.isfinite(value)]
    if len(usable) != len(ratios):
        return RatioEstimate(len(ratios), reason="a block measured no positive value")
    count = len(usable)
    if count == 0:
        return RatioEstimate(0, reason="there is no complete pair of blocks")
    logs = [math.log(value) for value in usable]
    centre = math.fsum(logs) / count
    if count == 1:
        return RatioEstimate(1, math.exp(centre), reason="one pair shows no spread; at least 2 are needed")
    spread = math.sqrt(math.fsum((value - centre) ** 2 for value in logs) / (count - 1))
    if spread < MIN_LOG_SPREAD:
        reason = "all pairs have the same ratio, so their spread is unknown"
        return RatioEstimate(count, math.exp(centre), reason=reason)
    error, degrees = error_of_mean(logs, correlation)
    interval = t_estimate(centre, error, degrees)
    if not all(-MOST_LOG <= bound <= MOST_LOG for bound in interval.interval or ()):
        return RatioEstimate(count, math.exp(centre), reason="the pairs are too far apart")
    bound = math.log1p(margin)
    below = student_tail((centre + bound) / error, degrees)
    above = student_tail((bound - centre) / error, degrees)
    return RatioEstimate(
        pairs=count,
        ratio=math.exp(centre),
        ci95=interval.exp().interval,
        p_value=2.0 * student_tail(abs(centre) / error, degrees),
        p_equivalence=max(below, above),
        correlation=allowed_correlation(correlation),
        error_log=error,
        degrees=degrees,
    )


def estimate_restarts(groups: Sequence[Sequence[float]], margin: float, correlation: float = 0.0) -> RatioEstimate:
    """`estimate_ratio` with each restart as one observation: the mean log ratio of its pairs (`groups`).

    With equally many pairs per restart, the variance of these means is σ²(between) + σ²(within)/pairs, so Student's t
    with restarts − 1 degrees of freedom is exact for normal effects, whatever the two variances are (Kalibera and
    Jones, ISMM 2013, section 6). With unequal numbers it is near that (`tests/truth` simulates 23, 17 and 7). With one
    group the pairs are the units, with this correlation, and the interval does not include what a restart changes.
    """
    filled = [group for group in groups if group]
    if len(filled) < 2:
        return estimate_ratio(filled[0] if filled else (), margin, correlation)
    pairs = sum(map(len, filled))
    if any(value <= 0.0 or not math.isfinite(value) for group in filled for value in group):
        return msgspec.structs.replace(estimate_ratio([0.0], margin), pairs=pairs)
    return msgspec.structs.replace(estimate_ratio([geometric_mean(group) for group in filled], margin), pairs=pairs)


def between_restarts(groups: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of what a restart adds to the log ratio: √max(0, variance of the restart means − variance
    within over pairs). None with fewer than 2 restarts or without 2 pairs in any of them."""
    filled = [[math.log(value) for value in group] for group in groups if group]
    degrees = sum(len(group) - 1 for group in filled)
    if len(filled) < 2 or degrees < 1:
        return None
    means = [math.fsum(group) / len(group) for group in filled]
    centre = math.fsum(means) / len(means)
    within = math.fsum((v - m) ** 2 for group, m in zip(filled, means, strict=True) for v in group) / degrees
    of_means = math.fsum((m - centre) ** 2 for m in means) / (len(means) - 1)
    share = math.fsum(1.0 / len(group) for group in filled) / len(filled)
    return math.sqrt(max(0.0, of_means - within * share))


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean: 0 with a value of 0, NaN with a negative one. The ratio of two of them is the geometric mean of
    the ratios."""
    if all(value > 0.0 for value in values):
        return math.exp(math.fsum(math.log(value) for value in values) / len(values))
    return 0.0 if all(value >= 0.0 for value in values) else math.nan


def mean_over_starts(starts: Sequence[Sequence[float]]) -> float:
    """Geometric mean of the starts' geometric means, so that a start with more blocks does not count more; of at least
    one positive figure."""
    return geometric_mean([geometric_mean(figures) for figures in starts if figures])


def interval_of_mean(starts: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % t interval of `mean_over_starts` of an arm's own figures, in their order; None with fewer than 2 or without
    spread.

    Of several starts each is one observation, as in `estimate_restarts`. Of one start it allows for a
    `lone_correlation` of successive figures, and what a restart changes is not in it. It includes the drift of the
    machine, which the paired ratio does not: arms with overlapping intervals may differ.
    """
    filled = [figures for figures in starts if figures]
    return estimate_restarts(filled, 1.0, lone_correlation(filled[0]) if len(filled) == 1 else 0.0).ci95


def lone_correlation(figures: Sequence[float]) -> float:
    """The `plausible_correlation` of one series without others of its run."""
    correlation = lag_one(figures)
    alone = [] if correlation is None else [(len(figures), correlation)]
    return plausible_correlation(alone, *alone)[0]


def adjust_holm(p_values: Sequence[float | None], weights: Sequence[float] | None = None) -> list[float | None]:
    """Holm's step-down adjustment (Scand. J. Statist. 6, 1979): the chance of one false winner among all comparisons
    of a run stays at 5 % however they depend on each other. None (no test made) stays None and does not count.

    `weights` divide the 5 % unevenly (the same paper, section 4). With anytime-valid p values the limit holds at all
    times at once: the first false winner needs a p below its own share of 5 %.
    """
    shares = [1.0] * len(p_values) if weights is None else list(weights)
    order = sorted((value / shares[index], index) for index, value in enumerate(p_values) if value is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    left, largest = math.fsum(shares[index] for _, index in order), 0.0
    for weighted, index in order:
        largest = max(largest, min(1.0, left * weighted))
        adjusted[index] = largest
        left -= shares[index]
    return adjusted


def detectable_effect(error_log: float, degrees: float, family: int) -> float | None:
    """Smallest true difference (0.03 for 3 %) that such a run detects with 80 % power at a family-wise 5 %.

    `error_log` is the standard error of the log ratio with `degrees` of freedom; `family` is the number of comparisons,
    whose strictest Holm step (5 % / family) a winner may have to pass. The error is itself an estimate from few pairs;
    the power is averaged over that uncertainty, so it holds for another run of the same plan. None without a degree of
    freedom.
    """
    if degrees < 1:
        return None
    log_effect = _effect_in_errors(round(degrees, 1), SIGNIFICANCE / max(family, 1)) * error_log
    return math.expm1(log_effect) if log_effect < 700.0 else None


@lru_cache(maxsize=1024)
def _effect_in_errors(degrees: float, significance: float) -> float:
    """k with P(|Z + k·S| > t·S') = 80 %, where Z is standard normal and S, S' are two independent estimates of the
    standard error, √(χ²/degrees), by the midpoint rule over their quantiles."""
    grid = (np.arange(120) + 0.5) / 120
    errors = np.sqrt(chi_square_quantiles(grid, degrees) / degrees)
    threshold = critical_t(degrees, significance) * errors[:, None]

    def missing(log_effect: float) -> float:
        shift = math.exp(log_effect) * errors[None, :]
        return POWER - float(np.mean(normal_cdf(shift - threshold) + normal_cdf(-shift - threshold)))

    return math.exp(root(missing, -3.0, 30.0, 1e-4))


MIXTURE = 0.05
"""c². Smaller values detect large effects sooner and small ones later. Pairs until one of 30 comparisons is certain at
a correlation of 0.5, the median of 400 simulated: an effect of 20 standard deviations 5 (with 0.5: 9), of five 7 (10),
of two 18 (18), of one 57 (51)."""


def log_bayes_factors(logs: Sequence[float], mean: float, correlation: float = 0.0) -> Values:
    """log BF(`mean`) after each of the log ratios."""
    values, weights = whiten(np.asarray(logs, dtype=np.float64) - mean, allowed_correlation(correlation))
    counts = np.arange(1, len(values) + 1, dtype=np.float64)
    weight, sums, squares = np.cumsum(weights**2), np.cumsum(weights * values), np.cumsum(values**2)
    share = np.divide(sums**2, (weight + MIXTURE) * squares, out=np.zeros_like(sums), where=squares > 0.0)
    share[:1] = weight[:1] / (weight[:1] + MIXTURE)  # one observation shows nothing, even if it is the mean itself
    return np.asarray(0.5 * np.log(MIXTURE / (weight + MIXTURE)) - counts / 2.0 * np.log1p(-share))


def interval_of_logs(logs: Sequence[float], correlation: float = 0.0) -> tuple[float, float]:
    """The interval of the mean of all log ratios; infinite with too few of them. BF(μ) < 1/α solved for (m − μ)², with
    m the weighted mean: Q·(K−1)·(w+c²) / (w·(w + c² − K·c²)) with K = (√((w+c²)/c²)/α)^(2/n) and Q the sum of squares
    about m."""
    values, weights = whiten(np.asarray(logs, dtype=np.float64), allowed_correlation(correlation))
    count, weight = len(values), float(weights @ weights)
    bound = (math.sqrt((weight + MIXTURE) / MIXTURE) / SIGNIFICANCE) ** (2.0 / count)
    room = weight + MIXTURE - bound * MIXTURE
    if count < 2 or room <= 0.0:
        return -math.inf, math.inf
    mean = float(weights @ values) / weight
    about_mean = float(np.sum((values - weights * mean) ** 2))
    half = math.sqrt(about_mean * (bound - 1.0) * (weight + MIXTURE) / (weight * room))
    return mean - half, mean + half


def estimate_anytime(ratios: Sequence[float], margin: float, correlation: float = 0.0) -> RatioEstimate:
    """Like `estimate_ratio`, with an interval and p values that stay valid although they are checked after every pair.
    `p_value` is 1 over the Bayes factor of no difference, and `p_equivalence` the smallest α at which the interval lies
    inside ±`margin`."""
    plain = estimate_ratio(ratios, margin)
    if plain.ci95 is None:
        return plain
    logs = [math.log(value) for value in ratios]
    (low, high), bound = interval_of_logs(logs, correlation), math.log1p(margin)
    p_equivalence = 1.0
    if -bound < (low + high) / 2.0 < bound:
        p_equivalence = max(anytime_p(logs, bound, correlation), anytime_p(logs, -bound, correlation))
    unbounded = not (-MOST_LOG <= low <= high <= MOST_LOG)
    estimate = msgspec.structs.replace(plain, correlation=allowed_correlation(correlation), error_log=None, degrees=0.0)
    if unbounded:
        reason = f"{plain.pairs} pairs are too few for an interval that stays valid after every round"
        return msgspec.structs.replace(estimate, ci95=None, p_value=None, p_equivalence=None, reason=reason)
    ci95 = math.exp(low), math.exp(high)
    return msgspec.structs.replace(
        estimate, ci95=ci95, p_value=anytime_p(logs, 0.0, correlation), p_equivalence=p_equivalence
    )


def anytime_p(logs: Sequence[float], mean: float, correlation: float) -> float:
    """p of this mean of the log ratios, valid after every pair: 1 over its Bayes factor."""
    return math.exp(-max(float(log_bayes_factors(logs, mean, correlation)[-1]), 0.0))
