"""Interval, tests, adjustment and sensitivity against textbook values and their own definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loadgen.stats.ratios import (
    MOST_CORRELATION,
    RatioEstimate,
    adjust_holm,
    detectable_effect,
    error_of_mean,
    estimate_anytime,
    estimate_ratio,
    geometric_mean,
    interval_of_mean,
    lag_one,
    plausible_correlation,
    unbiased,
)

RATIOS = st.lists(st.floats(0.2, 5.0), min_size=2, max_size=20).filter(lambda v: np.std(np.log(v)) > 1e-6)


@given(RATIOS)
def test_the_interval_is_scipys_t_interval_on_logs(ratios: list[float]) -> None:
    estimate = estimate_ratio(ratios, 0.05)
    logs = np.log(ratios)
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=stats.sem(logs))
    assert estimate.ci95 == pytest.approx((math.exp(low), math.exp(high)), rel=1e-6)
    assert estimate.p_value == pytest.approx(stats.ttest_1samp(logs, 0.0).pvalue, rel=1e-6, abs=1e-12)


@given(RATIOS)
def test_swapping_the_arms_mirrors_everything(ratios: list[float]) -> None:
    forward, backward = estimate_ratio(ratios, 0.05), estimate_ratio([1 / r for r in ratios], 0.05)
    assert forward.ci95 is not None
    assert backward.ci95 is not None
    assert forward.ci95[0] == pytest.approx(1 / backward.ci95[1])
    assert forward.p_value == pytest.approx(backward.p_value)
    assert forward.p_equivalence == pytest.approx(backward.p_equivalence, rel=1e-6, abs=1e-12)


def test_equivalence_agrees_with_the_interval() -> None:
    """Two one-sided tests at 2.5 % pass exactly where the 95 % interval lies inside the margin."""
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(500):
        estimate = estimate_ratio(list(np.exp(rng.normal(0.0, 0.04, size=6))), 0.05)
        assert estimate.ci95 is not None
        assert estimate.p_equivalence is not None
        inside = estimate.ci95[0] >= 1 / 1.05 and estimate.ci95[1] <= 1.05
        assert inside == (estimate.p_equivalence <= 0.025)
        seen.add(inside)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("ratios", "reason"),
    [
        ([], "no complete pair"),
        ([1.3], "one pair"),
        ([1.3, 1.3, 1.3], "same ratio"),
        ([1.0, 0.0], "no positive value"),
        ([1.0, math.inf], "no positive value"),
    ],
)
def test_what_cannot_be_computed_is_undetermined(ratios: list[float], reason: str) -> None:
    estimate = estimate_ratio(ratios, 0.05)
    assert estimate.ci95 is None
    assert estimate.p_value is None
    assert estimate.p_equivalence is None
    assert reason in (estimate.reason or "")


def test_identical_pairs_are_not_infinitely_certain() -> None:
    assert estimate_ratio([1.5] * 10, 0.05).p_value is None
    assert interval_of_mean([[100.0, 100.0]]) is None


def test_holm_against_the_worked_example() -> None:
    """p = 0.01, 0.04, 0.03, 0.005 with m = 4 adjusts to 0.03, 0.06, 0.06, 0.02."""
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), max_size=30))
def test_holm_is_between_raw_and_bonferroni_and_keeps_the_order(p_values: list[float | None]) -> None:
    adjusted = adjust_holm(p_values)
    family = sum(p is not None for p in p_values)
    known = sorted((p, a) for p, a in zip(p_values, adjusted, strict=True) if p is not None and a is not None)
    assert [a is None for a in adjusted] == [p is None for p in p_values]
    assert all(p <= a <= min(1.0, family * p) + 1e-12 for p, a in known)
    assert [a for _, a in known] == sorted(a for _, a in known)


def test_the_detectable_effect_shrinks_with_pairs_and_grows_with_the_family() -> None:
    effects = [detectable_effect(0.02 / math.sqrt(pairs), pairs - 1, 10) for pairs in (2, 4, 8, 16, 64)]
    assert all(e is not None for e in effects)
    assert effects == sorted(effects, key=lambda e: -(e or 0))
    assert (detectable_effect(0.007, 7, 30) or 0) > (detectable_effect(0.007, 7, 1) or 1)
    assert detectable_effect(0.02, 0, 1) is None


def test_the_detectable_effect_approaches_the_planning_formula() -> None:
    """For many pairs and one comparison: 2.80 · sd / √n."""
    assert detectable_effect(0.01 / math.sqrt(2000), 1999, 1) == pytest.approx(2.802 * 0.01 / math.sqrt(2000), rel=0.01)


def test_the_ratio_of_geometric_means_is_the_mean_ratio() -> None:
    a, b = [2.0, 3.0, 5.0], [3.0, 3.5, 9.0]
    ratio = estimate_ratio([y / x for x, y in zip(a, b, strict=True)], 0.05).ratio
    assert geometric_mean(b) / geometric_mean(a) == pytest.approx(ratio)


def test_few_rounds_that_strongly_resemble_each_other_do_not_hide_a_large_difference() -> None:
    """Six rounds of a machine that slowed down: by the widened spread the interval was 1.6 to 2.4."""
    ratios = [2.024, 2.020, 2.013, 1.997, 1.968, 1.972]
    estimate = estimate_ratio(ratios, 0.05, 0.78)
    assert estimate.ci95 is not None
    assert 1.85 < estimate.ci95[0] < min(ratios)
    assert max(ratios) < estimate.ci95[1] < 2.15
    assert estimate.degrees == 5


@given(RATIOS.filter(lambda ratios: len(ratios) >= 3))
def test_a_correlation_is_between_minus_one_and_one(ratios: list[float]) -> None:
    correlation = lag_one(ratios)
    assert correlation is not None
    assert -1.0 <= correlation <= 1.0


def test_the_expected_correlation_and_its_spread_are_those_of_few_pairs() -> None:
    """Simulated: the correction of the bias to a tenth, and Moran's variance without a correlation."""
    rng = np.random.default_rng(7)
    for count in (6, 12, 30):
        for phi in (0.0, 0.3, 0.5):
            series = rng.normal(size=(4000, count))
            for place in range(1, count):
                series[:, place] = phi * series[:, place - 1] + math.sqrt(1 - phi**2) * series[:, place]
            seen = np.array([lag_one(ratios) for ratios in np.exp(series).tolist()])
            assert unbiased(count, float(seen.mean())) == pytest.approx(phi, abs=0.1)
            if phi == 0.0:
                expected = (count - 2) / (count * math.sqrt(count - 1))
                assert float(seen.std()) == pytest.approx(expected, rel=0.05)


def test_few_pairs_leave_a_correlation_plausible_and_many_show_what_it_is() -> None:
    unknown, unknown_scatter = plausible_correlation([])
    assert unknown == 0.5
    assert plausible_correlation([(3, -0.5), (4, 0.3)])[0] == unknown, "up to four pairs show nothing of it"
    few, few_scatter = plausible_correlation([(6, -1 / 6)], (6, -1 / 6))
    many, many_scatter = plausible_correlation([(400, -1 / 400)], (400, -1 / 400))
    assert 0.3 < few < unknown
    assert 0.0 < many < 0.25
    assert unknown_scatter == 0.0 < many_scatter < few_scatter
    short = (14, -1 / 14)
    assert plausible_correlation([short] * 7, short)[0] < plausible_correlation([short], short)[0], "it is shared"
    assert plausible_correlation([(400, 0.8)], (400, 0.8))[0] == pytest.approx(0.84, abs=0.03)
    assert plausible_correlation([(400, 0.99)], (400, 0.99))[0] == MOST_CORRELATION


@pytest.mark.parametrize("count", [6, 14, 20, 60])
def test_the_larger_of_the_own_and_the_shared_correlation_counts(count: int) -> None:
    others = [(count, -1 / count)] * 4
    usual, _ = plausible_correlation([*others, (count, -1 / count)], (count, -1 / count))
    lasting, scatter = plausible_correlation([*others, (count, 0.6)], (count, 0.6))
    assert lasting > usual + 0.1
    assert plausible_correlation([(count, 0.6)] * 5, (count, -0.6))[0] > usual, "what the others share counts too"
    assert scatter > 0.0


@pytest.mark.parametrize("estimate", [estimate_ratio, estimate_anytime])
def test_an_estimate_says_the_correlation_that_its_interval_allows_for(estimate: Callable[..., RatioEstimate]) -> None:
    ratios = [1.0, 1.1, 1.05, 0.98, 1.02, 1.04]
    assert estimate(ratios, 0.05, 1.1).correlation == MOST_CORRELATION
    assert estimate(ratios, 0.05, 1.1).ci95 == estimate(ratios, 0.05, MOST_CORRELATION).ci95
    assert estimate(ratios, 0.05, -0.4).correlation == 0.0


@pytest.mark.parametrize("phi", [0.0, 0.5, MOST_CORRELATION])
@pytest.mark.parametrize("count", [3, 10])
def test_the_error_is_exact_for_the_correlation_that_it_allows_for(phi: float, count: int) -> None:
    rng, held, trials = np.random.default_rng(4), 0, 4000
    for _ in range(trials):
        logs = rng.normal(0.0, 0.02, count)
        for place in range(1, count):
            logs[place] = phi * logs[place - 1] + math.sqrt(1 - phi**2) * logs[place]
        error, degrees = error_of_mean(logs.tolist(), phi)
        held += abs(logs.mean()) <= stats.t.ppf(0.975, degrees) * error
    assert 0.93 < held / trials < 0.97
