"""What must exist before a server is asked: the exported model, the sample images, deployments for both arms."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from loadgen.deployment.command import ABSERVE
from loadgen.deployment.embedded import EmbeddedDeployment
from loadgen.deployment.interface import Deployment
from loadgen.deployment.process import ChildProcess
from loadgen.deployment.remote import RemoteDeployment
from loadgen.endpoint import Signature
from loadgen.inputs import InputError, SampleInputs, read_samples, write_samples, write_synthetic
from loadgen.records import ArmRequest, Experiment
from loadgen.store import RunStore

EMBEDDED = ("native", "triton")


class PreparationError(Exception):
    """Something that the run needs cannot be made; the message holds the process's last words."""


def is_embedded(arm: ArmRequest) -> bool:
    """Whether we start this arm's server."""
    return arm.target in EMBEDDED


def needs_artefact(arm: ArmRequest) -> bool:
    """Whether the arm executes an exported file rather than the torch module."""
    engine = arm.settings.get("engine", "onnxruntime" if arm.target == "triton" else "torch")
    return is_embedded(arm) and engine == "onnxruntime"


def make_deployment(
    arm: ArmRequest, experiment: Experiment, store: RunStore, work: Path, abserve: Sequence[str] = ABSERVE
) -> Deployment:
    """How this arm's server is started and found. Raises `AddressError` for a URL that cannot be used."""
    if not is_embedded(arm):
        return RemoteDeployment(arm.target)
    options = {"model": experiment.model, "weights": experiment.weights, "threads": str(experiment.threads)}
    if arm.target == "triton":
        options["work-dir"] = str(work / f"triton-{arm.label}")
    log_path = store.log_path(f"{arm.label}-{arm.target}")
    return EmbeddedDeployment(arm.target, {**options, **arm.settings}, log_path, abserve=abserve)


def export_artefacts(
    experiment: Experiment, store: RunStore, say: Callable[[str], None], abserve: Sequence[str] = ABSERVE
) -> None:
    """Run `abserve export` for the arms that need it (each place once), passing its lines on. Raises
    `PreparationError`."""
    places = {arm.settings.get("artefacts", "") for arm in (experiment.a, experiment.b) if needs_artefact(arm)}
    for place in sorted(places):
        argv = [*abserve, "export", "--model", experiment.model, "--weights", experiment.weights]
        argv += ["--artefacts", place] if place else []
        _run_telling(argv, store.log_path("export"), say)


def _run_telling(argv: Sequence[str], log_path: Path, say: Callable[[str], None]) -> None:
    process = ChildProcess(argv, log_path=log_path, pipes=True)
    lines: deque[str] = deque(maxlen=3)
    try:
        assert process.popen.stdout is not None
        for raw in process.popen.stdout:
            line = raw.decode("utf-8", "replace").strip()
            if line:
                lines.append(line)
                say(line)
        code = process.popen.wait()
    finally:
        process.stop()
    if code != 0:
        raise PreparationError(f"the export {process.failure()} {' | '.join(lines)}".strip())


def prepare_inputs(experiment: Experiment, folder: Path, abserve: Sequence[str] = ABSERVE) -> SampleInputs | None:
    """Photographs for a registered model. None for a model that only the remote servers know. Raises `InputError`."""
    try:
        write_samples(experiment.model, folder, abserve)
    except InputError:
        if is_embedded(experiment.a) or is_embedded(experiment.b):
            raise
        return None
    return read_samples(folder, experiment.payload)


def synthesise_inputs(experiment: Experiment, folder: Path, signature: Signature) -> SampleInputs:
    """Seeded values by the server's own metadata."""
    write_synthetic(signature, folder, experiment.payload, experiment.seed)
    return read_samples(folder, experiment.payload)
