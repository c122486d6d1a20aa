"""GPU verification: judges where the model ran once all blocks are done.

One arm also runs on the CPU deliberately, the control run: a detector that never says "no" proves nothing, so the
control must come out CPU_FALLBACK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from loadgen.experiment.prompts import SETTLING
from loadgen.experiment.schedule import ScheduledBlock, has_load
from loadgen.findings.gpu.analysis import ControlRun, GpuFound, analyse, assess_run
from loadgen.findings.registry import Probe
from loadgen.records.probes import Variant
from loadgen.records.run import ArmRequest, Experiment, Label, Workload
from loadgen.records.samples import read_samples
from loadgen.records.store import RunStore, StoredRunError, read_run
from loadgen.records.targets import Kind

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext

CONTROL_SECONDS = 12.0


def measure(context: RunContext) -> None:
    """Judge, run the control, judge again with it. The first judgement survives an interrupt."""
    recording = context.gpu
    if not recording.running:
        return
    recording.note_processes()  # of this restart: they have ended by the time they are judged
    if not context.last:
        return
    context.enter("verifying where the model ran")
    _judge(context, {})
    controls = _run_controls(context)
    recording.stop()
    _judge(context, controls)


def _judge(context: RunContext, controls: Mapping[Label, ControlRun]) -> None:
    recording, blocks = context.gpu, read_run(context.store.directory).blocks
    try:
        evidence = assess_run(
            context.store.directory,
            [recording.FILE],
            arms=recording.records,
            blocks=blocks,
            gaps=recording.gaps,
            pids=recording.pids,
            controls=controls,
            processes_unknown=recording.processes_unknown,
        )
    except StoredRunError as exc:
        context.progress.now(f"no GPU evidence: {exc}")
    else:
        context.store.write(evidence)


def _run_controls(context: RunContext) -> dict[Label, ControlRun]:
    """Run one arm as a control: whether the detector can say "no" does not depend on the arm."""
    experiment = context.experiment
    embedded = [request for request in experiment.arms if request.embedded]
    if not experiment.gpu_control or not embedded:
        return {}
    if experiment.deployment != "embedded":
        context.progress.now("no CPU control run: servers of a compose stack stay on the device that .env sets")
        return {}
    movable = [request for request in embedded if not request.own_repository]
    if not movable:
        context.progress.now("no CPU control run: your own repository stays on the device that its config sets")
        return {}
    request = min(movable, key=lambda request: request.target != "native")
    context.progress.now(f"{context.arms[request.label].name} once more, on the CPU: the control run")
    controls: dict[Label, ControlRun] = {}

    def run_control() -> None:
        controls[request.label] = _run_control(context, request)

    failure = context.attempt(run_control, OSError, ValueError)
    if failure is not None:
        context.progress.now(f"no CPU control run: {failure}")
    return controls


def _run_control(context: RunContext, request: ArmRequest) -> ControlRun:
    """Start the server on the CPU, load it between two idle gaps, stop it. Raises what starting and loading raise. The
    control's folder, DIR/gpu/control, looks like a run's."""
    workload = control_workload(context.experiment)
    store = RunStore(context.store.directory / "gpu" / "control")
    with context.varied(request.label, control_variant(context.experiment, request), store, "control") as started:
        arm = replace(started, request=request)
        record = context.gpu.describe(arm.record(), store)
        runner = context.load_runner({request.label: arm}, store)
        runner.warm_up([workload])
        context.gpu.gap()  # a new gap: after the load a GPU cools down for a while, and its idle power falls
        block = runner.measure(ScheduledBlock(0, workload, 0, request.label, 0))
        context.gpu.gap()
        pids = frozenset(arm.deployment.pids())
    return ControlRun(arm=record, block=block, samples=read_samples(store.samples_path(block.index)), pids=pids)


def control_variant(experiment: Experiment, request: ArmRequest) -> Variant:
    """The arm on the CPU, in the engine's default mode there and in FP32, which every engine offers."""
    settings = {"mode": "", "precision": "fp32", "device": "cpu"}
    payload, transport = experiment.payload_of(request), experiment.transport_of(request)
    return Variant(payload=payload, transport=transport, settings=settings)


def control_workload(experiment: Experiment) -> Workload:
    """The smallest request of the run, sent one after the other; for a language model, which may be slow on a CPU, the
    small prompt that is also sent before each block."""
    batch_size = min(workload.batch_size for workload in experiment.workloads if workload.has_blocks)
    prompts = {"prompt_tokens": SETTLING.prompt_tokens, "output_tokens": SETTLING.output_tokens}
    lengths: Mapping[Kind, dict[str, int]] = {Kind.TENSORS: {}, Kind.TOKENS: prompts}
    load = Workload(
        scenario="single" if batch_size == 1 else "batched",
        batch_size=batch_size,
        concurrency=1,
        requests=2,
        seconds=CONTROL_SECONDS,
        max_seconds=2 * CONTROL_SECONDS,
        rounds=1,
    )
    return msgspec.structs.replace(load, **lengths[experiment.kind])


PROBE = Probe(
    wanted=has_load,
    measure=measure,
    finding=GpuFound,
    analyse=analyse,
    sections="loadgen.report.sections.gpu",
)
