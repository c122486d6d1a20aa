"""The confidence sequence against its own definition, and what it owes to symmetry."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from loadgen.stats.ratios import MIXTURE, estimate_anytime, estimate_ratio, interval_of_logs, log_bayes_factors

LOGS = st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=25).filter(lambda v: np.std(v) > 1e-4)


CORRELATION = st.sampled_from([0.0, 0.3, 0.7])


@given(LOGS, CORRELATION)
def test_the_interval_ends_where_the_bayes_factor_reaches_twenty(logs: list[float], correlation: float) -> None:
    for end in interval_of_logs(logs, correlation):
        if math.isfinite(end):
            assert float(log_bayes_factors(logs, end, correlation)[-1]) == pytest.approx(math.log(20.0), abs=1e-6)


@pytest.mark.parametrize("logs", [[0.1, -0.2, 0.3], [0.05, 0.06, 0.02, 0.04, 0.07]])
def test_the_bayes_factor_is_the_integral_that_defines_it(logs: list[float]) -> None:
    """Over the spread with density 1/σ, and over the standardised effect with a normal density of variance 1/c²."""
    values = np.asarray(logs)

    def likelihood(spread: float, effect: float) -> float:
        exponent = -0.5 * float(np.sum((values / spread - effect) ** 2))
        return math.exp(exponent) / spread ** (len(logs) + 1)

    def weighted(spread: float, effect: float) -> float:
        return likelihood(spread, effect) * math.exp(-MIXTURE * effect**2 / 2) * math.sqrt(MIXTURE / (2 * math.pi))

    above, _ = integrate.dblquad(weighted, -25, 25, 5e-3, 4.0, epsabs=1e-8)
    below, _ = integrate.quad(likelihood, 5e-3, 4.0, args=(0.0,), points=[0.05, 0.2])
    assert float(log_bayes_factors(logs, 0.0)[-1]) == pytest.approx(math.log(above / below), abs=2e-3)


@given(LOGS)
def test_one_observation_says_nothing_and_the_order_only_matters_to_p(logs: list[float]) -> None:
    assert float(log_bayes_factors(logs, 0.01)[0]) == pytest.approx(0.0, abs=1e-9)
    assert interval_of_logs(logs) == pytest.approx(interval_of_logs(logs[::-1]))


@given(LOGS, CORRELATION)
def test_swapping_the_arms_mirrors_everything(logs: list[float], correlation: float) -> None:
    forward = estimate_anytime([math.exp(v) for v in logs], 0.05, correlation)
    backward = estimate_anytime([math.exp(-v) for v in logs], 0.05, correlation)
    if forward.ci95 is None:
        assert backward.ci95 is None
        return
    assert backward.ci95 is not None
    assert forward.ci95[0] == pytest.approx(1 / backward.ci95[1])
    assert forward.p_value == pytest.approx(backward.p_value)
    assert forward.p_equivalence == pytest.approx(backward.p_equivalence)


def test_a_winner_that_later_rounds_contradict_is_no_winner() -> None:
    """The largest Bayes factor so far would keep p, but it was computed with another correlation."""
    rng = np.random.default_rng(2)
    ratios = list(np.exp(rng.normal(0.1, 0.01, size=12)))
    shown = estimate_anytime(ratios, 0.05)
    later = estimate_anytime([*ratios, 0.5, 1.9, 0.4, 2.1], 0.05)
    assert shown.p_value is not None
    assert later.p_value is not None
    assert later.ci95 is not None
    assert shown.p_value < 0.001
    assert later.p_value > 0.05
    assert later.ci95[0] < 1.0 < later.ci95[1]


@pytest.mark.parametrize("count", [5, 30, 300, 1000])
def test_the_interval_holds_the_ratio_that_is_shown(count: int) -> None:
    """With a correlation the first and the last pair weigh more, so the interval's centre is another mean: in these
    series it lies as far from the geometric mean as it can, in standard errors."""
    places = np.arange(count)
    covariance = 0.9 ** np.abs(places - places[:, None])
    weights = np.linalg.solve(covariance, np.ones(count))
    logs = covariance @ (1.0 / count - weights / weights.sum())
    logs *= 0.1 / np.abs(logs).max()
    estimate = estimate_anytime(np.exp(logs).tolist(), 0.05, 0.9)
    assert estimate.ratio == pytest.approx(math.exp(logs.mean()))
    if estimate.ci95 is not None:
        low, high = map(math.log, estimate.ci95)
        assert low < logs.mean() < high
        assert abs(logs.mean() - (low + high) / 2.0) > 0.01 * (high - low), "the two means differ"


def test_it_is_wider_than_the_interval_of_a_fixed_plan_and_is_none_where_that_is_too_early() -> None:
    ratios = list(np.exp(np.random.default_rng(4).normal(0.0, 0.02, size=20)))
    for count in (5, 8, 20):
        fixed, open_ended = estimate_ratio(ratios[:count], 0.05), estimate_anytime(ratios[:count], 0.05)
        assert fixed.ci95 is not None
        assert open_ended.ci95 is not None
        assert open_ended.ci95[0] < fixed.ci95[0] < fixed.ci95[1] < open_ended.ci95[1]
    early = estimate_anytime(ratios[:2], 0.05)
    assert early.ci95 is None
    assert early.ratio is not None
    assert "too few" in (early.reason or "")


def test_equivalence_agrees_with_the_interval() -> None:
    rng, seen = np.random.default_rng(6), set()
    for _ in range(200):
        estimate = estimate_anytime(list(np.exp(rng.normal(0.0, 0.03, size=10))), 0.05)
        assert estimate.ci95 is not None
        assert estimate.p_equivalence is not None
        inside = estimate.ci95[0] >= 1 / 1.05 and estimate.ci95[1] <= 1.05
        assert inside == (estimate.p_equivalence <= 0.05)
        seen.add(inside)
    assert seen == {True, False}
