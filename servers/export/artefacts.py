"""Where artefacts lie, when one is up to date, and how one is made: `ROOT/<model>/<weights>/model.onnx`.

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
from servers.export.manifest import Manifest, ParityMeasurement, package_versions, read_manifest
from servers.export.onnx import OPSET, export_onnx
from servers.export.parity import COSINE_THRESHOLD, assert_parity, measure_parity
from servers.models.atomic_folder import FolderError, atomic_folder, file_sha256
from servers.models.specification import ModelSpecification
from servers.models.weights import CheckpointWeights, WeightsSource

if TYPE_CHECKING:
    import torch

ONNX_FILE = "model.onnx"
DEFAULT_ROOT = Path(".artefacts")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Artefact:
    """A file that an engine executes; `made_now` is False when it was already up to date."""

    path: Path
    manifest: Manifest
    made_now: bool


def artefact_folder(root: Path, specification: ModelSpecification, weights: WeightsSource) -> Path:
    """The folder of one model with one set of weights."""
    return root / specification.name / weights.slug


def find_artefact(root: Path, specification: ModelSpecification, weights: WeightsSource) -> Artefact | None:
    """The artefact if it is up to date, else None. Reads and hashes the whole file."""
    folder = artefact_folder(root, specification, weights)
    manifest = read_manifest(folder)
    if (
        manifest is None
        or manifest.model != specification.name
        or manifest.model_version != specification.version
        or manifest.weights != weights.label
        or manifest.weights_sha256 != _weights_sha256(weights)
        or manifest.versions != package_versions()
        or manifest.opset != OPSET
    ):
        return None
    path = folder / ONNX_FILE
    try:
        if path.stat().st_size != manifest.bytes or file_sha256(path) != manifest.sha256:
            return None
    except OSError:
        return None
    return Artefact(path, manifest, made_now=False)


def ensure_artefact(
    specification: ModelSpecification,
    weights: WeightsSource,
    root: Path = DEFAULT_ROOT,
    *,
    force: bool = False,
    progress: Progress = lambda _step: None,
) -> Artefact:
    """The up-to-date artefact, exported first when there is none or `force` is set.

    Another process that exports the same one is waited for. `progress` is told each step in a few words. Raises
    `ExportError` (`ParityError` among them), `WeightsError`, `EngineError` and `FolderError`.
    """
    folder = artefact_folder(root, specification, weights)
    with _exclusive(folder):
        progress("looking for an up-to-date artefact")
        found = None if force else find_artefact(root, specification, weights)
        return found or _make(specification, weights, folder, progress)


def _make(specification: ModelSpecification, weights: WeightsSource, folder: Path, progress: Progress) -> Artefact:
    progress(f"loading {weights.label}")
    module = specification.load_module(weights)
    parameter_bytes = sum(4 * parameter.numel() for parameter in module.parameters())
    with atomic_folder(folder, needed_bytes=parameter_bytes * 105 // 100) as fresh:
        path = fresh / ONNX_FILE
        progress("exporting to ONNX")
        seconds = export_onnx(specification, module, path)
        progress("comparing the file with torch")
        parity = _parity(specification, weights, module, path)
        manifest = Manifest(
            model=specification.name,
            model_version=specification.version,
            weights=weights.label,
            weights_sha256=_weights_sha256(weights),
            precision="fp32",
            versions=package_versions(),
            opset=OPSET,
            seconds=round(seconds, 3),
            file=ONNX_FILE,
            bytes=path.stat().st_size,
            sha256=file_sha256(path),
            parity_threshold=COSINE_THRESHOLD,
            parity=parity,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        manifest.write(fresh)
    return Artefact(folder / ONNX_FILE, manifest, made_now=True)


def _parity(
    specification: ModelSpecification, weights: WeightsSource, module: torch.nn.Module, path: Path
) -> tuple[ParityMeasurement, ...]:
    engine = OnnxRuntimeEngine(specification, weights, EngineSettings(kind="onnxruntime", device="cpu"), path)
    try:
        engine.load()
        measurements = measure_parity(specification, module, engine)
    finally:
        engine.close()
    assert_parity(measurements)
    return measurements


def _weights_sha256(weights: WeightsSource) -> str | None:
    return file_sha256(weights.path) if isinstance(weights, CheckpointWeights) else None


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
