"""How many requests a claim about a latency percentile needs, and how many of them may be late.

A server keeps "p99 ≤ X" when at most 1 % of its answers are late. Seeing t late answers among n, the claim is made at
confidence c when a server whose true share of late answers is 1 − q (or more) would show at most t with a probability
of at most 1 − c:

    P(Binomial(n, 1 − q) ≤ t) ≤ 1 − c

That is MLPerf's early-stopping bound for the Server scenario (MLCommons inference, `loadgen/early_stopping.cc`; Reddi
et al., "MLPerf Inference Benchmark", ISCA 2020), with the tolerance 0. For p99 at 99 % confidence it gives 459 queries
with 0 late, 2,010 with 10, 12,571 with 100. It assumes independent answers, and then holds for a whole search too.
Those of one batch, and those that queue together, are late together: on a simulated queue a trial at the very rate
whose p99 is the bound holds in every second case. So a trial that holds is no claim at 99 % confidence, and the rate
that a search finds is an estimate (`tests/truth/test_searches_keep_their_promises.py`).
"""

from __future__ import annotations

import math
from functools import lru_cache

from scipy import special

QUANTILE = 0.99
CONFIDENCE = 0.99


@lru_cache(maxsize=4096)
def queries_needed(late: int, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int:
    """The fewest requests among which `late` late answers still support the claim."""
    if late < 0 or not 0.0 < quantile < 1.0 or not 0.0 < confidence < 1.0:
        raise ValueError(f"no bound for {late} late answers, quantile {quantile}, confidence {confidence}")
    queries: int = max(math.ceil(special.bdtrin(late, 1.0 - confidence, 1.0 - quantile)) - 1, late + 1)
    while special.bdtr(late, queries, 1.0 - quantile) > 1.0 - confidence:  # the inverse may be off by rounding
        queries += 1
    return queries


@lru_cache(maxsize=4096)
def late_allowed(queries: int, quantile: float = QUANTILE, confidence: float = CONFIDENCE) -> int | None:
    """The most late answers among `queries` that still support the claim; None if even 0 late answers do not."""
    if queries < queries_needed(0, quantile, confidence):
        return None
    late: int = math.floor(special.bdtrik(1.0 - confidence, queries, 1.0 - quantile)) + 1
    while special.bdtr(late, queries, 1.0 - quantile) > 1.0 - confidence:
        late -= 1
    return late
