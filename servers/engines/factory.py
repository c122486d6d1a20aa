"""Builds an engine from its settings, in the Python environment that has its libraries.

Only the module of the requested engine is imported. What cannot be installed beside the rest, such as JAX, is in a
second environment: `make engines` builds .venv-engines beside .venv. A process whose engine lives there continues in
it, with the same command and the same process ID.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from servers.engines.interface import Engine, export_command
from servers.engines.settings import EngineError, EngineSettings, engine_kind, engine_names
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource


def check_engine(specification: ModelSpecification, settings: EngineSettings) -> None:
    """Raise `EngineError` for settings or a variant that no machine can execute; imports no library."""
    settings.check()
    if specification.file is not None and settings.kind in ("torch", "aotinductor", "jax"):
        raise EngineError(
            f"{specification.name} is an ONNX file, which the {settings.kind} engine does not execute; use --engine "
            "onnxruntime"
        )
    if engine_kind(settings.kind).executes == "jax" and (reason := why_not_through_jax(specification)):
        raise EngineError(f"{reason}; use --engine onnxruntime")
    if specification.executed is not specification:
        raise EngineError(
            f"no engine decodes images; use {specification.executed.name} instead of {specification.name}"
        )


def engines_here(
    specification: ModelSpecification, settings: EngineSettings, names: Sequence[str] = ()
) -> dict[Literal["installed", "elsewhere", "missing"], list[str]]:
    """The engines that take the settings except for the kind, by whether they are installed, in the second environment
    (`elsewhere`), or in none; the engine null executes no model. Loads no library. Without `names` all are asked for,
    which starts the second environment once for each that is not installed."""
    places: dict[Literal["installed", "elsewhere", "missing"], list[str]]
    places = {"installed": [], "elsewhere": [], "missing": []}
    for name in names or engine_names():
        candidate = replace(settings, kind=name)
        with suppress(EngineError):
            check_engine(specification, candidate)
            candidate.check_here()
            if name == "null":
                continue
            try:
                places["installed" if environment_of(name) is None else "elsewhere"].append(name)
            except EngineError:
                places["missing"].append(name)
    return places


def why_not_through_jax(specification: ModelSpecification) -> str | None:
    """Why the model has no ONNX file made from its JAX function, as a clause; None for one that may have one."""
    if specification.file is not None:
        return f"{specification.name} is an ONNX file, which has no JAX function"
    for tensor in (*specification.inputs, *specification.outputs):
        if -1 in tensor.item_shape:
            return (
                f"{specification.name} cannot be exported through JAX: only its batch could have any size, and "
                f"{tensor.name} has items of several sizes"
            )
    return None


def build_engine(
    specification: ModelSpecification,
    weights: WeightsSource,
    settings: EngineSettings,
    artefact_path: Path | None = None,
) -> Engine:
    """The engine, not loaded yet. Raises `EngineError` for a wrong setting, a missing file or a missing library.
    `specification` is a variant that an engine executes (see `ModelSpecification.executed`). `artefact_path` is the
    ONNX file, the TensorRT plan or the package for the kinds that execute one; others ignore it."""
    check_engine(specification, settings)
    kind = engine_kind(settings.kind)
    if kind.executes is not None and artefact_path is None:
        command = export_command(specification, settings.kind)
        raise EngineError(f"the {settings.kind} engine needs an exported file; run: {command}")
    module, _, name = kind.engine.partition(":")
    try:
        engine: type[Engine] = getattr(import_module(module), name)
    except ImportError as exc:
        raise EngineError(f"the {settings.kind} engine needs {exc.name}; run: {kind.install}") from exc
    return engine(specification, settings, weights, artefact_path)


ENGINES_PYTHON = "ABSERVE_ENGINES_PYTHON"
"""Environment variable: the interpreter of the second environment, where it is not beside this one."""
_SECONDS = 60


def environment_of(name: str) -> Path | None:
    """The interpreter that has the libraries of an engine; None: this one has them. Raises `EngineError` with the
    command that installs them where no environment has them."""
    kind = engine_kind(name)
    return interpreter_with(name, kind.libraries, kind.install)


def interpreter_with(name: str, libraries: tuple[str, ...], install: str) -> Path | None:
    """As `environment_of`, of an engine that needs these libraries."""
    missing = [library for library in libraries if find_spec(library) is None]
    if not missing:
        return None
    other = second_interpreter()
    if other is not None and _has(other, libraries):
        return other
    raise EngineError(f"the {name} engine needs {missing[0]}, which is not installed; run: {install}")


def second_interpreter() -> Path | None:
    """The interpreter of the second environment; None where there is none, and in that environment itself."""
    path_text = os.environ.get(ENGINES_PYTHON)
    path = Path(path_text) if path_text else Path(f"{sys.prefix}-engines") / "bin" / "python"
    return path if path.is_file() and path.absolute() != Path(sys.executable).absolute() else None


def enter(other: Path | None) -> None:
    """Continue this command in another interpreter; None: in this one. Call it before anything is bound, started or
    printed."""
    if other is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(other, [str(other), *sys.orig_argv[1:]])


def _has(interpreter: Path, libraries: tuple[str, ...]) -> bool:
    program = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    try:
        done = subprocess.run([interpreter, "-P", "-c", program, *libraries], capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
