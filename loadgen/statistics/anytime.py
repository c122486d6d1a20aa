"""An interval of a paired ratio that stays valid after every pair: a t-mixture confidence sequence.

Under a mean log ratio μ and an unknown spread, the Bayes factor of "the standardised effect is normal with variance
1/c²" against "the mean is μ", with the right Haar prior on the spread, is a non-negative martingale that starts at 1:

    BF(μ) = √(c²/(n+c²)) · [ (n+c²)·V / ((n+c²)·V − S²) ]^(n/2),    S = Σ(xᵢ − μ),  V = Σ(xᵢ − μ)²

(Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", Sequential
Analysis 2025; the statistic goes back to Lai, Ann. Statist. 4, 1976). By Ville's inequality the chance that it ever
reaches 1/α is at most α, so {μ : BF(μ) < 1/α} covers the truth at all times at once, whatever the stopping rule.
Assumption, as for the t interval: independent, about normal log ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.statistics.ratios import (
    MIN_LOG_SPREAD,
    SIGNIFICANCE,
    RatioEstimate,
    allowed_correlation,
    estimate_ratio,
    widening,
)

MIXTURE = 0.5
"""c². Smaller values detect large effects sooner and small ones later; between 0.2 and 2 the number of pairs hardly
changes."""

Logs = np.ndarray[tuple[int], np.dtype[np.float64]]


def log_bayes_factors(logs: Sequence[float], mean: float, wider: float = 1.0) -> Logs:
    """log BF(`mean`) after each of the log ratios; `wider` of them are worth one independent one."""
    deviations = np.asarray(logs, dtype=np.float64) - mean
    counts = np.arange(1, len(deviations) + 1, dtype=np.float64) / wider
    sums, squares = np.cumsum(deviations) / wider, np.cumsum(deviations**2) / wider
    share = np.divide(sums**2, (counts + MIXTURE) * squares, out=np.zeros_like(sums), where=squares > 0.0)
    share[:1] = 1.0 / (1.0 + MIXTURE)  # one observation shows nothing, even if it is the mean itself
    return np.asarray(0.5 * np.log(MIXTURE / (counts + MIXTURE)) - counts / 2.0 * np.log1p(-share))


def half_width(logs: Sequence[float], wider: float = 1.0) -> float:
    """Half the width of the interval around the mean of all log ratios; infinite with too few of them.

    BF(μ) < 1/α solved for (mean − μ)²: Q·(K−1) / (n·(1 − K·c²/(n+c²))) with K = (√((n+c²)/c²)/α)^(2/n) and Q the sum
    of squares about the mean.
    """
    count = len(logs) / wider
    values = np.asarray(logs, dtype=np.float64)
    bound = (math.sqrt((count + MIXTURE) / MIXTURE) / SIGNIFICANCE) ** (2.0 / count)
    room = 1.0 - bound * MIXTURE / (count + MIXTURE)
    if count < 2 or room <= 0.0:
        return math.inf
    about_mean = float(np.sum((values - values.mean()) ** 2)) / wider
    return math.sqrt(about_mean * (bound - 1.0) / (count * room))


def estimate_anytime(ratios: Sequence[float], margin: float, correlation: float = 0.0) -> RatioEstimate:
    """Like `estimate_ratio`, with an interval and p values that stay valid after every pair. With a correlation of
    successive pairs, fewer pairs are counted, by `ratios.widening`.

    `p_value` is 1 over the largest Bayes factor so far, so a difference stays shown. `p_equivalence` is
    the smallest α at which the interval lies inside ±`margin`.
    """
    plain = estimate_ratio(ratios, margin)
    if plain.ci95 is None or plain.ratio is None or plain.spread_log is None or plain.spread_log < MIN_LOG_SPREAD:
        return plain
    logs = [math.log(value) for value in ratios]
    wider, _ = widening(len(logs), correlation)
    centre, half, bound = math.log(plain.ratio), half_width(logs, wider=wider), math.log1p(margin)
    best = float(np.max(log_bayes_factors(logs, 0.0, wider)))
    p_equivalence = 1.0
    if abs(centre) < bound:
        p_equivalence = max(_p(logs, bound, wider), _p(logs, -bound, wider))
    unbounded = not math.isfinite(half) or half > 700.0
    return RatioEstimate(
        pairs=plain.pairs,
        ratio=plain.ratio,
        ci95=None if unbounded else (math.exp(centre - half), math.exp(centre + half)),
        p_value=None if unbounded else math.exp(-max(best, 0.0)),
        p_equivalence=None if unbounded else p_equivalence,
        spread_log=plain.spread_log,
        units=plain.units,
        correlation=allowed_correlation(correlation),
        reason=f"{plain.pairs} pairs are too few for an interval that stays valid after every round"
        if unbounded
        else None,
    )


def _p(logs: Sequence[float], mean: float, wider: float) -> float:
    return math.exp(-max(float(log_bayes_factors(logs, mean, wider)[-1]), 0.0))
