"""Measures cold starts: from no process to the first answer, several times, the arms taking turns.

The page cache is warm: the files of all arms have been read before (by the export, by earlier repetitions). Ports are
fresh for every start, and the other arms are stopped. The compared starts find what earlier ones have kept, such as
choices and compiled code. Where there are several, one more start of each arm, after them, finds these caches empty and
is not compared; neither are those of an arm without its own settings, which the handicap check has.

The steps between a container's start and "ready" are the times at which the Docker engine received the server's log
lines, on this machine's clock. A step that the server does not log is missing, never 0. The container and its image are
kept, so its files are in the page cache. `cached` also keeps what torch and Triton have compiled (the volume `caches`);
`uncached` empties that volume first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from time import perf_counter_ns

import msgspec

from loadgen.client.bodies import choose_items, for_server, prepare_body
from loadgen.client.connection import Address, ConnectionRefused, PreparedRequest, failure_message
from loadgen.client.http import HttpConnection
from loadgen.client.outputs import AnswerError
from loadgen.experiment.schedule import arm_orders, has_load
from loadgen.launch.compose import ComposeDeployment, LogLine, wall_to_monotonic_ns
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.measure.arms import Arm
from loadgen.measure.context import RunContext
from loadgen.measure.preparation import READY_SECONDS, make_deployment
from loadgen.records.probes import Caches, ContainerStart, ServerStart, Variant
from loadgen.records.run import Label
from loadgen.records.store import RunStore

CONDITIONS = "page cache warm, fresh ports, the other servers stopped"
CONDITIONS_OF_FIRST = f"{CONDITIONS}, no choices and no compiled code kept"
WITHOUT_PROFILE = {"ABSERVE_PROFILE_AT_START": "0"}
"""A timed start skips the kernel probe, which only GPU verification needs."""
CACHES = {
    "choices": "ABSERVE_PLANS_FOLDER",
    "code of torch.compile": "TORCHINDUCTOR_CACHE_DIR",
    "Triton kernels": "TRITON_CACHE_DIR",
    "CUDA kernels": "CUDA_CACHE_PATH",
    "vLLM's caches": "VLLM_CACHE_ROOT",
}
"""What servers keep for their next start → the variable that says where."""
CONTAINER_BATCH_SIZES = (1, 8)
"""Batch sizes requested from a container besides those of the experiment's workloads."""
CACHE_CONDITIONS: Mapping[Caches, str] = {
    "cached": "container kept and started again, page cache warm, compile caches kept",
    "uncached": "container kept and started again, page cache warm, compile caches emptied",
}
_CACHE_FOLDER = "/caches"

MILESTONES: Sequence[tuple[str, re.Pattern[str]]] = (
    ("process", re.compile(r".")),
    ("door_open", re.compile(r"\blistening\b.*url=|Started HTTPService")),
    ("imported", re.compile(r"\bengine imported\b")),
    ("load_begins", re.compile(r"loading: \S+:\d+")),
    ("weights_loaded", re.compile(r"\bweights loaded\b")),
    ("engine_ready", re.compile(r"\bengine ready\b|\bready\b.*warm_up_s=|successfully loaded '")),
)
"""A step → the first log line, of either server, that ends it."""


def measure_cold_starts(context: RunContext, repetitions: int) -> None:
    """Measure and store all starts of the arms that abserve launches. Servers must be stopped before, and are stopped
    afterwards. A failed start is in its record. Raises `StorageError`, and `DeploymentError` for a container that
    cannot be stopped."""
    arms, progress = context.arms, context.progress
    launched = [label for label, arm in arms.items() if arm.deployment.launched]
    order = cold_start_order(tuple(arms), repetitions, context.experiment.seed)
    order = [(repetition, label) for repetition, label in order if label in launched]
    starts: list[ServerStart] = []
    container_starts: list[ContainerStart] = []
    served = {label: arms[label].deployment.title for label in launched}

    def start(label: Label, repetition: int, caches: Caches = "cached", plain: Arm | None = None) -> ServerStart:
        arm = arms[label]
        if not isinstance(arm.deployment, ComposeDeployment):
            ask = context.sent.first_request(label)
            if caches == "uncached":
                started = _start_without_caches(arm, ask, context.work / f"caches-{label}")
            else:
                started = _start_process(plain or arm, repetition, ask)
            title, error = (plain or arm).deployment.title, started.error
            if error is None and title != served[label]:
                error = f"this time it was {title}, and {served[label]} was compared"
            return msgspec.structs.replace(started, plain=plain is not None, error=error)
        container = _start_container(context, label, arm.deployment, repetition, caches)
        container_starts.append(container)
        context.store.write_all(ContainerStart, container_starts)
        return _as_server_start(context, container, arm.deployment)

    def store(measured: ServerStart) -> None:
        starts.append(measured)
        context.store.write_all(ServerStart, starts)
        progress.cold_start_done(measured)

    plain = {label: _without_settings(context, label) for label in launched}
    for place, (repetition, label) in enumerate(order, start=1):
        progress.now(f"start {place} of {len(order)}: {arms[label].name}")
        store(start(label, repetition))
        context.forecast.start_took((starts[-1].first_answer_ns or 0) / 1e9 + 1.0)
        progress.plan(context.forecast.remaining_s())
        if (without := plain[label]) is not None:
            progress.now(f"{arms[label].name} without its own settings")
            store(start(label, repetition, plain=without))
    for label in launched:
        if isinstance(arms[label].deployment, ComposeDeployment):
            progress.now(f"{arms[label].name} once more, with its compile caches emptied")
            progress.cold_start_done(start(label, 0, "uncached"))
        elif repetitions > 1:
            progress.now(f"{arms[label].name} once more, as at its first start: without choices and compiled code")
            store(start(label, 0, "uncached"))


def _without_settings(context: RunContext, label: Label) -> Arm | None:
    """The arm without the settings that only affect its speed; None if the handicap check does not ask for it."""
    arm, experiment = context.arms[label], context.experiment
    asked = experiment.handicap_check and has_load(experiment) and isinstance(arm.deployment, EmbeddedDeployment)
    if not asked or not arm.deployment.tuning.keys() - arm.request.tried:
        return None
    variant = Variant(payload=arm.payload, transport=arm.transport, settings={"tuning": "none"})
    request = variant.request(arm.request)
    experiment, work = variant.experiment(experiment, request), context.work / f"plain-{label}"
    deployment = make_deployment(request, experiment, RunStore(context.store.directory / "handicap"), work)
    return replace(arm, request=request, deployment=deployment)


def _start_without_caches(arm: Arm, ask: Callable[[Arm], int], folder: Path) -> ServerStart:
    """A start with empty folders for everything that servers keep for later ones, and which of these it filled."""
    assert isinstance(arm.deployment, EmbeddedDeployment)
    folders = {name: folder / variable.lower() for name, variable in CACHES.items()}
    before = arm.deployment.environment
    arm.deployment.environment = before | {CACHES[name]: str(place) for name, place in folders.items()}
    try:
        start = _start_process(arm, 0, ask)
    finally:
        arm.deployment.environment = before
    filled = tuple(name for name, place in folders.items() if place.is_dir() and any(place.iterdir()))
    return msgspec.structs.replace(start, caches="uncached", filled=filled, conditions=CONDITIONS_OF_FIRST)


def cold_start_order(labels: Sequence[Label], repetitions: int, seed: int) -> list[tuple[int, Label]]:
    """(repetition, arm) in order: rounds of starts, the order inside them balanced as for blocks."""
    orders = arm_orders(labels, repetitions, Random(seed))
    return [(repetition, label) for repetition, order in enumerate(orders) for label in order]


def _start_process(arm: Arm, repetition: int, ask: Callable[[Arm], int]) -> ServerStart:
    """Start, wait for live and ready, connect by the arm's transport, send one request, stop. `ask` sends it and
    returns when it was answered; its errors are those of `_first_answer`."""
    if isinstance(arm.deployment, EmbeddedDeployment):
        arm.deployment.environment |= WITHOUT_PROFILE
    moments: dict[str, int] = {}
    stages_s: dict[str, float] = {}
    error: str | None = None
    asked_ns = perf_counter_ns()
    try:
        arm.deployment.plan()
        moments["command_ns"] = perf_counter_ns() - asked_ns
        arm.deployment.start()
        started_ns, live_ns, ready_ns = arm.deployment.wait_ready(arm.model, READY_SECONDS)
        moments |= {"live_ns": live_ns - started_ns, "ready_ns": ready_ns - started_ns}
        moments["first_answer_ns"] = ask(arm) - started_ns
    except (AnswerError, DeploymentError, ConnectionRefused) as exc:
        error = str(exc)
    if isinstance(arm.deployment, EmbeddedDeployment):
        stages_s = arm.deployment.stages_s()
    arm.deployment.stop()
    return ServerStart(
        label=arm.request.label,
        repetition=repetition,
        live_ns=moments.get("live_ns"),
        ready_ns=moments.get("ready_ns"),
        first_answer_ns=moments.get("first_answer_ns"),
        error=error,
        conditions=CONDITIONS,
        command_ns=moments.get("command_ns"),
        stages_s=stages_s,
    )


def _start_container(
    context: RunContext, label: Label, deployment: ComposeDeployment, repetition: int, caches: Caches
) -> ContainerStart:
    """Start an arm's container, ask it for every batch size that all arms accept, stop it."""
    arm, experiment = context.arms[label], context.experiment
    samples, signature = context.inputs[arm.payload], context.signatures[label]
    limits = [size for record in context.records if isinstance(size := record.in_effect.get("max_batch_size"), int)]
    sizes = {*CONTAINER_BATCH_SIZES, *(workload.batch_size for workload in experiment.workloads)}
    bodies = {
        size: prepare_body(samples, signature, choose_items(samples, size, experiment.seed, count=1)[0])
        for size in sorted(sizes)
        if size <= max(1, min(limits, default=1))
    }
    start = measure_container_cold_start(
        deployment, arm.model, bodies, label=label, repetition=repetition, timeout_s=READY_SECONDS, caches=caches
    )
    deployment.stop()
    return start


def _as_server_start(context: RunContext, start: ContainerStart, deployment: ComposeDeployment) -> ServerStart:
    """The start as it is compared, with the arms that share the container."""
    beside = [
        arm.name
        for label, arm in context.arms.items()
        if label != start.label
        and isinstance(arm.deployment, ComposeDeployment)
        and arm.deployment.container.name == deployment.container.name
    ]
    return ServerStart(
        label=start.label,
        repetition=start.repetition,
        live_ns=start.live_ns,
        ready_ns=start.ready_ns,
        first_answer_ns=start.first_answer_ns,
        error=start.error,
        conditions=f"{start.conditions}, the other servers stopped"
        + (f", {' and '.join(beside)} loaded in the same container" if beside else ""),
    )


def measure_container_cold_start(
    deployment: ComposeDeployment,
    model: str,
    bodies: Mapping[int, PreparedRequest],
    *,
    label: Label,
    repetition: int,
    timeout_s: float,
    caches: Caches = "cached",
) -> ContainerStart:
    """Stop, start, wait, send one request per batch size in `bodies`, which must hold size 1. The server runs on. A
    failure is in the record, not raised. Raises `DeploymentError` when the container cannot even be stopped."""
    if caches == "uncached":
        _empty_caches(deployment)
    deployment.stop()
    record = ContainerStart(
        label=label,
        repetition=repetition,
        service=deployment.container.service,
        image=deployment.container.image,
        conditions=CACHE_CONDITIONS[caches],
        caches=caches,
    )
    moments: dict[str, object] = {}
    try:
        offset_ns = wall_to_monotonic_ns()
        deployment.start()
        started_ns, live_ns, ready_ns = deployment.wait_ready(model, timeout_s)
        moments |= {"live_ns": live_ns - started_ns, "ready_ns": ready_ns - started_ns}
        first_ns, answers = _first_answers(deployment.url, model, bodies, timeout_s)
        moments["first_answer_ns"] = first_ns - started_ns
        moments["batch_answers_ns"] = answers
        created = deployment.container.created_process_ns()
        moments["started_ns"] = None if created is None else created + offset_ns - started_ns
        moments["milestones_ns"] = milestones(deployment.log(), offset_ns - started_ns)
    except (DeploymentError, ConnectionRefused) as exc:
        moments["error"] = str(exc)
    return msgspec.structs.replace(record, **moments)


def milestones(log: Sequence[LogLine], shift_ns: int) -> dict[str, int]:
    """Step → ns since the start, for each step in the log; `shift_ns` converts its wall clock."""
    moments = {name: next((at_ns for at_ns, text in log if pattern.search(text)), None) for name, pattern in MILESTONES}
    return {name: at_ns + shift_ns for name, at_ns in moments.items() if at_ns is not None}


def _first_answers(
    url: str, model: str, bodies: Mapping[int, PreparedRequest], timeout_s: float
) -> tuple[int, dict[int, int]]:
    """When the first request was answered, and the latency of the first request of each batch size."""
    address = Address.parse(url)
    connection = HttpConnection(address, timeout_s=timeout_s)
    answers: dict[int, int] = {}
    first_ns = 0
    try:
        for size in sorted(bodies):
            exchange = connection.send(for_server(bodies[size], address, model))
            if exchange.status != 200:
                raise DeploymentError(f"the first request of batch {size}: {failure_message(exchange)}")
            first_ns = first_ns or exchange.end_ns
            answers[size] = exchange.end_ns - exchange.send_ns
    finally:
        connection.close()
    return first_ns, answers


def _empty_caches(deployment: ComposeDeployment) -> None:
    """Empty the caches, which works inside a running container only; without the volume there is nothing to empty."""
    if deployment.container.status() != "running":
        deployment.container.start()
    script = f"[ ! -d {_CACHE_FOLDER} ] || find {_CACHE_FOLDER} -mindepth 1 -delete"
    status, output = deployment.container.execute("sh", "-c", script)
    if status != 0:
        raise DeploymentError(f"the compile caches cannot be emptied: {output.strip()[:200]}")
