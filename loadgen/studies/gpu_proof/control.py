"""The negative control: an arm once more, on the CPU and on purpose, so that the evidence has a case to say "no" to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from loadgen.bench.arms import Arm
from loadgen.bench.load_runner import LoadRunner
from loadgen.bench.preparation import READY_SECONDS
from loadgen.experiment.schedule import ScheduledBlock
from loadgen.records.run import ArmRecord, ArmRequest, Cell, Experiment, Label
from loadgen.records.samples import read_samples
from loadgen.storage.store import RunStore
from loadgen.studies.gpu_proof.analyse import ControlRun
from loadgen.targets.interface import Deployment

CONTROL_SECONDS = 12.0
WHOLE_SECONDS = 45.0
"""With the start of the server and the idle gaps, for planning."""
_ON_A_GPU_ONLY = ("mode", "precision")


def control_request(request: ArmRequest) -> ArmRequest:
    """The arm on the CPU, in FP32, which every engine offers there, and in the mode that it chooses."""
    kept = {name: value for name, value in request.settings.items() if name.lstrip("-") not in _ON_A_GPU_ONLY}
    return msgspec.structs.replace(request, settings={**kept, "device": "cpu"})


def control_cell(experiment: Experiment) -> Cell:
    """The smallest request of the run, one after the other."""
    batch_size = min(cell.batch_size for cell in experiment.cells if cell.has_blocks)
    return Cell(
        scenario="single" if batch_size == 1 else "batched",
        batch_size=batch_size,
        concurrency=1,
        requests=2,
        seconds=CONTROL_SECONDS,
        max_seconds=2 * CONTROL_SECONDS,
        rounds=1,
    )


def run_control(
    arm: Arm,
    cell: Cell,
    directory: Path,
    deploy: Callable[[ArmRequest, RunStore], Deployment],
    make_runner: Callable[[Mapping[Label, Arm], RunStore], LoadRunner],
    describe: Callable[[Arm, RunStore], ArmRecord],
    idle: Callable[[], None],
) -> ControlRun:
    """Start the server, load it between two calls of `idle`, stop it. What it stores is in `directory`, which is like
    that of a run and is none.

    Raises what starting and loading raise: `DeploymentError`, `EndpointError`, `LoadError`, `StorageError` …
    """
    store = RunStore(directory)
    deployment = deploy(control_request(arm.request), store)
    control = replace(arm, deployment=deployment)
    label = arm.request.label
    try:
        deployment.start()
        deployment.wait_ready(control.model, READY_SECONDS)
        record = describe(control, store)
        runner = make_runner({label: control}, store)
        runner.warm_up([cell])
        idle()  # again: after the load a GPU cools down for a while, and its idle power with it
        block = runner.measure(ScheduledBlock(0, cell, 0, label, 0))
        idle()
        pids = frozenset(deployment.pids())
    finally:
        deployment.stop()
    return ControlRun(arm=record, block=block, samples=read_samples(store.samples_path(block.index)), pids=pids)
