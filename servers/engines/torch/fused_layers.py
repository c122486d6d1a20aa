"""Linear layers, attention and LayerNorm of any module, in fewer kernels.

torch executes a module operation by operation. Here `torch.export`'s graph of the module executes, in which

- linear layers that read the same input are one product (queries, keys and values),
- attention of `nn.MultiheadAttention` to its own input reads queries, keys and values where that product wrote them,
- a convolution whose windows neither overlap nor are padded, as for patches of images, is a product,
- a linear layer with GELU behind it has GELU in its product: in its tanh form, whose error of 5e-4 halves round away,
- a sum and the LayerNorm behind it are one kernel,
- the boolean masks of attention become numbers once instead of in each layer.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from servers.engines.torch.exported_graphs import TENSOR, exported
from servers.models.specification import ModelSpecification

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
WIDEST = 8192
"""Values of a row that a program of the kernel holds."""
_CONVOLUTION = (None, None, None, (1, 1), (0, 0), (1, 1), 1)
"""Arguments of aten.conv2d, as far as they have a default."""


def dynamic_shapes(specification: ModelSpecification) -> tuple[dict[int, Any], ...]:
    """By input, the free dimensions with their names, as torch.export takes them."""
    from torch.export import Dim

    free: list[dict[int, Any]] = [{0: Dim("batch", min=1)} for _ in specification.inputs]
    for axis in specification.axes:
        dimension = Dim(re.sub(r"\W", "_", axis.name), min=1, max=axis.largest)
        for tensor, dimensions in zip(specification.inputs, free, strict=True):
            if (place := axis.places.get(tensor.name)) is not None:
                dimensions[place] = dimension
    return tuple(free)


class SumNorm(nn.Module):
    """LayerNorm(a + b), and the sum itself where something else reads it."""

    def __init__(self, weight: Tensor, bias: Tensor, epsilon: float, *, with_sum: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
        self._epsilon, self._with_sum = epsilon, with_sum

    def forward(self, one: Tensor, other: Tensor) -> Any:
        """[…, width] twice. Returns what it normalised, with `with_sum` the sum and that."""
        width = len(self.weight)
        if one.is_cuda and 0 < width <= WIDEST and one.shape == other.shape and one.numel() > 0:
            from servers.engines.torch.layer_kernels import sum_norm

            total, normal = sum_norm(
                one.contiguous(), other.contiguous(), self.weight, self.bias, self._epsilon, with_sum=self._with_sum
            )
        else:
            total = one + other
            normal = functional.layer_norm(total, (width,), self.weight, self.bias, self._epsilon)
        return (total, normal) if self._with_sum else normal

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, epsilon={self._epsilon}, with_sum={self._with_sum}"


class Product(nn.Module):
    """A linear layer, or several that read the same, one behind the other; with `gelu` GELU(x·Wᵀ + b)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.gelu = gelu

    def forward(self, values: Tensor) -> Tensor:
        """[…, ins] to […, outs]."""
        if not self.gelu:
            return functional.linear(values, self.weight, self.bias)
        if self.bias is None or values.dtype not in HALVES or not values.is_cuda:
            return functional.gelu(functional.linear(values, self.weight, self.bias))
        rows = values.reshape(-1, values.shape[-1])
        answer: Tensor = aten._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
        return answer.view(*values.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, gelu={self.gelu}"


class Patches(Product):
    """A convolution whose windows neither overlap nor are padded, as one product."""

    def forward(self, images: Tensor) -> Tensor:
        """[N, channels, height, width] to [N, outs, height / window height, width / window width]."""
        high, wide = self.weight.shape[2:]
        rows, columns = images.shape[2] // high, images.shape[3] // wide
        if images.shape[2:] != (rows * high, columns * wide):
            return functional.conv2d(images, self.weight, self.bias, (high, wide))
        windows = images.reshape(len(images), -1, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
        answer = functional.linear(windows.flatten(3), self.weight.flatten(1), self.bias)
        return answer.permute(0, 3, 1, 2)


class SelfAttention(nn.MultiheadAttention):
    """Attention that reads queries, keys and values where one product wrote them, where torch's own copies each."""

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Whether a layer may have this class instead of its own."""
        if not isinstance(layer, nn.MultiheadAttention) or type(layer) is not nn.MultiheadAttention:
            return False
        return not (layer.training or layer.bias_k is not None or layer.add_zero_attn) and layer._qkv_same_embed_dim

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`, which executes where other inputs, weights or more masks are asked for."""
        mask = options.get("attn_mask")
        is_plain = not arguments and options.get("key_padding_mask") is None and not options.get("need_weights", True)
        is_plain &= mask is None or (mask.is_floating_point() and mask.dim() == 2)
        is_plain &= mask is not None or not options.get("is_causal", False)
        if not (is_plain and query is key and key is value and query.dim() == 3):
            answer: tuple[Tensor, Tensor | None] = super().forward(query, key, value, *arguments, **options)
            return answer
        batch, sequence = (0, 1) if self.batch_first else (1, 0)
        products = functional.linear(query, self.in_proj_weight, self.in_proj_bias)
        heads = products.view(*products.shape[:2], 3, self.num_heads, self.head_dim)
        queries, keys, values = (part.permute(batch, 2, sequence, 3) for part in heads.unbind(2))
        attended = functional.scaled_dot_product_attention(queries, keys, values, mask)
        tokens = attended.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3))
        return self.out_proj(tokens.flatten(2)), None


@contextmanager
def _with_self_attention(module: nn.Module) -> Iterator[None]:
    """Give the layers of `module` the class `SelfAttention` where it takes them, and their own back afterwards."""
    layers = [layer for layer in module.modules() if SelfAttention.takes(layer)]
    try:
        for layer in layers:
            layer.__class__ = SelfAttention
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.MultiheadAttention


def exported_module(module: nn.Module, inputs: Sequence[Tensor], shapes: Sequence[dict[int, Any]]) -> fx.GraphModule:
    """The graph that `fused_layers` takes, exported with these inputs. `shapes`: see `dynamic_shapes`. Raises whatever
    torch.export and the module's own code raise."""
    with torch.no_grad(), _with_self_attention(module):
        return exported(module, inputs, shapes)


def fused_layers(graph: fx.GraphModule) -> fx.GraphModule:
    """This graph, changed to one with fused layers. Raises `ValueError` if there is nothing to fuse."""
    with torch.no_grad():
        _drop_nothings(graph)
        changes = (_multiply_patches, _merge_products, _add_gelu, _add_sums, _convert_masks_once)
        if not sum(change(graph) for change in changes):
            raise ValueError("nothing that can be fused surrounds a linear layer or a norm")
        graph.graph.eliminate_dead_code()
        graph.delete_all_unused_submodules()
        graph.recompile()
    return graph


def _multiply_patches(module: fx.GraphModule) -> int:
    """A product in place of a convolution that reads every pixel once."""
    changed = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.conv2d.default:
            continue
        arguments: tuple[Any, ...] = (*node.args, *_CONVOLUTION[len(node.args) :])
        images, stride, padding, dilation, groups = arguments[0], *arguments[3:]
        weight, bias = _constant(module, arguments[1]), _constant(module, arguments[2])
        if weight is None or (bias is None) != (arguments[2] is None) or tuple(weight.shape[2:]) != tuple(stride):
            continue
        if not any(padding) and set(dilation) == {1} and groups == 1 and not node.kwargs:
            with module.graph.inserting_before(node):
                _replace(module, node, _call(module, f"patches_{changed}", Patches(weight, bias), images))
            changed += 1
    return changed


def _drop_nothings(module: fx.GraphModule) -> None:
    """Remove dropout, which does nothing in eval mode."""
    for node in list(module.graph.nodes):
        if node.target is aten.dropout.default and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _merge_products(module: fx.GraphModule) -> int:
    """One product of several linear layers that read the same."""
    reading: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node.target is aten.linear.default:
            reading[node.args[0]].append(node)
    merged = 0
    for source, layers in reading.items():
        weights = [weight for node in layers if (weight := _constant(module, node.args[1])) is not None]
        biases = [bias for node in layers if (bias := _constant(module, _bias(node))) is not None]
        if len(layers) < 2 or len(weights) < len(layers) or len(biases) not in (0, len(layers)):
            continue
        with module.graph.inserting_before(layers[0]):
            product = Product(torch.cat(weights), torch.cat(biases) if biases else None)
            whole = _call(module, f"products_{merged}", product, source)
            ends = list(accumulate(map(len, weights)))
            parts = [
                module.graph.call_function(torch.narrow, (whole, -1, end - len(weight), len(weight)))
                for end, weight in zip(ends, weights, strict=True)
            ]
        for node, part in zip(layers, parts, strict=True):
            _replace(module, node, part)
        merged += 1
    for node in module.graph.nodes:
        if merged and node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # a part has gaps between its rows, where a view may need to copy
    return merged


def _add_gelu(module: fx.GraphModule) -> int:
    """GELU in the product before it."""
    added = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.gelu.default:
            continue
        linear = node.args[0]
        if linear.target is not aten.linear.default or len(linear.users) > 1:
            continue
        weight, bias = _constant(module, linear.args[1]), _constant(module, _bias(linear))
        if weight is None or bias is None:
            continue
        with module.graph.inserting_before(node):
            one = _call(module, f"gelu_{added}", Product(weight, bias, gelu=True), linear.args[0])
        _replace(module, node, one)
        module.graph.erase_node(linear)
        added += 1
    return added


def _add_sums(module: fx.GraphModule) -> int:
    """A sum of two tensors of one shape, and LayerNorm of its last axis."""
    added = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.layer_norm.default:
            continue
        total, shape, weight, bias, epsilon = (*node.args, None, None, 1e-5)[:5]
        weight, bias = _constant(module, weight), _constant(module, bias)
        if total.target is not aten.add.Tensor or total.kwargs or len(shape) != 1 or weight is None or bias is None:
            continue
        if len(weight) > WIDEST or not _same_shape(*total.args):
            continue
        with_sum = len(total.users) > 1
        with module.graph.inserting_before(total):  # before all who read the sum
            both = _call(module, f"norm_{added}", SumNorm(weight, bias, epsilon, with_sum=with_sum), *total.args)
            first = normal = both
            if with_sum:
                first, normal = (module.graph.call_function(operator.getitem, (both, place)) for place in range(2))
        _replace(module, node, normal)
        _replace(module, total, first)
        added += 1
    return added


def _convert_masks_once(module: fx.GraphModule) -> int:
    """Numbers for boolean masks that several layers of attention read: torch converts them in each."""
    reading: defaultdict[tuple[fx.Node, torch.dtype], list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default and len(node.args) > 3:
            query, mask = node.args[0], node.args[3]
            if isinstance(mask, fx.Node) and _dtype_of(mask) == torch.bool:
                reading[mask, _dtype_of(query)].append(node)
    for (mask, dtype), layers in reading.items():
        with module.graph.inserting_after(mask):
            numbers = module.graph.call_function(_as_numbers, (mask, dtype))
        for node in layers:
            node.update_arg(3, numbers)
    return len(reading)


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), float("-inf"))


def _constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """A parameter or buffer of the module that a node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value if isinstance(value, Tensor) else None


def _bias(linear: fx.Node) -> Any:
    return linear.args[2] if len(linear.args) > 2 else None


def _dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, node.meta[TENSOR][0].removeprefix("torch."))
    return dtype


def _same_shape(one: Any, other: Any) -> bool:
    """Also of the same datatype: the kernel would round the sum to that of the first."""
    known = [node.meta.get(TENSOR) if isinstance(node, fx.Node) else None for node in (one, other)]
    return known[0] is not None and known[0] == known[1]


def _call(module: fx.GraphModule, name: str, layer: nn.Module, *arguments: Any) -> fx.Node:
    module.add_submodule(name, layer)
    return module.graph.call_module(name, arguments)


def _replace(module: fx.GraphModule, node: fx.Node, by: fx.Node) -> None:
    by.meta = dict(node.meta)
    node.replace_all_uses_with(by)
    module.graph.erase_node(node)
