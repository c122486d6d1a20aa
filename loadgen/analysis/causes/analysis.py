"""From the stored counterfactual cells of a run to the causes of its differences."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.causes.differences import mean_pairs
from loadgen.analysis.causes.effects import MeasuredEffect, measure_effects
from loadgen.analysis.causes.ranking import CellCauses, explain_cells
from loadgen.analysis.stages import StageAccount
from loadgen.analysis.summaries import BlockSummary
from loadgen.records.causes import Untested
from loadgen.storage.stored_run import StoredRun


def find_causes(
    run: StoredRun, blocks: Sequence[BlockSummary], accounts: Sequence[StageAccount]
) -> tuple[CellCauses, ...]:
    """Of every cell that was explained; empty where nothing was. `blocks` are the arms' own."""
    explanation = run.explanation
    if explanation is None:
        return ()
    effects: dict[str, list[MeasuredEffect]] = {cell: [] for cell in explanation.cells}
    untested: dict[str, list[Untested]] = {cell: list(explanation.untested) for cell in explanation.cells}
    for counterfactual, stored in zip(explanation.done, run.counterfactual_blocks, strict=True):
        for cell, measured in measure_effects(counterfactual, stored).items():
            if isinstance(measured, Untested):
                untested[cell].append(measured)
            else:
                effects[cell].append(measured)
    named = {cell.name: cell for cell in run.experiment.cells}
    experiment = run.experiment
    return explain_cells(
        [named[cell] for cell in explanation.cells if cell in named],
        {cell: mean_pairs(cell, blocks) for cell in explanation.cells},
        effects,
        untested,
        accounts,
        comparable=experiment.payload_of(experiment.a) == experiment.payload_of(experiment.b),
    )
