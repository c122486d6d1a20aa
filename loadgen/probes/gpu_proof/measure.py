"""Judges where the model ran once all blocks are done, and runs one arm on the CPU deliberately: the control run.

A detector that never says "no" proves nothing: the control run must come out CPU_FALLBACK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from loadgen.bench.bench import Bench
from loadgen.bench.gpu_recording import GpuRecording
from loadgen.bench.load_runner import LoadError
from loadgen.bench.preparation import READY_SECONDS, make_deployment
from loadgen.child_process import ProcessError
from loadgen.client.endpoint import EndpointError
from loadgen.client.generator import GeneratorError
from loadgen.experiment.schedule import ScheduledBlock, has_load
from loadgen.launch.deployment import DeploymentError
from loadgen.probes.gpu_proof.analyse import ControlRun, assess_run
from loadgen.probes.gpu_proof.readings import ReadingsError
from loadgen.records.run import ArmRequest, Experiment, Label, Workload, setting_key, shown
from loadgen.records.samples import read_samples
from loadgen.storage.store import RunStore
from loadgen.storage.stored_run import read_run

wanted = has_load
CONTROL_SECONDS = 12.0
_CONTROL_ERRORS = (DeploymentError, EndpointError, GeneratorError, LoadError, ProcessError, OSError, ValueError)


def measure(bench: Bench) -> None:
    """Judge, run the control, judge again with it. The first judgement survives an interrupt."""
    recording = bench.gpu.recording
    if recording is None:
        return
    bench.gpu.note_processes()  # of this restart: they have ended by the time they are judged
    if not bench.last:
        return
    bench.enter("verifying where the model ran")
    _judge(bench, recording, {})
    controls = _run_controls(bench, recording)
    recording.stop()
    _judge(bench, recording, controls)
    bench.gpu.close()


def _judge(bench: Bench, recording: GpuRecording, controls: Mapping[Label, ControlRun]) -> None:
    try:
        evidence = assess_run(
            bench.store.directory,
            [recording.file],
            arms=bench.gpu.records,
            blocks=read_run(bench.store.directory).blocks,
            gaps=recording.gaps,
            pids=recording.pids,
            controls=controls,
            processes_unknown=recording.processes_unknown,
        )
    except ReadingsError as exc:
        bench.progress.now(f"no GPU evidence: {exc}")
    else:
        bench.store.write(evidence)


def _run_controls(bench: Bench, recording: GpuRecording) -> dict[Label, ControlRun]:
    """Run one arm as a control: whether the detector can say "no" does not depend on the arm."""
    experiment = bench.experiment
    embedded = [request for request in experiment.arms if request.embedded]
    if not experiment.gpu_control or not embedded:
        return {}
    if experiment.deployment != "embedded":
        bench.progress.now("no CPU control run: servers of a compose stack stay on the device that .env sets")
        return {}
    movable = [request for request in embedded if not request.own_repository]
    if not movable:
        bench.progress.now("no CPU control run: your own repository stays on the device that its config sets")
        return {}
    request = min(movable, key=lambda request: request.target != "native")
    bench.progress.now(f"{shown(request.label)} once more, on the CPU: the control run")
    try:
        return {request.label: _run_control(bench, recording, request)}
    except _CONTROL_ERRORS as exc:
        bench.progress.now(f"no CPU control run: {exc}")
        return {}


def _run_control(bench: Bench, recording: GpuRecording, request: ArmRequest) -> ControlRun:
    """Start the server on the CPU, load it between two idle gaps, stop it. Raises what starting and loading raise.

    The control's folder, DIR/gpu/control, looks like a run's.
    """
    experiment, workload = bench.experiment, control_workload(bench.experiment)
    store = RunStore(bench.store.directory / "gpu" / "control")
    work = bench.work / "control"
    deployment = make_deployment(control_request(request), experiment, store, work, bench.abserve)
    arm = replace(bench.arms[request.label], deployment=deployment)
    try:
        deployment.start()
        deployment.wait_ready(arm.model, READY_SECONDS)
        record = bench.gpu.describe(arm.record(), store)
        runner = bench.load_runner({request.label: arm}, store)
        runner.warm_up([workload])
        recording.gap()  # a new gap: after the load a GPU cools down for a while, and its idle power falls
        block = runner.measure(ScheduledBlock(0, workload, 0, request.label, 0))
        recording.gap()
        pids = frozenset(deployment.pids())
    finally:
        deployment.stop()
    return ControlRun(arm=record, block=block, samples=read_samples(store.samples_path(block.index)), pids=pids)


def control_request(request: ArmRequest) -> ArmRequest:
    """The arm on the CPU, in the engine's default mode there and in FP32, which every engine offers."""
    kept = {name: value for name, value in request.settings.items() if setting_key(name) not in ("mode", "precision")}
    return msgspec.structs.replace(request, settings={**kept, "precision": "fp32", "device": "cpu"})


def control_workload(experiment: Experiment) -> Workload:
    """The smallest request of the run, sent one after the other."""
    batch_size = min(workload.batch_size for workload in experiment.workloads if workload.has_blocks)
    return Workload(
        scenario="single" if batch_size == 1 else "batched",
        batch_size=batch_size,
        concurrency=1,
        requests=2,
        seconds=CONTROL_SECONDS,
        max_seconds=2 * CONTROL_SECONDS,
        rounds=1,
    )
