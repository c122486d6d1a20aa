"""Pairs until every cell is decided: a look after every round, on intervals that allow it, within a time limit.

A cell drops out once its leading comparison names a winner or equivalence. What is looked at is what the report will
say: the same blocks, summarised and compared in the same way. Looks happen while nothing is under load.
"""

from __future__ import annotations

from time import monotonic

from loadgen.analysis.comparisons import Comparison, compare_all
from loadgen.analysis.summaries import BlockSummary
from loadgen.experiment.schedule import endless_rounds, load_cells
from loadgen.quantities import ratio, ratio_interval
from loadgen.records.run import Cell
from loadgen.run.bench import Bench

DECIDED = ("a_faster", "b_faster", "equivalent")


class UntilDecided:
    """The load of one run. The least pairs of each cell are run in any case; after them no round begins that would
    end past the time limit."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._cells = {cell.name: cell for cell in load_cells(bench.experiment.cells)}
        self._blocks: list[BlockSummary] = []
        self._open = dict(self._cells)
        self._beside = 0.0
        """Seconds of a round that are in no block: idle gaps, above all."""
        self._deadline = monotonic() + 60.0 * (bench.experiment.time_limit_minutes or 0.0)

    def run(self) -> None:
        """Raises as `LoadPhase.run` does."""
        bench, phase = self._bench, self._bench.load_phase()
        bench.forecast.load_ends_within(self._deadline - monotonic())
        for chosen in endless_rounds(tuple(self._cells.values()), bench.experiment.seed):
            pairs = [one for one in chosen if one.cell.name in self._open]
            if not self._may_begin(pairs[0].pair if pairs else 0):
                break
            start = len(self._blocks)
            blocks = [block for place, one in enumerate(pairs) for block in one.blocks(start + 2 * place)]
            began = monotonic()
            summaries = phase.run(blocks, bench.forecast, last=False)
            self._beside = max(0.0, monotonic() - began - sum(bench.forecast.pair_s(one.cell) for one in pairs))
            self._blocks += summaries
            self._look()
        phase.idle()
        bench.forecast.load_ends()

    def _may_begin(self, pair: int) -> bool:
        """Whether something is open and one more pair of each fits in."""
        if not self._open:
            return False
        due = any(pair < cell.pairs for cell in self._open.values())
        seconds = sum(self._bench.forecast.pair_s(cell) for cell in self._open.values())
        return due or monotonic() + self._beside + seconds <= self._deadline

    def _look(self) -> None:
        leading = [c for c in compare_all(self._bench.experiment, self._blocks, ()) if c.leading]
        for comparison in leading:
            cell = self._open.get(comparison.scenario)
            if cell is not None and is_settled(comparison, cell):
                del self._open[comparison.scenario]
        self._bench.progress.now("; ".join(_standing(c) for c in leading if c.scenario in self._cells))


def is_settled(comparison: Comparison, cell: Cell) -> bool:
    """Whether a cell needs no more pairs."""
    return comparison.verdict in DECIDED and comparison.pairs >= cell.pairs


def _standing(comparison: Comparison) -> str:
    verdict = comparison.verdict.replace("_", " ")
    interval = "no interval yet" if comparison.ci95 is None else ratio_interval(comparison.ci95)
    return f"{comparison.scenario}: {verdict} after {comparison.pairs} pairs, B/A " + (
        f"{ratio(comparison.ratio_b_over_a, comparison.ci95)} ({interval})"
    )
