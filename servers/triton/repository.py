"""Writes the working folder of a tritonserver: a model repository, a backend directory and a folder with libpython.

    FOLDER/models/<model>/config.pbtxt      generated; clients can read its parameters
    FOLDER/models/<model>/1/model.py        python backend: one import of `servers.triton.python_model`
    FOLDER/models/<model>/1/engine.json     paths on this machine, which a published config must not show
    FOLDER/models/<model>/1/model.onnx      native backends: a link to the exported file; or model.plan
    FOLDER/backends/<name>/                 links into an installation whose stub is elsewhere
    FOLDER/lib/libpython3.X.so.1.0          a link, so that the loader's path gains only this file

Nothing large is copied; the artefact stays in its place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from servers.engines.settings import SPINS, EngineSettings
from servers.export.triton_config import (
    BatchingSettings,
    artefact_name,
    ensemble_config,
    onnxruntime_config,
    preprocess_config,
    preprocess_files,
    preprocess_name,
    python_config,
    tensorrt_config,
)
from servers.models.image_decoder import DecodingSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights, WeightsSource
from servers.triton.engine_parameters import EngineFile, parameters_from_model, parameters_from_settings
from servers.triton.errors import TritonOptionError
from servers.triton.installation import Installation

MARKER = ".abserve-triton"
DECODING = DecodingSettings()
NATIVE = {"onnxruntime": (onnxruntime_config, "onnx"), "tensorrt": (tensorrt_config, "plan")}
ENDINGS = {"onnxruntime": "_onnx", "tensorrt": "_tensorrt"}
"""The names of a model behind the native backends."""
_PLAIN = re.compile(r"[\w./+,=@%-]+", re.ASCII)
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
class Serving:
    """How Triton executes every model of a repository; `engine` is resolved (see `settings.resolve_engine`)."""

    engine: EngineSettings
    weights: WeightsSource
    batching: BatchingSettings
    decoding: DecodingSettings = DECODING
    backend: str = "python"

    def name(self, specification: ModelSpecification) -> str:
        """The name under which Triton serves it."""
        ending = {"python": "", **ENDINGS}[self.backend]
        return specification.name + ending


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


def lay_out(folder: Path, installation: Installation, placed: Sequence[PlacedModel], serving: Serving) -> Repository:
    """Write `folder` anew. Raises `TritonOptionError` if it cannot be written or holds foreign files."""
    backends = installation.backend_folder if installation.stub_in_place else folder / "backends"
    repository = Repository(folder / "models", backends, folder / "lib")
    try:
        _prepare(folder, repository)
        for model in placed:
            place = _place_python if serving.backend == "python" else _place_native
            place(repository.models, model, serving)
        if not installation.stub_in_place:
            _link_backends(backends, installation)
        repository.libraries.mkdir()
        if installation.libpython is not None:
            (repository.libraries / installation.libpython.name).symlink_to(installation.libpython)
    except OSError as exc:
        raise TritonOptionError(
            f"cannot write the working folder {folder}: {exc.strerror or exc}; give another one with --work-dir"
        ) from exc
    return repository


def link_installation(folder: Path, installation: Installation) -> Repository:
    """Write `folder` anew without models, which are the user's. Raises `TritonOptionError` as `lay_out` does."""
    return lay_out(folder, installation, (), Serving(EngineSettings(), RandomWeights(0), BatchingSettings(1)))


def plain_path(path: Path) -> Path:
    """The path itself, or a link to it where it has characters that the python backend cannot take: it puts the path
    into a shell's command, and Python there imports only from paths in ASCII. Raises `TritonOptionError`."""
    if _PLAIN.fullmatch(str(path)):
        return path
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")):
        folder = Path(place) / f"abserve-paths-{os.getuid()}"
        if not _PLAIN.fullmatch(place):
            continue
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():
                continue
            link = folder / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
            if not link.is_symlink():
                with suppress(FileExistsError):  # made by another process at this moment
                    link.symlink_to(path.absolute())
            return link
    raise TritonOptionError(
        f"tritonserver cannot use {path}, whose name has blanks or letters beyond ASCII, and no folder for a link to "
        "it can be written; set TMPDIR to one"
    )


def _prepare(folder: Path, repository: Repository) -> None:
    assert_usable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    for path in (repository.models, folder / "backends", repository.libraries):
        shutil.rmtree(path, ignore_errors=True)


def _place_python(models: Path, model: PlacedModel, serving: Serving) -> None:
    engine, specification, parameters = serving.engine, model.specification, _parameters(model, serving)
    if engine.device == "cpu" and engine.kind in SPINS:
        parameters["spinning"] = "on" if engine.threads != 1 and engine.spinning is not False else "off"
    config = python_config(specification, serving.batching, engine.device, parameters, ragged=bool(engine.pad_to))
    artefact = str(model.artefact.absolute()) if model.artefact else None
    private = EngineFile(model=specification.reference, weights=serving.weights.text, artefact=artefact)
    _write(
        models / specification.name,
        config,
        {"model.py": MODEL_PY, "engine.json": msgspec.json.encode(private).decode()},
    )


def _place_native(models: Path, model: PlacedModel, serving: Serving) -> None:
    """The exported file behind a native backend; for JPEG the model that decodes, and the ensemble of both."""
    specification = replace(model.specification, max_batch_size=serving.batching.max_batch_size)
    executed = replace(specification.executed, max_batch_size=specification.max_batch_size)
    assert model.artefact is not None
    config_of, suffix = NATIVE[serving.backend]
    config = config_of(executed, serving.batching, serving.engine.device, _parameters(model, serving, executed))
    folder = models / serving.name(executed)
    _write(folder, config, {})
    artefact = folder / "1" / artefact_name(executed, suffix)
    if not artefact.is_symlink():  # JPEG and UINT8 execute the same file
        artefact.symlink_to(model.artefact.absolute())
    if specification.decodes_to is not None:
        name = serving.name(specification)
        decoding = serving.decoding
        decoder = preprocess_config(specification, decoding.thread_count, decoding.max_pixels)
        _write(models / preprocess_name(specification), decoder, preprocess_files(specification))
        _write(models / name, ensemble_config(specification, name, serving.name(executed)), {})


def _parameters(model: PlacedModel, serving: Serving, executed: ModelSpecification | None = None) -> dict[str, str]:
    return {
        **parameters_from_settings(serving.engine, serving.weights, model.artefact, _sha256(model)),
        **parameters_from_model(executed or model.specification, serving.engine.pad_to, serving.decoding),
    }


def _write(folder: Path, config: str, files: Mapping[str, str]) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    for name, content in files.items():
        (folder / "1" / name).write_text(content, encoding="utf-8")


def _link_backends(folder: Path, installation: Installation) -> None:
    """Every backend of the installation, and in the python backend's folder the stub for this Python."""
    folder.mkdir(parents=True)
    assert installation.stub is not None
    for source in map(installation.backend_folder.joinpath, installation.backends):
        if source.name != "python":
            (folder / source.name).symlink_to(source)
            continue
        (folder / "python").mkdir()
        for file in (*filter(Path.is_file, source.iterdir()), installation.stub):
            (folder / "python" / file.name).unlink(missing_ok=True)
            (folder / "python" / file.name).symlink_to(file)


def _sha256(model: PlacedModel) -> str | None:
    found = (model.manifest or {}).get("sha256")
    return None if found is None else str(found)
