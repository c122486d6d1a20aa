"""Convolutions with what follows them: a bias, the sum with a residual, and an activation become one kernel.

torch executes each as a kernel of its own, which reads and writes every value. With ReLU, half-precision cuDNN has them
in the convolution's own kernel; otherwise a Triton kernel follows it. What follows which convolution is read from a
trace by torch.fx, and the traced graph executes. Batch norms should be in the weights before
(`servers.engines.torch.norms`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

from servers.engines.torch.forms import refuse_other_answers

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": functional.hardsigmoid,
}
ACTIVATIONS = tuple(FUNCTIONS)
LAYERS: Mapping[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
    nn.Sigmoid: "sigmoid",
    nn.Hardsigmoid: "hardsigmoid",
}
CALLS: Mapping[object, str] = {
    **{function: name for name, function in FUNCTIONS.items()},
    **dict.fromkeys((torch.relu, torch.relu_, "relu", "relu_"), "relu"),
    **dict.fromkeys((functional.sigmoid, "sigmoid"), "sigmoid"),
}
"""Functions, and names of tensors' methods."""
SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
IN_PLACE = (operator.iadd, "add_")
MOST_VALUES = 2**31 - 2**12
"""The kernel counts in 32 bits, to the end of its last block."""
HALVES = (torch.float16, torch.bfloat16)


class FusedConvolution(nn.Module):
    """act(convolution(x) + bias + residual), of the weights of `convolution`; `more_bias` [channels] is added."""

    def __init__(self, convolution: nn.Conv2d, activation: str, more_bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        if more_bias is not None:
            self.bias = nn.Parameter(more_bias if self.bias is None else self.bias + more_bias, requires_grad=False)
        # The padding may be a word, which the stubs of torch allow in no call with the others.
        self._geometry: Any = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)
        self.activation = activation

    def forward(self, images: Tensor, residual: Tensor | None = None) -> Tensor:
        """[n, c, h, w], and a residual of the shape of what is returned."""
        if self._suits_cudnn(images, residual):
            if residual is None:
                return torch.cudnn_convolution_relu(images, self.weight, self.bias, *self._geometry)
            return torch.cudnn_convolution_add_relu(images, self.weight, residual, 1.0, self.bias, *self._geometry)
        values = functional.conv2d(images, self.weight, None, *self._geometry)
        # The kernel would read what lies behind a smaller residual.
        fits = residual is None or residual.shape == values.shape
        if values.is_cuda and fits and 0 < values.numel() < MOST_VALUES:
            from servers.engines.torch.epilogue_kernels import epilogue_in_place

            values = values.contiguous(memory_format=torch.channels_last)
            if residual is not None:
                residual = residual.contiguous(memory_format=torch.channels_last)
            epilogue_in_place(values, self.bias, residual, ACTIVATIONS.index(self.activation))
            return values
        if self.bias is not None:
            values = values + self.bias.view(-1, 1, 1)
        if residual is not None:
            values = values + residual
        return FUNCTIONS[self.activation](values)

    def _suits_cudnn(self, images: Tensor, residual: Tensor | None) -> bool:
        """Whether cuDNN's fused convolution takes these and is fast.

        Not in FP32, where it may multiply in TF32. Not in groups: an H100 took 7.3 instead of 4.2 ms for MobileNetV3.
        """
        return (
            images.is_cuda
            and images.dtype in HALVES
            and self.activation == "relu"
            and self.bias is not None
            and not isinstance(self._geometry[1], str)
            and self._geometry[3] == 1
            and (residual is None or len(residual) == len(images))
        )

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, activation={self.activation}"


@torch.no_grad()
def fused_convolutions(module: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """`module` (FP32, eval mode) with a `FusedConvolution` wherever a convolution has a bias or something follows it.

    The bias of a residual that is a convolution becomes part of the other's. Raises `ValueError` if nothing can be
    fused, or if the answers to `inputs` then differ. Tracing executes the module with symbols for values, so its own
    code may raise anything else.
    """
    traced = fx.symbolic_trace(module)
    _drop_identities(traced)
    ShapeProp(traced).propagate(*inputs)
    called = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    fused = 0
    for node in list(traced.graph.nodes):
        if (layer := _convolution(node, traced, called)) is None:
            continue
        chain, residual, activation = _what_follows(node, traced)
        if len(chain) == 1 and layer.bias is None:
            continue
        name = f"fused_{fused}"
        more_bias = None if residual is None else _taken_bias(residual, f"residual_{fused}", traced, called)
        traced.add_submodule(name, FusedConvolution(layer, activation, more_bias))
        with traced.graph.inserting_before(chain[-1]):
            one = traced.graph.call_module(name, (node.args[0],) if residual is None else (node.args[0], residual))
        one.meta = chain[-1].meta
        chain[-1].replace_all_uses_with(one)
        for link in reversed(chain):
            traced.graph.erase_node(link)
        fused += 1
    if not fused:
        raise ValueError("nothing that can be fused follows a convolution")
    traced.delete_all_unused_submodules()
    traced.recompile()
    refuse_other_answers(module, traced, inputs, "fused convolutions")
    return traced


def _drop_identities(traced: fx.GraphModule) -> None:
    """Remove what does nothing in eval mode, such as a norm that is in the weights."""
    for node in list(traced.graph.nodes):
        layer = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        # torchvision hides what is in this function from traces; the last argument says whether it trains.
        skipped = node.op == "call_function" and getattr(node.target, "__name__", "") == "stochastic_depth"
        if isinstance(layer, (nn.Identity, nn.Dropout, nn.Dropout2d)) or (skipped and node.args[-1] is False):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _convolution(node: fx.Node, traced: fx.GraphModule, called: Mapping[object, int]) -> nn.Conv2d | None:
    """The plain convolution that a node calls, if nothing else calls it."""
    if node.op != "call_module" or called[node.target] > 1 or len(node.args) != 1 or node.kwargs:
        return None
    layer = traced.get_submodule(str(node.target))
    return layer if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" else None


def _taken_bias(residual: fx.Node, name: str, traced: fx.GraphModule, called: Counter[object]) -> Tensor | None:
    """The bias of a convolution whose answer is only a residual, which loses it: it costs a pass over every value."""
    layer = _convolution(residual, traced, called)
    if layer is None or layer.bias is None or len(residual.users) > 1:
        return None
    bare = deepcopy(layer)
    bare.bias = None
    traced.add_submodule(name, bare)
    residual.target = name
    called[name] = 1
    return layer.bias


def _what_follows(convolution: fx.Node, traced: fx.GraphModule) -> tuple[list[fx.Node], fx.Node | None, str]:
    """The convolution's node and those behind it that can be one kernel with it, in order; their residual; their
    activation."""
    chain, residual, activation = [convolution], None, "none"
    if (after := _only_user(chain[-1])) is not None and (other := _residual(chain[-1], after)) is not None:
        chain.append(after)
        residual = other
    if (after := _only_user(chain[-1])) is not None and (found := _activation(after, traced)) is not None:
        chain.append(after)
        activation = found
    return chain, residual, activation


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _residual(before: fx.Node, node: fx.Node) -> fx.Node | None:
    """What `node` adds to `before`, if it is the sum of two values of one shape and nothing else."""
    if node.op not in ("call_function", "call_method") or node.target not in SUMS or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    other = second if first is before else first
    if not isinstance(other, fx.Node) or other is before:
        return None
    shapes = [getattr(each.meta.get("tensor_meta"), "shape", None) for each in (before, other)]
    # A sum that is written into the residual would be seen by its other users.
    written = node.target in IN_PLACE and first is other and len(other.users) > 1
    return None if shapes[0] is None or shapes[0] != shapes[1] or written else other


def _activation(node: fx.Node, traced: fx.GraphModule) -> str | None:
    if node.op == "call_module":
        return LAYERS.get(type(traced.get_submodule(str(node.target))))
    return CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
