"""Cold start: how long a server takes from its process to its first answer, and a container step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.findings.cold_start import SCENARIO, ColdStartsFound, analyse
from loadgen.findings.registry import Probe
from loadgen.records.run import Experiment

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext


def measure(context: RunContext) -> None:
    """Start every arm that abserve launches, several times. Raises `StorageError`, `DeploymentError`."""
    from loadgen.measure.probes.cold_start_measurement import measure_cold_starts

    if any(arm.deployment.launched for arm in context.arms.values()):
        context.enter("cold starts")
        measure_cold_starts(context, repetitions_of(context.experiment))


def repetitions_of(experiment: Experiment) -> int:
    """Rounds of starts that the experiment requests."""
    return sum(workload.rounds for workload in experiment.workloads if workload.scenario == SCENARIO)


PROBE = Probe(
    wanted=lambda experiment: repetitions_of(experiment) > 0,
    measure=measure,
    after_servers=True,
    finding=ColdStartsFound,
    analyse=analyse,
    sections="loadgen.report.sections.cold_start",
)
