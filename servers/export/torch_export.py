"""Writes torch's modules as files whose batch and axes are free dimensions: ONNX, and packages of machine code.

ONNX with standard operators is torch's own export, converted for FP16; `servers.export.tower_graph` makes the graph of
fused ones, `servers.export.jax_graph` that of the model's JAX function. A package comes from torch.export and
AOTInductor; it runs only with the torch that made it, on a CPU with the instructions that it was compiled for
(`package_target`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.engines.batches import random_inputs
from servers.engines.onnxruntime import mark_precision
from servers.export.manifest import FUSED, JAX, OPSETS, STANDARD, ExportError, FileForm
from servers.models.files import load_onnx
from servers.models.specification import ModelSpecification, reason_of

if TYPE_CHECKING:
    import torch

EXAMPLE_BATCH = 2
"""With 1 torch.export takes the batch for a constant and freezes it."""

_MAX_BYTES = 2**31 - 2**20
"""Of the weights in one file: protobuf's limit, less the graph."""

_ELEMENTWISE = frozenset({"Cast", "Transpose", "Div", "Mul", "Sub", "Add"})
"""The exporter's operators for `UInt8Images`; a convolution or a product ends this part of the graph."""

_CHATTY_LOGGERS = (
    *("torch.onnx", "torch.export", "torch._dynamo", "torch._inductor", "torch.utils.cpp_extension"),
    *("onnxscript", "onnx_ir", "jax2onnx"),
)


def write_onnx(specification: ModelSpecification, module: torch.nn.Module, path: Path, form: FileForm) -> str:
    """Write `module`, as from `specification.load_module`, to `path`. Returns the operators in the file: standard ones
    where the fused do not cover the model. Raises `ExportError` when the model cannot be exported, `OSError` when the
    file cannot be written."""
    from servers.models.uint8_module import executed_module

    operators = form.operators
    if operators == FUSED and not (
        specification.fused_tower and _write_fused(specification, module, path, form.precision)
    ):
        operators = STANDARD
    if operators != FUSED:
        executed = executed_module(specification, module)
        if operators == JAX:
            from servers.export.jax_graph import write_jax_graph

            with quiet_exporter():
                write_jax_graph(specification, executed, path)
        else:
            _export(specification, executed, path)
        if form.precision == "fp16":
            convert_to_fp16(path, path)
    return operators


def _write_fused(specification: ModelSpecification, module: torch.nn.Module, path: Path, precision: str) -> bool:
    """Write the fused graph; False for a model that it does not cover."""
    import onnx

    from servers.engines.torch.vit_tower import UnsupportedTowerError
    from servers.export.tower_graph import tower_graph

    try:
        model = tower_graph(specification, module, precision)
    except UnsupportedTowerError:
        return False
    if precision == "fp16":
        mark_precision(model, precision)
    onnx.save(model, path)
    return True


def weight_bytes(module: torch.nn.Module) -> int:
    """The size of all parameters and buffers, which a file holds alike."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def example_sizes(specification: ModelSpecification) -> dict[str, int]:
    """A size for each axis: above 1 and unlike the other sizes, so that torch.export takes none for a constant."""
    sizes: dict[str, int] = {}
    for axis in specification.axes:
        candidates = (axis.default, axis.default // 2, *range(3, axis.largest + 1))
        free = (n for n in candidates if 1 < n <= axis.largest and n not in (EXAMPLE_BATCH, *sizes.values()))
        sizes[axis.name] = next(free, axis.largest)
    return sizes


def _export(specification: ModelSpecification, module: torch.nn.Module, path: Path) -> None:
    import torch

    from servers.engines.torch.fused_layers import dynamic_shapes

    if (held := weight_bytes(module)) > _MAX_BYTES:
        raise ExportError(
            f"{specification.name} has {held / 1e9:.1f} GB of weights, and an ONNX file holds at most 2 GB; "
            "use the engine torch"
        )
    names = [tensor.name for tensor in specification.inputs]
    inputs = random_inputs(specification, EXAMPLE_BATCH, 0, example_sizes(specification))
    free = dynamic_shapes(specification)
    with quiet_exporter():
        try:
            program = torch.onnx.export(
                module,
                tuple(torch.from_numpy(inputs[name]) for name in names),
                dynamo=True,
                verbose=False,
                opset_version=OPSETS[STANDARD],
                input_names=names,
                output_names=[tensor.name for tensor in specification.outputs],
                dynamic_shapes=free,
            )
        except Exception as exc:  # the model's own code runs here, and the exporter wraps most of its errors
            reason = reason_of(exc.__cause__ or exc)
            raise ExportError(
                f"torch cannot export {specification.name} to ONNX: {reason}; use the engine torch"
            ) from exc
        if program is None:
            raise ExportError("torch.onnx.export returned nothing; install torch 2.9 or later")
        for value, dimensions in zip(program.model.graph.inputs, free, strict=True):
            for place, dimension in dimensions.items():
                if value.shape is not None and isinstance(size := value.shape[place], int):
                    raise ExportError(
                        f"torch cannot export {specification.name} to ONNX: its module fixes the "
                        f"{dimension.__name__} of {value.name} at {size}; use the engine torch"
                    )
        _rename_inner(program.model.graph, {*names, *(tensor.name for tensor in specification.outputs)})
        # One file: Triton and people copy it, and a forgotten second one fails late.
        program.save(path, external_data=False)


def _rename_inner(graph: Any, reserved: set[str]) -> None:
    """Rename tensors inside the graph that are called like an input or output, as the exporter leaves them. It names
    inner tensors after their operators, such as mean."""
    outer = {id(value) for value in (*graph.inputs, *graph.outputs)}
    inner = [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in inner:
        if value.name in reserved and id(value) not in outer:
            value.name = f"{value.name}/inner"


def convert_to_fp16(source: Path, path: Path) -> None:
    """Write `source`, an FP32 file, to `path` with FP16 weights and arithmetic; inputs and outputs keep their types.

    Values beyond FP16 become its largest, such as the -3.4e38 of an attention mask, so that no product of them is NaN.
    The nodes that normalise bytes stay FP32: an FP16 pixel is precise enough, but its computation in FP16 is not.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = load_onnx(source)
    typed = bool(model.graph.value_info)  # torch's export names the type of every tensor, other exporters may not
    with quiet_exporter():
        model = convert_float_to_float16(
            model, keep_io_types=True, disable_shape_infer=typed, node_block_list=_normalisation(model.graph)
        )
    mark_precision(model, "fp16")
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
def quiet_exporter() -> Iterator[None]:
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


CONFIGURATION = {"cpp.dynamic_threads": True}
"""Else the number of threads at compilation would be a constant of the machine code."""


def package_target() -> str:
    """This kind of CPU: its vector instructions, and a short hash of all instruction sets, which the compiler uses
    (-march=native)."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    instructions = hashlib.sha256(" ".join(sorted(flags.partition(":")[2].split())).encode()).hexdigest()[:8]
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}-{instructions}"


def write_package(specification: ModelSpecification, module: torch.nn.Module, path: Path) -> None:
    """Compile `module`, FP32 on the CPU as from `specification.load_module`, and write it to `path`, a .pt2 file.
    Raises `ExportError` where torch cannot export or compile it."""
    import torch
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    from servers.engines.torch.fused_layers import dynamic_shapes
    from servers.models.uint8_module import executed_module

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as exc:
        raise ExportError(
            "AOTInductor needs a C++ compiler, and none was found; run: sudo apt-get install g++, or name one in CXX"
        ) from exc
    executed = executed_module(specification, module)
    arrays = random_inputs(specification, EXAMPLE_BATCH, 0, example_sizes(specification))
    inputs = tuple(torch.from_numpy(arrays[tensor.name]) for tensor in specification.inputs)
    try:
        with quiet_exporter(), torch.no_grad():
            program = torch.export.export(executed, inputs, dynamic_shapes=(*dynamic_shapes(specification),))
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(CONFIGURATION))
    except Exception as exc:  # the model's own code runs here, and the compiler's errors share no base class
        raise ExportError(
            f"torch cannot compile {specification.name} to a package: {reason_of(exc)}; use the engine torch"
        ) from exc
