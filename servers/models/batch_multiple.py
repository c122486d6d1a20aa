"""An ONNX file that executes only batches whose size is a multiple of some number, whatever size it is given.

ONNX Runtime's CUDA provider plans a convolution anew whenever a batch has another size than the one before, and
Triton's batcher forms batches of any size. Inside this file all sizes up to the number are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from servers.models.files import load_onnx


def fill_batches(source: Path, path: Path, multiple: int) -> None:
    """Write `source` to `path` so that it adds items of zeros up to a multiple of `multiple`, and takes their rows off
    its outputs again. The weights are in a second file beside it, since one of 2 GiB or more cannot hold them."""
    import onnx
    from onnx import helper

    model = load_onnx(source)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    made = {name for node in graph.node for name in node.output}
    outputs = [value for value in graph.output if value.name in made]
    inner = {value.name: f"{value.name}/filled" for value in (*inputs, *outputs)}
    for node in _nodes(graph):
        _rename(node.input, inner)
        _rename(node.output, inner)
    del graph.value_info[:]  # of these, the first dimension is no longer the batch's
    before, after = [], []

    def add(operator: str, given: list[str], name: str, **attributes: Any) -> str:
        before.append(helper.make_node(operator, given, [name], name=name, **attributes))
        return name

    def constant(name: str, number: int) -> str:
        graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [1], [number]))
        return name

    first, second, end = constant("filled/0", 0), constant("filled/1", 1), constant("filled/end", 2**62)
    rows = add("Slice", [add("Shape", [inputs[0].name], "filled/shape"), first, second], "filled/rows")
    missing = add("Mod", [add("Neg", [rows], "filled/neg"), constant("filled/multiple", multiple)], "filled/missing")
    for value in inputs:
        name = inner[value.name]
        item = add("Slice", [add("Shape", [value.name], f"{name}/shape"), second, end], f"{name}/item")
        shape = add("Concat", [missing, item], f"{name}/missing", axis=0)
        zero = helper.make_tensor("zero", value.type.tensor_type.elem_type, [1], [0])
        zeros = add("ConstantOfShape", [shape], f"{name}/zeros", value=zero)
        add("Concat", [value.name, zeros], name, axis=0)
    for value in outputs:
        after.append(helper.make_node("Slice", [inner[value.name], first, rows, first], [value.name]))
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def _nodes(graph: Any) -> Iterator[Any]:
    """All nodes, also those of the graphs inside nodes, which read the tensors around them by name."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inside in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _nodes(inside)


def _rename(names: Any, renamed: Mapping[str, str]) -> None:
    names[:] = [renamed.get(name, name) for name in names]
