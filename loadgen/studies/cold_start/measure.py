"""The phase of cold starts: every repetition of all arms, of processes or of containers, each on disk at once.

Containers: the repetitions that are compared keep the compile caches; one more start of each arm, after them, finds
those emptied and is in the account alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.bench.arms import Arm
from loadgen.bench.preparation import READY_SECONDS, Inputs
from loadgen.bench.progress import Progress
from loadgen.experiment.forecast import Forecast
from loadgen.records.run import ArmRecord, Experiment, Label, shown
from loadgen.storage.store import RunStore
from loadgen.studies.cold_start.containers import measure_container_cold_start
from loadgen.studies.cold_start.processes import cold_start_order, measure_cold_start
from loadgen.studies.cold_start.records import Caches, ColdStart, ContainerColdStart
from loadgen.targets.compose import ComposeDeployment
from loadgen.targets.embedded import EmbeddedDeployment
from loadgen.transport.bodies import PreparedBody, choose_items, prepare_body
from loadgen.transport.endpoint import Signature
from loadgen.transport.transports import Body, prepare

WITHOUT_PROFILE = {"ABSERVE_PROFILE_AT_START": "0"}
"""A start that is timed does without the profiled inference that the GPU evidence needs."""
CONTAINER_BATCH_SIZES = (1, 8)
"""Asked of a container besides those of the experiment's cells."""


def repetitions_of(experiment: Experiment) -> int:
    """Rounds of starts that the experiment asks for."""
    return sum(cell.rounds for cell in experiment.cells if cell.scenario == "cold-start")


class ColdStartPhase:
    """Begins with all servers stopped and leaves them so."""

    def __init__(
        self,
        arms: Mapping[Label, Arm],
        experiment: Experiment,
        store: RunStore,
        progress: Progress,
        forecast: Forecast,
    ) -> None:
        self._arms = arms
        self._experiment = experiment
        self._store = store
        self._progress = progress
        self._forecast = forecast
        self._starts: list[ColdStart] = []
        self._container_starts: list[ContainerColdStart] = []

    def run(self, inputs: Inputs, signatures: Mapping[Label, Signature], records: Mapping[Label, ArmRecord]) -> None:
        """All starts. A failed one is in its record. Raises `StorageError`, and `DeploymentError` for a container that
        cannot be stopped."""
        repetitions = repetitions_of(self._experiment)
        order = [
            entry
            for entry in cold_start_order(tuple(self._arms), repetitions, self._experiment.seed)
            if self._arms[entry[1]].deployment.launched
        ]
        sizes = self._batch_sizes(records)
        first: dict[Label, Body] = {}
        bodies: dict[Label, dict[int, PreparedBody]] = {}
        for label, arm in self._arms.items():
            if isinstance(arm.deployment, ComposeDeployment):
                bodies[label] = self._bodies(arm, inputs, signatures[label], sizes)
            else:
                first[label] = prepare(arm.transport, inputs[arm.payload], signatures[label], [0])
        for number, (repetition, label) in enumerate(order, start=1):
            self._progress.now(f"start {number} of {len(order)}: {shown(label)}")
            arm = self._arms[label]
            if isinstance(arm.deployment, ComposeDeployment):
                record = as_cold_start(self._start_container(arm.deployment, arm, bodies[label], repetition, "cached"))
            else:
                record = _start_process(arm, first[label], repetition)
            self._starts.append(record)
            self._store.write_all(ColdStart, self._starts)
            self._forecast.start_took((record.first_answer_ns or 0) / 1e9 + 1.0)
            self._progress.cold_start_done(record)
            self._progress.plan(self._forecast.remaining_s())
        for label, arm in self._arms.items():
            if isinstance(arm.deployment, ComposeDeployment):
                self._progress.now(f"{shown(label)} once more, with its compile caches emptied")
                uncached = self._start_container(arm.deployment, arm, bodies[label], 0, "uncached")
                self._progress.cold_start_done(as_cold_start(uncached))

    def _start_container(
        self,
        deployment: ComposeDeployment,
        arm: Arm,
        bodies: Mapping[int, PreparedBody],
        repetition: int,
        caches: Caches,
    ) -> ContainerColdStart:
        record = measure_container_cold_start(
            deployment,
            arm.model,
            bodies,
            label=arm.request.label,
            repetition=repetition,
            timeout_s=READY_SECONDS,
            caches=caches,
        )
        deployment.stop()
        self._container_starts.append(record)
        self._store.write_all(ContainerColdStart, self._container_starts)
        return record

    def _batch_sizes(self, records: Mapping[Label, ArmRecord]) -> list[int]:
        """The same for all arms: what all of them take."""
        limits = [size for r in records.values() if isinstance(size := r.in_effect.get("max_batch_size"), int)]
        wanted = {*CONTAINER_BATCH_SIZES, *(cell.batch_size for cell in self._experiment.cells)}
        return sorted(size for size in wanted if size <= max(1, min(limits, default=1)))

    def _bodies(self, arm: Arm, inputs: Inputs, signature: Signature, sizes: list[int]) -> dict[int, PreparedBody]:
        samples = inputs[arm.payload]
        return {
            size: prepare_body(samples, signature, choose_items(samples.count, size, self._experiment.seed, count=1)[0])
            for size in sizes
        }


def _start_process(arm: Arm, first: Body, repetition: int) -> ColdStart:
    if isinstance(arm.deployment, EmbeddedDeployment):
        arm.deployment.environment |= WITHOUT_PROFILE
    record = measure_cold_start(arm, repetition, first, READY_SECONDS)
    arm.deployment.stop()
    return record


def as_cold_start(record: ContainerColdStart) -> ColdStart:
    """What the comparisons take from it."""
    return ColdStart(
        label=record.label,
        repetition=record.repetition,
        live_ns=record.live_ns,
        ready_ns=record.ready_ns,
        first_answer_ns=record.first_answer_ns,
        error=record.error,
        conditions=f"{record.conditions}, the other servers stopped",
    )
