"""`Facts`: the records of a run and what is computed from them, which probes, checks, verdict and thresholds read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from loadgen.metrics.breakdown import ArmStages, LatencyBreakdown
from loadgen.metrics.comparisons import Comparison
from loadgen.metrics.summaries import BlockSummary, WorkloadSummary
from loadgen.records.names import names_of
from loadgen.records.run import Figure, Found, Label, Workload, item_of
from loadgen.records.store import StoredBlock, StoredRun, StoredRunError

F = TypeVar("F", bound=Found)

RUN = "run"
"""Scope of a check that covers every comparison."""
PLAN = "plan"
"""Scope of a check that fails the run as planned; complete workloads keep their verdict."""
TAKEN_LIMIT = 0.03
"""Share of the cores, over an arm's blocks: a server that uses all cores loses at most about 3 %, below δ = 5 %."""
LEAST_LEFT = 0.01
"""Share of the cores that others leave at least: a reading of 100 % is the kernel's coarse step."""


def workload_scope(workload: str) -> str:
    """Scope of a check that covers the comparisons of one workload."""
    return f"workload {workload}"


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """One workload with its blocks that ran; a search has none."""

    workload: Workload
    stored: Sequence[StoredBlock]
    blocks: Sequence[BlockSummary]
    summaries: Sequence[WorkloadSummary]
    """A summary per arm."""
    breakdowns: Sequence[LatencyBreakdown]
    """A breakdown per arm except the baseline."""
    by_url: Collection[Label]
    """The arms whose servers may have other clients."""

    @property
    def stages(self) -> list[ArmStages]:
        """The stages of each arm that reports them, the baseline's first."""
        return list({side.label: side for breakdown in self.breakdowns for side in breakdown.sides if side}.values())

    @property
    def scope(self) -> str:
        return workload_scope(self.workload.name)

    @property
    def further_requests(self) -> dict[Label, float]:
        """Requests that a server counted beyond those that were sent to it, as a share of these; empty where none
        counts them."""
        counted: dict[Label, list[tuple[int, int]]] = {}
        for record in (block.record for block in self.stored if block.record.complete):
            if record.stages is not None and record.stages.requests:
                sent = record.requests + record.cool_down
                counted.setdefault(record.label, []).append((record.stages.requests, sent))
        return {
            label: sum(of_all for of_all, _ in both) / sent - 1.0
            for label, both in counted.items()
            if (sent := sum(own for _, own in both))
        }

    @property
    def lost_to_others(self) -> dict[Label, float]:
        """The share of its time that each arm may have lost: of the cores to the hypervisor and other programs, and of
        a server at a URL to other clients. It is the mean over the blocks of the logarithm of what was left, since the
        geometric mean of the blocks is reported. 0 where nothing was recorded."""
        left: dict[Label, list[float]] = {}
        for record in (block.record for block in self.stored if block.record.complete):
            machine = record.machine
            taken = 0.0
            if machine is not None and machine.total_ns > 0:
                taken = ((machine.steal_ns or 0) + (machine.others_ns or 0)) / machine.total_ns
            left.setdefault(record.label, []).append(math.log(min(max(1.0 - taken, LEAST_LEFT), 1.0)))
        more = {label: max(self.further_requests.get(label, 0.0), 0.0) for label in self.by_url}
        return {
            label: 1.0 - math.exp(math.fsum(logs) / len(logs)) / (1.0 + more.get(label, 0.0))
            for label, logs in left.items()
        }

    @property
    def is_disturbed(self) -> bool:
        """Whether others took more from an arm than what a check tolerates."""
        return any(lost > TAKEN_LIMIT for lost in self.lost_to_others.values())


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
    def workloads(self) -> list[WorkloadFacts]:
        """Every workload of the experiment."""
        return [
            WorkloadFacts(
                workload,
                [block for block in self.run.blocks if block.record.workload == workload.name],
                [block for block in self.blocks if block.workload == workload.name],
                [summary for summary in self.summaries if summary.workload == workload.name],
                [breakdown for breakdown in self.breakdowns if breakdown.workload == workload.name],
                self.by_url,
            )
            for workload in self.run.experiment.workloads
        ]

    @property
    def planned(self) -> list[WorkloadFacts]:
        """Every workload that was planned to have blocks."""
        return [load for load in self.workloads if load.workload.has_blocks]

    @property
    def searches(self) -> list[WorkloadFacts]:
        """Every search for the highest rate."""
        return [load for load in self.workloads if load.workload.is_search]

    @property
    def loads(self) -> list[WorkloadFacts]:
        """Every workload that has blocks."""
        return [load for load in self.planned if load.blocks]

    @cached_property
    def names(self) -> dict[Label, str]:
        """The arms as sentences call them."""
        return names_of(self.run.experiment.arms, self.run.arms)

    @property
    def by_url(self) -> tuple[Label, ...]:
        """The arms whose servers abserve did not start, so that they may have other clients."""
        return tuple(arm.label for arm in self.run.arms if not arm.launched)

    @property
    def item(self) -> str:
        """What an input is called: image, sequence, item."""
        return item_of(self.run.environment)

    @property
    def cores(self) -> int | None:
        """CPU cores of this machine, where the launched servers run."""
        cores = self.run.environment.host.get("cpu_count") if self.run.environment else None
        return cores if isinstance(cores, int) else None
