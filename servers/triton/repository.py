"""Writes the working folder of a tritonserver: a model repository, a backend directory and a folder with libpython.

    FOLDER/models/<model>/config.pbtxt      generated; clients can read its parameters
    FOLDER/models/<model>/1/model.py        one import of `servers.triton.python_model`
    FOLDER/models/<model>/1/engine.json     paths on this machine, which a published config must not show
    FOLDER/backends/<name>/                 links into the installation, the stub in the place where Triton looks for it
    FOLDER/lib/libpython3.X.so.1.0          a link, so that the loader's path gains only this file

Nothing large is copied; the artefact stays in its place.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from servers.engines.settings import EngineSettings
from servers.export.triton_config import BatchingSettings, python_config
from servers.models.image_decoder import DecodingSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.triton.engine_parameters import EngineFile, parameters_from_model, parameters_from_settings
from servers.triton.errors import TritonOptionError
from servers.triton.installation import STUB, Installation

MARKER = ".abserve-triton"
MODEL_PY = """# The code is servers.triton.python_model, for every repository.
from servers.triton.python_model import TritonPythonModel as TritonPythonModel
"""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """One model of the repository, and the exported file with its manifest if the engine executes one."""

    specification: ModelSpecification
    artefact: Path | None = None
    manifest: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Repository:
    """The folders in a working folder."""

    models: Path
    backends: Path
    libraries: Path


def assert_usable(folder: Path) -> None:
    """Raise `TritonOptionError` if `folder` holds foreign files: Triton serves everything that it finds."""
    if folder.is_dir() and not (folder / MARKER).exists() and any(folder.iterdir()):
        raise TritonOptionError(
            f"the working folder {folder} holds other files, which would be removed; give --work-dir an empty folder"
        )


def lay_out(
    folder: Path,
    installation: Installation,
    placed: Sequence[PlacedModel],
    weights: WeightsSource,
    engine: EngineSettings,
    batching: BatchingSettings,
    decoding: DecodingSettings,
) -> Repository:
    """Write `folder` anew; `engine` is resolved (see `settings.resolve_engine`).

    Raises `TritonOptionError` if `folder` cannot be written or holds foreign files.
    """
    repository = Repository(folder / "models", folder / "backends", folder / "lib")
    try:
        assert_usable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
        for path in (repository.models, repository.backends, repository.libraries):
            shutil.rmtree(path, ignore_errors=True)
        for model in placed:
            parameters = {
                **parameters_from_settings(engine, weights, model.artefact, _sha256(model)),
                **parameters_from_model(model.specification, engine.pad_to, decoding),
            }
            ragged = bool(engine.pad_to)
            config = python_config(model.specification, batching, engine.device, parameters, ragged=ragged)
            artefact = str(model.artefact.absolute()) if model.artefact else None
            version = repository.models / model.specification.name / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
            (version / "model.py").write_text(MODEL_PY, encoding="utf-8")
            private = EngineFile(model=model.specification.reference, weights=weights.text, artefact=artefact)
            (version / "engine.json").write_bytes(msgspec.json.encode(private))
        _link_backends(repository.backends, installation)
        repository.libraries.mkdir()
        if installation.libpython is not None:
            (repository.libraries / installation.libpython.name).symlink_to(installation.libpython)
    except OSError as exc:
        raise TritonOptionError(
            f"cannot write the working folder {folder}: {exc.strerror or exc}; give another one with --work-dir"
        ) from exc
    return repository


def _link_backends(folder: Path, installation: Installation) -> None:
    """Every backend of the installation, and in the python backend's folder the stub for this Python."""
    folder.mkdir(parents=True)
    for name, source in installation.backends.items():
        if name != "python" or installation.stub is None:
            (folder / name).symlink_to(source)
            continue
        (folder / name).mkdir()
        for file in source.iterdir():
            if file.name != STUB and not file.is_dir():
                (folder / name / file.name).symlink_to(file)
        (folder / name / STUB).symlink_to(installation.stub)


def _sha256(model: PlacedModel) -> str | None:
    found = (model.manifest or {}).get("sha256")
    return None if found is None else str(found)
