"""Prepares a run: exported models, sample inputs and the deployments of the arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from loadgen.invocation import ABSERVE
from loadgen.records.payloads import base_name
from loadgen.records.run import ArmRequest, Experiment, Label
from loadgen.storage.store import RunStore
from loadgen.targets.compose import ComposeDeployment
from loadgen.targets.containers import PROJECT
from loadgen.targets.embedded import EmbeddedDeployment
from loadgen.targets.interface import Deployment, RemoteDeployment
from loadgen.targets.process import ChildProcess
from loadgen.transport.endpoint import Signature
from loadgen.transport.inputs import InputError, SampleInputs, read_inputs, write_samples, write_synthetic

READY_SECONDS = 300.0
"""Time limit for a launched server to start."""
Inputs = Mapping[str, SampleInputs]
"""Sample inputs by payload, all made from the same pictures."""


class PreparationError(Exception):
    """A preparation failed; the message says why."""


def needs_artefact(arm: ArmRequest) -> bool:
    """Whether the arm executes an exported file instead of the torch module."""
    engine = arm.settings.get("engine", "onnxruntime" if arm.target == "triton" else "torch")
    return arm.embedded and engine == "onnxruntime"


def make_deployment(
    arm: ArmRequest, experiment: Experiment, store: RunStore, work: Path, abserve: Sequence[str] = ABSERVE
) -> Deployment:
    """The deployment of an arm, not yet started. Raises `AddressError` for an unusable URL, `DeploymentError` when a
    compose stack is not up."""
    deployment = _deployment(arm, experiment, store, work, abserve)
    deployment.largest_batch = experiment.largest_batch
    return deployment


def _deployment(
    arm: ArmRequest, experiment: Experiment, store: RunStore, work: Path, abserve: Sequence[str]
) -> Deployment:
    if not arm.embedded:
        return RemoteDeployment(arm.target, arm.grpc if experiment.transport == "grpc" else None, arm.access)
    if experiment.deployment == "compose":
        return ComposeDeployment(arm.target, experiment.compose_project or PROJECT)
    options = {"model": base_name(experiment.model), "weights": experiment.weights, "threads": str(experiment.threads)}
    if experiment.payload_of(arm) != "fp32":
        options["payloads"] = experiment.payload_of(arm)
    if experiment.transport == "shm" and arm.target == "native":  # Triton always offers it
        options["allow-shared-memory"] = "true"
    if arm.target == "triton":
        options["work-dir"] = str(work / f"triton-{arm.label}")
    log_path = store.log_path(f"{arm.label}-{arm.target}")
    return EmbeddedDeployment(arm.target, {**options, **arm.settings}, log_path, abserve=abserve)


def export_artefacts(
    experiment: Experiment, store: RunStore, say: Callable[[str], None], abserve: Sequence[str] = ABSERVE
) -> None:
    """Run `abserve export` for the arms that need it, once per file, and pass its output lines on. Raises
    `PreparationError`."""
    wanted = {
        (
            arm.settings.get("artefacts", ""),
            "fp32" if experiment.payload_of(arm) == "fp32" else "uint8",
            "fp16" if arm.settings.get("precision") == "fp16" else "fp32",
        )
        for arm in experiment.arms
        if needs_artefact(arm)
    }  # a JPEG variant executes the file of the UINT8 one, TF32 that of FP32
    for place, payload, precision in sorted(wanted):
        argv = [*abserve, "export", "--model", base_name(experiment.model), "--weights", experiment.weights]
        argv += ["--payload", payload] if payload != "fp32" else []
        argv += ["--precision", precision] if precision != "fp32" else []
        argv += ["--artefacts", place] if place else []
        _export(argv, store.log_path("export"), say)


def _export(argv: Sequence[str], log_path: Path, say: Callable[[str], None]) -> None:
    process = ChildProcess(argv, log_path=log_path, pipes=True)
    try:
        assert process.popen.stdout is not None
        for raw in process.popen.stdout:
            line = raw.decode("utf-8", "replace").strip()
            if line:
                say(line)
        code = process.popen.wait()
    finally:
        process.stop()
    if code != 0:
        raise PreparationError(f"the export failed: {_error_line(log_path) or process.failure()}")


def _error_line(log_path: Path) -> str | None:
    """The last error message in the log of `abserve export`."""
    with suppress(OSError):
        for line in reversed(log_path.read_text("utf-8", "replace").splitlines()):
            if line.startswith("error: "):
                return line.removeprefix("error: ")
    return None


def prepare_inputs(experiment: Experiment, folder: Path, abserve: Sequence[str] = ABSERVE) -> Inputs | None:
    """The sample inputs in every payload that an arm takes; None for a model that only the remote servers know.
    Raises `InputError`."""
    try:
        write_samples(base_name(experiment.model), folder, abserve)
    except InputError:
        if any(arm.embedded for arm in experiment.arms):
            raise
        return None
    return {payload: read_inputs(folder, payload) for payload in experiment.payloads}


def synthesise_inputs(experiment: Experiment, folder: Path, signatures: Mapping[Label, Signature]) -> Inputs:
    """Random values of the shapes in the server's metadata. Raises `InputError`, also for several payloads: random
    values are not the same picture in two payloads."""
    if len(experiment.payloads) > 1:
        raise InputError(f"{experiment.model} has no sample inputs in two payloads; use the same payload for all arms")
    payload = experiment.payload_of(experiment.baseline)
    write_synthetic(signatures[experiment.baseline.label], folder, payload, experiment.seed)
    return {payload: read_inputs(folder, payload)}


def describe_inputs(inputs: Inputs) -> dict[str, str | int]:
    """A description for the stored record: the first payload's description and the digests of the others."""
    first, *rest = inputs.items()
    return first[1].describe() | {f"sha256_{name}": more.describe()["sha256"] for name, more in rest}
