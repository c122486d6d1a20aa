"""torch → ONNX, one self-contained file with a free batch dimension.

With standard operators it is what torch exports, for FP16 converted; with fused ones `servers.export.tower_graph` makes
the graph.
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

from servers.engines.onnxruntime import PRECISION_KEY
from servers.export.errors import ExportError
from servers.export.file_form import FUSED, OPSETS, STANDARD, FileForm
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import torch

_EXAMPLE_BATCH = 2
"""With 1 torch.export takes the batch for a constant and freezes it."""

_ELEMENTWISE = frozenset({"Cast", "Transpose", "Div", "Mul", "Sub", "Add"})
"""What the exporter makes of `UInt8Images`; a convolution or a product is none of these and ends it."""

_CHATTY_LOGGERS = ("torch.onnx", "torch.export", "torch._dynamo", "onnxscript", "onnx_ir")


def write_onnx(
    specification: ModelSpecification, module: torch.nn.Module, path: Path, form: FileForm
) -> tuple[float, str]:
    """Write `module` (FP32, eval, on the CPU, taking the specification's input) to `path`.

    Returns the seconds taken and the operators in the file: the standard ones where the fused do not cover the model.
    Raises `ExportError` when torch cannot export it, `OSError` when the file cannot be written.
    """
    started_ns = time.perf_counter_ns()
    operators = STANDARD
    if form.operators == FUSED and _write_fused(specification, module, path, form.precision):
        operators = FUSED
    else:
        export_onnx(specification, module, path)
        if form.precision == "fp16":
            convert_to_fp16(path)
    return (time.perf_counter_ns() - started_ns) / 1e9, operators


def _write_fused(specification: ModelSpecification, module: torch.nn.Module, path: Path, precision: str) -> bool:
    """False for a model that is not covered."""
    import onnx

    from servers.engines.vit.tower import UnsupportedTowerError
    from servers.export.tower_graph import tower_graph
    from servers.models.uint8_module import tower_of

    try:
        model = tower_graph(specification, tower_of(module), precision)
    except UnsupportedTowerError:
        return False
    if precision == "fp16":
        onnx.helper.set_model_props(model, {PRECISION_KEY: "fp16"})
    onnx.save(model, path)
    return True


def export_onnx(specification: ModelSpecification, module: torch.nn.Module, path: Path) -> None:
    """Write `module` (FP32, eval, on the CPU, taking the specification's input) to `path` as torch exports it.

    Raises `ExportError` when torch cannot export it, `OSError` when the file cannot be written.
    """
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
                opset_version=OPSETS[STANDARD],
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


def convert_to_fp16(path: Path) -> None:
    """Rewrite an exported FP32 file with FP16 weights and arithmetic; inputs and outputs keep their types.

    What turns bytes into normalised pixels stays FP32: an FP16 pixel is precise enough, an FP16 way to it loses more.
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
