"""Runs an experiment: brings the servers up, compares their answers, loads them, stores every record as it happens.

Order: inputs and export → both servers up → parity → warm-up → blocks → servers down → cold starts. Parity comes
before any load, so that a wrong server costs no time; cold starts come last, when the page cache is warm for both.
During the blocks both servers are up and one of them is under load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from loadgen.arms import Arm
from loadgen.clients.requests import AddressError
from loadgen.cold_start_phase import READY_SECONDS, ColdStartPhase, repetitions_of
from loadgen.deployment.command import ABSERVE
from loadgen.deployment.compose import ComposeDeployment, require_one_way
from loadgen.deployment.interface import DeploymentError
from loadgen.deployment.process import ProcessError
from loadgen.endpoint import EndpointError, Signature
from loadgen.environment import read_environment, utc_now
from loadgen.forecast import Forecast
from loadgen.generator_messages import Prepare
from loadgen.generator_process import GeneratorError, GeneratorProcess
from loadgen.gpu_recording import SAMPLER
from loadgen.gpu_stage import GpuStage
from loadgen.inputs import InputError
from loadgen.interruption import terminated_as_interrupted, uninterrupted
from loadgen.load_phase import LoadError, LoadPhase
from loadgen.parity import Questioned, check_parity
from loadgen.preparation import (
    Inputs,
    PreparationError,
    describe_inputs,
    export_artefacts,
    make_deployment,
    payloads,
    prepare_inputs,
    synthesise_inputs,
)
from loadgen.progress import Progress
from loadgen.records import ArmRecord, ArmRequest, Experiment, Label, ParityRecord, RunState
from loadgen.schedule import schedule
from loadgen.store import RunStore, StorageError


class ParityFailedError(Exception):
    """The arms do not compute the same function, so their speed is not compared."""


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

    `sampler` is the command of the GPU sampler; it gets `--out FILE`.

    Raises `StorageError` only when not even the experiment can be stored.
    """
    store = RunStore(out_dir)
    store.experiment(experiment)
    run = _Run(experiment, store, progress, abserve, sampler)
    error: str | None = None
    ended: Literal["finished", "interrupted", "failed"] = "finished"
    with terminated_as_interrupted():
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
    with suppress(StorageError):  # a full disk: the state is returned, and "running" without a process says the rest
        store.state(state)
    return state


class _Run:
    """The phases of one run and what is open in them."""

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
        self._blocks = schedule(experiment.cells, experiment.seed)
        self._forecast = Forecast(experiment, self._blocks)
        self._resources = ExitStack()
        self._work = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="abserve-")))
        requests: tuple[ArmRequest, ...] = (experiment.a, experiment.b)
        self._abserve = tuple(abserve)
        self._requests = requests
        self._arms: dict[Label, Arm] = {}
        self._gpu = GpuStage(experiment, store, self._work, progress, self._abserve, sampler)
        self._resources.callback(self._gpu.close)

    def phases(self) -> None:
        """Everything in order."""
        experiment, store, progress = self._experiment, self._store, self._progress
        progress.plan(self._forecast.remaining_s())
        self._make_arms()  # first: a stack that is not up is said before anything is prepared
        self.enter("preparing inputs")
        samples_folder = self._work / "samples"
        inputs = prepare_inputs(experiment, samples_folder, self._abserve)
        store.environment(read_environment({"status": "unknown"}, {} if inputs is None else describe_inputs(inputs)))
        if experiment.deployment == "embedded":
            self.enter("exporting the model")
            export_artefacts(experiment, store, progress.now, self._abserve)
        self.enter("starting the servers")
        records = self._start_servers()
        signatures = self._signatures()
        if inputs is None:
            inputs = synthesise_inputs(experiment, samples_folder, signatures)
        store.environment(read_environment(_gpu(records), describe_inputs(inputs)))
        self.enter("checking parity")
        self._check_parity(inputs, signatures, records)
        if self._blocks:
            self._load(samples_folder, signatures, records)
        if experiment.deployment == "embedded" or repetitions_of(experiment):  # a stack that is not ours runs on
            self.enter("stopping the servers")
            for arm in self._arms.values():
                arm.deployment.stop()
        self._measure_cold_starts(inputs, signatures, records)
        self.phase = "finished"

    def enter(self, phase: str) -> None:
        """A phase begins: on disk and on the screen."""
        self.phase = phase
        self._store.state(RunState(state="running", phase=phase))
        self._progress.phase(phase)

    def close(self) -> None:
        """Stop all that runs; bounded."""
        self._resources.close()

    def _make_arms(self) -> None:
        for request in self._requests:
            deployment = make_deployment(request, self._experiment, self._store, self._work, self._abserve)
            self._arms[request.label] = Arm(
                request,
                deployment,
                self._experiment.model_of(request),
                self._experiment.transport,
                self._experiment.payload_of(request),
            )
            self._resources.callback(
                deployment.restore if isinstance(deployment, ComposeDeployment) else deployment.stop
            )

    def _start_servers(self) -> list[ArmRecord]:
        for label, arm in self._arms.items():
            self._progress.now(f"{label.upper()}: {arm.request.target}")
            arm.deployment.start()
        require_one_way([arm.deployment for arm in self._arms.values()])
        records = []
        for label, arm in self._arms.items():
            self._progress.now(f"waiting until {label.upper()} ({arm.request.target}) is ready")
            try:
                if isinstance(arm.deployment, ComposeDeployment):
                    arm = replace(arm, model=arm.deployment.await_model(arm.model, READY_SECONDS))
                    self._arms[label] = arm
                arm.deployment.wait_ready(arm.model, READY_SECONDS if arm.deployment.launched else 5.0)
                records.append(arm.record())
            except (DeploymentError, EndpointError) as exc:
                raise DeploymentError(f"arm {label} ({arm.request.target}): {exc}") from exc
            self._progress.arm_ready(records[-1])
        self._store.arms(records)
        return records

    def _signatures(self) -> dict[Label, Signature]:
        """What the arms take; a difference is a failed parity with its own sentence, but for the inputs of arms that
        are sent different payloads on purpose."""
        inputs_alike = len(payloads(self._experiment)) == 1
        signatures = {label: arm.endpoint.signature(arm.model) for label, arm in self._arms.items()}
        interfaces = {
            label: (
                sorted((tensor.name, tensor.datatype) for tensor in signature.inputs if inputs_alike),
                sorted(tensor.name for tensor in signature.outputs),
            )
            for label, signature in signatures.items()
        }
        if interfaces["a"] != interfaces["b"]:
            message = f"the arms do not serve the same model: a takes and gives {interfaces['a']}, b {interfaces['b']}"
            self._store.parity(ParityRecord(threshold_cosine=0.999, cases=(), ok=False, error=message))
            raise ParityFailedError(message)
        return signatures

    def _check_parity(self, inputs: Inputs, signatures: Mapping[Label, Signature], records: list[ArmRecord]) -> None:
        self._progress.now(f"{next(iter(inputs.values())).count} images to both servers, alone and in mixed batches")
        sizes = [size for record in records if isinstance(size := record.in_effect.get("max_batch_size"), int)]
        largest = max((cell.batch_size for cell in self._experiment.cells), default=1)
        arms = {
            label: Questioned(arm.door, signatures[label], inputs[arm.payload]) for label, arm in self._arms.items()
        }
        record = check_parity(arms, max(1, min([*sizes, max(largest, 8)])))
        self._store.parity(record)
        self._progress.parity_done(record)
        if not record.ok:
            failed = ", ".join(f"{case.name} (cosine {case.cosine_min:.6f})" for case in record.cases if not case.ok)
            raise ParityFailedError(
                f"the arms do not give the same answers, so their speed is not compared: {record.error or failed}"
            )

    def _load(self, samples_folder: Path, signatures: Mapping[Label, Signature], records: list[ArmRecord]) -> None:
        self.enter("warming up")
        generator = GeneratorProcess(self._store.log_path("generator"))
        self._resources.callback(generator.stop)
        cells = [cell for cell in self._experiment.cells if cell.scenario != "cold-start"]
        self._progress.now("preparing request bodies")
        for key, label in {arm.body_key: label for label, arm in self._arms.items()}.items():
            generator.prepare(
                Prepare(
                    samples_directory=str(samples_folder),
                    payload=self._arms[label].payload,
                    signature=signatures[label],
                    batch_sizes=tuple(sorted({cell.batch_size for cell in cells})),
                    seed=self._experiment.seed,
                    transport=self._experiment.transport,
                    key=key,
                )
            )
        LoadPhase(self._arms, generator, self._store, self._progress).warm_up(cells)
        self._gpu.start(self._arms, records)

        def make_phase(arms: Mapping[Label, Arm], store: RunStore) -> LoadPhase:
            return LoadPhase(arms, generator, store, self._progress, self._gpu.recording)

        self.enter("load")
        self._forecast.load_begins()
        make_phase(self._arms, self._store).run(self._blocks, self._forecast)
        if self._gpu.recording is not None:
            self.enter("proving where the model ran")
            self._gpu.finish(make_phase)
        generator.stop()

    def _measure_cold_starts(
        self, inputs: Inputs, signatures: Mapping[Label, Signature], records: list[ArmRecord]
    ) -> None:
        if not repetitions_of(self._experiment) or not any(arm.deployment.launched for arm in self._arms.values()):
            return
        self.enter("cold starts")
        phase = ColdStartPhase(self._arms, self._experiment, self._store, self._progress, self._forecast)
        phase.run(inputs, signatures, {record.label: record for record in records})


def _gpu(records: list[ArmRecord]) -> dict[str, object]:
    """This machine's GPU as a server of ours reports it."""
    return next((r.gpu_info for r in records if r.launched and r.gpu_info is not None), {"status": "unknown"})
