"""Searches for a rate on simulated queues: that the interval of their ratio covers, and how true the rates are.

    pytest -s -m "slow or not slow" tests/truth/test_searches_keep_their_promises.py     prints the tables

Each arm is a server of a fixed service time and one queue (M/D/1), simulated query by query; a trial is what
`loadgen.measure.probes.rate_search` runs, with the bound of `loadgen.stats.percentiles`. In *stalls* the
machine stops for 150 ms about every 100 s, longer than the bound, which fails trials at any rate. The true rate is the
one at which 1 % of the answers is late, found in simulations of two million queries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from loadgen.experiment.plan import make_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.findings.rate_search import search_from
from loadgen.records.run import Workload
from loadgen.stats.percentiles import late_allowed
from loadgen.stats.ratios import estimate_ratio

BOUND_S = 0.1
SERVICE_S = 0.010
STEEPNESS = 18.0
"""About the power of the rate with which the share of late answers of this queue grows, near the true rate."""
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


def searched(preset: str) -> Workload:
    (workload,) = make_workloads(
        ExperimentSettings.model_validate({"preset": preset, "scenarios": "slo", "slo_p99_ms": BOUND_S * 1000.0})
    )
    return workload


def holds(workload: Workload, rate: float, late: Callable[[int], int]) -> bool:
    """One trial, of whose requests so many are late."""
    planned = max(workload.requests, int(np.ceil(rate * workload.seconds)))
    allowed = late_allowed(planned)
    assert allowed is not None
    return late(planned) <= allowed


def late_in_queue(rate: float, service_s: float, random: Random, stalls: bool) -> Callable[[int], int]:
    return lambda planned: int(np.sum(latencies(rate, service_s, planned, random, stalls) > BOUND_S))


def search(
    workload: Workload, service_s: float, random: Random, stalls: bool, independent: float | None = None
) -> float | None:
    """One search from about one user's rate; None where no rate held. With the true rate in `independent`, requests
    are late independently of each other, with about the queue's probability."""
    search_result = search_from(workload, 0.8 / service_s * 2.0 ** (random.random() - 0.5))
    while (rate := search_result.next_rate) is not None:
        late = late_in_queue(rate, service_s, random, stalls)
        if independent is not None:
            share = min(1.0, 0.01 * (rate / independent) ** STEEPNESS)
            late = partial(lambda planned, share: int(random.binomial(planned, share)), share=share)
        search_result.record(holds(workload, rate, late))
    return search_result.held


def true_rate(service_s: float, queries: int = 2_000_000) -> float:
    """At which 1 % is late."""
    low, high = 0.3 / service_s, 1.0 / service_s
    random = np.random.default_rng(1)
    while high / low > 1.002:
        middle = (low + high) / 2.0
        late = float(np.mean(latencies(middle, service_s, queries, random, stalls=False) > BOUND_S))
        low, high = (middle, high) if late <= 0.01 else (low, middle)
    return low


def ratios_of(first: list[float | None], second: list[float | None]) -> list[float]:
    """Ratios of the pairs in which both found a rate."""
    return [b / a for a, b in zip(first, second, strict=True) if a and b]


@pytest.mark.parametrize("trials", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("preset", "above"), [("quick", 0.75), ("full", 0.56)])
def test_a_found_rate_is_an_estimate_and_no_bound(preset: str, above: float, trials: int) -> None:
    """What holds for a whole search. A trial's bound holds for independent answers, and then for the search too; those
    that queue together are late together."""
    workload, truth, random = searched(preset), true_rate(SERVICE_S, 500_000), np.random.default_rng(28)
    rates, apart = (
        np.array([search(workload, SERVICE_S, random, stalls=False, independent=rate) or np.nan for _ in range(trials)])
        / truth
        for rate in (None, truth)
    )
    at_limit = sum(holds(workload, truth, late_in_queue(truth, SERVICE_S, random, False)) for _ in range(trials))
    low, high = np.quantile(rates, [0.05, 0.95])
    sys.stdout.write(
        f"\n{preset}: above the true rate {np.mean(rates > 1.0):.1%}, nine in ten from {low:.2f} to {high:.2f}; a "
        f"trial at the true rate holds {at_limit / trials:.0%}; independent answers: above {np.mean(apart > 1.0):.1%}\n"
    )
    assert float(np.mean(apart > 1.0)) <= 0.015
    assert float(np.mean(rates > 1.0)) == pytest.approx(above, abs=0.1)
    assert at_limit / trials > 0.3
    assert 0.9 < low < 1.0 < high < 1.16


@pytest.mark.slow
@pytest.mark.parametrize("stalls", [False, True], ids=["plain", "stalls"])
@pytest.mark.parametrize("preset", ["quick", "full"])
def test_intervals_cover_and_identical_arms_get_no_winner(preset: str, stalls: bool) -> None:
    workload, services = searched(preset), (SERVICE_S, 0.008)
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
    coverage, winners, log_shares = float(np.mean(covered)), float(np.mean(excluded)), np.log(shares)
    without = 1.0 - len(shares) / (RUNS * PAIRS)
    sys.stdout.write(
        f"\n{preset}, {'stalls' if stalls else 'plain'}: intervals that cover the true ratio {coverage:.1%}, identical "
        f"arms with a winner {winners:.1%}, a rate found is {np.exp(np.mean(log_shares)):.3f} of the true one "
        f"(spread {np.std(log_shares):.1%}), searches without a rate {without:.1%}\n"
    )
    assert coverage >= 0.92
    assert winners <= 0.08
    assert 0.85 <= np.exp(np.mean(log_shares)) <= 1.05
    assert without <= 0.01
