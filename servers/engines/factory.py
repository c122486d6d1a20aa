"""From settings to an engine; each kind's module is imported only when it is asked for."""

from __future__ import annotations

from pathlib import Path

from servers.engines.interface import Engine, EngineError
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource

KINDS = ("torch", "onnxruntime", "tensorrt", "null")
KINDS_WITH_FILE = ("onnxruntime", "tensorrt")
"""Those that execute an exported file, and not the model's own module."""
LIBRARIES = {"torch": ("torch", "open_clip"), "onnxruntime": ("onnxruntime",), "tensorrt": ("tensorrt",), "null": ()}
"""What a kind's `load` imports first; whoever times a start may import them beforehand."""


def build_engine(
    specification: ModelSpecification,
    weights: WeightsSource,
    settings: EngineSettings,
    artefact_path: Path | None = None,
) -> Engine:
    """The engine, not loaded yet. Raises `EngineError` for an unknown kind or a missing artefact.

    `specification` is a variant that an engine executes, FP32 or UINT8 (see `ModelSpecification.executed`).
    `artefact_path` is the ONNX file that the kind onnxruntime executes, or the plan of the kind tensorrt; the other
    kinds ignore it.
    """
    if specification.executed is not specification:
        raise EngineError(
            f"no engine decodes images: {specification.name} is executed as {specification.executed.name}"
        )
    if settings.max_batch_size < 1:
        raise EngineError(f"max_batch_size {settings.max_batch_size}: it must be at least 1")
    if settings.threads < 0:
        raise EngineError(f"threads {settings.threads}: it must be 0 (all cores) or more")
    match settings.kind:
        case "torch":
            from servers.engines.torch import TorchEngine

            return TorchEngine(specification, weights, settings)
        case "onnxruntime":
            from servers.engines.onnxruntime import OnnxRuntimeEngine

            if artefact_path is None:
                raise EngineError(
                    f"the onnxruntime engine needs an ONNX file; run: abserve export --model {specification.name}"
                )
            return OnnxRuntimeEngine(specification, weights, settings, artefact_path)
        case "tensorrt":
            from servers.engines.tensorrt import TensorRTEngine

            if artefact_path is None:
                raise EngineError(
                    f"the tensorrt engine needs a plan; run: abserve export --to tensorrt --model {specification.name}"
                )
            return TensorRTEngine(specification, weights, settings, artefact_path)
        case "null":
            from servers.engines.null import NullEngine

            return NullEngine(specification, settings)
        case _:
            raise EngineError(f"unknown engine {settings.kind!r}; use one of: {', '.join(KINDS)}")
