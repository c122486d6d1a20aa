"""A module's graph by `torch.export`, and the same graph as text for later starts: exporting a model takes seconds.

A stored graph names operators of aten and of arithmetic, and parameters and buffers by their names in the module, whose
values are not stored. So reading one executes nothing but these, on the weights of the module that it is read for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

ARITHMETIC = {
    name: getattr(operator, name)
    for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge")
}
CONSTANTS = {
    name for name in dir(torch) if isinstance(getattr(torch, name), (torch.dtype, torch.layout, torch.memory_format))
}
TENSOR = "tensor"
"""In a node's `meta`: the datatype and the sizes of what it gives, all as text, free sizes by their symbols."""


def exported(module: nn.Module, inputs: Sequence[Tensor], shapes: Sequence[dict[int, Any]]) -> fx.GraphModule:
    """The graph of `module` with these inputs and free dimensions (see `torch.export.export`); each node's `meta` says
    which tensor it gives. Raises whatever torch.export and the module's own code raise."""
    graph = torch.export.export(module, tuple(inputs), dynamic_shapes=tuple(shapes)).module()
    assert isinstance(graph, fx.GraphModule)
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        node.meta = {TENSOR: [str(value.dtype), *map(str, value.shape)]} if isinstance(value, Tensor) else {}
        if node.target is torch.ops.aten._assert_tensor_metadata.default or node.target == "_guards_fn":
            graph.graph.erase_node(node)  # they only check
    return graph


def stored(graph: fx.GraphModule, module: nn.Module) -> list[Any]:
    """The graph of `module`, as from `exported`, as JSON has it; empty if a later start could not read it."""
    known = {*dict(module.named_parameters(remove_duplicate=False)), *dict(module.named_buffers())}
    outputs = graph.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    places = (*range(outputs.num_leaves),)
    answer = torch.utils._pytree.tree_unflatten(places, outputs)
    if answer not in (0, places):  # neither a tensor nor a tuple of them
        return []
    try:
        nodes = [_described(node, known) for node in graph.graph.nodes]
    except TypeError:
        return []
    if answer == 0:
        (nodes[-1][3],) = nodes[-1][3]["tuple"]  # the graph gives a tuple, which the module's own code unpacks
    return nodes


def _described(node: fx.Node, known: Container[str]) -> list[Any]:
    options = {name: _encoded(value) for name, value in node.kwargs.items()}
    return [node.op, node.name, _target(node, known), _encoded(node.args), options, node.meta.get(TENSOR)]


def _target(node: fx.Node, known: Container[str]) -> str:
    function: Any = node.target
    if node.op in ("placeholder", "output") or (node.op == "get_attr" and function in known):
        return str(function)
    if isinstance(function, torch._ops.OpOverload) and function.namespace == "aten":
        return str(function)
    for name, known_function in ARITHMETIC.items():
        if function is known_function:
            return name
    raise TypeError(f"{node.op} of {function} is not stored")


def restored(nodes: Sequence[Any], module: nn.Module, device: torch.device) -> fx.GraphModule:
    """The graph that `stored` describes, with the weights of `module` on `device`. Raises anything
    for a damaged one."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    for kind, name, target, arguments, options, tensor in nodes:
        function = _function(target) if kind == "call_function" else target
        values = _decoded(arguments, made, device)
        named = {option: _decoded(value, made, device) for option, value in options.items()}
        made[name] = graph.create_node(kind, function, values, named, name)
        made[name].meta = {} if tensor is None else {TENSOR: tensor}
    return fx.GraphModule(module, graph)


def _function(name: str) -> Any:
    if name in ARITHMETIC:
        return ARITHMETIC[name]
    namespace, packet, overload = name.split(".")
    if namespace != "aten":
        raise ValueError(f"{name} is not an operator of aten")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _encoded(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(each) for each in value]}
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{type(value).__name__} is not stored")


def _decoded(value: Any, made: Mapping[str, fx.Node], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decoded(each, made, device) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return made[content]
    if kind == "tuple":
        return tuple(_decoded(each, made, device) for each in content)
    if kind == "device":
        return device if content == device.type else torch.device(content)
    if kind == "float":
        return float(content)
    return getattr(torch, content) if content in CONSTANTS else made[content]  # which raises KeyError
