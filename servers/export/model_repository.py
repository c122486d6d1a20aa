"""The repository for Triton's native backends: every file of it but the artefacts, which are made where they serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from servers.export.jpeg_config import MODEL_PY, ensemble_config, preprocess_config, preprocess_name
from servers.export.model_config import onnxruntime_config, tensorrt_config
from servers.models.specification import ModelSpecification

BACKENDS = ("onnx", "tensorrt")
"""Suffixes of the models' names."""


def write_model_repository(root: Path, specifications: Iterable[ModelSpecification]) -> tuple[Path, ...]:
    """Write `<model>_onnx` and `<model>_tensorrt` of every specification under `root`; the written files.

    For JPEG these are ensembles, and there is `<model>_preprocess`. Each has a version folder `1`, where an artefact
    belongs if the model has one; a `.gitkeep` keeps it where there is nothing else.
    """
    written = []
    for specification in specifications:
        for name, text, model_py in _models(specification):
            folder = root / name
            (folder / "1").mkdir(parents=True, exist_ok=True)
            beside = ("model.py", model_py) if model_py else (".gitkeep", "")
            for path, content in ((folder / "config.pbtxt", text), (folder / "1" / beside[0], beside[1])):
                path.write_text(content, encoding="utf-8")
                written.append(path)
    return tuple(written)


def _models(specification: ModelSpecification) -> Iterator[tuple[str, str, str]]:
    """Name, config and model.py of each."""
    if specification.payload != "jpeg":
        yield f"{specification.name}_onnx", onnxruntime_config(specification), ""
        yield f"{specification.name}_tensorrt", tensorrt_config(specification), ""
        return
    yield preprocess_name(specification), preprocess_config(specification), MODEL_PY
    for backend in BACKENDS:
        name, executing = f"{specification.name}_{backend}", f"{specification.executed.name}_{backend}"
        yield name, ensemble_config(specification, name, executing), ""
