"""The records of a run with what follows from them for every arm and cell: what studies, checks and verdict look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from loadgen.comparison.comparisons import Comparison
from loadgen.comparison.stages import ArmStages, StageAccount
from loadgen.comparison.summaries import BlockSummary, CellSummary
from loadgen.records.run import Cell, Found
from loadgen.storage.stored_run import StoredBlock, StoredRun

F = TypeVar("F", bound=Found)

RUN = "run"
"""Scope of a check that covers every comparison."""
PLAN = "plan"
"""Scope of a check on the run as planned: it takes the verdict from the run, not from cells that are complete."""


def cell_scope(cell: str) -> str:
    """Scope of a check that covers the comparisons of one cell."""
    return f"cell {cell}"


@dataclass(frozen=True, slots=True)
class CellFacts:
    """One cell whose blocks were planned, with those that ran."""

    cell: Cell
    stored: Sequence[StoredBlock]
    blocks: Sequence[BlockSummary]
    summaries: Sequence[CellSummary]
    """One for each arm."""
    accounts: Sequence[StageAccount]
    """One for each arm beside the baseline."""

    @property
    def stages(self) -> list[ArmStages]:
        """Of each arm that reports them, the baseline's first."""
        return list({side.label: side for account in self.accounts for side in account.sides if side}.values())

    @property
    def scope(self) -> str:
        """Of a check on this cell."""
        return cell_scope(self.cell.name)


@dataclass(frozen=True, slots=True)
class Facts:
    """The records of a run and what was computed from them: all that checks, verdict and thresholds look at. Before the
    load there are only records."""

    run: StoredRun
    blocks: Sequence[BlockSummary] = ()
    summaries: Sequence[CellSummary] = ()
    accounts: Sequence[StageAccount] = ()
    findings: Mapping[str, Found] = field(default_factory=dict)
    """Of the studies, by their names."""
    comparisons: Sequence[Comparison] = ()
    """For checks those before any check has invalidated one."""

    def of(self, kind: type[F]) -> F:
        """What a study has found."""
        return kind.among(self.findings)

    @property
    def planned(self) -> list[CellFacts]:
        """Every cell that was to have blocks."""
        return [
            CellFacts(
                cell,
                [block for block in self.run.blocks if block.record.cell == cell.name],
                [block for block in self.blocks if block.cell == cell.name],
                [summary for summary in self.summaries if summary.cell == cell.name],
                [account for account in self.accounts if account.cell == cell.name],
            )
            for cell in self.run.experiment.cells
            if cell.has_blocks
        ]

    @property
    def loads(self) -> list[CellFacts]:
        """Every cell that has blocks."""
        return [load for load in self.planned if load.blocks]

    @property
    def cores(self) -> int | None:
        """Of this machine, where servers run that were started by us."""
        cores = self.run.environment.host.get("cpu_count") if self.run.environment else None
        return cores if isinstance(cores, int) else None
