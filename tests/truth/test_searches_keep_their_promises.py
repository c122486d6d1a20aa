"""Searches for a rate on simulated queues: that the interval of their ratio covers, and how true the rates are.

    pytest -s -m slow tests/truth/test_searches_keep_their_promises.py     prints the table

Each arm is a server of a fixed service time and one queue (M/D/1), simulated query by query; a trial is what
`loadgen.studies.rate_search.measure` runs, with the bound of `loadgen.statistics.early_stopping`. In *stalls* the
machine stops for 150 ms about every 100 s, longer than the bound, which fails trials at any rate. The true rate is the
one at which 1 % of the answers is late, found in simulations of two million queries.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import pytest

from loadgen.experiment.plan import make_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Workload
from loadgen.statistics.early_stopping import late_allowed
from loadgen.statistics.ratios import estimate_ratio
from loadgen.studies.rate_search.analyse import search_from

pytestmark = pytest.mark.slow

BOUND_S = 0.1
PAIRS = 6
RUNS = 300
STALL_S, STALL_EVERY_S = 0.15, 100.0

Random = np.random.Generator


def latencies(rate: float, service_s: float, queries: int, random: Random, stalls: bool) -> npt.NDArray[np.float64]:
    """Of a Lindley recursion, in closed form: the wait is the sum of (service − gap) above its running minimum."""
    gaps = random.exponential(1.0 / rate, queries)
    work = np.full(queries, service_s)
    if stalls:
        stopped = random.random(queries) < gaps / STALL_EVERY_S
        work = work + np.where(stopped, STALL_S, 0.0)
    steps = np.concatenate([[0.0], np.cumsum(work[:-1] - gaps[1:])])
    waits = steps - np.minimum.accumulate(np.minimum(steps, 0.0))
    return np.asarray(waits + work)


def search(workload: Workload, service_s: float, random: Random, stalls: bool) -> float | None:
    """One search from about one user's rate; None where no rate held."""
    found = search_from(workload, 0.8 / service_s * 2.0 ** (random.random() - 0.5))
    while (rate := found.next_rate) is not None:
        planned = max(workload.requests, int(np.ceil(rate * workload.seconds)))
        late = int(np.sum(latencies(rate, service_s, planned, random, stalls) > BOUND_S))
        allowed = late_allowed(planned)
        assert allowed is not None
        found.record(late <= allowed)
    return found.held


def true_rate(service_s: float) -> float:
    """At which 1 % is late."""
    low, high = 0.3 / service_s, 1.0 / service_s
    random = np.random.default_rng(1)
    while high / low > 1.002:
        middle = (low + high) / 2.0
        late = float(np.mean(latencies(middle, service_s, 2_000_000, random, stalls=False) > BOUND_S))
        low, high = (middle, high) if late <= 0.01 else (low, middle)
    return low


def ratios_of(first: list[float | None], second: list[float | None]) -> list[float]:
    """Ratios of the pairs in which both found a rate."""
    return [b / a for a, b in zip(first, second, strict=True) if a and b]


@pytest.mark.parametrize("stalls", [False, True], ids=["plain", "stalls"])
@pytest.mark.parametrize("preset", ["quick", "full"])
def test_intervals_cover_and_identical_arms_get_no_winner(preset: str, stalls: bool) -> None:
    asked = {"preset": preset, "scenarios": "slo", "slo_p99_ms": BOUND_S * 1000.0}
    (workload,) = make_workloads(ExperimentSettings.model_validate(asked))
    services = (0.010, 0.008)
    truths = [true_rate(service_s) for service_s in services]
    random = np.random.default_rng(20)
    covered, excluded = [], []
    shares: list[float] = []
    for _ in range(RUNS):
        a, same, b = ([search(workload, s, random, stalls) for _ in range(PAIRS)] for s in (services[0], *services))
        estimate, identical = estimate_ratio(ratios_of(a, b), 0.05), estimate_ratio(ratios_of(a, same), 0.05)
        assert estimate.ci95 is not None
        covered.append(estimate.ci95[0] <= truths[1] / truths[0] <= estimate.ci95[1])
        excluded.append(identical.ci95 is not None and not identical.ci95[0] <= 1.0 <= identical.ci95[1])
        shares += [rate / truths[0] for rate in a if rate]
    coverage, winners, found = float(np.mean(covered)), float(np.mean(excluded)), np.log(shares)
    without = 1.0 - len(shares) / (RUNS * PAIRS)
    sys.stdout.write(
        f"\n{preset}, {'stalls' if stalls else 'plain'}: intervals that cover the true ratio {coverage:.1%}, identical "
        f"arms with a winner {winners:.1%}, a rate found is {np.exp(np.mean(found)):.3f} of the true one "
        f"(spread {np.std(found):.1%}), searches without a rate {without:.1%}\n"
    )
    assert coverage >= 0.92
    assert winners <= 0.08
    assert 0.85 <= np.exp(np.mean(found)) <= 1.05
    assert without <= 0.01
