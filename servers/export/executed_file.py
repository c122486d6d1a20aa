"""The file that an engine executes: an ONNX file is made when it is missing, a TensorRT plan has to be there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from servers.export.artefacts import Progress, ensure_artefact
from servers.export.errors import ExportError
from servers.export.file_form import executed_form
from servers.export.manifest import Manifest
from servers.export.tensorrt_plan import plan_path
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource


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
