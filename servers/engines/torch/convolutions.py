"""Convolutions with what surrounds them: gates before, and a bias, a residual and an activation behind, are one kernel.

torch executes each as a kernel of its own, which reads and writes every value. Convolutions of single channels, and in
halves those of single pixels, are Triton kernels with all of it. Others have it in cuDNN's own kernel, in halves with
ReLU, or in a Triton kernel behind them. What surrounds which convolution is read from a trace by torch.fx, and the
traced graph executes. Batch norms should be in the weights before (`servers.engines.torch.norms`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
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
PRODUCTS = (operator.mul, torch.mul, "mul")
IN_PLACE = (operator.iadd, "add_")
MOST_VALUES = 2**31 - 2**16
"""The kernels count in 32 bits, to the end of their last block."""
MOST_POOLED = 1024
"""Pixels that one program adds up; torch spreads more of them over the device."""
CUDNN_CHANNELS = 64
"""From so many on cuDNN's product with ReLU is used: a quarter slower with 24 to 120 channels, and 10 % faster with
960 to 240, on an H100."""
HALVES = (torch.float16, torch.bfloat16)


class FusedConvolution(nn.Module):
    """act(convolution(x · gates) + bias + residual), with the weights of `convolution`; `more_bias` [channels] is
    added."""

    def __init__(self, convolution: nn.Conv2d, activation: str, more_bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        if more_bias is not None:
            self.bias = nn.Parameter(more_bias if self.bias is None else self.bias + more_bias, requires_grad=False)
        # The padding may be a word, which the stubs of torch allow in no call with the others.
        self._geometry: Any = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)
        self._pointwise = is_pointwise(convolution)
        self._depthwise = _depthwise_geometry(convolution)
        # [height, width, channels], as the kernel reads it
        taps = self.weight[:, 0].permute(1, 2, 0).contiguous() if self._depthwise else torch.empty(0)
        self.register_buffer("_taps", taps, persistent=False)
        self.activation = activation

    def forward(self, images: Tensor, residual: Tensor | None = None, gates: Tensor | None = None) -> Tensor:
        """[n, c, h, w], a residual of the shape of what is returned, and gates [n, c, 1, 1]."""
        if images.is_cuda and (values := self._by_own_kernel(images, residual, gates)) is not None:
            return values
        if gates is not None:
            images = images * gates
        if self._suits_cudnn(images, residual):
            if residual is None:
                return torch.cudnn_convolution_relu(images, self.weight, self.bias, *self._geometry)
            return torch.cudnn_convolution_add_relu(images, self.weight, residual, 1.0, self.bias, *self._geometry)
        values = functional.conv2d(images, self.weight, None, *self._geometry)
        # The kernel would read what lies behind a smaller residual.
        fits = residual is None or residual.shape == values.shape
        if values.is_cuda and fits and 0 < values.numel() < MOST_VALUES:
            from servers.engines.torch.convolution_kernels import epilogue_in_place

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

    def _by_own_kernel(self, images: Tensor, residual: Tensor | None, gates: Tensor | None) -> Tensor | None:
        """By the Triton kernel of this convolution; None if it has none, or cuDNN's is as fast."""
        shape = self._answer_shape(images)
        if (
            shape is None
            or min(images.numel(), shape.numel()) == 0
            or max(images.numel(), shape.numel()) >= MOST_VALUES
        ):
            return None
        if (residual is not None and residual.shape != shape) or (gates is not None and len(gates) != len(images)):
            return None
        wide = self._depthwise is None and min(self.weight.shape[:2]) >= CUDNN_CHANNELS
        if wide and gates is None and self._suits_cudnn(images, residual):
            return None
        from servers.engines.torch.convolution_kernels import depthwise, pointwise

        images = images.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        answer = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
        activation = ACTIVATIONS.index(self.activation)
        if self._depthwise is not None:
            depthwise(images, self._taps, self.bias, residual, answer, self._depthwise, activation)
        else:
            gates = None if gates is None else gates.contiguous()
            pointwise(images, self.weight, self.bias, residual, gates, answer, activation)
        return answer

    def _answer_shape(self, images: Tensor) -> torch.Size | None:
        """The shape of the answer, if there is a Triton kernel for it."""
        rows, _, height, width = images.shape
        if self._depthwise is not None:
            stride, padding, dilation = self._depthwise
            high, wide = (
                (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
                for size, taps in zip((height, width), self.weight.shape[2:], strict=True)
            )
            return torch.Size((rows, len(self.weight), high, wide))
        if self._pointwise and images.dtype in HALVES:
            return torch.Size((rows, len(self.weight), height, width))
        return None

    def _suits_cudnn(self, images: Tensor, residual: Tensor | None) -> bool:
        """Whether cuDNN's fused convolution takes these and is fast. Not in FP32, where it may multiply in TF32. Not in
        groups: an H100 took 7.3 instead of 4.2 ms for MobileNetV3."""
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


class PooledMean(nn.Module):
    """The mean of each channel, [n, c, h, w] to [n, c, 1, 1]."""

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.shape[2] * images.shape[3]
        if images.is_cuda and 0 < pixels <= MOST_POOLED and images.numel() < MOST_VALUES:
            from servers.engines.torch.convolution_kernels import mean_of_pixels

            means = images.new_empty((*images.shape[:2], 1, 1))
            mean_of_pixels(images.contiguous(memory_format=torch.channels_last), means)
            return means
        return functional.adaptive_avg_pool2d(images, 1)


def is_pointwise(convolution: nn.Conv2d) -> bool:
    """Whether each pixel of the answer depends on the one pixel at its place."""
    return (
        {*convolution.kernel_size, *convolution.stride} == {1}
        and convolution.groups == 1
        and convolution.padding in ((0, 0), "valid", "same")
    )


def _depthwise_geometry(convolution: nn.Conv2d) -> tuple[int, int, int] | None:
    """Stride, padding and dilation of a convolution in which each channel is a group, if both axes have the same."""
    padding = (0, 0) if convolution.padding == "valid" else convolution.padding
    if not convolution.groups == convolution.in_channels == convolution.out_channels or isinstance(padding, str):
        return None
    pairs = convolution.stride, padding, convolution.dilation
    return None if any(down != right for down, right in pairs) else (pairs[0][0], pairs[1][0], pairs[2][0])


@torch.no_grad()
def fused_convolutions(module: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """`module` (FP32, eval mode) with a `FusedConvolution` wherever a convolution has a bias or something follows it.

    The bias of a residual that is a convolution becomes part of the other's. Raises `ValueError` if nothing can be
    fused, or if the answers to `inputs` then differ. Tracing executes the module with symbols for values, so its own
    code may raise anything else.
    """
    traced = fx.symbolic_trace(module)
    _drop_identities(traced)
    _Shapes(traced).run(*inputs)
    called = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    fused = 0
    for node in list(traced.graph.nodes):
        if (layer := _convolution(node, traced, called)) is None:
            continue
        chain, residual, activation = _what_follows(node, traced)
        images, gates = _gated(node, layer)
        if len(chain) == 1 and layer.bias is None and gates is None:
            continue
        name = f"fused_{fused}"
        given = [images, residual, gates]
        while given[-1] is None:
            given.pop()
        more_bias = None if residual is None else _taken_bias(residual, f"residual_{fused}", traced, called)
        traced.add_submodule(name, FusedConvolution(layer, activation, more_bias))
        with traced.graph.inserting_before(chain[-1]):
            one = traced.graph.call_module(name, tuple(given))
        one.meta = chain[-1].meta
        chain[-1].replace_all_uses_with(one)
        for link in (*reversed(chain), *(node.all_input_nodes if gates is not None else ())):
            traced.graph.erase_node(link)
        fused += 1
    _replace_means(traced)
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


def _replace_means(traced: fx.GraphModule) -> None:
    """Let a kernel of ours compute the mean of each channel."""
    for number, node in enumerate(list(traced.graph.nodes)):
        layer = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size in (1, (1, 1)):
            node.target = f"mean_{number}"
            traced.add_submodule(node.target, PooledMean())


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


def _gated(convolution: fx.Node, layer: nn.Conv2d) -> tuple[fx.Node, fx.Node | None]:
    """What a convolution of single pixels reads, and the gates, one for each channel, that multiply it before."""
    images = convolution.args[0]
    assert isinstance(images, fx.Node)
    if images.target in PRODUCTS and is_pointwise(layer) and _only_user(images) is convolution and not images.kwargs:
        first, second = images.args
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            whole, of_first, of_second = map(_shape, (images, first, second))
            if whole is not None and {of_first, of_second} == {whole, torch.Size((*whole[:2], 1, 1))}:
                return (first, second) if of_first == whole else (second, first)
    return images, None


class _Shapes(fx.Interpreter):
    """Notes the shape of every tensor in the graph. torch's own ShapeProp imports SymPy, which takes seconds."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["shape"] = value.shape if isinstance(value, Tensor) else None
        return value


def _shape(node: fx.Node) -> torch.Size | None:
    return node.meta.get("shape")


def layer_calls(
    traced: fx.GraphModule, rows: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[Callable[[], object]]:
    """A call of each layer with a kernel of ours, alone, on tensors of the shapes that it gets in batches of `rows`."""
    for node in traced.graph.nodes:
        layer = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, (FusedConvolution, PooledMean)):
            shapes = [None if given is None else _shape(given) for given in node.args]
            yield from (partial(_call_alone, layer, shapes, count, dtype, device) for count in rows)


def _call_alone(
    layer: nn.Module, shapes: Sequence[torch.Size | None], rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    def zeros(shape: torch.Size) -> Tensor:
        made = torch.zeros((rows, *shape[1:]), dtype=dtype, device=device)
        return made.contiguous(memory_format=torch.channels_last)

    layer(*(None if shape is None else zeros(shape) for shape in shapes))


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
    shapes = [_shape(each) for each in (before, other)]
    # A sum that is written into the residual would be seen by its other users.
    written = node.target in IN_PLACE and first is other and len(other.users) > 1
    return None if shapes[0] is None or shapes[0] != shapes[1] or written else other


def _activation(node: fx.Node, traced: fx.GraphModule) -> str | None:
    if node.op == "call_module":
        return LAYERS.get(type(traced.get_submodule(str(node.target))))
    return CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
