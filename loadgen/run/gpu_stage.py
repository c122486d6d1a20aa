"""The GPU evidence of one run: when the sampler starts and ends, the control run, and what is stored of it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.clients.endpoint import EndpointError
from loadgen.deployment.interface import Deployment, DeploymentError
from loadgen.deployment.process import ProcessError
from loadgen.documents import read_json
from loadgen.generator.process import GeneratorError
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, Label, shown
from loadgen.run.arms import Arm
from loadgen.run.gpu_control import control_cell, run_control
from loadgen.run.gpu_recording import GpuRecording
from loadgen.run.load_runner import LoadError, LoadRunner
from loadgen.run.preparation import make_deployment
from loadgen.run.progress import Progress
from loadgen.storage.store import RunStore
from loadgen.storage.stored_run import read_run
from loadgen.studies.gpu_proof.analyse import ControlRun, Evidence, assess_run
from loadgen.studies.gpu_proof.readings import ReadingsError
from loadgen.studies.gpu_proof.records import used_gpu

GPU_INFO_SECONDS = 60.0
MakeRunner = Callable[[Mapping[Label, Arm], RunStore], LoadRunner]
_CONTROL_ERRORS = (DeploymentError, EndpointError, GeneratorError, LoadError, ProcessError, OSError, ValueError)


class GpuStage:
    """Life: `start` when the servers are warm → load with `recording` → `finish`; `close` at any time."""

    def __init__(
        self,
        experiment: Experiment,
        store: RunStore,
        work: Path,
        progress: Progress,
        abserve: Sequence[str],
        sampler: Sequence[str],
    ) -> None:
        self._experiment = experiment
        self._store = store
        self._work = work
        self._progress = progress
        self._abserve = tuple(abserve)
        self._sampler = tuple(sampler)
        self._arms: Mapping[Label, Arm] = {}
        self._records: tuple[ArmRecord, ...] = ()
        self.recording: GpuRecording | None = None
        """None without a GPU, or where all arms say that they execute on the CPU."""

    def start(self, arms: Mapping[Label, Arm], records: Sequence[ArmRecord]) -> None:
        """Start the sampler where there is something for it to see, and complete the arms' records. Called again
        after a restart of the servers, it goes on and learns their new processes."""
        if self.recording is None and all(_on_cpu(record) for record in records):
            return
        self._arms = arms
        described = tuple(self._described(record, self._store) for record in records)
        if self.recording is None:
            sampler = (*self._sampler, *gpu_options(described))
            self.recording = GpuRecording(self._store.directory, self._store.log_path("gpu-sampler"), sampler)
            if not self.recording.ok:
                self.close()
                return
        self._records = described
        self._store.write_all(ArmRecord, self._records)
        self.note_processes()

    def finish(self, make_runner: MakeRunner) -> None:
        """After the load: judge, run the control, judge again with it. What was judged first survives an interrupt."""
        if self.recording is None:
            return
        self.note_processes()
        self._judge({})
        controls = self._run_controls(make_runner)
        self.recording.stop()
        self._judge(controls)
        self.close()

    def close(self) -> None:
        """End the sampler."""
        if self.recording is not None:
            self.recording.stop()
            self.recording = None

    def note_processes(self) -> None:
        """Which processes the arms' servers are now, for a recording that goes on."""
        assert self.recording is not None
        for label, arm in self._arms.items():
            self.recording.processes(label, arm.deployment.pids())

    def _judge(self, controls: Mapping[Label, ControlRun]) -> None:
        assert self.recording is not None
        run = read_run(self._store.directory)
        evidence = Evidence(
            arms=self._records,
            blocks=run.blocks,
            gaps=tuple(self.recording.gaps),
            pids=self.recording.pids,
            controls=controls,
        )
        try:
            self._store.write(assess_run(self._store.directory, [self.recording.file], evidence))
        except ReadingsError as exc:
            self._progress.now(f"no evidence: {exc}")

    def _run_controls(self, make_runner: MakeRunner) -> dict[Label, ControlRun]:
        """Of one arm: it tells whether the detector can say no, which does not depend on the arm."""
        assert self.recording is not None
        requests = self._experiment.arms
        if not self._experiment.gpu_control or not all(request.embedded for request in requests):
            return {}
        if self._experiment.deployment != "embedded":
            self._progress.now("no negative control: the stack's servers stay on the device that .env gives them")
            return {}
        request = min(requests, key=lambda request: request.target != "native")
        self._progress.now(f"{shown(request.label)} once more on the CPU, on purpose: the negative control")
        try:
            control = run_control(
                self._arms[request.label],
                control_cell(self._experiment),
                self._store.directory / "gpu" / "control",
                self._deploy,
                make_runner,
                lambda arm, store: self._described(arm.record(), store),
                self.recording.gap,
            )
        except _CONTROL_ERRORS as exc:
            self._progress.now(f"no negative control: {exc}")
            return {}
        return {request.label: control}

    def _deploy(self, request: ArmRequest, store: RunStore) -> Deployment:
        return make_deployment(request, self._experiment, store, self._work / "control", self._abserve)

    def _described(self, record: ArmRecord, store: RunStore) -> ArmRecord:
        """With the `/gpu-info` document that a Triton does not offer itself."""
        if record.gpu_info is not None:
            return record
        log_path = store.log_path(f"{record.label}-{record.target}") if record.launched else Path()
        document = ask_gpu_info(record, self._arms[record.label].model, log_path, self._abserve)
        return msgspec.structs.replace(record, gpu_info=document)


def gpu_options(records: Sequence[ArmRecord]) -> tuple[str, ...]:
    """For the sampler: the GPUs that the arms name. Where one is silent, those of CUDA_VISIBLE_DEVICES, which servers
    that we started have inherited, and of somebody else's servers all."""
    on_gpu = [record for record in records if not _on_cpu(record)]
    named = [used_gpu(record.gpu_info) for record in on_gpu]
    if named and None not in named:
        return tuple(part for uuid in dict.fromkeys(named) for part in ("--gpu", str(uuid)))
    return () if all(record.launched for record in on_gpu) else ("--gpu", "all")


def _on_cpu(record: ArmRecord) -> bool:
    return str(record.in_effect.get("device", "")).startswith("cpu")


def ask_gpu_info(arm: ArmRecord, model: str, log_path: Path, abserve: Sequence[str]) -> dict[str, Any] | None:
    """The `/gpu-info` document of a server that has no such route, made up from its config and its log by
    `abserve gpu-info`; None where that fails."""
    argv = [*abserve, "gpu-info", arm.url, "--model", model, "--json"]
    argv += ["--log", str(log_path)] if log_path.exists() else []
    try:
        done = subprocess.run(argv, capture_output=True, check=False, timeout=GPU_INFO_SECONDS)
        document = read_json(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return document if isinstance(document, dict) else None
