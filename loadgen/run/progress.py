"""The events that a run reports as it progresses, and the ratios during the run; `loadgen.report` shows them.

The ratios are the final formulas applied to the blocks stored so far. They decide nothing. With a fixed number of pairs
their intervals are not tests: stopping a run when one looks good finds differences that do not exist (`--until decided`
has intervals that allow it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from loadgen.experiment.schedule import load_workloads
from loadgen.metrics.comparisons import PairedMetric, estimate_pairs, pair_metrics, shared_correlation
from loadgen.metrics.registry import leading_metric
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.probes import ServerStart
from loadgen.records.run import ArmRecord, BlockRecord, Experiment, Label, ParityRecord
from loadgen.verdict.checks.registry import Check


class RunProgress:
    """Listens to a run and shows nothing. Calls come in order, from one thread."""

    def plan(self, seconds: float) -> None:
        """The remaining time, if known."""

    def phase(self, title: str) -> None:
        """A phase begins."""

    def now(self, text: str) -> None:
        """The current step."""

    def padding_decided(self, rule: str) -> None:
        """How the servers pad batches, in a sentence, before they start."""

    def inputs_ready(self, about: Mapping[str, str | int]) -> None:
        """The inputs are made, as described in the stored environment."""

    def arm_ready(self, record: ArmRecord) -> None:
        """A server is up."""

    def cold_start_done(self, record: ServerStart) -> None:
        """One cold start is done."""

    def parity_done(self, record: ParityRecord) -> None:
        """All servers have answered the same inputs."""

    def fairness_checked(self, checks: Sequence[Check]) -> None:
        """The arms and the machine were checked, right before the load."""

    def block_done(self, record: BlockRecord, summary: BlockSummary) -> None:
        """One block is stored; `summary` is computed from its samples."""


@dataclass(frozen=True, slots=True)
class LiveRatio:
    """An arm against the baseline in one workload, by its leading metric."""

    workload: str
    baseline: Label
    arm: Label
    metric: str
    """The metric's title."""
    pairs: int
    planned: int | None
    """None when the number of pairs is not fixed."""
    ratio: float | None
    ci95: tuple[float, float] | None
    reason: str | None
    """The reason why a ratio or an interval is still missing."""


class LiveRatios:
    """The ratios of one run. Not thread-safe."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._workloads = {workload.name: workload for workload in load_workloads(experiment.workloads)}
        self._blocks: dict[str, list[BlockSummary]] = {name: [] for name in self._workloads}
        self._latest: dict[tuple[str, Label], LiveRatio] = {}

    @property
    def until_decided(self) -> bool:
        """Whether these intervals determine when the run ends."""
        return self._experiment.until_decided

    @property
    def latest(self) -> tuple[LiveRatio, ...]:
        """Every workload and arm with a complete pair, in the order of the experiment."""
        every = ((name, arm) for name in self._workloads for _, arm in self._experiment.pairings)
        return tuple(self._latest[key] for key in every if key in self._latest)

    def add(self, summary: BlockSummary) -> list[LiveRatio]:
        """Add a stored block; returns the ratios of the pairs that it completes."""
        workload = self._workloads.get(summary.workload)
        if workload is None or not summary.complete:
            return []
        blocks = self._blocks[workload.name]
        blocks.append(summary)
        ran = {block.label for block in blocks if block.round == summary.round}
        completed = {two for two in self._experiment.pairings if ran.issuperset(two) and summary.label in two}
        metric = leading_metric(workload)
        alone = msgspec.structs.replace(self._experiment, workloads=(workload,))
        ratios = [
            self._estimate(paired)
            for paired in pair_metrics(alone, blocks)
            if paired.metric == metric and paired.pairing in completed
        ]
        self._latest |= {(ratio.workload, ratio.arm): ratio for ratio in ratios}
        return ratios

    def _estimate(self, paired: PairedMetric) -> LiveRatio:
        workload, metric = paired.workload, paired.metric
        _, estimate, _ = estimate_pairs(paired, self._experiment, shared_correlation([paired]).plausible)
        return LiveRatio(
            workload=workload.name,
            baseline=paired.pairing.baseline,
            arm=paired.pairing.arm,
            metric=metric.title,
            pairs=estimate.pairs,
            planned=workload.rounds
            if self._experiment.minutes is None and not self._experiment.until_decided
            else None,
            ratio=estimate.ratio,
            ci95=estimate.ci95,
            reason=paired.reason or estimate.reason,
        )
