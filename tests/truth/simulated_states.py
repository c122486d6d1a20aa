"""Runs of identical arms that stay fast or slow for several rounds, from their log ratios alone, without any block.

Each arm of each workload has a state of its own, fast or slow, which lasts as `correlation` says and differs by `jump`
spreads of the noise that each block has besides; without a jump the arm is a Gaussian first-order autoregression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.experiment.plan import DECIDED_ROUNDS
from loadgen.metrics.comparisons import (
    Outcome,
    Pair,
    PairedMetric,
    adjust,
    estimate_pairs,
    judge,
    seen_correlations,
)
from loadgen.metrics.registry import METRICS, THROUGHPUT, leading_metric
from loadgen.records.run import Experiment, Pairing
from tests.truth.promises import Share
from tests.truth.simulated_runs import autoregression, experiment

NOISE = 0.02
P50 = METRICS["latency_p50"]
OF_P50 = 0.006
"""By which a round's ratio of p50 differs from that of throughput."""
WON = ("arm_better", "baseline_better")


@dataclass(frozen=True)
class States:
    """How long an arm stays fast or slow, and by how much."""

    correlation: float
    jump: float = 0.0
    only_first: bool = False
    """Whether this holds in the first workload alone."""

    def __str__(self) -> str:
        kind = f"fast or slow by {self.jump:g} × the noise" if self.jump else "Gaussian"
        return f"{kind}, correlation {self.correlation:g}{', one workload of five' if self.only_first else ''}"

    def log_seconds(self, rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
        """Of each workload, arm and round."""
        independent = rng.normal(0.0, NOISE, shape)
        if not self.jump:
            lasting = autoregression(rng, self.correlation, shape)
        else:
            fast = rng.random(shape) < 0.5
            kept = rng.random(shape) < self.correlation
            for place in range(1, shape[-1]):
                fast[..., place] = np.where(kept[..., place], fast[..., place - 1], fast[..., place])
            lasting = independent + self.jump * NOISE * fast
        return np.concatenate([lasting[:1], independent[1:]]) if self.only_first else lasting


@dataclass(frozen=True)
class Plan:
    """The rounds of each workload; until decided at most so many."""

    rounds: int
    workloads: int = 5
    arms: int = 2
    until_decided: bool = False

    def __str__(self) -> str:
        arms = f", {self.arms} arms" if self.arms > 2 else ""
        until = ", until decided" if self.until_decided else ""
        return f"{self.rounds} rounds, {self.workloads} workload{'s'[: self.workloads - 1]}{arms}{until}"


GAUSSIAN = States(0.5)
JUMPS = tuple(States(correlation, jump) for correlation in (0.3, 0.5) for jump in (2, 4, 8))
ONE_OF_FIVE = States(0.5, only_first=True), States(0.5, 8, only_first=True)
PLANS = (
    Plan(3, 1),
    Plan(3),
    Plan(4),
    Plan(8),
    Plan(14),
    Plan(30),
    Plan(4, arms=4),
    Plan(14, 7, arms=4),
    Plan(30, 1, until_decided=True),
    Plan(14, until_decided=True),
)
"""Of the presets smoke (3 rounds), quick (4 to 14) and full (30); four arms with 45 and 63 comparisons."""


def play(
    plan: Plan, states: States, rng: np.random.Generator, faster: float = 1.0
) -> list[tuple[PairedMetric, Outcome]]:
    """One run: the throughput and p50 of every pairing with the baseline, the throughput of the others, and their
    verdicts; until decided those of the first round in which any names a winner. The arm b is so many times as fast.
    The margin is so small that nothing is decided by "no meaningful difference"."""
    asked = experiment(plan.workloads, plan.rounds, 1e-4, arms=plan.arms, until_decided=plan.until_decided)
    log_seconds = states.log_seconds(rng, (plan.workloads, plan.arms, plan.rounds))
    log_seconds[:, asked.labels.index("b")] -= math.log(faster)
    paired = []
    for workload, of_arms in zip(asked.workloads, log_seconds, strict=True):
        by_label = dict(zip(asked.labels, of_arms, strict=True))
        for pairing in (*asked.pairings, *asked.pairings_of_others(workload)):
            logs = by_label[pairing.arm] - by_label[pairing.baseline]
            paired.append(PairedMetric(workload, THROUGHPUT, pairing, _pairs(-logs)))
            if pairing in asked.pairings:
                paired.append(PairedMetric(workload, P50, pairing, _pairs(logs + rng.normal(0.0, OF_P50, len(logs)))))
    verdicts = []
    for rounds in range(min(DECIDED_ROUNDS, plan.rounds) if plan.until_decided else plan.rounds, plan.rounds + 1):
        so_far = [replace(metric, pairs=metric.pairs[:rounds]) for metric in paired]
        verdicts = list(zip(so_far, _verdicts(so_far, asked), strict=True))
        if any(verdict in WON for _, verdict in verdicts):
            break
    return verdicts


def _pairs(logs: np.ndarray) -> tuple[Pair, ...]:
    return tuple(Pair(1.0, ratio) for ratio in np.exp(logs).tolist())


def _verdicts(paired: Sequence[PairedMetric], asked: Experiment) -> list[Outcome]:
    seen = seen_correlations(paired)
    estimates = [estimate_pairs(metric, asked, seen)[1] for metric in paired]
    leads = [metric.metric == leading_metric(metric.workload) for metric in paired]
    adjusted = adjust(leads, [estimate.p_value for estimate in estimates], until_decided=asked.until_decided)
    return [
        judge(estimate.ci95, p, asked.equivalence_margin, metric.metric.higher_is_better)
        for metric, estimate, p in zip(paired, estimates, adjusted, strict=True)
    ]


def false_winners(plan: Plan, states: States, trials: int) -> Share:
    """Runs of identical arms that name a winner."""
    rng = np.random.default_rng(41)
    return Share(sum(any(verdict in WON for _, verdict in play(plan, states, rng)) for _ in range(trials)), trials)


def found(plan: Plan, faster: float, trials: int) -> Share:
    """Comparisons of throughput that name an arm which is so many times as fast as the baseline, in independent
    rounds."""
    rng = np.random.default_rng(43)
    verdicts = [
        verdict
        for _ in range(trials)
        for metric, verdict in play(plan, States(0.0), rng, faster)
        if (metric.metric, metric.pairing) == (THROUGHPUT, Pairing("a", "b"))
    ]
    return Share(verdicts.count("arm_better"), len(verdicts))
