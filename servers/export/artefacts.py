"""Where artefacts lie, when one is up to date, and how one is made.

    ROOT/<model>/<weights>/model.onnx                       FP32 weights
    ROOT/<model>/<weights>-fp16/model_fp16.onnx             FP16 weights
    ROOT/<model>_uint8/<weights>/model_uint8.onnx           the same with UINT8 input; model_uint8_fp16.onnx likewise

and with -fused behind the folder's name each of them with operators that only ONNX Runtime knows.

Each file has a folder and a manifest of its own.
An artefact is up to date when its manifest names the same model, weights and package versions, and the file's hash is
the manifest's. It appears whole, after its parity was proven, or not at all.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from servers.engines.onnxruntime import OnnxRuntimeEngine
from servers.engines.settings import EngineSettings
from servers.export.errors import ExportError
from servers.export.file_form import OPSETS, PLAIN, PRECISIONS, FileForm, executed_form
from servers.export.manifest import Manifest, ParityMeasurement, package_versions, read_manifest
from servers.export.onnx import write_onnx
from servers.export.parity import assert_parity, cosine_threshold, measure_parity
from servers.export.tensorrt_plan import plan_path
from servers.models.atomic_folder import FolderError, atomic_folder, file_sha256, remove_abandoned
from servers.models.specification import ModelSpecification
from servers.models.weights import PretrainedWeights, RandomWeights, WeightsError, WeightsSource, pin

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Artefact:
    """A file that an engine executes; `made_now` is False when it was already up to date."""

    path: Path
    manifest: Manifest
    made_now: bool


def onnx_name(payload: str, precision: str = "fp32") -> str:
    """model.onnx, model_uint8.onnx, model_fp16.onnx or model_uint8_fp16.onnx."""
    return "_".join(["model", *(part for part in (payload, precision) if part != "fp32")]) + ".onnx"


def artefact_folder(
    root: Path, specification: ModelSpecification, weights: WeightsSource, form: FileForm = PLAIN
) -> Path:
    """The folder of one model with one set of weights in one form."""
    return root / specification.name / f"{weights.slug}{form.suffix}"


def find_artefact(
    root: Path, specification: ModelSpecification, weights: WeightsSource, form: FileForm = PLAIN
) -> Artefact | None:
    """The artefact if it is up to date, else None. Reads and hashes the whole file. `weights` are pinned."""
    folder = artefact_folder(root, specification, weights, form)
    manifest = read_manifest(folder)
    if (
        manifest is None
        or manifest.model != specification.name
        or manifest.model_version != specification.version
        or manifest.payload != specification.payload
        or manifest.precision != form.precision
        or manifest.weights != weights.label
        or manifest.weights_sha256 != _weights_sha256(weights)
        or manifest.versions != package_versions()
        or manifest.opset != OPSETS.get(manifest.operators)
    ):
        return None
    path = folder / onnx_name(specification.payload, form.precision)
    try:
        if path.stat().st_size != manifest.bytes or file_sha256(path) != manifest.sha256:
            return None
    except OSError:
        return None
    return Artefact(path, manifest, made_now=False)


def ensure_artefact(
    specification: ModelSpecification,
    weights: WeightsSource,
    root: Path,
    *,
    form: FileForm = PLAIN,
    force: bool = False,
    progress: Progress = lambda _step: None,
) -> Artefact:
    """The up-to-date artefact, exported first when there is none or `force` is set.

    `specification` is one that an engine executes: FP32 or UINT8. Another process that exports the same one is waited
    for. `progress` is told each step in a few words. Raises `ExportError` (`ParityError` among them), `WeightsError`,
    `EngineError` and `FolderError`.
    """
    if specification.executed is not specification:
        raise ExportError(
            f"there is no file of {specification.name}, since JPEG files are decoded outside of the model; export the "
            "payload uint8, which is what it executes"
        )
    if form.precision not in PRECISIONS:
        raise ExportError(f"there is no file in precision {form.precision!r}; use one of: {', '.join(PRECISIONS)}")
    if form.operators not in OPSETS:
        raise ExportError(f"unknown operators {form.operators!r}; use one of: {', '.join(OPSETS)}")
    weights = pin(weights, specification.find_pretrained)
    folder = artefact_folder(root, specification, weights, form)
    with _exclusive(folder):
        remove_abandoned(folder)
        progress("looking for an up-to-date artefact")
        found = None if force else find_artefact(root, specification, weights, form)
        if found is None and not force:
            _refuse_another_file(folder, weights)
        return found or _make(specification, weights, form, folder, progress)


@dataclass(frozen=True, slots=True)
class ExecutedFile:
    """`manifest` is the file's own; a plan has none."""

    path: Path
    manifest: Manifest | None


def executed_file(
    engine: str,
    precision: str,
    specification: ModelSpecification,
    weights: WeightsSource,
    root: Path,
    progress: Progress = lambda _step: None,
) -> ExecutedFile:
    """What one of `KINDS_WITH_FILE` executes. Raises what `ensure_artefact` raises, `ExportError` without a plan.

    A plan belongs to the ONNX file that it was built from, so that one is looked for, and made, first.
    """
    form = executed_form(engine, precision)
    artefact = ensure_artefact(specification, weights, root, form=form, progress=progress)
    if engine != "tensorrt":
        return ExecutedFile(artefact.path, artefact.manifest)
    plan = plan_path(artefact.path)
    if not plan.is_file():
        raise ExportError(
            f"there is no TensorRT plan {plan}; make it with the same weights and artefacts: "
            f"abserve export --to tensorrt --model {specification.name} --precision {form.precision}"
        )
    return ExecutedFile(plan, None)


def _refuse_another_file(folder: Path, weights: WeightsSource) -> None:
    """A tag whose file changed since the last export is refused: the results of both would bear the same name."""
    manifest = read_manifest(folder)
    before = None if manifest is None else manifest.weights_sha256
    if isinstance(weights, PretrainedWeights) and before not in (None, weights.sha256):
        revision = f"@{manifest.weights_revision}" if manifest is not None and manifest.weights_revision else ""
        raise WeightsError(
            f"the file of {weights.tag} has SHA-256 {weights.sha256}, and the last export was made from {before}; keep "
            f"that one with --weights {weights.tag}{revision}@sha256:{before}, or take the new one with "
            f"abserve export --force --weights {weights.text}"
        )


def _make(
    specification: ModelSpecification, weights: WeightsSource, form: FileForm, folder: Path, progress: Progress
) -> Artefact:
    from servers.models.uint8_module import load_executed_module, tower_of

    progress(f"loading {weights.label}")
    module = load_executed_module(specification, weights)
    precision = form.precision
    name, threshold = onnx_name(specification.payload, precision), cosine_threshold(specification.payload, precision)
    parameter_bytes = sum(4 * parameter.numel() for parameter in module.parameters())
    with atomic_folder(folder, needed_bytes=parameter_bytes * 105 // 100) as fresh:
        path = fresh / name
        progress("exporting to ONNX")
        seconds, operators = write_onnx(specification, module, path, form)
        progress("comparing the file with torch")
        parity = _parity(specification, weights, tower_of(module), path, precision)
        assert_parity(parity, threshold)
        manifest = Manifest(
            model=specification.name,
            model_version=specification.version,
            weights=weights.label,
            weights_sha256=_weights_sha256(weights),
            weights_revision=weights.revision if isinstance(weights, PretrainedWeights) else None,
            payload=specification.payload,
            precision=precision,
            operators=operators,
            versions=package_versions(),
            opset=OPSETS[operators],
            seconds=round(seconds, 3),
            file=name,
            bytes=path.stat().st_size,
            sha256=file_sha256(path),
            parity_threshold=threshold,
            parity=parity,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        manifest.write(fresh)
    return Artefact(folder / name, manifest, made_now=True)


def _parity(
    specification: ModelSpecification, weights: WeightsSource, tower: torch.nn.Module, path: Path, precision: str
) -> tuple[ParityMeasurement, ...]:
    settings = EngineSettings(kind="onnxruntime", device="cpu", precision=precision)
    engine = OnnxRuntimeEngine(specification, weights, settings, path)
    try:
        engine.load()
        return measure_parity(specification, tower, engine)
    finally:
        engine.close()


def _weights_sha256(weights: WeightsSource) -> str | None:
    return None if isinstance(weights, RandomWeights) else weights.sha256


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock file beside `folder`; the system releases it when the process dies."""
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise FolderError(f"cannot write {lock.parent}: {exc.strerror}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
