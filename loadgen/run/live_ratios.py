"""The ratio of every cell while the run goes on: by the same formulas as in the end, from the blocks stored so far.

Nothing is decided by it. With a fixed number of pairs its intervals are no tests: whoever stopped a run when one looks
good would find differences that are not there (`--until decided` has intervals that may be looked at).
"""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.comparison.comparisons import estimate_pairs
from loadgen.comparison.pairs import leading_metric, pair_metrics
from loadgen.comparison.summaries import BlockSummary
from loadgen.experiment.schedule import load_cells
from loadgen.records.run import Cell, Experiment


@dataclass(frozen=True, slots=True)
class LiveRatio:
    """How one cell stands, in the metric that will stand for it."""

    cell: str
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
        self._latest: dict[str, LiveRatio] = {}

    @property
    def until_decided(self) -> bool:
        """Whether what shows decides when the run ends."""
        return self._experiment.until_decided

    @property
    def latest(self) -> tuple[LiveRatio, ...]:
        """Every cell that has a complete pair, in the order of the experiment."""
        return tuple(self._latest[name] for name in self._cells if name in self._latest)

    def add(self, summary: BlockSummary) -> LiveRatio | None:
        """Take in a block that has been stored; the cell's ratio where the block completes a pair, else None."""
        cell = self._cells.get(summary.cell)
        if cell is None or not summary.complete:
            return None
        blocks = self._blocks[cell.name]
        blocks.append(summary)
        if not any(block.pair == summary.pair and block.label != summary.label for block in blocks):
            return None
        self._latest[cell.name] = self._estimate(cell, blocks)
        return self._latest[cell.name]

    def _estimate(self, cell: Cell, blocks: list[BlockSummary]) -> LiveRatio:
        metric = leading_metric(cell)
        paired = next(one for one in pair_metrics([cell], blocks, ()) if one.metric == metric)
        _, estimate, _ = estimate_pairs(paired, self._experiment)
        return LiveRatio(
            cell=cell.name,
            metric=metric.title,
            pairs=estimate.pairs,
            planned=cell.pairs if self._experiment.minutes is None and not self._experiment.until_decided else None,
            ratio=estimate.ratio,
            ci95=estimate.ci95,
            reason=paired.reason or estimate.reason,
        )
