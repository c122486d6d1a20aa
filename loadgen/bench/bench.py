"""The run context, which the phases of a run and its studies share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

from loadgen.bench.answers import AnswersUnderLoad
from loadgen.bench.arms import Arm
from loadgen.bench.gpu_recording import GpuStage
from loadgen.bench.load_runner import LoadRunner
from loadgen.bench.preparation import READY_SECONDS, Inputs, make_deployment
from loadgen.bench.progress import Progress
from loadgen.client.endpoint import Signature
from loadgen.client.generator import GeneratorProcess
from loadgen.experiment.forecast import Forecast
from loadgen.experiment.schedule import schedule
from loadgen.records.run import ArmRecord, Experiment, Label, RunState, Workload
from loadgen.storage.store import RunStore
from loadgen.storage.stored_run import StoredBlock

GPU_CONTROL_SECONDS = 45.0
"""Time of the GPU verification's control run with the start of its server and the idle gaps, for planning."""


class Bench:
    """The context of one run. A study gets it when all servers are up and warm and give the same answers."""

    work: Path
    """A temporary folder of the run."""
    samples_folder: Path
    records: Sequence[ArmRecord]
    """The records of the running arms, as are the `signatures`."""
    signatures: Mapping[Label, Signature]
    inputs: Inputs
    generator: GeneratorProcess
    answers: AnswersUnderLoad

    def __init__(
        self,
        experiment: Experiment,
        store: RunStore,
        progress: Progress,
        abserve: Sequence[str],
        sampler: Sequence[str],
    ) -> None:
        """`abserve` is the command that starts servers, `sampler` the one that starts the GPU sampler."""
        self.experiment = experiment
        self.store = store
        self.progress = progress
        self.abserve = tuple(abserve)
        self.forecast = Forecast(experiment, schedule(experiment))
        self.gpu = GpuStage(store, abserve, sampler)
        self.arms: dict[Label, Arm] = {}
        self.restart = 0
        """The number of this start of the servers, from 0."""
        self.done: list[StoredBlock] = []
        """The run's blocks so far, also of earlier restarts, when their number is not fixed."""
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
    def last(self) -> bool:
        return self.restart + 1 == self.experiment.restarts

    def load_deadline(self) -> float:
        """When this restart's load must end, by `time.monotonic`. The rest of the run's minutes, without the time of
        what follows the load, is shared equally among this restart and those to come."""
        if self.experiment.minutes is None:
            return monotonic() + 60.0 * (self.experiment.time_limit_minutes or 0.0)
        after = self.forecast.after_load_s() + (GPU_CONTROL_SECONDS if self.gpu.recording is not None else 0.0)
        left = self.began_s + 60.0 * self.experiment.minutes - after - monotonic()
        return monotonic() + max(0.0, left) / (self.experiment.restarts - self.restart)

    def load_runner(
        self, arms: Mapping[Label, Arm] | None = None, store: RunStore | None = None, *, watched: bool = True
    ) -> LoadRunner:
        """A runner for these arms and this store, by default the run's; only the run's arms have answers kept.
        `watched`: record the GPU."""
        return LoadRunner(
            self.arms if arms is None else arms,
            self.generator,
            self.store if store is None else store,
            self.progress,
            self.gpu.recording if watched else None,
            self.experiment.seed,
            self.answers if arms is None else None,
        )

    def start_generator(self, processes: int) -> None:
        """Start the load generator; the caller has stopped an earlier one."""
        self.generator = GeneratorProcess(self.store.log_path("generator"), processes=processes)
        self.resources.callback(self.generator.stop)

    def prepare_bodies(self, batch_sizes: Sequence[int]) -> None:
        """Replace the generator's bodies with bodies of these batch sizes. Raises `GeneratorError`."""
        self.progress.now("preparing request bodies")
        for label in {arm.body_key: label for label, arm in self.arms.items()}.values():
            arm, signature = self.arms[label], self.signatures[label]
            self.generator.prepare(arm.bodies(self.samples_folder, signature, batch_sizes, self.experiment))

    @contextmanager
    def second_server(self, arm: Arm, experiment: Experiment, store: RunStore, work: Path) -> Iterator[Arm]:
        """Start a server for the arm's request beside the run's own servers, and stop it at the end. `store` gets its
        log, `work` is its folder. Raises `AddressError`, `DeploymentError`, `ProcessError`."""
        deployment = make_deployment(arm.request, experiment, store, work, self.abserve)
        try:
            deployment.start()
            started = replace(arm, deployment=deployment, model=deployment.model or arm.model)
            deployment.wait_ready(started.model, READY_SECONDS)
            yield started
        finally:
            deployment.stop()

    def warm_up(self, workloads: Sequence[Workload]) -> dict[str, float]:
        """Run every load shape of these workloads on every arm. Returns by name how many seconds a request takes on the
        slowest arm. Raises `LoadError`."""
        return self.load_runner().warm_up(workloads)
