"""What the statistics promise, measured on simulated runs: each function answers one question with so many trials.

The tests call these with few trials, `python -m tests.truth.tables` with many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import special

from loadgen.checks.noise_floor import floor_of
from loadgen.measure.probes.load import NEEDY
from loadgen.metrics.claims import rank
from loadgen.metrics.comparisons import (
    LEADING_SHARE,
    Pair,
    PairedMetric,
    compare_all,
    estimate_pairs,
    judge,
    roughen,
    seen_correlations,
)
from loadgen.metrics.registry import THROUGHPUT
from loadgen.records.run import Pairing
from loadgen.stats.estimates import SIGNIFICANCE, critical_t
from loadgen.stats.ratios import (
    RatioEstimate,
    adjust_holm,
    estimate_anytime,
    estimate_ratio,
    estimate_restarts,
    interval_of_mean,
    lag_one,
    log_bayes_factors,
    plausible_correlation,
)
from loadgen.stats.tails import Round, estimate_tail_ratio
from tests.truth.closed_loops import Times, compare
from tests.truth.simulated_runs import (
    Noise,
    autoregression,
    experiment,
    names_a_winner,
    plain,
    simulate,
    simulate_blocks,
)

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


MANY = 1000
"""Trials from which the comparisons of p90 and p99 are simulated too."""


def false_winners(
    trials: int, noise: Noise, pairs: int, *, restarts: int = 1, restart_spread: float = 0.0,
    resemblance: float = 0.0, workloads: int = 7, margin: float = 0.05, arms: int = 2,
) -> Share:  # fmt: skip
    """Runs of identical arms, seven scenarios with four metrics each, that name any winner."""
    plan, rng = experiment(workloads, pairs, margin, restarts=restarts, arms=arms), np.random.default_rng(2024)
    runs = (
        simulate(plan, rng, noise, 1.0, "", restart_spread, resemblance, tails=trials >= MANY) for _ in range(trials)
    )
    return Share(sum(map(names_a_winner, runs)), trials)


def winners_on_a_busy_machine(
    trials: int, noise: Noise, effect: float, taken: float, lost: float, *, workloads: int = 7, pairs: int = 6
) -> tuple[Share, Share]:
    """Rough runs that name a winner, and those that name the wrong one. B is `effect` times as fast as A, others took
    the share `taken` of the cores in every block, and B alone loses the share `lost` of its time."""
    plan, rng, any_winner, wrong = experiment(workloads, pairs, 0.05), np.random.default_rng(54), 0, 0
    shares = {load.name: {"a": taken, "b": taken} for load in plan.workloads}
    for _ in range(trials):
        seen = roughen(simulate(plan, rng, noise, effect * (1.0 - lost)), shares, plan.equivalence_margin)
        winners = {comparison.winner for comparison in seen} - {None}
        any_winner += bool(winners)
        wrong += bool(winners - ({"b"} if effect > 1.0 else set()))
    return Share(any_winner, trials), Share(wrong, trials)


def named_in_resembling_rounds(trials: int, effect: float, pairs: int, phi: float) -> Share:
    """Comparisons of throughput, in runs of four scenarios, that name the arm that is `effect` times as fast."""
    plan, rng, named = experiment(4, pairs, 0.05), np.random.default_rng(3), 0
    for _ in range(trials):
        compared = [c for c in simulate(plan, rng, plain, effect, resemblance=phi) if c.metric == "throughput"]
        named += sum(c.verdict == "arm_better" for c in compared)
    return Share(named, 4 * trials)


SPEEDS = {"b": 1.1, "c": 1.0, "d": 1.3}
"""Of four arms, beside the baseline's 1."""


def rankings(trials: int, noise: Noise, pairs: int) -> tuple[Share, Share]:
    """Of four arms in three scenarios: those whose order and neighbours are as planted (d, b, then a and c, which are
    alike), and those that call a and c unlike."""
    plan, rng, right, wrong = experiment(3, pairs, 0.01, arms=4), np.random.default_rng(18), 0, 0
    for _ in range(trials):
        for ranking in rank(simulate(plan, rng, noise, SPEEDS), lambda _: "a"):
            separated = [two not in ranking.not_separated for two in pairwise(ranking.order)]
            right += ranking.order[:2] == ("d", "b") and separated == [True, True, False]
            wrong += set(ranking.order[2:]) == {"a", "c"} and separated[2]
    return Share(right, 3 * trials), Share(wrong, 3 * trials)


def tail_coverage(trials: int, slow: float, pairs: int, requests: int) -> tuple[Share, Share]:
    """Intervals of the p99 that hold its true ratio where so large a share of B's requests takes four times as long,
    and what the interval over the blocks' own p99 would hold. The machine wanders by a tenth over the run."""
    rng = np.random.default_rng(15)
    truth = _p99_of_a_mixture(slow) / _p99_of_a_mixture(0.0)
    covered = by_blocks = 0
    for _ in range(trials):
        speed = np.cumsum(rng.normal(0.0, 0.1 / math.sqrt(pairs), pairs))
        rounds = []
        for pair in range(pairs):
            a, b = (np.exp(rng.normal(speed[pair] + rng.normal(0.0, 0.01), 0.1, requests)) for _ in "ab")
            b[rng.random(requests) < slow * rng.gamma(4.0, 0.25)] *= 4.0
            rounds.append(Round(a, b, pair))
        estimate, _ = estimate_tail_ratio(rounds, 0.99, 0.05)
        low, high = estimate.ci95 or (0.0, math.inf)
        covered += low <= truth <= high
        p99s = [tuple(np.quantile(arm, 0.99, method="median_unbiased") for arm in (pair.a, pair.b)) for pair in rounds]
        low, high = estimate_ratio([float(b / a) for a, b in p99s], 0.05).ci95 or (0.0, math.inf)
        by_blocks += low <= truth <= high
    return Share(covered, trials), Share(by_blocks, trials)


def _p99_of_a_mixture(slow: float) -> float:
    """Of a log-normal of which a share is four times as large, by bisection."""
    low, high = 0.5, 10.0
    for _ in range(60):
        middle = (low + high) / 2.0
        below = (1 - slow) * special.ndtr(math.log(middle) / 0.1) + slow * special.ndtr(math.log(middle / 4.0) / 0.1)
        low, high = (middle, high) if below < 0.99 else (low, middle)
    return low


def two_stages(trials: int, effect: float) -> tuple[Share, Share]:
    """Runs by time: scenarios of unlike spread, of which those with the larger standard error get further pairs.
    Intervals that hold the true ratio, and runs of identical arms that name a winner."""
    rng, spreads = np.random.default_rng(16), (0.01, 0.02, 0.03, 0.05)
    plan, covered, named = experiment(len(spreads), 6, 0.05), 0, 0
    for _ in range(trials):
        logs = [rng.normal(math.log(effect), spread, 6).tolist() for spread in spreads]
        for _ in range(6):
            errors = [np.std(values, ddof=1) / math.sqrt(len(values)) for values in logs]
            for values, spread, error in zip(logs, spreads, errors, strict=True):
                if error >= NEEDY * max(errors):
                    values += rng.normal(math.log(effect), spread, 2).tolist()
        paired = [
            PairedMetric(workload, THROUGHPUT, Pairing("a", "b"), tuple(Pair(1.0, math.exp(value)) for value in values))
            for workload, values in zip(plan.workloads, logs, strict=True)
        ]
        seen = seen_correlations(paired)
        estimates = [estimate_pairs(metric, plan, seen)[1] for metric in paired]
        covered += sum((estimate.ci95 or (0, 0))[0] <= effect <= (estimate.ci95 or (0, 0))[1] for estimate in estimates)
        named += any((p or 1.0) < SIGNIFICANCE for p in adjust_holm([estimate.p_value for estimate in estimates]))
    return Share(covered, trials * len(spreads)), Share(named, trials)


def closed_loop_coverage(trials: int, times: Times, users: int, rounds: int, spans: float) -> tuple[Share, Share]:
    """Intervals of the throughput that hold the truth, 1, and those that lie beside it, whose arm would be the
    winner."""
    rng = np.random.default_rng(17)
    intervals = [compare(rng, times, users, spans, rounds) for _ in range(trials)]
    covered = sum(low <= 1.0 <= high for low, high in intervals)
    return Share(covered, trials), Share(trials - covered, trials)


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


def own_figure(trials: int, blocks: Sequence[int], start: float, correlation: float) -> tuple[Share, Share]:
    """Intervals of an arm's own figure that hold it, where each start of the server has so many blocks and shifts them
    by a spread of `start`; and those of a t interval over all blocks, as they were made before."""
    rng, covered, over_blocks = np.random.default_rng(19), 0, 0
    for _ in range(trials):
        logs = [rng.normal(0.0, start) + autoregression(rng, correlation, (1, count))[0] for count in blocks]
        low, high = interval_of_mean([np.exp(values).tolist() for values in logs]) or (0.0, math.inf)
        covered += low <= 1.0 <= high
        low, high = estimate_ratio(np.exp(np.concatenate(logs)).tolist(), 1.0).ci95 or (0.0, math.inf)
        over_blocks += low <= 1.0 <= high
    return Share(covered, trials), Share(over_blocks, trials)


def coverage_at_all_looks(trials: int, pairs: int, spread: float = WITHIN) -> Share:
    """Runs in which no look's interval, after any number of pairs, misses a true ratio of 1.05."""
    rng, truth, covered = np.random.default_rng(9), math.log(1.05), 0
    for _ in range(trials):
        logs = rng.normal(truth, spread, size=pairs)
        covered += bool(np.max(log_bayes_factors(logs.tolist(), truth)) < math.log(1.0 / SIGNIFICANCE))
    return Share(covered, trials)


def coverage_when_stopped(trials: int, effect: float, noise: Noise, pairs: int) -> Share:
    """The interval when a run until decided stopped: does it hold the truth?"""
    plan, rng, covered = experiment(1, pairs, 0.05, until_decided=True), np.random.default_rng(10), 0
    for _ in range(trials):
        blocks = simulate_blocks(plan, rng, noise, effect)
        logs = [math.log(ratio) for ratio in compare_all(plan, blocks)[0].ratios]
        stop = _stop([logs])
        low, high = (stop[1].ci95 if stop else None) or (0.0, math.inf)
        covered += low <= effect <= high
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
        stop = _stop(rng.normal(math.log(effect), spread, size=(scenarios, limit)).tolist())
        stops.append(stop[0] if stop else limit + 1)
    ordered = sorted(stops)

    def quantile(share: float) -> int | None:
        value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        return value if value <= limit else None

    return Duration(Share(sum(stop <= limit for stop in stops), trials), quantile(0.5), quantile(0.9))


def _stop(series: Sequence[Sequence[float]]) -> tuple[int, RatioEstimate] | None:
    """After how many pairs the first scenario is decided, and its estimate then; a series of log ratios per
    scenario."""
    for count in range(4, len(series[0]) + 1):
        ratios = [np.exp(logs[:count]).tolist() for logs in series]
        seen = [(count, lag_one(ratio_series) or 0.0) for ratio_series in ratios]
        correlation, _ = plausible_correlation(seen, seen[0])
        estimate = estimate_anytime(ratios[0], 0.05, correlation)
        p = None if estimate.p_value is None else min(1.0, estimate.p_value * len(series) / LEADING_SHARE)
        if judge(estimate.ci95, p, 0.05, higher_is_better=True) != "inconclusive":
            return count, estimate
    return None


def _first_equivalent(logs: list[float], bound: float) -> int | None:
    means = np.cumsum(logs) / np.arange(1, len(logs) + 1)
    enough = math.log(1.0 / SIGNIFICANCE)
    both = (log_bayes_factors(logs, bound) >= enough) & (log_bayes_factors(logs, -bound) >= enough)
    shown_equivalent = both & (np.abs(means) < bound)
    return int(np.argmax(shown_equivalent)) + 1 if np.any(shown_equivalent) else None


def power_at_the_stated_effect(trials: int, noise: Noise, pairs: int, restarts: int = 1) -> Share:
    """The effect that a run of identical arms states is planted into an independent run of the same plan."""
    plan, rng = experiment(5, pairs, 0.0001, restarts=restarts), np.random.default_rng(11)
    target, detected = plan.workloads[2].name, 0
    for _ in range(trials):
        stated = next(c for c in simulate(plan, rng, noise) if c.workload == target).minimal_detectable_effect
        assert stated is not None
        again = next(c for c in simulate(plan, rng, noise, 1.0 + stated, target) if c.workload == target)
        detected += again.verdict == "arm_better"
    return Share(detected, trials)


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
