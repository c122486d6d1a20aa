"""An interval of a paired ratio that is checked after every pair: a t-mixture confidence sequence.

Under a mean log ratio μ and an unknown spread, the Bayes factor of "the standardised effect is normal with variance
1/c²" against "the mean is μ", with the right Haar prior on the spread, is a non-negative martingale that starts at 1:

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

import numpy as np

from loadgen.stats.ratios import (
    MIN_LOG_SPREAD,
    SIGNIFICANCE,
    RatioEstimate,
    Values,
    allowed_correlation,
    estimate_ratio,
    whiten,
)

MIXTURE = 0.5
"""c². Smaller values detect large effects sooner and small ones later; between 0.2 and 2 the number of pairs hardly
changes."""


def log_bayes_factors(logs: Sequence[float], mean: float, correlation: float = 0.0) -> Values:
    """log BF(`mean`) after each of the log ratios."""
    values, weights = whiten(np.asarray(logs, dtype=np.float64) - mean, allowed_correlation(correlation))
    counts = np.arange(1, len(values) + 1, dtype=np.float64)
    known, sums, squares = np.cumsum(weights**2), np.cumsum(weights * values), np.cumsum(values**2)
    share = np.divide(sums**2, (known + MIXTURE) * squares, out=np.zeros_like(sums), where=squares > 0.0)
    share[:1] = known[:1] / (known[:1] + MIXTURE)  # one observation shows nothing, even if it is the mean itself
    return np.asarray(0.5 * np.log(MIXTURE / (known + MIXTURE)) - counts / 2.0 * np.log1p(-share))


def interval_of_logs(logs: Sequence[float], correlation: float = 0.0) -> tuple[float, float]:
    """The interval of the mean of all log ratios; infinite with too few of them.

    BF(μ) < 1/α solved for (m − μ)², with m the weighted mean: Q·(K−1)·(w+c²) / (w·(w + c² − K·c²)) with
    K = (√((w+c²)/c²)/α)^(2/n) and Q the sum of squares about m.
    """
    values, weights = whiten(np.asarray(logs, dtype=np.float64), allowed_correlation(correlation))
    count, known = len(values), float(weights @ weights)
    bound = (math.sqrt((known + MIXTURE) / MIXTURE) / SIGNIFICANCE) ** (2.0 / count)
    room = known + MIXTURE - bound * MIXTURE
    if count < 2 or room <= 0.0:
        return -math.inf, math.inf
    mean = float(weights @ values) / known
    about_mean = float(np.sum((values - weights * mean) ** 2))
    half = math.sqrt(about_mean * (bound - 1.0) * (known + MIXTURE) / (known * room))
    return mean - half, mean + half


def estimate_anytime(ratios: Sequence[float], margin: float, correlation: float = 0.0) -> RatioEstimate:
    """Like `estimate_ratio`, with an interval and p values that stay valid although they are checked after every pair.

    `p_value` is 1 over the Bayes factor of no difference, and `p_equivalence` the smallest α at which the interval lies
    inside ±`margin`.
    """
    plain = estimate_ratio(ratios, margin)
    if plain.ci95 is None or plain.ratio is None or plain.spread_log is None or plain.spread_log < MIN_LOG_SPREAD:
        return plain
    logs = [math.log(value) for value in ratios]
    (low, high), bound = interval_of_logs(logs, correlation), math.log1p(margin)
    # The weighted mean is not the geometric mean that is shown, which belongs to its interval.
    low, high = min(low, math.log(plain.ratio)), max(high, math.log(plain.ratio))
    p_equivalence = 1.0
    if -bound < (low + high) / 2.0 < bound:
        p_equivalence = max(_p(logs, bound, correlation), _p(logs, -bound, correlation))
    unbounded = not math.isfinite(high - low) or high - low > 1400.0
    return RatioEstimate(
        pairs=plain.pairs,
        ratio=plain.ratio,
        ci95=None if unbounded else (math.exp(low), math.exp(high)),
        p_value=None if unbounded else _p(logs, 0.0, correlation),
        p_equivalence=None if unbounded else p_equivalence,
        spread_log=plain.spread_log,
        units=plain.units,
        correlation=allowed_correlation(correlation),
        reason=f"{plain.pairs} pairs are too few for an interval that stays valid after every round"
        if unbounded
        else None,
    )


def _p(logs: Sequence[float], mean: float, correlation: float) -> float:
    return math.exp(-max(float(log_bayes_factors(logs, mean, correlation)[-1]), 0.0))
