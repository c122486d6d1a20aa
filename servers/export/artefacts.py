"""Where artefacts lie, when one is up to date, and how one is made.

    ROOT/<model>/<weights>/model.onnx                       FP32 weights
    ROOT/<model>/<weights>-fp16/model_fp16.onnx             FP16 weights
    ROOT/<model>/<weights>-int8/model_int8.onnx             INT8 weights and activations
    ROOT/<model>_uint8/<weights>/model_uint8.onnx           UINT8 input; with FP16 weights model_uint8_fp16.onnx
    ROOT/<model>/<weights>-fused/model.onnx                 ONNX Runtime's own operators; other forms have -fused, too
    ROOT/<model>/<weights>-package-<processor>/model.pt2    torch's package, see `servers.export.torch_export`
    ROOT/<model>/<weights>-jax/model.onnx                   from its JAX function; other forms have -jax, too
    ROOT/<model>-<hash of its path>/…                       a model from a file of the user

Each file has its own folder and manifest. An artefact is up to date when its manifest names the same model, weights and
package versions and the file has the manifest's hash; for a model from the user's file that has to be the same, too. It
appears whole, after its parity check, or not at all. A user's ONNX file is executed unchanged and gets no folder.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.engines.agreement import TOLERANCE, Answer
from servers.engines.factory import build_engine, why_not_through_jax
from servers.engines.interface import Engine
from servers.engines.onnxruntime import stored_precision
from servers.engines.settings import KINDS, EngineSettings, engine_kind
from servers.export.manifest import (
    FUSED,
    JAX,
    OPSETS,
    PACKAGE,
    PLAIN,
    PRECISIONS,
    STANDARD,
    ExportError,
    FileForm,
    Manifest,
    executed_form,
    package_versions,
    read_manifest,
)
from servers.export.parity import assert_parity, measure_parity
from servers.export.quantisation import quantise
from servers.export.tensorrt import PlanRequest, bindings_version, ensure_plan, gpu_kind, profile_shapes
from servers.export.torch_export import convert_to_fp16, package_target, weight_bytes, write_onnx, write_package
from servers.models.files import (
    atomic_folder,
    exclusive,
    file_sha256,
    known_sha256,
    onnx_parts,
    remove_abandoned,
)
from servers.models.specification import ModelSpecification, choose_from, reason_of
from servers.models.weights import PretrainedWeights, RandomWeights, WeightsError, WeightsSource, pin
from servers.options import defaults

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Artefact:
    """An exported file; `made_now` is False when it was already up to date."""

    path: Path
    manifest: Manifest
    made_now: bool


def artefact_folder(
    root: Path, specification: ModelSpecification, weights: WeightsSource, form: FileForm = PLAIN
) -> Path:
    """The folder of one model with one set of weights in one form."""
    from_file = specification.definition_sha256 is not None
    of_path = f"-{hashlib.sha256(specification.reference.encode()).hexdigest()[:12]}" if from_file else ""
    return root / f"{specification.name}{of_path}" / f"{weights.slug}{form.suffix}"


def plan_request(
    root: Path,
    specification: ModelSpecification,
    weights: WeightsSource,
    artefact: Artefact,
    precision: str,
    max_batch_size: int,
    release: str,
) -> PlanRequest:
    """The TensorRT plan of an artefact on this machine's GPU; also that of a user's ONNX file lies under `root`."""
    folder = artefact_folder(root, specification, weights, executed_form("tensorrt", precision))
    return PlanRequest(
        artefact.path,
        artefact.manifest.sha256,
        folder.with_name(f"{folder.name}-tensorrt"),
        precision,
        profile_shapes(specification, max_batch_size),
        release,
        gpu_kind(),
    )


def find_artefact(
    root: Path, specification: ModelSpecification, weights: WeightsSource, form: FileForm = PLAIN
) -> Artefact | None:
    """The artefact if it is up to date, else None. Hashes a file that has changed since. `weights` are pinned."""
    folder = artefact_folder(root, specification, weights, form)
    manifest = read_manifest(folder)
    required = _required(specification, weights, form)
    if manifest is None or any(getattr(manifest, name) != value for name, value in required.items()):
        return None
    path = folder / _file_name(specification, form)
    try:
        if (
            (specification.file is None and manifest.opset != OPSETS.get(manifest.operators))
            or path.stat().st_size != manifest.bytes
            or known_sha256(path) != manifest.sha256
        ):
            return None
    except OSError:
        return None
    return Artefact(path, manifest, made_now=False)


def check_form(specification: ModelSpecification, form: FileForm) -> None:
    """Raise `ExportError` for a variant or a form without a file."""
    if specification.executed is not specification:
        raise ExportError(
            f"{specification.name} has no exported file, since JPEG files are decoded outside the model; "
            "export the payload uint8, which it executes"
        )
    if form.operators == PACKAGE:
        if specification.file is not None:
            raise ExportError(f"{specification.name} is an ONNX file, of which torch makes no package; use --to onnx")
        return
    if form.precision not in PRECISIONS:
        raise ExportError(f"no file has the precision {form.precision!r}; {choose_from(form.precision, PRECISIONS)}")
    if form.operators not in OPSETS:
        raise ExportError(f"unknown operators {form.operators!r}; {choose_from(form.operators, OPSETS)}")
    if form.precision == "int8" and form.operators != STANDARD:
        raise ExportError("an INT8 file has standard operators; leave --operators out")
    if form.operators == JAX and (reason := why_not_through_jax(specification)):
        raise ExportError(f"{reason}; use --operators standard")


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

    `specification` is one that an engine executes, not one for JPEG. Waits for another process that exports the same
    one. `progress` gets each step in a few words. Raises `ExportError`, also for a file that does not compute the same
    as the model, `WeightsError`, `EngineError` and `FolderError`.
    """
    check_form(specification, form)
    weights = pin(weights, specification.find_pretrained)
    if not specification.fused_tower and form.operators == FUSED:
        form = FileForm(form.precision)
    if users := _users_file(specification, weights, form):
        return users
    folder = artefact_folder(root, specification, weights, form)
    with exclusive(folder):
        remove_abandoned(folder)
        if not force:
            progress("checking the existing artefact")
            if artefact := find_artefact(root, specification, weights, form):
                return artefact
            _refuse_another_file(folder, weights)
        source = None
        if form.precision == "int8" or specification.file is not None:
            source = ensure_artefact(specification, weights, root, progress=progress)
        return _make(specification, weights, form, folder, progress, source)


def executed_file(
    engine: str,
    precision: str,
    specification: ModelSpecification,
    weights: WeightsSource,
    root: Path,
    progress: Progress = lambda _step: None,
    *,
    max_batch_size: int = defaults.MAX_BATCH_SIZE,
    release: str | None = None,
) -> tuple[Path, Manifest | None]:
    """The file for an engine that executes one, made first when it is missing or out of date, and its manifest, which a
    TensorRT plan has not. `release` is the TensorRT that executes a plan; default: Python's. Raises the errors of
    `ensure_artefact` and `ensure_plan`."""
    of_plans = engine_kind(engine).engine == KINDS["tensorrt"].engine
    plan_release = (release or bindings_version() or _imported_release()) if of_plans else ""
    form = executed_form(engine, precision)
    if form.operators == PACKAGE:
        form = replace(form, target=package_target())
    artefact = ensure_artefact(specification, weights, root, form=form, progress=progress)
    if not plan_release:
        return artefact.path, artefact.manifest
    request = plan_request(root, specification, weights, artefact, precision, max_batch_size, plan_release)
    ensure_plan(request, progress)
    return request.path, None


def current_plan(
    precision: str,
    specification: ModelSpecification,
    weights: WeightsSource,
    root: Path,
    max_batch_size: int,
    release: str | None,
) -> Path | None:
    """The TensorRT plan that `executed_file` would return without building anything. `weights` are pinned."""
    form = executed_form("tensorrt", precision)
    artefact = _users_file(specification, weights, form) or find_artefact(root, specification, weights, form)
    if artefact is None or release is None:
        return None
    plan = plan_request(root, specification, weights, artefact, precision, max_batch_size, release).path
    return plan if plan.is_file() else None


def _imported_release() -> str:
    """The version of a `tensorrt` that no package manager installed. Raises `EngineError` without one."""
    from servers.engines.tensorrt import import_tensorrt

    return ".".join(str(import_tensorrt().__version__).split(".")[:3])


def _users_file(specification: ModelSpecification, weights: WeightsSource, form: FileForm) -> Artefact | None:
    """The user's ONNX file if it has the requested form; None if a file must be made."""
    if specification.file is None:
        return None
    manifest = users_manifest(specification, weights, specification.file)
    if manifest.precision == form.precision:
        return Artefact(specification.file, manifest, made_now=False)
    if manifest.precision != "fp32":
        raise ExportError(f"{specification.file.name} holds {manifest.precision}; use --precision {manifest.precision}")
    return None


def _file_name(specification: ModelSpecification, form: FileForm) -> str:
    if form.operators == PACKAGE:
        return "model.pt2"
    parts = (part for part in (specification.payload, form.precision) if part in ("uint8", "fp16", "int8"))
    return "_".join(["model", *parts]) + ".onnx"


def _required(specification: ModelSpecification, weights: WeightsSource, form: FileForm) -> dict[str, Any]:
    """The fields of the manifest that an up-to-date artefact must have."""
    return {
        "model": specification.name,
        "model_version": specification.version,
        "model_sha256": specification.definition_sha256,
        "payload": specification.payload,
        "precision": form.precision,
        "kind": "aotinductor" if form.operators == PACKAGE else "onnx",
        "target": form.target,
        "weights": weights.label,
        "weights_sha256": None if isinstance(weights, RandomWeights) else weights.sha256,
        "versions": package_versions(),
    }


def users_manifest(specification: ModelSpecification, weights: WeightsSource, path: Path) -> Manifest:
    """The manifest of a user's ONNX file that is executed unchanged; its size and hash include external data. Raises
    `ExportError` for a file that is missing or not an ONNX file."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
        parts = onnx_parts(path, model)
        sha256, states = known_sha256(*parts), [part.stat() for part in parts]
    except OSError as exc:
        raise ExportError(f"cannot read {exc.filename or path}: {exc.strerror or exc}") from exc
    except Exception as exc:  # protobuf's DecodeError, of which each implementation has its own
        raise ExportError(f"{path.name} is not an ONNX file: {reason_of(exc)}") from exc
    modified = datetime.fromtimestamp(max(state.st_mtime for state in states), UTC)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    return Manifest(
        **_required(specification, weights, FileForm(stored_precision(model))),
        operators=FUSED if "com.microsoft" in opsets else STANDARD,
        opset=opsets.get("", 0),
        seconds=0.0,
        file=path.name,
        bytes=sum(state.st_size for state in states),
        sha256=sha256,
        parity=(),
        created_at=modified.isoformat(timespec="seconds"),
    )


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
    specification: ModelSpecification,
    weights: WeightsSource,
    form: FileForm,
    folder: Path,
    progress: Progress,
    source: Artefact | None,
) -> Artefact:
    """Write the file, compare it with the model, and put both it and its manifest into `folder`. `source` is the FP32
    file that an INT8 one, or another one of a user's file, is made from."""
    name = _file_name(specification, form)
    with (
        _original(specification, weights, progress) as (module, answers),
        atomic_folder(folder, needed_bytes=_needed_bytes(module, source) * 105 // 100) as fresh,
    ):
        path = fresh / name
        started_ns = time.perf_counter_ns()
        written = _write(specification, module, path, form, progress, source)
        seconds = (time.perf_counter_ns() - started_ns) / 1e9
        progress("comparing the file with the model")
        with _loaded(specification, weights, path, form) as engine:
            parity = measure_parity(specification, answers, engine, form.precision)
        assert_parity(parity)
        manifest = Manifest(
            **_required(specification, weights, form),
            weights_revision=weights.revision if isinstance(weights, PretrainedWeights) else None,
            seconds=round(seconds, 3),
            **written,
            file=name,
            bytes=path.stat().st_size,
            sha256=file_sha256(path),
            parity_tolerance=TOLERANCE[form.precision],
            parity=parity,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        manifest.write(fresh)
    return Artefact(folder / name, manifest, made_now=True)


@contextmanager
def _original(
    specification: ModelSpecification, weights: WeightsSource, progress: Progress
) -> Iterator[tuple[torch.nn.Module | None, Answer]]:
    """What a file is made from: the model's own module, or None for the user's FP32 file; and its answers."""
    if (file := specification.file) is not None:
        with _loaded(specification, weights, file, PLAIN) as engine:
            yield None, engine.infer
        return
    from servers.engines.torch.forms import expected_answers

    progress(f"loading {weights.label}")
    module = specification.load_module(weights)
    yield module, partial(expected_answers, specification, module)


def _needed_bytes(module: torch.nn.Module | None, source: Artefact | None) -> int:
    if source is not None:
        return source.manifest.bytes
    assert module is not None
    return weight_bytes(module)


def _write(
    specification: ModelSpecification,
    module: torch.nn.Module | None,
    path: Path,
    form: FileForm,
    progress: Progress,
    source: Artefact | None,
) -> dict[str, Any]:
    """Write the file to `path`; returns what the manifest says of the file's operators."""
    if source is not None:
        written = {"operators": source.manifest.operators, "opset": source.manifest.opset}
        if form.precision == "int8":
            progress(f"quantising {source.path.name} to INT8")
            return {"quantisation": quantise(specification, source.path, path), **written}
        progress(f"converting {source.path.name} to FP16")
        convert_to_fp16(source.path, path)
        return written
    assert module is not None
    if form.operators == PACKAGE:
        progress("compiling with AOTInductor")
        write_package(specification, module, path)
        return {"operators": PACKAGE}
    progress("exporting to ONNX")
    operators = write_onnx(specification, module, path, form)
    return {"operators": operators, "opset": OPSETS[operators]}


@contextmanager
def _loaded(specification: ModelSpecification, weights: WeightsSource, path: Path, form: FileForm) -> Iterator[Engine]:
    kind = "aotinductor" if form.operators == PACKAGE else "onnxruntime"
    settings = EngineSettings(kind=kind, device="cpu", precision=form.precision)
    with closing(build_engine(specification, weights, settings, path)) as engine:
        engine.load()
        yield engine
