"""Runs an experiment: starts the servers, compares their answers, loads them, stores every record at once.

Order: inputs and export → for each restart (all servers up → parity → warm-up → probes under load → servers down) →
probes of stopped servers: engines alone, cold starts. Parity comes before any load, so that a wrong server costs no
time; only a run by minutes shows a first figure of seconds before it, which counts for nothing. Cold starts come last,
when the page cache is warm for all. Under load all servers are up and one of them gets requests. At each restart all
servers are started, described and compared again. The probes are in `loadgen.measure.probes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Literal

import msgspec

from loadgen.base.child_process import ABSERVE
from loadgen.client.endpoint import EndpointError
from loadgen.experiment.plan import expects_gpu, padding_in_words
from loadgen.experiment.schedule import load_workloads, schedule
from loadgen.findings.registry import Probe, probes_of
from loadgen.launch.compose import ComposeDeployment, require_one_way
from loadgen.launch.deployment import RUNNING_READY_SECONDS, Deployment, DeploymentError, stop_all
from loadgen.launch.embedded import EmbeddedDeployment
from loadgen.launch.work_folder import work_folder
from loadgen.measure.arms import Arm
from loadgen.measure.context import OBSTACLES, RunContext, size_generator
from loadgen.measure.errors import RunError
from loadgen.measure.gpu_recording import SAMPLER
from loadgen.measure.interruption import interruptible, uninterrupted
from loadgen.measure.load_runner import ArmFaults
from loadgen.measure.machine import own_calibration, read_environment, utc_now
from loadgen.measure.noise_floor import own_floors
from loadgen.measure.preparation import (
    READY_SECONDS,
    Prepared,
    make_deployment,
    model_name,
)
from loadgen.measure.progress import RunProgress, Unfailing
from loadgen.measure.sent import SENT, unless_left_out
from loadgen.records.machine import NoiseFloor
from loadgen.records.names import names_of
from loadgen.records.run import ArmRecord, Experiment, Label, RunState, Workload, option_of, shown
from loadgen.records.store import RunStore, StorageError, running
from loadgen.stats.agreement import tolerance_of

SLOWEST_START = 3.0
"""A screening waits for a server at least so many times as long as those before it took to start."""
RUN_ERRORS = (*OBSTACLES, StorageError)
"""Exceptions that end a run as failed, with their message; any other is a bug and is raised."""


def run_experiment(
    experiment: Experiment,
    out_dir: Path,
    progress: RunProgress,
    *,
    abserve: Sequence[str] = ABSERVE,
    sampler: Sequence[str] = SAMPLER,
    prepared: Prepared | None = None,
) -> RunState:
    """Run everything; returns how it ended. No process that it started is left behind, however it ends.

    `sampler` is the command of the GPU sampler; it gets `--gpu UUID`, when the servers name their GPUs, and `--out
    FILE`. `prepared` is what earlier runs of the same model and inputs have made. Raises `StorageError` only when not
    even the experiment can be stored.
    """
    store = RunStore(out_dir)
    store.write(experiment)
    context = RunContext(experiment, store, Unfailing(progress), abserve, sampler)
    context.prepared = prepared
    error: str | None = None
    failed_arm: Label | None = None
    ended: Literal["finished", "interrupted", "failed"] = "finished"
    with interruptible(), running(out_dir):
        try:
            try:
                _run_phases(context)
            finally:
                with uninterrupted():
                    context.resources.close()
        except KeyboardInterrupt:
            ended = "interrupted"
        except RUN_ERRORS as exc:
            ended, error = "failed", store.without_secrets(str(exc))
            failed_arm = exc.arm if isinstance(exc, RunError) else None
        except BaseException as exc:
            with suppress(StorageError):
                store.write_last(RunState(state="failed", phase=context.phase, error=repr(exc), finished_at=utc_now()))
            raise
        state = RunState(state=ended, phase=context.phase, error=error, failed_arm=failed_arm, finished_at=utc_now())
        with suppress(StorageError), uninterrupted():  # else the state stays "running", without a process
            store.write_last(state)
    return state


def _run_phases(context: RunContext) -> None:
    """The whole run in its order."""
    measured = probes_of(context.experiment)
    under_load = [probe for probe in measured if not probe.after_servers]
    after_servers = [probe for probe in measured if probe.after_servers]
    context.progress.plan(context.forecast.remaining_s())
    _make_work_folder(context)
    _prepare(context)
    experiment = context.experiment
    for restart in range(experiment.restarts):
        if restart:
            _stop_servers(context)
        context.restart = restart
        context.enter("starting the servers" if starts_servers(experiment) else "connecting")
        if under_load and restart == 0:  # it imports while the servers start
            context.start_generator(max(1, experiment.processes))
        started = monotonic()
        start_servers(context)
        context.forecast.start_s = monotonic() - started
        if restart == 0:
            _describe(context)
            if under_load:
                _first_figure(context)
        context.enter("checking parity")
        tolerance = tolerance_of(record.in_effect.get("precision") for record in context.records)
        context.sent.compare_answers(tolerance)
        if under_load:
            _load(context, under_load)
    if under_load:
        context.generator.stop()
    if experiment.deployment == "embedded" or after_servers:  # a stack that was up stays up
        _stop_servers(context)
    for probe in after_servers:
        probe.measure(context)
    context.phase = "finished"


def _prepare(context: RunContext) -> None:
    """Make what is sent, as far as no server must be asked for it, and what the servers need."""
    store, progress = context.store, context.progress
    context.enter("preparing inputs")
    context.sent = SENT[context.experiment.kind](context)
    context.sent.prepare()
    experiment = context.experiment
    store.write(experiment)
    make_arms(context)
    about = context.sent.describe()
    store.write(read_environment({"status": "unknown"}, about))
    if rule := padding_in_words(experiment, int(about.get("length_max", 0))):
        progress.rule_decided(rule)
    context.sent.announce()


def _describe(context: RunContext) -> None:
    """Store the machine as the servers describe it, and what is sent to them."""
    experiment, store = context.experiment, context.store
    described = context.sent.describe()
    context.progress.inputs_ready(described)
    environment = read_environment(_gpu_info(context), described)
    store.write(environment)
    store.write_all(NoiseFloor, own_floors(environment, experiment))


def _make_work_folder(context: RunContext) -> None:
    try:
        context.work = context.resources.enter_context(work_folder("run"))
    except OSError as exc:
        raise RunError(
            f"cannot make a temporary folder: {exc.strerror or exc}; set TMPDIR to a folder that can be written"
        ) from exc
    context.samples_folder = context.work / "samples" if context.prepared is None else context.prepared.samples
    context.resources.callback(context.gpu.stop)


def starts_servers(experiment: Experiment) -> bool:
    """Whether any server is started for the run, unlike those at a URL."""
    return experiment.deployment == "compose" or any(arm.embedded for arm in experiment.arms)


def _stop_servers(context: RunContext) -> None:
    context.enter("stopping the servers" if starts_servers(context.experiment) else "done")
    deployments = [arm.deployment for arm in context.arms.values()]
    stop_all(deployment for deployment in deployments if not isinstance(deployment, ComposeDeployment))
    for deployment in deployments:  # arms in containers may be models of the same one
        if isinstance(deployment, ComposeDeployment):
            deployment.stop()


def _first_figure(context: RunContext) -> None:
    """Show how the arms compare at their smallest load, at once: what follows may take a minute before its first pair.
    A fault is left to the checks, which say more about it. A run by rounds, or a screening, shows nothing."""
    loads = load_workloads(context.experiment.workloads)
    if context.experiment.minutes is None or context.care.leaves_out or not loads:
        return

    def look() -> None:
        smallest = min(loads, key=lambda load: (load.batch_size, load.concurrency))
        context.prepare_bodies([smallest.batch_size])
        runner = context.load_runner(context.arms, watched=False)
        context.progress.first_figure(runner.first_figure(context.experiment, smallest))

    context.attempt(look)
    if not context.generator.alive:
        context.generator.stop()
        context.start_generator(max(1, context.experiment.processes))


def _load(context: RunContext, measured: Sequence[Probe]) -> None:
    """Warm-up and the probes under load, on servers that have just been started."""
    context.answers.begin()
    context.enter("warming up")
    first = context.restart == 0
    workloads = load_workloads(context.experiment.workloads)
    if first and not context.care.leaves_out:
        context.faults = ArmFaults(context.experiment.labels, workloads)
    batch_sizes = [workload.batch_size for workload in workloads] or [1]
    if first:
        context.prepare_bodies(batch_sizes)
    began = monotonic()
    until_s = context.load_deadline() if first and context.experiment.minutes is not None else None
    by_arm = _warm_up(context, workloads, until_s)
    context.forecast.request_s = by_arm
    took = {name: max(arms.values()) for name, arms in by_arm.items()}
    alone_s = min(
        (took[workload.name] / max(workload.batch_size, workload.concurrency) for workload in workloads), default=0.0
    )
    answers_s = len(context.experiment.arms) * context.answers.least * len(workloads) * alone_s
    context.forecast.checks_s = context.sent.checks_s(answers_s)
    if first:
        calibration = own_calibration()
        if calibration is not None:
            context.store.write(calibration)
        context.experiment = _sized(context, by_arm, monotonic() - began)
        context.experiment = msgspec.structs.replace(
            context.experiment,
            processes=context.experiment.processes or size_generator(context, calibration, batch_sizes),
        )
        context.store.write(context.experiment)
        context.forecast.blocks = list(schedule(context.experiment))
    context.gpu.start(context.arms, context.records)
    for probe in measured:
        probe.measure(context)


def _warm_up(
    context: RunContext, workloads: Sequence[Workload], until_s: float | None
) -> dict[str, dict[Label, float]]:
    """Seconds of a request by workload and arm. Raises `RunError`."""
    took: dict[str, dict[Label, float]] = {workload.name: {} for workload in workloads}
    for label, arm in tuple(context.arms.items()):
        runner = context.load_runner({label: arm})
        runner.faults = context.faults
        warm_up = partial(runner.warm_up, workloads, until_s, each=context.care.warm_up_requests)
        for name, of_arm in (unless_left_out(context, label, warm_up) or {}).items():
            took[name] |= of_arm
    return took


def _sized(context: RunContext, by_arm: Mapping[str, Mapping[Label, float]], warm_up_s: float) -> Experiment:
    """The experiment with blocks as long as its arms need, by the seconds that each takes for a request."""
    experiment = context.experiment
    took = {name: max(arms.values()) for name, arms in by_arm.items()}
    if (times := context.care.times_baseline) is not None:  # a slow arm need not be known well
        first = experiment.baseline.label
        took = {name: min(slowest, times * by_arm[name][first]) for name, slowest in took.items()}
    return _with_rounds_that_pay(context, context.sent.sized(took, by_arm, warm_up_s))


def _with_rounds_that_pay(context: RunContext, experiment: Experiment) -> Experiment:
    """A screening of one load that takes half as long as what came before it, if two rounds allow that: of long blocks,
    more contenders tell more than more rounds. On a GPU its proof needs them all, and so does a choice for each of
    several loads."""
    least = context.care.least_rounds
    if least is None or len(experiment.workloads) > 1 or expects_gpu(*experiment.arms):
        return experiment
    before_s = monotonic() - context.began_s
    workloads = tuple(
        msgspec.structs.replace(
            workload, rounds=max(least, min(workload.rounds, int(before_s / 2.0 / context.forecast.round_s(workload))))
        )
        for workload in experiment.workloads
    )
    return msgspec.structs.replace(experiment, workloads=workloads)


def _gpu_info(context: RunContext) -> dict[str, object]:
    """This machine's GPU as a launched server reports it."""
    documents = (record.gpu_info for record in context.records if record.launched and record.gpu_info is not None)
    return next(documents, {"status": "unknown"})


def make_arms(context: RunContext) -> None:
    """Find the servers without starting any; the end of the run stops launched servers and restores a stack.
    Raises `AddressError`, and `DeploymentError` for a stack that is not up."""
    experiment = context.experiment
    names = names_of(experiment.arms, ())
    started: list[Deployment] = []
    context.resources.callback(stop_all, started)
    for request in experiment.arms:
        deployment = make_deployment(request, experiment, context.store, context.work, context.abserve)
        model, payload = experiment.model_of(request) or experiment.model, experiment.payload_of(request)
        context.arms[request.label] = Arm(
            request,
            deployment,
            model,
            experiment.transport_of(request),
            payload,
            request_timeout_s=experiment.request_timeout_s,
            called=names[request.label],
        )
        if isinstance(deployment, ComposeDeployment):
            context.resources.callback(deployment.restore)
        else:
            started.append(deployment)


def start_servers(context: RunContext) -> None:
    """Start all at once on fresh ports, in the reverse order each time; describe and store them. Raises
    `DeploymentError`, `EndpointError`, `RunError`."""
    order = list(context.arms.items())
    if context.restart % 2:
        order.reverse()
    with ThreadPoolExecutor(len(order)) as pool:
        planning = [(label, arm, pool.submit(arm.deployment.plan)) for label, arm in order]
    for label, arm, planned in planning:
        context.progress.now(f"{shown(label)}: {arm.request.target}")
        unless_left_out(context, label, planned.result)
        if label in context.arms:
            unless_left_out(context, label, arm.deployment.start)
    require_one_way([arm.deployment for arm in context.arms.values()])
    ready_s, began, records = READY_SECONDS, monotonic(), []
    for label in tuple(context.arms):
        record = unless_left_out(context, label, partial(_await, context, label, ready_s))
        if record is not None:
            records.append(record)
        if context.care.ready_s is not None:
            ready_s = max(context.care.ready_s, SLOWEST_START * (monotonic() - began))
    context.records = records
    names = names_of(context.experiment.arms, records)
    context.arms = {label: replace(arm, called=names[label]) for label, arm in context.arms.items()}
    context.store.write_all(ArmRecord, context.records)
    _require_batch_sizes(context)
    context.sent.connect()


def _await(context: RunContext, label: Label, ready_s: float) -> ArmRecord:
    arm = context.arms[label]
    context.progress.now(f"waiting until {arm.name} is ready")
    try:
        if isinstance(arm.deployment, ComposeDeployment):
            model = arm.deployment.await_model(arm.model, READY_SECONDS)
        else:
            deployments = {other: started.deployment for other, started in context.arms.items()}
            model = model_name(arm.request, context.experiment, deployments)
        context.arms[label] = arm = replace(arm, model=model)
        arm.deployment.wait_ready(arm.model, ready_s if arm.deployment.launched else RUNNING_READY_SECONDS)
        record = arm.record()
    except (DeploymentError, EndpointError) as exc:
        raise DeploymentError(f"{arm.name}: {exc}") from exc
    context.progress.arm_ready(record)
    return record


def _require_batch_sizes(context: RunContext) -> None:
    """Raises `DeploymentError` when a server would refuse a batch size of the load."""
    largest = context.experiment.largest_batch
    limits = {record.label: (record, record.in_effect.get("max_batch_size")) for record in context.records}
    small = {label: (record, n) for label, (record, n) in limits.items() if isinstance(n, int) and 0 < n < largest}
    if not small:
        return
    taken = " and ".join(f"{context.arms[label].name} accepts at most {n}" for label, (_, n) in small.items())
    options = " ".join(
        f"{option_of(label, 'option')} max-batch-size={largest}"
        if isinstance(context.arms[label].deployment, EmbeddedDeployment)
        else f"a larger max_batch_size on the server of {context.arms[label].name}"
        for label in small
    )
    raise DeploymentError(
        f"the load has batches of {largest}, but {taken}; give {options}, or leave that size out of --batch-sizes"
    )
