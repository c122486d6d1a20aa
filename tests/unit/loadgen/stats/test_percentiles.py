"""Percentiles come from raw samples, and only from enough of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.stats.percentiles import distribution, percentile, samples_needed
from loadgen.stats.tails import Round, estimate_tail_ratio

VALUES = st.lists(st.floats(0.001, 1e6), min_size=11, max_size=400)


@pytest.mark.parametrize(("quantile", "needed"), [(0.5, 11), (0.9, 64), (0.95, 130), (0.99, 662), (0.999, 6636)])
def test_samples_needed_follow_the_binomial_bound(quantile: float, needed: int) -> None:
    assert samples_needed(quantile) == needed
    assert percentile(np.arange(needed - 1), quantile) is None
    assert percentile(np.arange(needed), quantile) is not None


@pytest.mark.parametrize("quantile", [0.0, 1.0, 99.0])
def test_a_quantile_is_a_share(quantile: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        samples_needed(quantile)


@given(VALUES)
def test_percentiles_lie_within_the_samples_and_in_order(values: list[float]) -> None:
    percentiles = [p for q in (0.5, 0.9, 0.95, 0.99) if (p := percentile(values, q)) is not None]
    assert percentiles == sorted(percentiles)
    assert min(values) <= percentiles[0]
    assert percentiles[-1] <= max(values)


@given(VALUES, st.floats(0.1, 10.0))
def test_percentiles_scale_with_the_unit_and_ignore_order(values: list[float], factor: float) -> None:
    median = percentile(values, 0.5)
    assert median is not None
    assert percentile(values[::-1], 0.5) == median
    assert percentile([v * factor for v in values], 0.5) == pytest.approx(median * factor)


def test_type_8_is_nearly_median_unbiased_where_type_7_is_not() -> None:
    """A tail percentile must not move with n: half of the estimates lie below the truth."""
    rng = np.random.default_rng(1)
    below, below_type_7 = [], []
    truth = -np.log(1 - 0.9)
    for _ in range(4000):
        sample = rng.exponential(size=64)
        estimate = percentile(sample, 0.9)
        assert estimate is not None
        below.append(estimate < truth)
        below_type_7.append(float(np.quantile(sample, 0.9)) < truth)
    assert abs(np.mean(below) - 0.5) < 0.03
    assert np.mean(below_type_7) > 0.53


@given(VALUES)
def test_a_distribution_is_monotone_and_ends_at_one(values: list[float]) -> None:
    points = distribution(values)
    assert [p[0] for p in points] == sorted(p[0] for p in points)
    assert points[-1] == (max(values), 1.0)
    assert points[0][0] == min(values)
    assert {p[0] for p in points} <= set(values)


def test_no_samples_have_no_distribution() -> None:
    assert distribution([]) == ()


def test_times_of_zero_are_below_all_others_and_half_of_them_have_no_ratio() -> None:
    """Such as the gaps of an answer whose tokens were all read at once."""
    times = np.linspace(1.0, 2.0, 200)
    few = np.where(np.arange(200) < 10, 0.0, times)
    for values in (times, few):
        estimate, tails = estimate_tail_ratio([Round(values, 2.0 * times, unit) for unit in range(4)], 0.9, 0.05)
        assert tails is not None
        assert estimate.ratio == pytest.approx(2.0, rel=0.01)
    estimate, tails = estimate_tail_ratio([Round(np.zeros(200), times, 0)], 0.9, 0.05)
    assert (estimate.ratio, estimate.reason, tails) == (None, "half of a block's values are 0", None)
