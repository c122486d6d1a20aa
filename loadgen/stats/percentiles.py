"""Percentiles of raw samples, and how many samples a percentile needs before it may be printed.

The quantile is Hyndman and Fan's type 8 (The American Statistician 50(4), 1996): linear between order statistics, at
plotting positions (k - 1/3) / (n + 1/3). It is approximately median-unbiased whatever the distribution, so blocks
with different numbers of requests stay comparable, which they are not under the default of most libraries (type 7),
whose high percentiles are too low for small n.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

MAX_MISS_PROBABILITY = 0.01


@lru_cache(maxsize=64)
def samples_needed(quantile: float) -> int:
    """Smallest n for which at most one sample beyond the true quantile has a probability of at most 1 %.

    That is p^n + n·p^(n-1)·(1-p) ≤ 0.01 for independent samples: the printed value then rests on at least two
    observations of the tail. p50 needs 11, p90 64, p95 130, p99 662, p99.9 6,636.
    """
    if not 0.0 < quantile < 1.0:
        raise ValueError(f"a quantile lies strictly between 0 and 1, got {quantile}")
    count = 2
    while quantile**count + count * quantile ** (count - 1) * (1.0 - quantile) > MAX_MISS_PROBABILITY:
        count += 1
    return count


def percentile(values: npt.ArrayLike, quantile: float) -> float | None:
    """The quantile (0.99 for p99) of `values`, in their unit; None if there are too few."""
    array = np.asarray(values, dtype=np.float64)
    if array.size < samples_needed(quantile):
        return None
    return float(np.quantile(array, quantile, method="median_unbiased"))


def distribution(values: npt.ArrayLike) -> tuple[tuple[float, float], ...]:
    """Points of a chart (value, share of values at or below it), of observed values only: evenly spaced ranks, the
    extremes and a denser upper tail."""
    array = np.sort(np.asarray(values, dtype=np.float64))
    size = array.size
    if size == 0:
        return ()
    shares = np.concatenate([np.linspace(0.0, 0.98, 201), np.linspace(0.98, 1.0, 50)])
    ranks = np.unique(np.clip(np.ceil(shares * size).astype(np.int64), 1, size))
    return tuple((float(array[rank - 1]), float(rank / size)) for rank in ranks)
