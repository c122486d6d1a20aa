"""The run context: what the phases of a run and its probes share, from the warm servers to the load generator.

When `--processes` is 0, a pilot chooses how many processes the load generator has, before anything is measured. It
loads every arm for half a second per load shape. One process sends at most its ceiling: that of this machine's
calibration, or what its own CPU time per request allows. There are enough processes when the fastest arm takes at most
`USED_SHARE` of their ceilings together. A pilot with too few processes hides how fast an arm is, so it is run again
with more. At most half the cores get one, since the servers need the others, and at most one per user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

from loadgen.base.child_process import ProcessError, usable_cores
from loadgen.client.connection import AddressError
from loadgen.client.endpoint import EndpointError, Signature
from loadgen.client.generator import GeneratorProcess
from loadgen.client.inputs import InputError
from loadgen.client.messages import BlockOutcome, GeneratorError
from loadgen.experiment.plan import Care, care_of
from loadgen.experiment.schedule import ScheduledBlock, closed_loop, interleave, request_shape, schedule
from loadgen.launch.deployment import DeploymentError
from loadgen.measure.answers import AnswersUnderLoad
from loadgen.measure.arms import Arm
from loadgen.measure.errors import RunError
from loadgen.measure.gpu_recording import GpuRecording
from loadgen.measure.load_runner import ArmFaults, LoadRunner
from loadgen.measure.preparation import READY_SECONDS, Inputs, Prepared, make_deployment
from loadgen.measure.progress import Forecast, RunProgress
from loadgen.records.machine import CEILING_SHARE_LIMIT, Calibration, ceiling_images_per_s
from loadgen.records.probes import Variant
from loadgen.records.run import ArmRecord, Experiment, Label, RunState, Workload
from loadgen.records.store import RunStore, StoredBlock

OBSTACLES = (
    AddressError, DeploymentError, EndpointError, GeneratorError, InputError, ProcessError, RunError,
)  # fmt: skip
"""Errors that cost one step of a probe; a full disk ends the run, as everywhere."""
GPU_CONTROL_SECONDS = 45.0
"""Time of the GPU verification's control run with the start of its server and the idle gaps, for planning."""


class RunContext:
    """The context of one run. Most probes get it when all servers are up and warm and give the same answers."""

    work: Path
    """A temporary folder of the run."""
    samples_folder: Path
    records: Sequence[ArmRecord]
    """The records of the running arms, as are the `signatures`. A language model has no signatures and no inputs."""
    signatures: Mapping[Label, Signature]
    inputs: Inputs
    sent: Any
    """What it sends, a `SentTensors` of `loadgen.measure.sent`, which is above this module."""
    generator: GeneratorProcess
    answers: AnswersUnderLoad

    def __init__(
        self,
        experiment: Experiment,
        store: RunStore,
        progress: RunProgress,
        abserve: Sequence[str],
        sampler: Sequence[str],
    ) -> None:
        """`abserve` is the command that starts servers, `sampler` the one that starts the GPU sampler."""
        self.experiment = experiment
        self.store = store
        self.progress = progress
        self.abserve = tuple(abserve)
        self.forecast = Forecast(experiment, schedule(experiment))
        self.gpu = GpuRecording(store, abserve, sampler)
        self.arms: dict[Label, Arm] = {}
        self.records, self.signatures, self.inputs = (), {}, {}
        self.restart = 0
        """The number of this start of the servers, from 0."""
        self.faults: ArmFaults | None = None
        """What faults of single arms have cost the load; None in a screening, which leaves out arms as a whole."""
        self.done: list[StoredBlock] = []
        """The run's blocks so far, also of earlier restarts, when their number is not fixed."""
        self.prepared: Prepared | None = None
        """What earlier runs of the same model and inputs have made; None: the run makes all of it."""
        self.phase = "starting"
        self.began_s = monotonic()
        self.resources = ExitStack()
        """Closed at the end of the run."""

    def enter(self, phase: str) -> None:
        """Begin a phase, in the stored state and on the screen."""
        self.phase = phase
        self.store.write(RunState(state="running", phase=phase))
        self.progress.phase(phase)

    @property
    def care(self) -> Care:
        """How much the run does beside its load."""
        return care_of(self.experiment)

    @property
    def last(self) -> bool:
        return self.restart + 1 == self.experiment.restarts

    def load_deadline(self) -> float:
        """When this restart's load must end, by `time.monotonic`. The rest of the run's minutes, without the time of
        what follows the load, is shared equally among this restart and those to come."""
        if self.experiment.minutes is None:
            return monotonic() + 60.0 * (self.experiment.time_limit_minutes or 0.0)
        after = self.forecast.after_load_s() + (GPU_CONTROL_SECONDS if self.gpu.running else 0.0)
        left = self.began_s + 60.0 * self.experiment.minutes - after - monotonic()
        return monotonic() + max(0.0, left) / (self.experiment.restarts - self.restart)

    def load_runner(
        self,
        arms: Mapping[Label, Arm] | None = None,
        store: RunStore | None = None,
        *,
        watched: bool = True,
        quiet: bool = False,
    ) -> LoadRunner:
        """A runner for these arms and this store, by default the run's; only the run's arms have answers kept.
        `watched`: record the GPU; `quiet`: report no steps."""
        return LoadRunner(
            self.arms if arms is None else arms,
            self.generator,
            self.store if store is None else store,
            RunProgress() if quiet else self.progress,
            self.gpu if watched and self.gpu.running else None,
            self.experiment.seed,
            self.answers if arms is None else None,
            self.faults if arms is None else None,
        )

    def start_generator(self, processes: int) -> None:
        """Start the load generator; the caller has stopped an earlier one."""
        self.generator = GeneratorProcess(self.store.log_path("generator"), processes=processes)
        self.resources.callback(self.generator.stop)

    def prepare_bodies(self, batch_sizes: Sequence[int]) -> None:
        """Replace the generator's bodies with bodies of these batch sizes, or with the prompts of a language model.
        Raises `GeneratorError`."""
        self.progress.now("preparing request bodies")
        for arm in {arm.body_key: arm for arm in self.arms.values()}.values():
            self.sent.prepare_bodies(arm, batch_sizes)

    @contextmanager
    def varied(self, label: Label, variant: Variant, store: RunStore, name: str) -> Iterator[Arm]:
        """One of the run's arms, changed: on its running server if nothing but the protocol or the payload differs and
        the server takes that, else on a second one beside it, which is stopped at the end and whose log `store` gets.
        Raises `AddressError`, `DeploymentError`, `ProcessError`."""
        running, experiment = self.arms[label], self.experiment
        same_server = variant.target is None and not variant.settings
        if same_server and (variant.payload, variant.transport) == (running.payload, running.transport):
            yield running
            return
        request = variant.request(running.request)
        varied = variant.experiment(experiment, request)
        arm = replace(
            running,
            request=request,
            model=running.model if variant.payload == running.payload else varied.model_of(request) or running.model,
            transport=variant.transport,
            payload=variant.payload,
        )
        speaks_all = same_server and self.sent.speaks_all
        if not request.embedded or experiment.deployment == "compose" or speaks_all:
            arm.deployment.wait_ready(arm.model, 5.0)
            yield arm
            return
        deployment = make_deployment(request, varied, store, self.work / store.directory.name / name, self.abserve)
        try:
            deployment.start()
            started = replace(arm, deployment=deployment, model=deployment.model or arm.model)
            deployment.wait_ready(started.model, READY_SECONDS)
            yield started
        finally:
            deployment.stop()

    def beside(
        self, arms: Mapping[Label, Arm], store: RunStore, loads: Sequence[Workload], number: int
    ) -> tuple[LoadRunner, tuple[ScheduledBlock, ...]]:
        """A runner of two variants of an arm that stores in a folder of their own, warm, and the blocks of their
        interleaved rounds; `number` makes the order of these differ. Raises `RunError`."""
        runner = self.load_runner(arms, store, watched=False, quiet=True)
        runner.warm_up(loads)
        return runner, interleave(loads, tuple(arms), self.experiment.seed + number)

    def attempt(self, step: Callable[[], object], *also: type[Exception]) -> str | None:
        """Run a step of a probe whose failure costs only that step; returns why it failed, or None. `also`: errors of
        this step besides `OBSTACLES`. Raises `StorageError`."""
        expected: tuple[type[Exception], ...] = (*OBSTACLES, *also)
        try:
            step()
        except expected as exc:
            return str(exc)
        return None


USED_SHARE = 0.8 * CEILING_SHARE_LIMIT
"""So that the check of the ceiling passes also for an arm that is a little faster than in the pilot."""
PILOT_SECONDS = 0.5
_MOST_USERS = 64
_MOST_PROCESSES = 64


def size_generator(context: RunContext, calibration: Calibration | None, batch_sizes: Sequence[int]) -> int:
    """Restart the generator with as many processes as the load needs, and return their number. Raises `RunError`,
    `GeneratorError`."""
    loads = pilot_loads(context.experiment.workloads)
    limit = most_processes(loads)
    processes = 1
    while processes < limit:
        needed = min(limit, math.ceil(processes * _used(context, loads, calibration, processes) / USED_SHARE))
        if needed <= processes:
            break
        processes = needed
        context.generator.stop()
        context.start_generator(processes)
        context.prepare_bodies(batch_sizes)
    return processes


def most_processes(loads: Sequence[Workload], cores: int | None = None) -> int:
    """The limit on this machine, which has one process up to three cores."""
    cores = usable_cores() if cores is None else cores
    return max(1, min(cores // 2, _MOST_PROCESSES, max((load.concurrency for load in loads), default=1)))


def pilot_loads(workloads: Sequence[Workload]) -> list[Workload]:
    """A closed loop in the shape of each load, with the rate of an open loop as `rate_per_s`."""
    shapes = {
        (request_shape(load), min(load.concurrency, _MOST_USERS), load.rate_per_s): load
        for load in workloads
        if load.scenario != "cold-start"
    }
    return [
        closed_loop(users, 1, seconds=PILOT_SECONDS, max_seconds=30.0, rate_per_s=rate, of=load)
        for (_, users, rate), load in shapes.items()
    ]


def _used(context: RunContext, loads: Sequence[Workload], calibration: Calibration | None, processes: int) -> float:
    """The largest share of the processes' ceilings that an arm took."""
    runner, most = context.load_runner(watched=False), 0.0
    for (label, arm), load in product(context.arms.items(), loads):
        context.progress.now(f"{arm.name}: how fast it is, to choose the load generator's processes")
        try:
            outcome = runner.unstored(f"pilot of {arm.name}", label, load)
        except RunError:
            if runner.faults is None or not runner.generator.alive:
                raise
            continue  # the arm's blocks of this load will say why
        share = used_share(outcome, load, context.experiment, calibration, payload=arm.payload, of=processes)
        most = max(most, share)
    return most


def used_share(
    outcome: BlockOutcome,
    load: Workload,
    experiment: Experiment,
    calibration: Calibration | None,
    *,
    payload: str,
    of: int,
) -> float:
    """The share of the ceilings of `of` processes that this load takes; 0 for a load that more processes could not
    share, because it has no more users than there are processes."""
    rate = outcome.requests_per_s
    if rate is None or outcome.cpu_ns == 0 or load.concurrency <= of:
        return 0.0
    if load.rate_per_s is not None:
        rate = min(rate, load.rate_per_s)
    ceiling = (outcome.requests + outcome.cool_down) / (outcome.cpu_ns / 1e9)
    if calibration is not None:
        calibrated = ceiling_images_per_s(calibration, experiment.transport, payload, load.batch_size)
        ceiling = ceiling if calibrated is None else calibrated / load.batch_size
    return rate / (of * ceiling)
