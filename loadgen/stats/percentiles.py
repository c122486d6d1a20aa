"""Percentiles of raw samples, the samples that each needs, and the late answers that a claim about one allows.

**Percentiles.** The quantile is Hyndman and Fan's type 8 (The American Statistician 50(4), 1996): linear between
order statistics, at plotting positions (k - 1/3) / (n + 1/3). It is approximately median-unbiased whatever the
distribution, so blocks with different numbers of requests stay comparable, which they are not under the default of
most libraries (type 7), whose high percentiles are too low for small n.

**Claims.** A server keeps "p99 ≤ X" when at most 1 % of its answers are late. Seeing t late answers among n, the
claim is made at confidence c when a server whose true share of late answers is 1 − q (or more) would show at most t
with a probability of at most 1 − c:

    P(Binomial(n, 1 − q) ≤ t) ≤ 1 − c

That is MLPerf's early-stopping bound for the Server scenario (MLCommons inference, `loadgen/early_stopping.cc`; Reddi
et al., "MLPerf Inference Benchmark", ISCA 2020), with the tolerance 0. For p99 at 99 % confidence it gives 459 queries
with 0 late, 2,010 with 10, 12,571 with 100. It assumes independent answers, and then holds for a whole search too.
Those of one batch, and those that queue together, are late together: on a simulated queue a trial at the very rate
whose p99 is the bound holds in every second case. So a trial that holds is no claim at 99 % confidence, and the rate
that a search finds is an estimate (`tests/truth/test_searches_keep_their_promises.py`).

**Pools.** A run by time may last a day and measure a billion requests. A pool keeps at most `MOST_VALUES` values, all
of them as long as there are no more. Beyond that it keeps of each block's values, in ascending order, every second,
every fourth and so on, from a random place among the first ones. Such a systematic sample has, for every threshold,
the block's share of values below it as expected value, and varies no more than one value per block, which is less
than a random sample of the same size does (Cochran, Sampling Techniques, 3rd ed., 8.2). So intervals that take the
kept values for a random sample are valid, and wider than those of all values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from random import Random

import numpy as np
import numpy.typing as npt

from loadgen.stats.distributions import binomial_cdf

MAX_MISS_PROBABILITY = 0.01


@lru_cache(maxsize=64)
def samples_needed(quantile: float) -> int:
    """Smallest n with at most a 1 % chance that fewer than two samples exceed the quantile. That is p^n +
    n·p^(n-1)·(1-p) ≤ 0.01 for independent samples: the printed value then rests on at least two observations of the
    tail. p50 needs 11, p90 64, p95 130, p99 662, p99.9 6,636."""
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


QUANTILE = 0.99
CONFIDENCE = 0.99


@lru_cache(maxsize=4096)
def queries_needed(late: int, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int:
    """The fewest requests among which `late` late answers still support the claim."""
    if late < 0 or not 0.0 < quantile < 1.0 or not 0.0 < confidence < 1.0:
        raise ValueError(f"no bound for {late} late answers, quantile {quantile}, confidence {confidence}")
    if late == 0:
        return math.ceil(math.log(1.0 - confidence) / math.log(quantile))
    first, chance = late + 1, 1.0 - quantile
    counts = range(first, math.ceil((4 * late + 100) / chance))
    return first + bisect_left(counts, True, key=lambda count: binomial_cdf(late, count, chance) <= 1.0 - confidence)


@lru_cache(maxsize=4096)
def late_allowed(queries: int, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int | None:
    """The most late answers among `queries` that still support the claim; None if even 0 late answers do not."""
    if queries < queries_needed(0, quantile, confidence):
        return None
    counts, chance = range(queries), 1.0 - quantile
    return bisect_left(counts, True, key=lambda late: binomial_cdf(late, queries, chance) > 1.0 - confidence) - 1


MOST_VALUES = 2**19
"""4 MB. The p99.9 of so many rests on 524 values beyond it."""

Values = npt.NDArray[np.float64]


class Pool:
    """Add each block once, under its index; `blocks` are the kept values of each, in ascending order."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self.blocks: dict[int, Values] = {}
        self.count = 0
        """Values that were added."""
        self.total = 0.0
        """Their sum."""
        self._most = most
        self._step = 1
        self._kept = 0

    def add(self, index: int, values: npt.ArrayLike) -> None:
        """Add the values of one block."""
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        self.count += len(ordered)
        self.total += float(ordered.sum())
        self._keep(index, ordered, self._step)
        while self._kept > self._most and any(len(sample) > 1 for sample in self.blocks.values()):
            self._step *= 2
            for place, sample in self.blocks.items():
                self._keep(place, sample, 2)

    def _keep(self, index: int, ordered: Values, step: int) -> None:
        """Keep every `step`-th value of a block; at least one, so that no block is missing."""
        self._kept -= len(self.blocks.get(index, ()))
        if step > 1 and len(ordered):
            first = Random(f"{index} {self._step}").randrange(step)
            ordered = ordered[min(first, len(ordered) - 1) :: step].copy()
        self.blocks[index] = ordered
        self._kept += len(ordered)

    @property
    def mean(self) -> float | None:
        """The mean of all values that were added; None without any."""
        return self.total / self.count if self.count else None

    @property
    def values(self) -> Values:
        """The kept values of all blocks."""
        return np.concatenate([np.empty(0), *self.blocks.values()])
