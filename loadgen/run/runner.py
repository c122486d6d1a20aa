"""Runs an experiment: brings the servers up, compares their answers, loads them, stores every record as it happens.

Order: inputs and export → for each restart (both servers up → parity → warm-up → phases under load → servers down) →
engines alone → cold starts. Parity comes before any load, so that a wrong server costs no time; cold starts come last,
when the page cache is warm for both. Under load both servers are up and one of them is asked. Which phases there are is
in `loadgen.run.phases`, what they work with in `loadgen.run.bench`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from loadgen.clients.endpoint import EndpointError, Signature
from loadgen.clients.inputs import InputError
from loadgen.clients.requests import AddressError
from loadgen.deployment.interface import DeploymentError
from loadgen.deployment.process import ProcessError
from loadgen.deployment.work_folder import work_folder
from loadgen.experiment.ceiling_plan import wants_ceilings
from loadgen.experiment.forecast import Forecast
from loadgen.experiment.schedule import load_cells, schedule
from loadgen.generator.process import GeneratorError, GeneratorProcess
from loadgen.invocation import ABSERVE
from loadgen.machine.calibration import own_calibration
from loadgen.machine.environment import read_environment, utc_now
from loadgen.machine.noise_floor import own_floors
from loadgen.records.run import ArmRecord, Experiment, Label, RunState
from loadgen.run.bench import Bench
from loadgen.run.ceiling_phase import measure_ceilings
from loadgen.run.cold_start_phase import ColdStartPhase, repetitions_of
from loadgen.run.gpu_recording import SAMPLER
from loadgen.run.gpu_stage import GpuStage
from loadgen.run.interruption import interruptible, uninterrupted
from loadgen.run.load_phase import LoadError
from loadgen.run.phases import phases_of
from loadgen.run.preparation import (
    Inputs,
    PreparationError,
    describe_inputs,
    export_artefacts,
    prepare_inputs,
    synthesise_inputs,
)
from loadgen.run.progress import Progress
from loadgen.run.server_pair import ParityFailedError, ServerPair
from loadgen.storage.run_lock import running
from loadgen.storage.store import RunStore, StorageError

RUN_ERRORS = (
    AddressError,
    DeploymentError,
    EndpointError,
    GeneratorError,
    InputError,
    LoadError,
    ParityFailedError,
    PreparationError,
    ProcessError,
    StorageError,
)
"""What ends a run as failed, with its message; anything else is a fault of ours and is raised."""


def run_experiment(
    experiment: Experiment,
    out_dir: Path,
    progress: Progress,
    *,
    abserve: Sequence[str] = ABSERVE,
    sampler: Sequence[str] = SAMPLER,
) -> RunState:
    """Run everything; returns how it ended. Nothing that it started is left behind, however it ends.

    `sampler` is the command of the GPU sampler; it gets `--gpu UUID`, where the servers tell theirs, and `--out FILE`.

    Raises `StorageError` only when not even the experiment can be stored.
    """
    store = RunStore(out_dir)
    store.experiment(experiment)
    run = _Run(experiment, store, progress, abserve, sampler)
    error: str | None = None
    ended: Literal["finished", "interrupted", "failed"] = "finished"
    with interruptible(), running(out_dir):
        try:
            try:
                run.phases()
            finally:
                with uninterrupted():
                    run.close()
        except KeyboardInterrupt:
            ended = "interrupted"
        except RUN_ERRORS as exc:
            ended, error = "failed", str(exc)
        except BaseException as exc:
            with suppress(StorageError):
                store.state(RunState(state="failed", phase=run.phase, error=repr(exc), finished_at=utc_now()))
            raise
        state = RunState(state=ended, phase=run.phase, error=error, finished_at=utc_now())
        with suppress(StorageError), uninterrupted():  # a full disk: "running" without a process says the rest
            store.state(state)
    return state


class _Run:
    """The order of one run and what is open in it."""

    def __init__(
        self,
        experiment: Experiment,
        store: RunStore,
        progress: Progress,
        abserve: Sequence[str],
        sampler: Sequence[str],
    ) -> None:
        self.phase = "starting"
        self._experiment = experiment
        self._store = store
        self._progress = progress
        self._phases = phases_of(experiment)
        self._forecast = Forecast(experiment, schedule(experiment.cells, experiment.seed, experiment.restarts))
        self._resources = ExitStack()
        self._abserve = tuple(abserve)
        self._sampler = tuple(sampler)
        self._generator: GeneratorProcess | None = None
        self._work: Path
        self._samples_folder: Path
        self._gpu: GpuStage

    def phases(self) -> None:
        """Everything in order."""
        experiment, store, progress = self._experiment, self._store, self._progress
        progress.plan(self._forecast.remaining_s())
        self._make_room()
        # first: a stack that is not up is said before anything is prepared
        servers = ServerPair(experiment, store, progress, self._work, self._abserve)
        self._resources.callback(servers.close)
        self.enter("preparing inputs")
        inputs = prepare_inputs(experiment, self._samples_folder, self._abserve)
        store.environment(read_environment({"status": "unknown"}, {} if inputs is None else describe_inputs(inputs)))
        if experiment.deployment == "embedded":
            self.enter("exporting the model")
            export_artefacts(experiment, store, progress.now, self._abserve)
        for restart in range(experiment.restarts):
            if restart:
                self.enter("stopping the servers")
                servers.stop()
            self.enter("starting the servers")
            records = servers.start()
            signatures = servers.signatures()
            if restart == 0:
                if inputs is None:
                    inputs = synthesise_inputs(experiment, self._samples_folder, signatures)
                environment = read_environment(_gpu(records), describe_inputs(inputs))
                store.environment(environment)
                store.noise_floors(own_floors(environment, experiment))
            assert inputs is not None
            self.enter("checking parity")
            servers.check_parity(inputs, signatures, records)
            if self._phases:
                self._load(servers, inputs, signatures, records, restart)
        if self._generator is not None:
            self._generator.stop()
        assert inputs is not None
        if experiment.deployment == "embedded" or repetitions_of(experiment):  # a stack that is not ours runs on
            self.enter("stopping the servers")
            servers.stop()
        if wants_ceilings(experiment):
            self.enter("measuring the engines alone")
            measure_ceilings(experiment, records, store, progress, self._work, self._abserve)
        self._measure_cold_starts(servers, inputs, signatures, records)
        self.phase = "finished"

    def enter(self, phase: str) -> None:
        """A phase begins: on disk and on the screen."""
        self.phase = phase
        self._store.state(RunState(state="running", phase=phase))
        self._progress.phase(phase)

    def _make_room(self) -> None:
        try:
            self._work = self._resources.enter_context(work_folder("run"))
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise PreparationError(
                f"no temporary folder can be made: {reason}; set TMPDIR to a folder that can be written"
            ) from exc
        self._samples_folder = self._work / "samples"
        self._gpu = GpuStage(self._experiment, self._store, self._work, self._progress, self._abserve, self._sampler)
        self._resources.callback(self._gpu.close)

    def close(self) -> None:
        """Stop all that runs; bounded."""
        self._resources.close()

    def _load(
        self,
        servers: ServerPair,
        inputs: Inputs,
        signatures: Mapping[Label, Signature],
        records: Sequence[ArmRecord],
        restart: int,
    ) -> None:
        """Warm-up and the phases under load, on servers that have just been started."""
        self.enter("warming up")
        first = self._generator is None
        if self._generator is None:
            self._generator = GeneratorProcess(self._store.log_path("generator"), processes=self._experiment.processes)
            self._resources.callback(self._generator.stop)
            calibration = own_calibration()
            if calibration is not None:
                self._store.calibration(calibration)
        bench = Bench(
            experiment=self._experiment,
            store=self._store,
            progress=self._progress,
            forecast=self._forecast,
            enter=self.enter,
            arms=servers.arms,
            records=records,
            signatures=signatures,
            inputs=inputs,
            samples_folder=self._samples_folder,
            generator=self._generator,
            gpu=self._gpu,
            work=self._work,
            abserve=self._abserve,
            restart=restart,
        )
        cells = load_cells(self._experiment.cells)
        if first and cells:
            bench.prepare_bodies([cell.batch_size for cell in cells])
        bench.warm_up(cells)
        self._gpu.start(servers.arms, records)
        for phase in self._phases:
            phase.run(bench)

    def _measure_cold_starts(
        self,
        servers: ServerPair,
        inputs: Inputs,
        signatures: Mapping[Label, Signature],
        records: Sequence[ArmRecord],
    ) -> None:
        launched = any(arm.deployment.launched for arm in servers.arms.values())
        if not repetitions_of(self._experiment) or not launched:
            return
        self.enter("cold starts")
        phase = ColdStartPhase(servers.arms, self._experiment, self._store, self._progress, self._forecast)
        phase.run(inputs, signatures, {record.label: record for record in records})


def _gpu(records: Sequence[ArmRecord]) -> dict[str, object]:
    """This machine's GPU as a server of ours reports it."""
    return next((r.gpu_info for r in records if r.launched and r.gpu_info is not None), {"status": "unknown"})
