"""torch → ONNX, one self-contained file with a free batch dimension.

With standard operators it is torch's own export, converted for FP16; `servers.export.tower_graph` makes the graph of
fused ones.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.engines.interface import first_line
from servers.engines.onnxruntime import PRECISION_KEY
from servers.export.errors import ExportError
from servers.export.file_form import OPSETS, FileForm, Operators
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import torch

_EXAMPLE_BATCH = 2
"""With 1 torch.export takes the batch for a constant and freezes it."""

_ELEMENTWISE = frozenset({"Cast", "Transpose", "Div", "Mul", "Sub", "Add"})
"""The exporter's operators for `UInt8Images`; a convolution or a product ends this part of the graph."""

_CHATTY_LOGGERS = ("torch.onnx", "torch.export", "torch._dynamo", "onnxscript", "onnx_ir")


def write_onnx(
    specification: ModelSpecification, tower: torch.nn.Module, path: Path, form: FileForm
) -> tuple[float, Operators]:
    """Write `tower` (FP32, eval, on the CPU, taking normalised pixels) to `path`.

    Returns the seconds taken and the operators in the file: standard ones where the fused do not cover the model.
    Raises `ExportError` when torch cannot export it, `OSError` when the file cannot be written.
    """
    from servers.models.uint8_module import executed_module

    started_ns = time.perf_counter_ns()
    operators = Operators.FUSED
    if form.operators != operators or not _write_fused(specification, tower, path, form.precision):
        operators = Operators.STANDARD
        _export(specification, executed_module(specification, tower), path)
        if form.precision == "fp16":
            _convert_to_fp16(path)
    return (time.perf_counter_ns() - started_ns) / 1e9, operators


def _write_fused(specification: ModelSpecification, tower: torch.nn.Module, path: Path, precision: str) -> bool:
    """Write the fused graph; False for a model that it does not cover."""
    import onnx

    from servers.engines.vit.tower import UnsupportedTowerError
    from servers.export.tower_graph import tower_graph

    try:
        model = tower_graph(specification, tower, precision)
    except UnsupportedTowerError:
        return False
    if precision == "fp16":
        onnx.helper.set_model_props(model, {PRECISION_KEY: "fp16"})
    onnx.save(model, path)
    return True


def _export(specification: ModelSpecification, module: torch.nn.Module, path: Path) -> None:
    import torch

    names = [tensor.name for tensor in specification.inputs]
    example = tuple(
        torch.zeros(_EXAMPLE_BATCH, *tensor.item_shape, dtype=torch.uint8 if tensor.datatype == "UINT8" else None)
        for tensor in specification.inputs
    )
    with _quiet():
        try:
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                verbose=False,
                opset_version=OPSETS[Operators.STANDARD],
                input_names=names,
                output_names=[tensor.name for tensor in specification.outputs],
                dynamic_shapes=tuple({0: "batch"} for _ in names),
            )
        except torch.onnx.OnnxExporterError as exc:
            raise ExportError(f"torch cannot export {specification.name} to ONNX: {first_line(exc)}") from exc
        if program is None:
            raise ExportError("torch.onnx.export returned nothing; install torch 2.9 or later")
        # One file: Triton and people copy it, and a forgotten second one fails late.
        program.save(path, external_data=False)


def _convert_to_fp16(path: Path) -> None:
    """Rewrite an exported FP32 file with FP16 weights and arithmetic; inputs and outputs keep their types.

    The nodes that normalise bytes stay FP32: an FP16 pixel is precise enough, but its computation in FP16 is not.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(path)
    with _quiet():
        model = convert_float_to_float16(
            model, keep_io_types=True, disable_shape_infer=True, node_block_list=_normalisation(model.graph)
        )
    onnx.helper.set_model_props(model, {PRECISION_KEY: "fp16"})
    onnx.save(model, path)


def _normalisation(graph: Any) -> list[str]:
    """Names of the nodes between a UINT8 input and the first one that reads a weight matrix."""
    import onnx

    reached = {i.name for i in graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.UINT8}
    names = []
    for node in graph.node:  # in topological order, as ONNX demands
        if reached.intersection(node.input) and node.op_type in _ELEMENTWISE:
            reached.update(node.output)
            names.append(node.name)
    return names


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's prints, logs and warnings, which are about its own internals."""
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
