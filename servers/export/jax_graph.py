"""torch → JAX → ONNX by jax2onnx: the way back from the function that the jax engine executes.

torchax needs the size of every dimension while it traces, so the function of one item is traced and `jax.vmap` adds the
batch as a free dimension. A dimension of the items cannot be freed like that: such models are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from servers.engines.interface import EngineError
from servers.engines.jax_engine import as_jax, start_jax
from servers.export.manifest import JAX, OPSETS, ExportError
from servers.models.specification import ModelSpecification, reason_of
from servers.protocol.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

_MOST_POOLED = 3
"""The most dimensions that ONNX Runtime's MaxPool has, besides batch and channels."""


def write_jax_graph(specification: ModelSpecification, module: torch.nn.Module, path: Path) -> None:
    """Write the module that takes this variant's inputs to `path`. The model's items have one size (see
    `why_not_through_jax`). Raises `ExportError` for a model that torchax or jax2onnx does not cover."""
    import onnx

    try:
        model = _traced(specification, module)
        _pool_fewer_dimensions(model.graph)
        _restore_datatypes(model.graph, specification)
        onnx.save(model, path)
    except OSError:
        raise
    except Exception as exc:  # the model's own code runs here, and jax2onnx and JAX raise errors of every kind
        raise ExportError(
            f"jax2onnx cannot export {specification.name} to ONNX: {type(exc).__name__}: {reason_of(exc)}; "
            "use --operators standard"
        ) from exc


def _traced(specification: ModelSpecification, module: torch.nn.Module) -> Any:
    try:
        start_jax("cpu", 0)
    except EngineError as exc:
        raise ExportError(str(exc)) from exc
    import jax
    from jax2onnx import to_onnx

    weights, function = as_jax(specification, module, "float32")

    def of_item(*item: Any) -> tuple[Any, ...]:
        return tuple(output[0] for output in function(weights, [value[None] for value in item]))

    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [
        jax.ShapeDtypeStruct((batch, *tensor.item_shape), jax.dtypes.canonicalize_dtype(tensor.dtype))
        for tensor in specification.inputs
    ]
    return to_onnx(
        jax.vmap(of_item),
        shapes,
        model_name=specification.name,
        opset=OPSETS[JAX],
        input_names=[tensor.name for tensor in specification.inputs],
        output_names=[tensor.name for tensor in specification.outputs],
    )


def _pool_fewer_dimensions(graph: Any) -> None:
    """Let every MaxPool have as few dimensions as ONNX Runtime takes, where that is possible. jax2onnx puts two
    dimensions of size 1 before the array's own, and pools all of those. The array's first two can take their place
    where the window does not cover them."""
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for pool in [node for node in graph.node if node.op_type == "MaxPool"]:
        sizes = {
            attribute.name: attribute
            for attribute in pool.attribute
            if attribute.name in ("kernel_shape", "strides", "dilations", "pads")
        }
        count = len(sizes["kernel_shape"].ints)
        pads = list(sizes["pads"].ints) if "pads" in sizes else [0] * 2 * count
        single = all(attribute.ints[:2] == [1, 1] for name, attribute in sizes.items() if name != "pads")
        if count <= _MOST_POOLED or not single or any((*pads[:2], *pads[count : count + 2])):
            continue
        first, last, around = pool.input[0], pool.output[0], []
        while (before := makers.get(first)) is not None and before.op_type == "Unsqueeze":
            first = before.input[0]
            around.append(before)
        while [node.op_type for node in readers.get(last, [])] == ["Squeeze"]:
            around.append(readers[last][0])
            last = around[-1].output[0]
        for name, attribute in sizes.items():
            values = [*pads[2:count], *pads[count + 2 :]] if name == "pads" else list(attribute.ints[2:])
            del attribute.ints[:]
            attribute.ints.extend(values)
        pool.input[0], pool.output[0] = first, last
        for node in around:
            graph.node.remove(node)
    del graph.value_info[:]  # some of it is about other shapes now


def _restore_datatypes(graph: Any, specification: ModelSpecification) -> None:
    """Give inputs and outputs the specification's datatypes: JAX computes with 32 bits."""
    from onnx import helper

    def differing(values: Sequence[Any], tensors: Sequence[TensorSpec]) -> list[tuple[Any, int, int]]:
        specified = {tensor.name: helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)) for tensor in tensors}
        types = [(value, value.type.tensor_type.elem_type, specified[value.name]) for value in values]
        return [(value, of_graph, of_model) for value, of_graph, of_model in types if of_graph != of_model]

    for value, of_graph, of_model in differing(graph.input, specification.inputs):
        inner = f"{value.name}/jax"
        for node in graph.node:
            node.input[:] = [inner if name == value.name else name for name in node.input]
        graph.node.insert(0, helper.make_node("Cast", [value.name], [inner], name=f"{inner}/cast", to=of_graph))
        value.type.tensor_type.elem_type = of_model
    for value, _, of_model in differing(graph.output, specification.outputs):
        inner = f"{value.name}/jax"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == value.name else name for name in names]
        graph.node.append(helper.make_node("Cast", [inner], [value.name], name=f"{inner}/cast", to=of_model))
        value.type.tensor_type.elem_type = of_model
