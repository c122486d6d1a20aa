"""What the statistics promise, measured on simulated runs: each function answers one question with so many trials.

The tests call these with few trials, `python -m tests.truth.tables` with many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loadgen.analysis.comparisons import LEADING_SHARE, compare_all
from loadgen.analysis.noise_floor import floor_of
from loadgen.statistics.anytime import half_width, log_bayes_factors
from loadgen.statistics.ratios import SIGNIFICANCE, critical_t, estimate_ratio, estimate_restarts
from tests.truth.simulated_runs import Noise, experiment, names_a_winner, simulate, simulate_blocks

WITHIN = 0.02
"""Spread of the log ratios of pairs."""


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    events: int
    trials: int

    @property
    def value(self) -> float:
        """As a share."""
        return self.events / self.trials

    @property
    def upper(self) -> float:
        """One-sided 97.5 % bound, normal approximation."""
        return self.value + 1.96 * math.sqrt(max(self.value * (1 - self.value), 1 / self.trials) / self.trials)


def false_winners(trials: int, noise: Noise, pairs: int, *, restarts: int = 1, restart_spread: float = 0.0) -> Share:
    """Runs of identical arms, seven scenarios with four metrics each, that name any winner."""
    plan, rng = experiment(7, pairs, 0.05, restarts=restarts), np.random.default_rng(2024)
    runs = (simulate(plan, rng, noise, restart_spread=restart_spread) for _ in range(trials))
    return Share(sum(map(names_a_winner, runs)), trials)


def false_winners_until_decided(trials: int, noise: Noise, pairs: int) -> Share:
    """The same with a look after every pair, on to the last in any case: the most that looking can do. A winner once
    named stays named, so the last look has them all."""
    plan, rng = experiment(7, pairs, 0.05, until_decided=True), np.random.default_rng(2024)
    runs = (compare_all(plan, simulate_blocks(plan, rng, noise), []) for _ in range(trials))
    named = (any(c.p_adjusted is not None and c.p_adjusted < SIGNIFICANCE for c in run) for run in runs)
    return Share(sum(named), trials)


def false_winners_of_repeated_t(trials: int, looks: int) -> Share:
    """One comparison of identical arms whose fixed-plan interval is looked at after every pair."""
    rng, named = np.random.default_rng(1), 0
    for _ in range(trials):
        logs = rng.normal(0.0, WITHIN, size=looks + 1)
        counts = np.arange(2, looks + 2)
        means = np.cumsum(logs)[1:] / counts
        spread = np.sqrt((np.cumsum(logs**2)[1:] - counts * means**2) / (counts - 1))
        critical = np.array([critical_t(int(n) - 1, SIGNIFICANCE) for n in counts])
        named += bool(np.any(np.abs(means) > critical * spread / np.sqrt(counts)))
    return Share(named, trials)


def coverage(trials: int, noise: Noise, pairs: int) -> Share:
    """Fixed plan: intervals that hold a true ratio of 1.05."""
    plan, rng, covered = experiment(1, pairs, 0.05), np.random.default_rng(7), 0
    for _ in range(trials):
        low, high = simulate(plan, rng, noise, 1.05)[0].ci95 or (math.nan, math.nan)
        covered += low <= 1.05 <= high
    return Share(covered, trials)


def coverage_with_restarts(trials: int, between: float, restarts: int, pairs: int, *, as_pairs: bool = False) -> Share:
    """Intervals that hold a true ratio of 1.05 where a restart shifts the ratio by a spread of `between`; `as_pairs`
    takes all pairs as independent, as a run without restarts must."""
    rng, covered = np.random.default_rng(8), 0
    for _ in range(trials):
        means = math.log(1.05) + rng.normal(0.0, between, size=(restarts, 1))
        groups = np.exp(means + rng.normal(0.0, WITHIN, size=(restarts, pairs))).tolist()
        flat = [ratio for group in groups for ratio in group]
        interval = (estimate_ratio(flat, 0.05) if as_pairs else estimate_restarts(groups, 0.05)).ci95
        covered += interval is not None and interval[0] <= 1.05 <= interval[1]
    return Share(covered, trials)


def coverage_at_all_looks(trials: int, pairs: int, spread: float = WITHIN) -> Share:
    """Runs in which no look's interval, after any number of pairs, misses a true ratio of 1.05."""
    rng, truth, covered = np.random.default_rng(9), math.log(1.05), 0
    for _ in range(trials):
        logs = rng.normal(truth, spread, size=pairs)
        covered += bool(np.max(log_bayes_factors(logs.tolist(), truth)) < math.log(1.0 / SIGNIFICANCE))
    return Share(covered, trials)


def coverage_when_stopped(trials: int, effect: float, noise: Noise, pairs: int) -> Share:
    """The interval printed when a run until decided stopped, or after the last pair: does it hold the truth?"""
    plan, rng, covered = experiment(1, pairs, 0.05, until_decided=True), np.random.default_rng(10), 0
    for _ in range(trials):
        blocks = simulate_blocks(plan, rng, noise, effect)
        logs = [math.log(ratio) for ratio in compare_all(plan, blocks, [])[0].ratios]
        stop = _stop(logs, len(plan.cells)) or len(logs)
        half = half_width(logs[:stop])
        covered += abs(math.fsum(logs[:stop]) / stop - math.log(effect)) <= half
    return Share(covered, trials)


def false_equivalence(trials: int, pairs: int) -> Share:
    """Runs until decided whose true difference is δ itself and that are ever called equivalent."""
    rng, bound, called = np.random.default_rng(12), math.log(1.05), 0
    for _ in range(trials):
        logs = rng.normal(bound, WITHIN, size=pairs)
        called += _first_equivalent(logs.tolist(), bound) is not None
    return Share(called, trials)


@dataclass(frozen=True)
class Duration:
    """How long runs until decided take."""

    decided: Share
    """Within the limit."""
    median: int | None
    """Pairs a scenario; None where more than half are not decided within the limit."""
    late: int | None
    """The same of nine in ten."""


def pairs_until_decided(trials: int, effect: float, scenarios: int, limit: int, spread: float = WITHIN) -> Duration:
    """Pairs until one scenario among `scenarios` is decided, by a winner or by equivalence within 5 %. The others are
    taken as undecided, which makes its threshold the strictest."""
    rng, stops = np.random.default_rng(13), []
    for _ in range(trials):
        logs = rng.normal(math.log(effect), spread, size=limit).tolist()
        stops.append(_stop(logs, scenarios) or limit + 1)
    ordered = sorted(stops)

    def quantile(share: float) -> int | None:
        value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        return value if value <= limit else None

    return Duration(Share(sum(stop <= limit for stop in stops), trials), quantile(0.5), quantile(0.9))


def _stop(logs: list[float], scenarios: int) -> int | None:
    """After how many pairs one leading comparison is decided."""
    needed = math.log(scenarios / (LEADING_SHARE * SIGNIFICANCE))
    factors = log_bayes_factors(logs, 0.0)
    winner = int(np.argmax(factors >= needed)) + 1 if np.any(factors >= needed) else None
    equivalent = _first_equivalent(logs, math.log(1.05))
    return min((stop for stop in (winner, equivalent) if stop is not None), default=None)


def _first_equivalent(logs: list[float], bound: float) -> int | None:
    means = np.cumsum(logs) / np.arange(1, len(logs) + 1)
    enough = math.log(1.0 / SIGNIFICANCE)
    both = (log_bayes_factors(logs, bound) >= enough) & (log_bayes_factors(logs, -bound) >= enough)
    found = both & (np.abs(means) < bound)
    return int(np.argmax(found)) + 1 if np.any(found) else None


def power_at_the_stated_effect(trials: int, noise: Noise, pairs: int, restarts: int = 1) -> Share:
    """The effect that a run of identical arms states is planted into an independent run of the same plan."""
    plan, rng = experiment(5, pairs, 0.0001, restarts=restarts), np.random.default_rng(11)
    target, found = plan.cells[2].name, 0
    for _ in range(trials):
        stated = next(c for c in simulate(plan, rng, noise) if c.scenario == target).minimal_detectable_effect
        assert stated is not None
        again = next(c for c in simulate(plan, rng, noise, 1.0 + stated, target) if c.scenario == target)
        found += again.verdict == "b_faster"
    return Share(found, trials)


def false_winners_beside_the_floor(trials: int, between: float, *, floor: bool) -> Share:
    """One comparison of identical arms with one start of the servers, 12 pairs, where a start shifts the ratio by a
    spread of `between`; the floor comes from an A/A run of 6 starts with 4 pairs each."""
    rng, named = np.random.default_rng(14), 0
    for _ in range(trials):
        starts = rng.normal(0.0, between, size=(6, 1)) + rng.normal(0.0, WITHIN, size=(6, 4))
        limit = floor_of(np.exp(starts).tolist()) if floor else 0.0
        estimate = estimate_ratio(np.exp(rng.normal(0.0, between) + rng.normal(0.0, WITHIN, size=12)).tolist(), 0.05)
        assert limit is not None
        assert estimate.ratio is not None
        assert estimate.p_value is not None
        named += estimate.p_value < SIGNIFICANCE and abs(math.log(estimate.ratio)) > limit
    return Share(named, trials)
