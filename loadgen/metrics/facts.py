"""`Facts`: the records of a run and what is computed from them, which probes, checks, verdict and thresholds read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from loadgen.metrics.breakdown import ArmStages, LatencyBreakdown
from loadgen.metrics.claims import names_of
from loadgen.metrics.comparisons import Comparison
from loadgen.metrics.summaries import BlockSummary, WorkloadSummary
from loadgen.records.run import Figure, Found, Label, Workload, item_of
from loadgen.records.store import StoredBlock, StoredRun, StoredRunError

F = TypeVar("F", bound=Found)

RUN = "run"
"""Scope of a check that covers every comparison."""
PLAN = "plan"
"""Scope of a check that fails the run as planned; complete workloads keep their verdict."""


def workload_scope(workload: str) -> str:
    """Scope of a check that covers the comparisons of one workload."""
    return f"workload {workload}"


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """One workload whose blocks were planned, with those that ran."""

    workload: Workload
    stored: Sequence[StoredBlock]
    blocks: Sequence[BlockSummary]
    summaries: Sequence[WorkloadSummary]
    """A summary per arm."""
    breakdowns: Sequence[LatencyBreakdown]
    """A breakdown per arm except the baseline."""

    @property
    def stages(self) -> list[ArmStages]:
        """The stages of each arm that reports them, the baseline's first."""
        return list({side.label: side for breakdown in self.breakdowns for side in breakdown.sides if side}.values())

    @property
    def scope(self) -> str:
        return workload_scope(self.workload.name)


@dataclass(frozen=True)
class Facts:
    """Everything that checks, verdict and thresholds may read. Before the load only `run` is filled."""

    run: StoredRun
    blocks: Sequence[BlockSummary] = ()
    summaries: Sequence[WorkloadSummary] = ()
    breakdowns: Sequence[LatencyBreakdown] = ()
    findings: Mapping[str, Found] = field(default_factory=dict)
    """The probes' findings by their names."""
    comparisons: Sequence[Comparison] = ()
    """The comparisons; checks get them before any check has invalidated one."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The steps of the analysis that failed, such as the name of a finding, and why."""

    def of(self, kind: type[F]) -> F:
        """The finding of this kind, or an empty one where nothing was requested or found. Raises `StoredRunError` if
        it could not be computed, so that no check passes for the lack of it."""
        if kind.STUDY in self.failures:
            raise StoredRunError(self.failures[kind.STUDY])
        return kind.among(self.findings)

    @cached_property
    def figures(self) -> list[Figure]:
        """The figures of metrics that probes measured without blocks."""
        return [figure for finding in self.findings.values() for figure in finding.figures()]

    @cached_property
    def planned(self) -> list[WorkloadFacts]:
        """Every workload that was planned to have blocks."""
        return [
            WorkloadFacts(
                workload,
                [block for block in self.run.blocks if block.record.workload == workload.name],
                [block for block in self.blocks if block.workload == workload.name],
                [summary for summary in self.summaries if summary.workload == workload.name],
                [breakdown for breakdown in self.breakdowns if breakdown.workload == workload.name],
            )
            for workload in self.run.experiment.workloads
            if workload.has_blocks
        ]

    @property
    def loads(self) -> list[WorkloadFacts]:
        """Every workload that has blocks."""
        return [load for load in self.planned if load.blocks]

    @cached_property
    def names(self) -> dict[Label, str]:
        """The arms as sentences call them."""
        return names_of(self.run.experiment.arms, self.run.arms)

    @property
    def item(self) -> str:
        """What an input is called: image, sequence, item."""
        return item_of(self.run.environment)

    @property
    def cores(self) -> int | None:
        """CPU cores of this machine, where the launched servers run."""
        cores = self.run.environment.host.get("cpu_count") if self.run.environment else None
        return cores if isinstance(cores, int) else None
