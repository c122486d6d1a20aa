"""The ratio of every cell while the run goes on: by the same formulas as in the end, from the blocks stored so far.

Nothing is decided by it. With a fixed number of pairs its intervals are no tests: whoever stopped a run when one looks
good would find differences that are not there (`--until decided` has intervals that may be looked at).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from loadgen.comparison.comparisons import estimate_pairs
from loadgen.comparison.pairs import PairedMetric, leading_metric, pair_metrics
from loadgen.comparison.summaries import BlockSummary
from loadgen.experiment.schedule import load_cells
from loadgen.records.run import Cell, Experiment, Label


@dataclass(frozen=True, slots=True)
class LiveRatio:
    """How an arm stands beside the baseline in one cell, in the metric that will stand for it."""

    cell: str
    baseline: Label
    arm: Label
    metric: str
    """For people."""
    pairs: int
    planned: int | None
    """None where the number of pairs is not fixed."""
    ratio: float | None
    ci95: tuple[float, float] | None
    reason: str | None
    """Why there is no ratio or no interval yet."""


class LiveRatios:
    """Of one run. Not for more than one thread."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._cells: dict[str, Cell] = {cell.name: cell for cell in load_cells(experiment.cells)}
        self._blocks: dict[str, list[BlockSummary]] = {name: [] for name in self._cells}
        self._latest: dict[tuple[str, Label], LiveRatio] = {}

    @property
    def until_decided(self) -> bool:
        """Whether what shows decides when the run ends."""
        return self._experiment.until_decided

    @property
    def latest(self) -> tuple[LiveRatio, ...]:
        """Every cell and arm with a complete pair, in the order of the experiment."""
        every = ((name, arm) for name in self._cells for _, arm in self._experiment.pairings)
        return tuple(self._latest[key] for key in every if key in self._latest)

    def add(self, summary: BlockSummary) -> list[LiveRatio]:
        """Take in a block that has been stored; the ratios of the pairs that it completes."""
        cell = self._cells.get(summary.cell)
        if cell is None or not summary.complete:
            return []
        blocks = self._blocks[cell.name]
        blocks.append(summary)
        ran = {block.label for block in blocks if block.round == summary.round}
        completed = {two for two in self._experiment.pairings if ran.issuperset(two) and summary.label in two}
        metric = leading_metric(cell)
        own = msgspec.structs.replace(self._experiment, cells=(cell,))
        found = [
            self._estimate(paired)
            for paired in pair_metrics(own, blocks, ())
            if paired.metric == metric and paired.pairing in completed
        ]
        self._latest |= {(one.cell, one.arm): one for one in found}
        return found

    def _estimate(self, paired: PairedMetric) -> LiveRatio:
        cell, metric = paired.cell, paired.metric
        _, estimate, _ = estimate_pairs(paired, self._experiment)
        return LiveRatio(
            cell=cell.name,
            baseline=paired.pairing.baseline,
            arm=paired.pairing.arm,
            metric=metric.title,
            pairs=estimate.pairs,
            planned=cell.rounds if self._experiment.minutes is None and not self._experiment.until_decided else None,
            ratio=estimate.ratio,
            ci95=estimate.ci95,
            reason=paired.reason or estimate.reason,
        )
