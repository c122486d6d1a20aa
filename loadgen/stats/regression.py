"""Regression of scores on settings: what measured combinations say of all others. Pure functions of numbers.

A Gaussian process (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1) over a list of
combinations. The covariance of two of them is s²·∏ exp(−dⱼ/lⱼ) over the settings j, where dⱼ is 0 for equal values, 1
for unlike ones, and the distance of their ranks (0 to 1) in a setting whose values are ordered. So settings may act
together in any way, an ordered setting may have a cliff, and a setting without effect gets a long lⱼ. s, the lⱼ and the
spread between starts are the most probable ones given the scores and log-normal priors.

The scores of one run share the anchor, see `Observations`. Assumptions: all errors are about normal on the log scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy
import scipy.linalg
import scipy.optimize

from loadgen.stats.ratios import Values

Codes = npt.NDArray[np.int64]
LEVEL_SPREAD = 0.5
"""Standard deviation of the mean log ratio of all combinations, before any was measured."""
LEAST_SCALE = 0.02
"""Least typical effect of settings that is assumed, as a log ratio."""
LENGTH, LENGTH_SPREAD = 2.0, 1.2
"""Median of the prior of the lⱼ, and the standard deviation of its log."""
SCALE_SPREAD, START_FACTOR = 1.0, 0.4
"""Standard deviation of the log of s² and of the spread between starts, by the prior."""
JITTER = 1e-9


@dataclass(frozen=True, slots=True)
class Observations:
    """Scores of combinations of settings against the anchor of their run."""

    rows: Codes
    """The row of each score's combination in `Grid.codes`."""
    runs: Codes
    """The run of each; −1 for one that shares no anchor."""
    values: Values
    """Log ratios to the anchor."""
    errors: Values
    """Standard errors within the run. Half the variance is the anchor's, which the scores of a run share."""
    start_spread: float
    """Standard deviation of what a start of a server adds to a log, by the prior."""

    def noise(self) -> tuple[Values, Values]:
        """The covariance of the errors within the runs, and what one unit of τ², the variance of a start, adds: to each
        score its own start and the anchor's."""
        same = (self.runs[:, None] == self.runs[None, :]) & (self.runs[:, None] >= 0)
        within = np.where(same, np.outer(self.errors, self.errors) / 2.0, 0.0)
        within[np.diag_indices_from(within)] = self.errors**2
        return within, same.astype(np.float64) + np.diag((self.runs >= 0).astype(np.float64))


class Grid:
    """Combinations of settings, one per row of `codes`: the rank of the value of each setting."""

    def __init__(self, codes: Codes, ordered: Sequence[bool]) -> None:
        """Of each setting `ordered` says whether its values are."""
        self.codes = codes
        self._tables = []
        for column, is_ordered in zip(codes.T, ordered, strict=True):
            ranks = np.arange(column.max() + 1, dtype=np.float64)
            apart = np.abs(ranks[:, None] - ranks[None, :])
            self._tables.append(apart / max(len(ranks) - 1, 1) if is_ordered else np.minimum(apart, 1.0))

    def distances(self, some: Codes, others: Codes) -> Values:
        """Of each setting the distances of these rows to those: settings × some × others."""
        columns = enumerate(self._tables)
        return np.array([table[np.ix_(self.codes[some, j], self.codes[others, j])] for j, table in columns])


class Regression:
    """What the observations say of every row of the grid. Needs at least one observation."""

    def __init__(self, grid: Grid, observations: Observations) -> None:
        self.grid = grid
        rows = observations.rows
        self._logs = self._fit(observations)
        within, starts = observations.noise()
        covariance = self._covariance(rows, rows) + within + self.start_spread**2 * starts
        factor = np.linalg.cholesky(covariance + JITTER * np.eye(len(rows)))
        every = np.arange(len(grid.codes))
        across = self._covariance(rows, every)
        weights = scipy.linalg.cho_solve((factor, True), observations.values)
        self.means: Values = weights @ across
        """Expected log ratio of every row."""
        self._explained = scipy.linalg.solve_triangular(factor, across, lower=True)
        self._prior_variance = math.exp(self._logs[0]) + LEVEL_SPREAD**2
        self._every = every

    @property
    def start_spread(self) -> float:
        """τ, the standard deviation of what a start of a server adds to the log of its speed."""
        return math.exp(self._logs[1])

    @property
    def spreads(self) -> Values:
        """Standard deviation of the log ratio of every row, given the observations."""
        return np.asarray(np.sqrt(np.maximum(self._prior_variance - np.sum(self._explained**2, axis=0), JITTER)))

    def covariance(self, rows: Codes) -> Values:
        """Of the log ratios of these rows, given the observations."""
        explained = self._explained[:, rows]
        return np.asarray(self._covariance(rows, rows) - explained.T @ explained + JITTER * np.eye(len(rows)))

    def assume(self, row: int, error: float) -> None:
        """Lower the spreads as a measurement of this row with this error would."""
        explained = self._explained
        rest = self._covariance(np.array([row]), self._every)[0] - explained[:, row] @ explained
        self._explained = np.vstack([explained, rest / math.sqrt(max(rest[row], 0.0) + error**2)])

    def _covariance(self, some: Codes, others: Codes) -> Values:
        weights = np.exp(self._logs[2:])
        apart = np.tensordot(weights, self.grid.distances(some, others), axes=1)
        return np.asarray(math.exp(self._logs[0]) * np.exp(-apart) + LEVEL_SPREAD**2)

    def _fit(self, observations: Observations) -> Values:
        """The most probable log s², log τ and −log lⱼ."""
        distances = self.grid.distances(observations.rows, observations.rows)
        within, starts = observations.noise()
        values, identity = observations.values, np.eye(len(observations.values))
        scale = max(float(np.var(values)), LEAST_SCALE**2)
        settings = len(distances)
        centre = np.array([math.log(scale), math.log(observations.start_spread), *[-math.log(LENGTH)] * settings])
        spread = np.array([SCALE_SPREAD, START_FACTOR, *[LENGTH_SPREAD] * settings])

        def improbability(logs: Values) -> tuple[float, Values]:
            """Minus the log of the posterior density, and its gradient (the same book, equation 5.9)."""
            weights = np.exp(logs[2:])
            shape = math.exp(logs[0]) * np.exp(-np.tensordot(weights, distances, axes=1))
            of_starts = math.exp(2.0 * logs[1]) * starts
            covariance = shape + LEVEL_SPREAD**2 + within + of_starts + JITTER * identity
            factor = scipy.linalg.cho_factor(covariance, lower=True)
            inverse = scipy.linalg.cho_solve(factor, identity)
            solved = inverse @ values
            sensitivity = 0.5 * (inverse - np.outer(solved, solved))
            from_settings = -weights * np.einsum("ij,ij,kij->k", sensitivity, shape, distances)
            gradient = np.array([np.sum(sensitivity * shape), 2.0 * np.sum(sensitivity * of_starts), *from_settings])
            away = (logs - centre) / spread
            misfit = 0.5 * float(values @ solved) + float(np.sum(np.log(np.diag(factor[0]))))
            return misfit + 0.5 * float(away @ away), gradient + away / spread

        bounds = [(middle - 4.0 * width, middle + 4.0 * width) for middle, width in zip(centre, spread, strict=True)]
        found = scipy.optimize.minimize(
            improbability, centre, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60}
        )
        return np.asarray(found.x)


def expected_gain(means: Values, spreads: Values, best: float) -> Values:
    """Expected improvement over the best so far (Mockus, 1978): E max(0, x − best) of normal x."""
    by_spread = (means - best) / spreads
    density = np.exp(-0.5 * by_spread**2) / math.sqrt(2.0 * math.pi)
    return np.asarray(spreads * (by_spread * scipy.special.ndtr(by_spread) + density))
