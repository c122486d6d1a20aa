"""Cold starts: from no process to the first answer, several times, the arms taking turns, each start stored at once.

The page cache is warm: the files of all arms have been read before (by the export, by earlier repetitions). Ports are
fresh for every start, and the other arms are stopped. For containers the compared starts keep the compile caches; one
more start of each arm, after them, finds the caches emptied and is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from loadgen.bench.arms import Arm
from loadgen.bench.preparation import READY_SECONDS, Inputs
from loadgen.bench.progress import Progress
from loadgen.client.bodies import choose_items, prepare_body
from loadgen.client.connection import ConnectionRefused, failure_message
from loadgen.client.endpoint import Signature
from loadgen.client.transports import Body, prepare
from loadgen.experiment.forecast import Forecast
from loadgen.experiment.schedule import arm_orders
from loadgen.launch.compose import ComposeDeployment
from loadgen.launch.deployment import DeploymentError, StartTimes
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.probes.cold_start.containers import measure_container_cold_start
from loadgen.probes.cold_start.records import Caches, ColdStart, ContainerColdStart
from loadgen.records.run import ArmRecord, Experiment, Label, shown
from loadgen.storage.store import RunStore

CONDITIONS = "page cache warm, fresh ports, the other servers stopped"
WITHOUT_PROFILE = {"ABSERVE_PROFILE_AT_START": "0"}
"""A timed start skips the kernel probe, which only GPU verification needs."""
CONTAINER_BATCH_SIZES = (1, 8)
"""Batch sizes requested from a container besides those of the experiment's workloads."""


def repetitions_of(experiment: Experiment) -> int:
    """Rounds of starts that the experiment requests."""
    return sum(workload.rounds for workload in experiment.workloads if workload.scenario == "cold-start")


def cold_start_order(labels: Sequence[Label], repetitions: int, seed: int) -> list[tuple[int, Label]]:
    """(repetition, arm) in order: rounds of starts, the order inside them balanced as for blocks."""
    orders = arm_orders(labels, repetitions, Random(seed))
    return [(repetition, label) for repetition, order in enumerate(orders) for label in order]


def measure_cold_starts(
    experiment: Experiment,
    arms: Mapping[Label, Arm],
    records: Sequence[ArmRecord],
    inputs: Inputs,
    signatures: Mapping[Label, Signature],
    store: RunStore,
    progress: Progress,
    forecast: Forecast,
) -> None:
    """Measure all starts of the arms that abserve launches. Servers must be stopped before, and are stopped afterwards.

    A failed start is in its record. Raises `StorageError`, and `DeploymentError` for a container that cannot be
    stopped.
    """
    limits = [size for record in records if isinstance(size := record.in_effect.get("max_batch_size"), int)]
    wanted = {*CONTAINER_BATCH_SIZES, *(workload.batch_size for workload in experiment.workloads)}
    sizes = sorted(size for size in wanted if size <= max(1, min(limits, default=1)))  # all arms accept these
    starts: list[ColdStart] = []
    container_starts: list[ContainerColdStart] = []

    containers = {
        label: arm.deployment.container.name
        for label, arm in arms.items()
        if isinstance(arm.deployment, ComposeDeployment)
    }

    def start(label: Label, repetition: int, caches: Caches = "cached") -> ColdStart:
        arm, samples = arms[label], inputs[arms[label].payload]
        if not isinstance(arm.deployment, ComposeDeployment):
            return _start_process(arm, repetition, prepare(arm.transport, samples, signatures[label], [0]))
        bodies = {
            size: prepare_body(samples, signatures[label], choose_items(samples, size, experiment.seed, count=1)[0])
            for size in sizes
        }
        record = measure_container_cold_start(
            arm.deployment,
            arm.model,
            bodies,
            label=label,
            repetition=repetition,
            timeout_s=READY_SECONDS,
            caches=caches,
        )
        arm.deployment.stop()
        name = arm.deployment.container.name
        beside = [shown(other) for other, its in containers.items() if other != label and its == name]
        container_starts.append(record)
        store.write_all(ContainerColdStart, container_starts)
        return ColdStart(
            label=label,
            repetition=repetition,
            live_ns=record.live_ns,
            ready_ns=record.ready_ns,
            first_answer_ns=record.first_answer_ns,
            error=record.error,
            conditions=f"{record.conditions}, the other servers stopped"
            + (f", {' and '.join(beside)} loaded in the same container" if beside else ""),
        )

    launched = [label for label, arm in arms.items() if arm.deployment.launched]
    order = cold_start_order(tuple(arms), repetitions_of(experiment), experiment.seed)
    order = [(repetition, label) for repetition, label in order if label in launched]
    for number, (repetition, label) in enumerate(order, start=1):
        progress.now(f"start {number} of {len(order)}: {shown(label)}")
        starts.append(start(label, repetition))
        store.write_all(ColdStart, starts)
        forecast.start_took((starts[-1].first_answer_ns or 0) / 1e9 + 1.0)
        progress.cold_start_done(starts[-1])
        progress.plan(forecast.remaining_s())
    for label in launched:
        if isinstance(arms[label].deployment, ComposeDeployment):
            progress.now(f"{shown(label)} once more, with its compile caches emptied")
            progress.cold_start_done(start(label, 0, "uncached"))


def _start_process(arm: Arm, repetition: int, first: Body) -> ColdStart:
    """Start, wait for live and ready, connect by the arm's transport, send one request, stop."""
    if isinstance(arm.deployment, EmbeddedDeployment):
        arm.deployment.environment |= WITHOUT_PROFILE
    times: StartTimes | None = None
    error: str | None = None
    first_answer_ns: int | None = None
    try:
        arm.deployment.start()
        times = arm.deployment.wait_ready(arm.model, READY_SECONDS)
        target = arm.target
        request = target.sendable(first)
        connection = target.connection((request,), timeout_s=READY_SECONDS)
        try:
            exchange = connection.send(request)
            if exchange.good:
                first_answer_ns = exchange.end_ns - times.started_ns
            else:
                error = failure_message(exchange)
        finally:
            connection.close()
    except (DeploymentError, ConnectionRefused) as exc:
        error = str(exc)
    arm.deployment.stop()
    return ColdStart(
        label=arm.request.label,
        repetition=repetition,
        live_ns=None if times is None else times.live_ns - times.started_ns,
        ready_ns=None if times is None else times.ready_ns - times.started_ns,
        first_answer_ns=first_answer_ns,
        error=error,
        conditions=CONDITIONS,
    )
