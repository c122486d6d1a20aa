"""Runs an experiment: starts the servers, compares their answers, loads them, stores every record at once.

Order: inputs and export → for each restart (all servers up → parity → warm-up → studies under load → servers down) →
engines alone → cold starts. Parity comes before any load, so that a wrong server costs no time; cold starts come last,
when the page cache is warm for all. Under load all servers are up and one of them gets requests. The studies are in
`loadgen.probes`, their run context in `loadgen.bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Literal

import msgspec

from loadgen.bench.answers import LEAST_ANSWERS, AnswersUnderLoad
from loadgen.bench.bench import Bench
from loadgen.bench.generator_size import size_generator
from loadgen.bench.gpu_recording import SAMPLER
from loadgen.bench.interruption import interruptible, uninterrupted
from loadgen.bench.load_runner import LoadError
from loadgen.bench.preparation import PreparationError, describe_inputs, export_artefacts, make_inputs, prepare_inputs
from loadgen.bench.progress import Progress
from loadgen.client.endpoint import EndpointError
from loadgen.client.inputs import InputError
from loadgen.client.requests import AddressError
from loadgen.experiment.plan import padding_in_words, sized
from loadgen.experiment.schedule import load_workloads, schedule
from loadgen.generator.process import GeneratorError
from loadgen.invocation import ABSERVE
from loadgen.launch.interface import DeploymentError
from loadgen.launch.process import ProcessError
from loadgen.launch.work_folder import work_folder
from loadgen.machine.calibration import own_calibration
from loadgen.machine.environment import read_environment, utc_now
from loadgen.machine.noise_floor import own_floors
from loadgen.probes.ceiling.measure import measure_ceilings
from loadgen.probes.ceiling.plan import wants_ceilings
from loadgen.probes.cold_start.measure import measure_cold_starts, repetitions_of
from loadgen.probes.registry import measurements
from loadgen.records.machine import NoiseFloor
from loadgen.records.run import Experiment, RunState
from loadgen.run.servers import ParityFailedError, make_arms, require_parity, start_servers
from loadgen.stats.agreement import tolerance_of
from loadgen.storage.run_lock import running
from loadgen.storage.store import RunStore, StorageError

RUN_ERRORS = (
    AddressError, DeploymentError, EndpointError, GeneratorError, InputError, LoadError, ParityFailedError,
    PreparationError, ProcessError, StorageError,
)  # fmt: skip
"""Exceptions that end a run as failed, with their message; any other is a bug and is raised."""


def run_experiment(
    experiment: Experiment,
    out_dir: Path,
    progress: Progress,
    *,
    abserve: Sequence[str] = ABSERVE,
    sampler: Sequence[str] = SAMPLER,
) -> RunState:
    """Run everything; returns how it ended. No process that it started is left behind, however it ends.

    `sampler` is the command of the GPU sampler; it gets `--gpu UUID`, when the servers name their GPUs, and `--out
    FILE`. Raises `StorageError` only when not even the experiment can be stored.
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
                    run.resources.close()
        except KeyboardInterrupt:
            ended = "interrupted"
        except RUN_ERRORS as exc:
            ended, error = "failed", store.without_secrets(str(exc))
        except BaseException as exc:
            with suppress(StorageError):
                store.write(RunState(state="failed", phase=run.phase, error=repr(exc), finished_at=utc_now()))
            raise
        state = RunState(state=ended, phase=run.phase, error=error, finished_at=utc_now())
        with suppress(StorageError), uninterrupted():  # on a full disk the state stays "running", without a process
            store.write(state)
    return state


class _Run(Bench):
    """One run in its order, and the run context of its studies."""

    def phases(self) -> None:
        experiment, store, progress = self.experiment, self.store, self.progress
        studies = measurements(experiment)
        progress.plan(self.forecast.remaining_s())
        self._make_room()
        self.enter("preparing inputs")
        self.experiment, inputs = prepare_inputs(experiment, self.samples_folder, self.abserve)
        experiment = self.experiment
        store.write(experiment)
        make_arms(self)
        about = {} if inputs is None else describe_inputs(inputs, experiment.seed)
        store.write(read_environment({"status": "unknown"}, about))
        if rule := padding_in_words(experiment, int(about.get("length_max", 0))):
            progress.padding_decided(rule)
        if experiment.deployment == "embedded":
            self.enter("exporting the model")
            export_artefacts(experiment, store, progress.now, self.abserve)
        for restart in range(experiment.restarts):
            if restart:
                self._stop_servers()
            self.restart = restart
            self.enter("starting the servers")
            started = monotonic()
            start_servers(self)
            self.forecast.start_takes(monotonic() - started)
            if restart == 0:
                self.inputs = inputs or make_inputs(
                    experiment, self.samples_folder, self.signatures[experiment.baseline.label]
                )
                described = describe_inputs(self.inputs, experiment.seed)
                progress.inputs_ready(described)
                environment = read_environment(self._gpu_info(), described)
                store.write(environment)
                store.write_all(NoiseFloor, own_floors(environment, experiment))
            self.enter("checking parity")
            tolerance = tolerance_of(record.in_effect.get("precision") for record in self.records)
            require_parity(self, tolerance)
            if restart == 0:
                self.answers = AnswersUnderLoad(store, experiment.seed, tolerance)
            if studies:
                self._load(studies)
        if studies:
            self.generator.stop()
        if experiment.deployment == "embedded" or repetitions_of(experiment):  # a stack that was up stays up
            self._stop_servers()
        if wants_ceilings(experiment):
            self.enter("measuring the engines alone")
            lengths = {length for samples in self.inputs.values() for length in samples.lengths}
            measure_ceilings(experiment, self.records, store, progress, self.work, self.abserve, lengths=lengths)
        if repetitions_of(experiment) and any(arm.deployment.launched for arm in self.arms.values()):
            self.enter("cold starts")
            measure_cold_starts(
                experiment, self.arms, self.records, self.inputs, self.signatures, store, progress, self.forecast
            )
        self.phase = "finished"

    def _make_room(self) -> None:
        try:
            self.work = self.resources.enter_context(work_folder("run"))
        except OSError as exc:
            raise PreparationError(
                f"cannot make a temporary folder: {exc.strerror or exc}; set TMPDIR to a folder that can be written"
            ) from exc
        self.samples_folder = self.work / "samples"
        self.resources.callback(self.gpu.close)

    def _stop_servers(self) -> None:
        self.enter("stopping the servers")
        for arm in self.arms.values():
            arm.deployment.stop()

    def _load(self, studies: Sequence[Callable[[Bench], None]]) -> None:
        """Warm-up and the studies under load, on servers that have just been started."""
        self.answers.begin()
        self.enter("warming up")
        first = self.restart == 0
        if first:
            self.start_generator(max(1, self.experiment.processes))
        workloads = load_workloads(self.experiment.workloads)
        batch_sizes = [workload.batch_size for workload in workloads] or [1]
        if first:
            self.prepare_bodies(batch_sizes)
        took = self.warm_up(workloads)
        alone_s = min(
            (took[workload.name] / max(workload.batch_size, workload.concurrency) for workload in workloads),
            default=0.0,
        )
        self.forecast.checks_take(len(self.experiment.arms) * LEAST_ANSWERS * len(workloads) * alone_s)
        if first:
            calibration = own_calibration()
            if calibration is not None:
                self.store.write(calibration)
            self.experiment = msgspec.structs.replace(
                self.experiment,
                workloads=sized(self.experiment.workloads, took),
                processes=self.experiment.processes or size_generator(self, calibration, batch_sizes),
            )
            self.store.write(self.experiment)
            self.forecast.blocks_are(schedule(self.experiment))
        self.gpu.start(self.arms, self.records)
        for measure in studies:
            measure(self)

    def _gpu_info(self) -> dict[str, object]:
        """This machine's GPU as a launched server reports it."""
        known = (record.gpu_info for record in self.records if record.launched and record.gpu_info is not None)
        return next(known, {"status": "unknown"})
