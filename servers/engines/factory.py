"""Builds an engine from its settings; imports only the module of the requested kind."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from servers.engines.interface import Engine, EngineError, export_command
from servers.engines.settings import EngineSettings, engine_kind
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

    `specification` is a variant that an engine executes (see `ModelSpecification.executed`).
    `artefact_path` is the ONNX file, the TensorRT plan or the package for the kinds that execute one; others ignore it.
    """
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
