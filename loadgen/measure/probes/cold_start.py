"""Cold start: how long a server takes from its process to its first answer, and a container step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.findings.registry import Probe
from loadgen.metrics.facts import Facts
from loadgen.metrics.registry import TIME_TO_FIRST_ANSWER, TIME_TO_READY
from loadgen.records.probes import ContainerStart, ServerStart
from loadgen.records.run import Experiment, Figure, Found
from loadgen.records.samples import NS_PER_S

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext

SCENARIO = "cold-start"


class ColdStartsFound(Found, frozen=True, kw_only=True):
    """Every start of a server."""

    STUDY = "cold_start"
    starts: tuple[ServerStart, ...] = ()
    containers: tuple[ContainerStart, ...] = ()
    """Every start of a container, step by step; empty except with `--deployment compose`."""

    def figures(self) -> list[Figure]:
        """The seconds of every start that succeeded; each repetition is a start of the servers."""
        return [
            Figure(metric.name, SCENARIO, start.label, start.repetition, start.repetition, elapsed_ns / NS_PER_S)
            for start in self.starts
            for metric, elapsed_ns in ((TIME_TO_READY, start.ready_ns), (TIME_TO_FIRST_ANSWER, start.first_answer_ns))
            if start.error is None and elapsed_ns
        ]


def measure(context: RunContext) -> None:
    """Start every arm that abserve launches, several times. Raises `StorageError`, `DeploymentError`."""
    from loadgen.measure.probes.cold_start_measurement import measure_cold_starts

    if any(arm.deployment.launched for arm in context.arms.values()):
        context.enter("cold starts")
        measure_cold_starts(context, repetitions_of(context.experiment))


def analyse(facts: Facts) -> ColdStartsFound:
    """The starts as they were stored; their ratios are comparisons like any other."""
    run = facts.run
    return ColdStartsFound(starts=run.records_of(ServerStart), containers=run.records_of(ContainerStart))


def repetitions_of(experiment: Experiment) -> int:
    """Rounds of starts that the experiment requests."""
    return sum(workload.rounds for workload in experiment.workloads if workload.scenario == SCENARIO)


PROBE = Probe(
    wanted=lambda experiment: repetitions_of(experiment) > 0,
    measure=measure,
    records=(ServerStart, ContainerStart),
    after_servers=True,
    finding=ColdStartsFound,
    analyse=analyse,
    sections="loadgen.report.sections.cold_start",
)
