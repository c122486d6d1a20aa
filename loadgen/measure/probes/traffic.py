"""Traffic: describes the recorded traffic that a run replays, whose folder may change after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.findings.registry import Probe
from loadgen.findings.traffic import COMPANY, TrafficFound, analyse, describe
from loadgen.measure.arms import replay_of
from loadgen.measure.errors import RunError
from loadgen.records.run import Experiment
from loadgen.records.traffic import TrafficError

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext


def wanted(experiment: Experiment) -> bool:
    """Whether recorded traffic is replayed."""
    return any(workload.traffic is not None for workload in experiment.workloads)


def measure(context: RunContext) -> None:
    """Describe the traffic, once. Raises `RunError`, `StorageError`."""
    arm = next(iter(context.arms.values()))
    replay = next(filter(None, (replay_of(load, arm.transport) for load in context.experiment.workloads)))
    if context.restart == 0:
        try:
            context.store.write(describe(replay, COMPANY[context.experiment.kind].near_s))
        except TrafficError as exc:
            raise RunError(str(exc)) from exc


PROBE = Probe(
    wanted=wanted,
    measure=measure,
    finding=TrafficFound,
    analyse=analyse,
    sections="loadgen.report.sections.traffic",
)
