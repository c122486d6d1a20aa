"""Lays out what a tritonserver reads: a model repository, a backend directory and a folder with libpython.

    FOLDER/models/<model>/config.pbtxt      generated, its parameters are what clients may read
    FOLDER/models/<model>/1/model.py        one import: the code is `servers.triton.python_model`
    FOLDER/models/<model>/1/engine.json     paths on this machine, which a published config must not show
    FOLDER/backends/python/                 links into the wheel, with the stub where Triton looks for it
    FOLDER/lib/libpython3.X.so.1.0          a link, so that the loader's path gains this one file and nothing else

Nothing of size is copied; the artefact stays where it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from servers.engines.settings import EngineSettings
from servers.export.triton_config import BatchingSettings, python_config
from servers.models.image_decoder import DecodingSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.triton.engine_parameters import EngineFile, parameters_from_payload, parameters_from_settings
from servers.triton.errors import TritonUnavailableError
from servers.triton.wheel import Wheel

MARKER = ".abserve-triton"
MODEL_PY = """# One import, so that one code serves every repository: what executes is servers.triton.python_model.
from servers.triton.python_model import TritonPythonModel as TritonPythonModel
"""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """One model of the repository; `manifest` belongs to the file at `artefact`, where the engine executes one."""

    specification: ModelSpecification
    artefact: Path | None = None
    manifest: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Repository:
    """A laid-out working folder."""

    models: Path
    backends: Path
    libraries: Path


def lay_out(
    folder: Path,
    wheel: Wheel,
    placed: Sequence[PlacedModel],
    weights: WeightsSource,
    engine: EngineSettings,
    batching: BatchingSettings,
    decoding: DecodingSettings,
) -> Repository:
    """Write everything anew under `folder`. `engine` has nothing left to choose (see `settings.resolve_engine`).

    Raises `TritonUnavailableError` where `folder` cannot be written, or holds anything that is not ours: a repository
    serves all it finds.
    """
    with _writing(folder):
        _claim(folder)
        models, backends, libraries = folder / "models", folder / "backends", folder / "lib"
        for path in (models, backends, libraries):
            shutil.rmtree(path, ignore_errors=True)
        for model in placed:
            version = models / model.specification.name / "1"
            version.mkdir(parents=True)
            sha256 = model.manifest.get("sha256") if model.manifest is not None else None
            parameters = {
                **parameters_from_settings(engine, weights, model.artefact, None if sha256 is None else str(sha256)),
                **parameters_from_payload(model.specification, decoding),
            }
            config = python_config(model.specification, batching, engine.device, parameters)
            (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
            (version / "model.py").write_text(MODEL_PY, encoding="utf-8")
            artefact = str(model.artefact.absolute()) if model.artefact else None
            (version / "engine.json").write_bytes(
                msgspec.json.encode(EngineFile(weights=weights.text, artefact=artefact))
            )

        backend = backends / "python"
        backend.mkdir(parents=True)
        for source in wheel.python_backend.iterdir():
            if source.is_file():
                (backend / source.name).symlink_to(source)
        (backend / wheel.stub.name).symlink_to(wheel.stub)
        libraries.mkdir()
        (libraries / wheel.libpython.name).symlink_to(wheel.libpython)
        return Repository(models=models, backends=backends, libraries=libraries)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise TritonUnavailableError(
            f"cannot write the working folder {folder}: {exc.strerror or exc}; give another one with --work-dir"
        ) from exc


def _claim(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MARKER).exists() and any(folder.iterdir()):
        raise TritonUnavailableError(
            f"the working folder {folder} holds other files, which would be removed; give --work-dir an empty folder"
        )
    (folder / MARKER).touch()
