"""Runs an experiment: brings the servers up, compares their answers, loads them, stores every record as it happens.

Order: inputs and export → for each restart (all servers up → parity → warm-up → phases under load → servers down) →
engines alone → cold starts. Parity comes before any load, so that a wrong server costs no time; cold starts come last,
when the page cache is warm for all. Under load all servers are up and one of them is asked. What is measured under
load is in `loadgen.studies`, what that works with in `loadgen.bench`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Literal

import msgspec

from loadgen.bench.answers import LEAST_ANSWERS, AnswersUnderLoad
from loadgen.bench.bench import Bench
from loadgen.bench.gpu_recording import SAMPLER
from loadgen.bench.gpu_stage import GpuStage
from loadgen.bench.interruption import interruptible, uninterrupted
from loadgen.bench.load_runner import LoadError
from loadgen.bench.preparation import (
    Inputs,
    PreparationError,
    describe_inputs,
    export_artefacts,
    prepare_inputs,
    synthesise_inputs,
)
from loadgen.bench.progress import Progress
from loadgen.experiment.forecast import Forecast
from loadgen.experiment.plan import sized
from loadgen.experiment.schedule import load_cells, schedule
from loadgen.generator.process import GeneratorError, GeneratorProcess
from loadgen.invocation import ABSERVE
from loadgen.machine.calibration import own_calibration
from loadgen.machine.environment import read_environment, utc_now
from loadgen.machine.noise_floor import own_floors
from loadgen.records.machine import NoiseFloor
from loadgen.records.run import ArmRecord, Experiment, Label, RunState
from loadgen.run.servers import ArmServers, ParityFailedError
from loadgen.statistics.agreement import tolerance_of
from loadgen.storage.run_lock import running
from loadgen.storage.store import RunStore, StorageError
from loadgen.storage.stored_run import StoredBlock
from loadgen.studies.ceiling.measure import measure_ceilings
from loadgen.studies.ceiling.plan import wants_ceilings
from loadgen.studies.cold_start.measure import measure_cold_starts, repetitions_of
from loadgen.studies.gpu_proof.measure import WHOLE_SECONDS
from loadgen.studies.registry import measurements
from loadgen.targets.interface import DeploymentError
from loadgen.targets.process import ProcessError
from loadgen.targets.work_folder import work_folder
from loadgen.transport.endpoint import EndpointError, Signature
from loadgen.transport.inputs import InputError
from loadgen.transport.requests import AddressError

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
    store.write(experiment)
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
                store.write(RunState(state="failed", phase=run.phase, error=repr(exc), finished_at=utc_now()))
            raise
        state = RunState(state=ended, phase=run.phase, error=error, finished_at=utc_now())
        with suppress(StorageError), uninterrupted():  # a full disk: "running" without a process says the rest
            store.write(state)
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
        self._measurements = measurements(experiment)
        self._forecast = Forecast(experiment, schedule(experiment))
        self._began = monotonic()
        self._done: list[StoredBlock] = []
        self._resources = ExitStack()
        self._abserve = tuple(abserve)
        self._sampler = tuple(sampler)
        self._generator: GeneratorProcess | None = None
        self._answers: AnswersUnderLoad | None = None
        self._work: Path
        self._samples_folder: Path
        self._gpu: GpuStage

    def phases(self) -> None:
        """Everything in order."""
        experiment, store, progress = self._experiment, self._store, self._progress
        progress.plan(self._forecast.remaining_s())
        self._make_room()
        # first: a stack that is not up is said before anything is prepared
        servers = ArmServers(experiment, store, progress, self._work, self._abserve)
        self._resources.callback(servers.close)
        self.enter("preparing inputs")
        inputs = prepare_inputs(experiment, self._samples_folder, self._abserve)
        store.write(read_environment({"status": "unknown"}, {} if inputs is None else describe_inputs(inputs)))
        if experiment.deployment == "embedded":
            self.enter("exporting the model")
            export_artefacts(experiment, store, progress.now, self._abserve)
        for restart in range(experiment.restarts):
            if restart:
                self.enter("stopping the servers")
                servers.stop()
            self.enter("starting the servers")
            started = monotonic()
            records = servers.start()
            self._forecast.start_takes(monotonic() - started)
            signatures = servers.signatures()
            if restart == 0:
                if inputs is None:
                    inputs = synthesise_inputs(experiment, self._samples_folder, signatures)
                environment = read_environment(_gpu(records), describe_inputs(inputs))
                store.write(environment)
                store.write_all(NoiseFloor, own_floors(environment, experiment))
            assert inputs is not None
            self.enter("checking parity")
            tolerance = tolerance_of(record.in_effect.get("precision") for record in records)
            servers.check_parity(inputs, signatures, records, tolerance)
            if self._answers is None:
                self._answers = AnswersUnderLoad(store, experiment.seed, tolerance)
            if self._measurements:
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
        self._store.write(RunState(state="running", phase=phase))
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
        self._gpu = GpuStage(self._store, self._abserve, self._sampler)
        self._resources.callback(self._gpu.close)

    def close(self) -> None:
        """Stop all that runs; bounded."""
        self._resources.close()

    def _load(
        self,
        servers: ArmServers,
        inputs: Inputs,
        signatures: Mapping[Label, Signature],
        records: Sequence[ArmRecord],
        restart: int,
    ) -> None:
        """Warm-up and the phases under load, on servers that have just been started."""
        assert self._answers is not None
        self._answers.begin()
        self.enter("warming up")
        first = self._generator is None
        if self._generator is None:
            self._generator = GeneratorProcess(self._store.log_path("generator"), processes=self._experiment.processes)
            self._resources.callback(self._generator.stop)
            calibration = own_calibration()
            if calibration is not None:
                self._store.write(calibration)
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
            answers=self._answers,
            work=self._work,
            abserve=self._abserve,
            restart=restart,
            done=self._done,
            load_deadline=lambda: self._load_deadline(restart),
        )
        cells = load_cells(self._experiment.cells)
        if first and cells:
            bench.prepare_bodies([cell.batch_size for cell in cells])
        took = bench.warm_up(cells)
        alone_s = min((took[cell.name] / max(cell.batch_size, cell.concurrency) for cell in cells), default=0.0)
        self._forecast.checks_take(len(self._experiment.arms) * LEAST_ANSWERS * len(cells) * alone_s)
        if first:
            self._experiment = msgspec.structs.replace(self._experiment, cells=sized(self._experiment.cells, took))
            self._store.write(self._experiment)
            self._forecast.blocks_are(schedule(self._experiment))
        bench = replace(bench, experiment=self._experiment)
        self._gpu.start(servers.arms, records)
        for measure in self._measurements:
            measure(bench)

    def _load_deadline(self, restart: int) -> float:
        """What is left of the time, less what comes after the load, in equal parts for this restart and those to
        come."""
        if self._experiment.minutes is None:
            return monotonic() + 60.0 * (self._experiment.time_limit_minutes or 0.0)
        after = self._forecast.after_load_s() + (WHOLE_SECONDS if self._gpu.recording is not None else 0.0)
        left = self._began + 60.0 * self._experiment.minutes - after - monotonic()
        return monotonic() + max(0.0, left) / (self._experiment.restarts - restart)

    def _measure_cold_starts(
        self,
        servers: ArmServers,
        inputs: Inputs,
        signatures: Mapping[Label, Signature],
        records: Sequence[ArmRecord],
    ) -> None:
        launched = any(arm.deployment.launched for arm in servers.arms.values())
        if not repetitions_of(self._experiment) or not launched:
            return
        self.enter("cold starts")
        experiment, store, progress, forecast = self._experiment, self._store, self._progress, self._forecast
        measure_cold_starts(experiment, servers.arms, records, inputs, signatures, store, progress, forecast)


def _gpu(records: Sequence[ArmRecord]) -> dict[str, object]:
    """This machine's GPU as a server of ours reports it."""
    return next((r.gpu_info for r in records if r.launched and r.gpu_info is not None), {"status": "unknown"})
