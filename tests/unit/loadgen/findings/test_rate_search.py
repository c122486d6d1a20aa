"""The search for a rate finds what simulated arms can do, in few trials."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.findings.rate_search import RateSearch
from loadgen.stats.percentiles import late_allowed


def run(search: RateSearch, capacity: float) -> list[float]:
    tried = []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        search.record(rate <= capacity)
    return tried


@pytest.mark.parametrize("capacity", [0.7, 3.0, 100.0, 1234.5, 20_000.0])
@pytest.mark.parametrize("start", [1.0, 50.0, 10_000.0])
def test_a_sharp_capacity_is_bracketed(capacity: float, start: float) -> None:
    search = RateSearch(start)
    tried = run(search, capacity)
    assert search.ended == "found"
    assert search.held is not None
    assert search.failed is not None
    assert search.held <= capacity < search.failed <= search.held * 1.05
    assert len(tried) <= abs(np.log2(capacity / start)) + 8
    assert tried[-1] == search.failed
    assert len(set(tried)) == len(tried) - 1, "only the lowest rate that failed is tried twice"


def test_it_doubles_then_bisects() -> None:
    assert run(RateSearch(10.0), 70.0)[:5] == [10.0, 20.0, 40.0, 80.0, pytest.approx(56.57, abs=0.01)]


@pytest.mark.parametrize("stalls", [{0}, {2}, {0, 3, 5}, set(range(1, 60, 4))])
def test_a_moment_that_fails_a_trial_does_not_cap_the_search(stalls: set[int]) -> None:
    """Some trials fail whatever the rate."""
    search, number = RateSearch(10.0), 0
    while (rate := search.next_rate) is not None:
        search.record(rate <= 1000.0 and number not in stalls)
        number += 1
    assert search.held is not None
    assert 900.0 < search.held <= 1000.0
    assert number < 60


def test_it_ends_whatever_the_trials_say() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        search, number = RateSearch(10.0, lowest=1.0, highest=1e5), 0
        while search.next_rate is not None:
            search.record(bool(random.random() < 0.5))
            number += 1
        assert number < 150


def test_the_limits_end_it() -> None:
    everything = RateSearch(10.0, highest=100.0)
    assert run(everything, 1e9)[-1] == 100.0
    assert (everything.ended, everything.held, everything.failed) == ("highest", 100.0, None)
    nothing = RateSearch(10.0, lowest=1.0)
    assert run(nothing, 0.0)[-1] == 1.0
    assert (nothing.ended, nothing.held, nothing.failed) == ("none", None, 1.0)
    with pytest.raises(ValueError, match="ended"):
        nothing.record(True)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no search"):
        RateSearch(0.0)


def test_searches_of_a_queueing_server_find_its_rate() -> None:
    """An M/D/1 server, simulated query by query: what the searches find is what holds, and they agree."""
    service_s, bound_s, random = 0.01, 0.05, np.random.default_rng(11)

    def late(rate: float, queries: int) -> int:
        gaps = random.exponential(1.0 / rate, queries)
        waits, wait = np.empty(queries), 0.0
        for number, gap in enumerate(gaps):
            wait = max(0.0, wait + service_s - gap)
            waits[number] = wait
        return int(np.sum(waits + service_s > bound_s))

    rates = []
    for _ in range(12):
        search = RateSearch(20.0 * 2.0 ** random.uniform(-0.5, 0.5))
        while (rate := search.next_rate) is not None:
            allowed = late_allowed(2_010)
            assert allowed is not None
            search.record(late(rate, 2_010) <= allowed)
        assert search.held is not None
        rates.append(search.held)
    truth = max(rate for rate in np.arange(40.0, 100.0, 1.0) if late(rate, 40_000) <= 400)
    assert 0.75 * truth <= np.exp(np.mean(np.log(rates))) <= 1.02 * truth
    assert np.std(np.log(rates)) < 0.1
