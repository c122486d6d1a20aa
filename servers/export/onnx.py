"""torch → ONNX, one self-contained file with a free batch dimension."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from servers.export.errors import ExportError
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import torch

OPSET = 18
"""Opset 23 would emit Attention operators, which not every runtime here is known to support."""

_EXAMPLE_BATCH = 2
"""With 1 torch.export takes the batch for a constant and freezes it."""

_CHATTY_LOGGERS = ("torch.onnx", "torch.export", "torch._dynamo", "onnxscript", "onnx_ir")


def export_onnx(specification: ModelSpecification, module: torch.nn.Module, path: Path) -> float:
    """Write `module` (FP32, eval, on the CPU) to `path`; returns the seconds taken.

    Raises `ExportError` when torch cannot export it, `OSError` when the file cannot be written.
    """
    import torch

    names = [tensor.name for tensor in specification.inputs]
    example = tuple(torch.zeros(_EXAMPLE_BATCH, *tensor.item_shape) for tensor in specification.inputs)
    started_ns = time.perf_counter_ns()
    with _quiet():
        try:
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=names,
                output_names=[tensor.name for tensor in specification.outputs],
                dynamic_shapes=tuple({0: "batch"} for _ in names),
            )
        except torch.onnx.OnnxExporterError as exc:
            raise ExportError(
                f"torch cannot export {specification.name} to ONNX: {str(exc).partition(chr(10))[0]}"
            ) from exc
        if program is None:
            raise ExportError("torch.onnx.export returned nothing; torch 2.9 or later is needed")
        # One file: Triton and people copy it about, and a forgotten second one fails late.
        program.save(path, external_data=False)
    return (time.perf_counter_ns() - started_ns) / 1e9


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints, logs and warns about its own internals; none of it is for the person who runs an export."""
    levels = {name: logging.getLogger(name).level for name in _CHATTY_LOGGERS}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
