"""The ratio of every workload during the run: the final formulas applied to the blocks stored so far.

It decides nothing. With a fixed number of pairs its intervals are not tests: stopping a run when one looks good finds
differences that do not exist (`--until decided` has intervals that allow it).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from loadgen.experiment.schedule import load_workloads
from loadgen.metrics.comparisons import PairedMetric, estimate_pairs, pair_metrics, shared_correlation
from loadgen.metrics.registry import leading_metric
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.run import Experiment, Label


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
        own = msgspec.structs.replace(self._experiment, workloads=(workload,))
        found = [
            self._estimate(paired)
            for paired in pair_metrics(own, blocks)
            if paired.metric == metric and paired.pairing in completed
        ]
        self._latest |= {(one.workload, one.arm): one for one in found}
        return found

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
