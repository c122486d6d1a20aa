"""The regression of scores on settings: known effects, errors in common, the fit, and what a measurement would add."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from loadgen.stats.regression import Grid, Observations, Regression, expected_gain

CODES = np.array(list(product(range(3), range(4), range(2))))
EVERY = np.arange(len(CODES))
GRID = Grid(CODES, [False, True, False])
"""A setting of three unordered values, one of four ordered ones, and one of two."""


def observe(rows: np.ndarray, values: np.ndarray, runs: np.ndarray | None = None, error: float = 0.01) -> Observations:
    return Observations(rows, np.arange(len(rows)) if runs is None else runs, values, np.full(len(rows), error), 0.005)


def truth() -> np.ndarray:
    """The first setting's last value pays 20 %, the second falls off a cliff at its end, the third has no effect."""
    return 0.2 * (CODES[:, 0] == 2) - 0.5 * (CODES[:, 1] == 3)


def test_what_was_not_measured_is_predicted_from_what_was() -> None:
    rng = np.random.default_rng(1)
    rows = rng.permutation(EVERY)[:16]
    regression = Regression(GRID, observe(rows, truth()[rows] + rng.normal(0.0, 0.01, 16)))
    rest = np.setdiff1d(EVERY, rows)
    assert np.abs(regression.means - truth())[rest].max() < 0.1
    assert (np.abs(regression.means - truth()) < 2.5 * regression.spreads).mean() > 0.9
    assert regression.spreads[rows].max() < regression.spreads[rest].min()


def test_ordered_values_are_as_far_apart_as_their_ranks() -> None:
    apart = GRID.distances(np.array([0]), EVERY)
    assert apart[:, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert apart[1, 0, :8:2].tolist() == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert apart[0, 0, [0, 8, 16]].tolist() == [0.0, 1.0, 1.0]


def test_an_anchor_that_started_badly_makes_no_contender_of_its_run_better() -> None:
    """In the second run the anchor is 10 % slower. Two combinations were in both runs, two in the second alone."""
    rows, runs = np.array([0, 2, 4, 0, 2, 8, 10]), np.array([0, 0, 0, 1, 1, 1, 1])
    values = np.array([0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.1])
    in_common = Regression(GRID, observe(rows, values, runs))
    alone = Regression(GRID, observe(rows, values))
    assert in_common.means[[8, 10]].max() < alone.means[[8, 10]].min() - 0.01


def test_two_scores_of_a_run_share_half_the_error_and_one_start() -> None:
    within, starts = observe(np.array([0, 1, 2]), np.zeros(3), np.array([4, 4, -1]), error=0.02).noise()
    assert within == pytest.approx(np.array([[4e-4, 2e-4, 0.0], [2e-4, 4e-4, 0.0], [0.0, 0.0, 4e-4]]))
    assert starts.tolist() == [[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("spread", [0.005, 0.04])
def test_the_spread_between_starts_is_estimated(spread: float) -> None:
    rng = np.random.default_rng(2)
    rows = np.tile(EVERY, 4)
    values = truth()[rows] + rng.normal(0.0, np.sqrt(2.0) * spread, len(rows))
    observations = Observations(rows, np.arange(len(rows)), values, np.full(len(rows), 0.005), 0.02)
    assert Regression(GRID, observations).start_spread == pytest.approx(spread, rel=0.35)


def test_assuming_a_measurement_lowers_the_spreads_as_measuring_it_does() -> None:
    rows = np.array([0, 5, 9, 14, 20])
    regression = Regression(GRID, observe(rows, truth()[rows]))
    before = regression.spreads
    assert np.sqrt(np.diag(regression.covariance(np.array([3, 11])))) == pytest.approx(before[[3, 11]], rel=1e-3)
    regression.assume(11, 0.03)
    assert np.all(regression.spreads <= before + 1e-12)
    assert regression.spreads[11] == pytest.approx((before[11] ** -2 + 0.03**-2) ** -0.5)


def test_one_observation_is_enough() -> None:
    regression = Regression(GRID, observe(np.array([3]), np.array([0.1])))
    assert regression.means[3] == pytest.approx(0.1, abs=0.01)
    assert np.isfinite(regression.spreads).all()


def test_the_expected_gain_is_that_of_the_normal_distribution() -> None:
    gain = expected_gain(np.array([0.1, -0.5]), np.array([0.2, 0.1]), 0.15)
    integral, _ = quad(lambda x: (x - 0.15) * norm.pdf(x, 0.1, 0.2), 0.15, 2.0)
    assert gain[0] == pytest.approx(integral, rel=1e-6)
    assert 0.0 <= gain[1] < 1e-9
