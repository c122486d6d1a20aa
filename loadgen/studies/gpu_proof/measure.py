"""Proves where the model ran, once all blocks are there: judges the readings, and runs an arm on the CPU on purpose."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.bench.bench import Bench
from loadgen.bench.gpu_recording import GpuRecording
from loadgen.bench.load_runner import LoadError
from loadgen.bench.preparation import make_deployment
from loadgen.experiment.schedule import has_load
from loadgen.generator.process import GeneratorError
from loadgen.records.run import Label, shown
from loadgen.storage.stored_run import read_run
from loadgen.studies.gpu_proof.analyse import ControlRun, Evidence, assess_run
from loadgen.studies.gpu_proof.control import control_cell, run_control
from loadgen.studies.gpu_proof.readings import ReadingsError
from loadgen.targets.interface import DeploymentError
from loadgen.targets.process import ProcessError
from loadgen.transport.endpoint import EndpointError

wanted = has_load
_CONTROL_ERRORS = (DeploymentError, EndpointError, GeneratorError, LoadError, ProcessError, OSError, ValueError)


def measure(bench: Bench) -> None:
    """Judge, run the control, judge again with it. What was judged first survives an interrupt."""
    recording = bench.gpu.recording
    if recording is None:
        return
    bench.gpu.note_processes()  # this restart's; they are gone when it is judged
    if not bench.last:
        return
    bench.enter("proving where the model ran")
    _judge(bench, recording, {})
    controls = _run_controls(bench, recording)
    recording.stop()
    _judge(bench, recording, controls)
    bench.gpu.close()


def _judge(bench: Bench, recording: GpuRecording, controls: Mapping[Label, ControlRun]) -> None:
    evidence = Evidence(
        arms=bench.gpu.records,
        blocks=read_run(bench.store.directory).blocks,
        gaps=tuple(recording.gaps),
        pids=recording.pids,
        controls=controls,
    )
    try:
        bench.store.write(assess_run(bench.store.directory, [recording.file], evidence))
    except ReadingsError as exc:
        bench.progress.now(f"no evidence: {exc}")


def _run_controls(bench: Bench, recording: GpuRecording) -> dict[Label, ControlRun]:
    """Of one arm: it tells whether the detector can say no, which does not depend on the arm."""
    experiment = bench.experiment
    if not experiment.gpu_control or not all(request.embedded for request in experiment.arms):
        return {}
    if experiment.deployment != "embedded":
        bench.progress.now("no negative control: the stack's servers stay on the device that .env gives them")
        return {}
    request = min(experiment.arms, key=lambda request: request.target != "native")
    bench.progress.now(f"{shown(request.label)} once more on the CPU, on purpose: the negative control")
    try:
        control = run_control(
            bench.arms[request.label],
            control_cell(experiment),
            bench.store.directory / "gpu" / "control",
            lambda request, store: make_deployment(request, experiment, store, bench.work / "control", bench.abserve),
            bench.load_runner,
            lambda arm, store: bench.gpu.describe(arm.record(), store),
            recording.gap,
        )
    except _CONTROL_ERRORS as exc:
        bench.progress.now(f"no negative control: {exc}")
        return {}
    return {request.label: control}
