"""Where artefacts lie, when one is up to date, and how one is made.

    ROOT/<model>/<weights>/model.onnx                       FP32 weights
    ROOT/<model>/<weights>-fp16/model_fp16.onnx             FP16 weights
    ROOT/<model>_uint8/<weights>/model_uint8.onnx           UINT8 input; with FP16 weights model_uint8_fp16.onnx
    ROOT/<model>/<weights>-fused/model.onnx                 ONNX Runtime's own operators; other forms have -fused, too

Each file has its own folder and manifest. An artefact is up to date when its manifest names the same model, weights and
package versions and the file has the manifest's hash. It appears whole, after its parity check, or not at all.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.export.errors import ExportError
from servers.export.file_form import OPSETS, PLAIN, PRECISIONS, FileForm, Operators, executed_form
from servers.export.manifest import Manifest, ParityMeasurement, package_versions, read_manifest
from servers.export.onnx import write_onnx
from servers.export.parity import assert_parity, cosine_threshold, measure_parity
from servers.export.tensorrt_plan import plan_path
from servers.models.atomic_folder import FolderError, atomic_folder, file_sha256, remove_abandoned
from servers.models.specification import ModelSpecification, choose_from
from servers.models.weights import PretrainedWeights, RandomWeights, WeightsError, WeightsSource, pin

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Artefact:
    """An exported file; `made_now` is False when it was already up to date."""

    path: Path
    manifest: Manifest
    made_now: bool


@dataclass(frozen=True, slots=True)
class ExecutedFile:
    """The file that an engine executes; a TensorRT plan has no manifest."""

    path: Path
    manifest: Manifest | None


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
    required = _required(specification, weights, form)
    if manifest is None or any(getattr(manifest, name) != value for name, value in required.items()):
        return None
    path = folder / _file_name(specification, form)
    try:
        if (
            manifest.opset != OPSETS.get(Operators(manifest.operators))
            or path.stat().st_size != manifest.bytes
            or file_sha256(path) != manifest.sha256
        ):
            return None
    except (OSError, ValueError):
        return None
    return Artefact(path, manifest, made_now=False)


def check_form(specification: ModelSpecification, form: FileForm) -> None:
    """Raise `ExportError` for a variant, a precision or operators without a file."""
    if specification.executed is not specification:
        raise ExportError(
            f"{specification.name} has no exported file, since JPEG files are decoded outside the model; "
            "export the payload uint8, which it executes"
        )
    if form.precision not in PRECISIONS:
        raise ExportError(f"no file has the precision {form.precision!r}; {choose_from(form.precision, PRECISIONS)}")
    if form.operators not in OPSETS:
        raise ExportError(f"unknown operators {form.operators!r}; {choose_from(form.operators, OPSETS)}")


def ensure_artefact(
    specification: ModelSpecification,
    weights: WeightsSource,
    root: Path,
    *,
    form: FileForm = PLAIN,
    force: bool = False,
    progress: Progress = lambda _step: None,
) -> Artefact:
    """The up-to-date artefact; exports it first when it is missing or out of date, or `force` is set.

    `specification` is one that an engine executes: FP32 or UINT8. Waits for another process that exports the same one.
    `progress` gets each step in a few words. Raises `ExportError` (`ParityError` among them), `WeightsError`,
    `EngineError` and `FolderError`.
    """
    check_form(specification, form)
    weights = pin(weights, specification.find_pretrained)
    folder = artefact_folder(root, specification, weights, form)
    with _exclusive(folder):
        remove_abandoned(folder)
        if not force:
            progress("checking the existing artefact")
            if found := find_artefact(root, specification, weights, form):
                return found
            _refuse_another_file(folder, weights)
        return _make(specification, weights, form, folder, progress)


def executed_file(
    engine: str,
    precision: str,
    specification: ModelSpecification,
    weights: WeightsSource,
    root: Path,
    progress: Progress = lambda _step: None,
) -> ExecutedFile:
    """The file for one of `KINDS_WITH_FILE`. Raises the errors of `ensure_artefact`, `ExportError` without a plan.

    A plan belongs to the ONNX file that it was built from, so that file is found, or made, first.
    """
    form = executed_form(engine, precision)
    artefact = ensure_artefact(specification, weights, root, form=form, progress=progress)
    if engine != "tensorrt":
        return ExecutedFile(artefact.path, artefact.manifest)
    plan = plan_path(artefact.path)
    if not plan.is_file():
        raise ExportError(
            f"there is no TensorRT plan {plan}; build it with the same weights and artefacts: "
            f"abserve export --to tensorrt --model {specification.name} --precision {form.precision}"
        )
    return ExecutedFile(plan, None)


def _file_name(specification: ModelSpecification, form: FileForm) -> str:
    parts = (part for part in (specification.payload, form.precision) if part != "fp32")
    return "_".join(["model", *parts]) + ".onnx"


def _required(specification: ModelSpecification, weights: WeightsSource, form: FileForm) -> dict[str, Any]:
    """The fields of the manifest that an up-to-date artefact must have."""
    return {
        "model": specification.name,
        "model_version": specification.version,
        "payload": specification.payload,
        "precision": form.precision,
        "weights": weights.label,
        "weights_sha256": None if isinstance(weights, RandomWeights) else weights.sha256,
        "versions": package_versions(),
    }


def _refuse_another_file(folder: Path, weights: WeightsSource) -> None:
    """Refuse a tag whose file changed since the last export: results of both files would have the same name."""
    manifest = read_manifest(folder)
    if manifest is None or not isinstance(weights, PretrainedWeights):
        return
    if (before := manifest.weights_sha256) not in (None, weights.sha256):
        revision = f"@{manifest.weights_revision}" if manifest.weights_revision else ""
        raise WeightsError(
            f"the file of {weights.tag} has SHA-256 {weights.sha256}, but the last export was made from {before}; keep "
            f"the old one with --weights {weights.tag}{revision}@sha256:{before}, or take the new one with "
            f"abserve export --force --weights {weights.text}"
        )


def _make(
    specification: ModelSpecification, weights: WeightsSource, form: FileForm, folder: Path, progress: Progress
) -> Artefact:
    progress(f"loading {weights.label}")
    tower = specification.load_module(weights)
    name, threshold = _file_name(specification, form), cosine_threshold(specification.payload, form.precision)
    parameter_bytes = sum(4 * parameter.numel() for parameter in tower.parameters())
    with atomic_folder(folder, needed_bytes=parameter_bytes * 105 // 100) as fresh:
        path = fresh / name
        progress("exporting to ONNX")
        seconds, operators = write_onnx(specification, tower, path, form)
        progress("comparing the file with torch")
        parity = _parity(specification, weights, tower, path, form.precision)
        assert_parity(parity, threshold)
        manifest = Manifest(
            **_required(specification, weights, form),
            weights_revision=weights.revision if isinstance(weights, PretrainedWeights) else None,
            operators=operators,
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
    engine = build_engine(specification, weights, settings, path)
    try:
        engine.load()
        return measure_parity(specification, tower, engine)
    finally:
        engine.close()


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
