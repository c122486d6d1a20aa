"""The products of a model on the CPU: torch's own, or oneDNN's with weights packed once, by which is faster here.

torch gives FP32 products of matrices to MKL. oneDNN is slower than MKL on some processors and faster on others, so each
size of a linear layer is measured at load. torch's convolutions are oneDNN's, but their weights are packed again in
every call; here they are packed once, and the images lie channels-last, with the batch norms behind them in their
weights where the model can be traced. What does not make the whole model faster is undone.

A layer is changed in place, by a `forward` of its own beside its class's, and keeps its parameters: packed weights take
as much memory again. `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` have fast paths that call MKL by
themselves; where their products are packed, they execute without those paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from threading import Event, Thread
from time import monotonic
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from servers.engines.choice import MOST_SECONDS, Call, digest, race
from servers.engines.torch.norms import folded_norms

TYPICAL_ITEMS = 4
"""Sizes and the whole model are measured for one item and for this many: most batches on a CPU are small."""

MARGIN = 0.97
"""A size, and the changes of a whole model, are taken if they clearly need at most this share of the time.

That is the geometric mean for one item and several."""
MOST_LOSS = 1.05
"""Neither may take more than this share: a convolution packed for one item can be slower than torch's own for four."""

MAX_ERROR = 1e-4
"""Largest ‖oneDNN's product - torch's‖ / ‖torch's‖ of a layer whose product is replaced."""

SIZE_SECONDS, MODEL_SECONDS = 1.0, 20.0
"""The most CPU time for one size of linear layers, and for one comparison of the whole model, without a clear lead."""
POOL_ELEMENTS = 2**20
"""A sum of so many is divided among threads."""
LEAST_CONVOLUTIONS = 0.1
"""Convolutions with a smaller share of a model's multiplications, as in a vision transformer, stay as they are."""

Product = Callable[[Tensor], Tensor]
InputShapes = Mapping[nn.Module, tuple[int, ...]]
"""By layer, the shape of its first argument."""
NO_SHAPES: InputShapes = MappingProxyType({})
Change = tuple[nn.Module, str, object]
"""A module, the name of its attribute, and the value that this gets."""


class TunedProducts:
    """The products that were chosen for a module, which has them until `restore`."""

    def __init__(
        self,
        module: nn.Module,
        single: Sequence[Tensor],
        several: Sequence[Tensor],
        stored: Mapping[str, Any] = MappingProxyType({}),
        shapes: InputShapes = NO_SHAPES,
    ) -> None:
        """Measure on a batch of one item and one of `several`, and change `module` (FP32, without gradients). With the
        `stored` choice of an earlier start nothing is measured. Raises `ValueError` for one that is damaged. `shapes`
        are those of `noted_shapes` for `single`, if they are known."""
        items, batches = len(several[0]), (single, several)[: len(several[0])]
        self.details: list[dict[str, object]] = []
        """Of each size of a linear layer, and of each comparison of the whole model, the times and the choice."""
        self.decided = True
        """Whether there was time enough for every comparison."""
        self.description = "oneDNN's prepacked products are not faster"
        self.stored = bool(stored)
        self._sizes, self._whole, self._changes = set[tuple[int, ...]](), "", list[Change]()
        self._deadline = monotonic() + MOST_SECONDS
        if stored:
            self._take(stored)
            if not self._whole:
                return
        with torch.inference_mode(), nullcontext() if stored else _sleeping_threads():
            if not shapes:
                with noted_shapes(module) as shapes:
                    module(*single)
            weights = list(_linear_weights(shapes))
            if not stored:
                self._sizes = self._faster_sizes(weights, items)
            # With a stored choice, the answers of the whole module are compared next.
            make = packed_for if stored else agreeing_product
            packed = {
                id(weight): product
                for rows, weight, bias in weights
                if (rows, *weight.shape, bias is None) in self._sizes
                and (product := make(rows, weight, bias, items)) is not None
            }
            linear, convolutions = linear_changes(module, shapes, packed), convolution_changes(shapes)
            candidates = []
            if linear:
                candidates.append(("linear", f"{len(packed)} of {len(weights)} linear products", linear))
            if convolutions:
                both = f"{candidates[0][1]} and " if linear else ""
                title = f"{both}all {len(convolutions)} convolutions"
                candidates.append(("convolutions", title, [*linear, *convolutions]))
                if folded := _folded(module, single):
                    changes = [*linear, *convolution_changes(shapes, folded)]
                    candidates.append(("norms", f"{title} with {len(folded) // 2} batch norms", changes))
            for name, title, changes in reversed(candidates):
                if name == self._whole or (not stored and self._faster_model(title, changes, module, batches)):
                    self.description, self._whole = f"{title} prepacked by oneDNN", name
                    self._changes = _exchange(changes)
                    break

    @property
    def changed(self) -> bool:
        """Whether the module has other products than its own."""
        return bool(self._changes)

    @property
    def choice(self) -> dict[str, Any]:
        """What a later start needs to choose the same."""
        return {"sizes": sorted(map(list, self._sizes)), "whole": self._whole, "measured": self.details}

    @property
    def digest(self) -> str:
        """By which two modules are compared."""
        return digest([self.description, sorted(map(list, self._sizes)) if self._changes else []])

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Give the module its own products for a while."""
        changes = _exchange(self._changes)
        try:
            yield
        finally:
            self._changes = _exchange(changes)

    def restore(self) -> None:
        """Give the module its own products back."""
        _exchange(self._changes)
        self._changes = []

    def _take(self, stored: Mapping[str, Any]) -> None:
        try:
            self._sizes = {tuple(map(int, size)) for size in stored["sizes"]}
            self._whole, self.details = str(stored["whole"]), [dict(each) for each in stored["measured"]]
        except (KeyError, TypeError) as exc:
            raise ValueError("not a choice of products") from exc

    def _faster_sizes(self, weights: Sequence[tuple[int, Tensor, Tensor | None]], items: int) -> set[tuple[int, ...]]:
        """The sizes at which oneDNN is faster: rows of one item, outputs, inputs, and whether there is no bias."""
        first = {(rows, *weight.shape, bias is None): (weight, bias) for rows, weight, bias in reversed(weights)}
        faster = set()
        for size, (weight, bias) in first.items():
            rows = sorted({size[0], size[0] * items})
            product = packed_linear(weight, bias, rows[-1])
            inputs = [_random_rows(count, weight.shape[1]) for count in rows]
            pairs = [(partial(functional.linear, batch, weight, bias), partial(product, batch)) for batch in inputs]
            what = f"linear {size[2]}→{size[1]}, {' and '.join(map(str, rows))} rows"
            if self._faster(what, pairs, SIZE_SECONDS):
                faster.add(tuple(map(int, size)))
        return faster

    def _faster(self, what: str, pairs: Sequence[tuple[Call, Call]], seconds: float) -> bool:
        """Whether packed products, the second of each pair, are clearly faster; notes the times. False, too, once the
        time was over before a comparison was clear: then the module keeps its own products."""
        if not self.decided:
            return False
        won, own_ms, packed_ms, rounds, self.decided = race(pairs, seconds, MARGIN, MOST_LOSS, self._deadline)
        times = {"own_cpu_ms": own_ms, "packed_cpu_ms": packed_ms, "rounds": rounds}
        self.details.append({"product": what, **times, "chosen": won})
        return won

    def _faster_model(
        self, what: str, changes: Sequence[Change], module: nn.Module, batches: Sequence[Sequence[Tensor]]
    ) -> bool:
        """Whether the whole module is faster with the changes."""
        state = list(changes)

        def changed(*inputs: Tensor) -> None:
            nonlocal state
            state = _exchange(state)
            try:
                module(*inputs)
            finally:
                state = _exchange(state)

        pairs = [(partial(module, *inputs), partial(changed, *inputs)) for inputs in batches]
        return self._faster(f"whole model with {what}", pairs, MODEL_SECONDS)


def packed_linear(weight: Tensor, bias: Tensor | None, rows: int) -> Product:
    """oneDNN's product with a copy of `weight` [outputs, inputs] in the order that suits this number of rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda inputs: multiply(inputs, packed, bias, "none", [], "")


def packed_for(rows: int, weight: Tensor, bias: Tensor | None, items: int) -> Product | None:
    """oneDNN's product with this weight, for several items of so many rows."""
    return packed_linear(weight, bias, rows * items)


def agreeing_product(rows: int, weight: Tensor, bias: Tensor | None, items: int) -> Product | None:
    """oneDNN's product with this weight; None if it differs from torch's, or has NaN or infinities."""
    product = packed_linear(weight, bias, rows * items)
    inputs = _random_rows(rows, weight.shape[1])
    expected = functional.linear(inputs, weight, bias)
    error = torch.linalg.vector_norm(product(inputs) - expected) / torch.linalg.vector_norm(expected)
    return product if float(error) <= MAX_ERROR else None


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Let torch's threads sleep while they wait for each other. Where another program has a core, threads that spin
    multiply the CPU time of either form at random: paired times of one product differed by a factor of two, and by a
    twentieth with threads that sleep. libgomp lets its threads spin only briefly while a process has more of them than
    there are cores, so a second pool of them is kept for as long."""
    started, ended = Event(), Event()

    def hold() -> None:
        torch.ones(POOL_ELEMENTS).add_(1)
        started.set()
        ended.wait()

    thread = Thread(target=hold, name="second pool of OpenMP threads", daemon=True)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _random_rows(rows: int, width: int) -> Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(0))


def _exchange(changes: Sequence[Change]) -> list[Change]:
    """Set the attributes; returns the changes that undo it, in their order."""
    undo: list[Change] = []
    for module, name, value in changes:
        undo.append((module, name, vars(module).get(name)))
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    return undo[::-1]


@contextmanager
def noted_shapes(module: nn.Module) -> Iterator[InputShapes]:
    """Note the shape of the first argument of each layer that could be changed, while the module is called."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}

    def note(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].dtype == torch.float32:
            shapes[layer] = tuple(arguments[0].shape)

    layers = [layer for layer in module.modules() if _is_known(layer)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


def _is_known(layer: nn.Module) -> bool:
    """Whether the layer is a plain one in FP32, of exactly a class whose products can be replaced."""
    if "forward" in vars(layer) or any(parameter.dtype != torch.float32 for parameter in layer.parameters()):
        return False
    if type(layer) is nn.MultiheadAttention:
        added = layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn
        return layer.in_proj_weight is not None and not added
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def _linear_weights(shapes: Mapping[nn.Module, tuple[int, ...]]) -> list[tuple[int, Tensor, Tensor | None]]:
    """Rows, weight and bias of each linear product, those of attention among them."""
    return [(prod(shape[:-1]), weight, bias) for layer, shape in shapes.items() for weight, bias in _products_of(layer)]


def _products_of(layer: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    if isinstance(layer, nn.MultiheadAttention):
        out = layer.out_proj
        return [(layer.in_proj_weight, layer.in_proj_bias), (out.weight, out.bias)]
    return [(layer.weight, layer.bias)] if isinstance(layer, nn.Linear) else []


def linear_changes(
    module: nn.Module, shapes: Mapping[nn.Module, tuple[int, ...]], packed: Mapping[int, Product]
) -> list[Change]:
    """The changes of the layers with a packed product, by the identity of its weight."""
    changes: list[Change] = []
    for layer in shapes:
        products = [packed.get(id(weight)) for weight, _ in _products_of(layer)]
        if isinstance(layer, nn.MultiheadAttention) and any(products):
            changes.append((layer, "forward", attention_of(layer, *products)))
        elif any(products):
            changes.append((layer, "forward", products[0]))
    changed = {layer for layer, _, _ in changes}
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and not changed.isdisjoint(layer.modules()):
            changes.append((layer, "activation_relu_or_gelu", 0))  # its fast path knows no other activation
    return changes


def attention_of(layer: nn.MultiheadAttention, into: Product | None, out: Product | None) -> Callable[..., Any]:
    """The `forward` of an attention with these products; None: torch's own. What is not self-attention, or has a mask,
    or returns weights, is the layer's own."""
    own, heads = layer.forward, layer.num_heads
    into = into or (lambda tokens: functional.linear(tokens, layer.in_proj_weight, layer.in_proj_bias))
    out = out or (lambda tokens: functional.linear(tokens, layer.out_proj.weight, layer.out_proj.bias))

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        alone = query is key and key is value and query.dim() == 3 and not options.get("is_causal")
        if not alone or need_weights or key_padding_mask is not None or attn_mask is not None:
            return own(query, key, value, key_padding_mask, need_weights, attn_mask, **options)
        tokens = query if layer.batch_first else query.transpose(0, 1)
        batch, length, width = tokens.shape
        q, k, v = into(tokens).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        answer = out(mixed.transpose(1, 2).reshape(batch, length, width))
        return answer if layer.batch_first else answer.transpose(0, 1), None

    return forward


def _folded(module: nn.Module, inputs: Sequence[Tensor]) -> dict[nn.Module, nn.Module]:
    """By layer, what takes its place where batch norms are folded; empty if none can be."""
    try:
        replaced = folded_norms(module, inputs)
    except Exception:  # noqa: BLE001  a module that is traced may raise anything
        return {}
    return {module.get_submodule(name): layer for name, layer in replaced.items()}


def convolution_changes(
    shapes: Mapping[nn.Module, tuple[int, ...]], folded: Mapping[nn.Module, nn.Module] = MappingProxyType({})
) -> list[Change]:
    """The changes of the convolutions: their weights packed for an input of the shape that was seen, with the layers of
    `folded` in the places of others. None if convolutions are a small part of the model."""
    layers = {layer: shape for layer, shape in shapes.items() if isinstance(layer, nn.Conv2d) and len(shape) == 4}
    convolved = sum(layer.weight.numel() * prod(shape[2:]) / prod(layer.stride) for layer, shape in layers.items())
    multiplied = sum(rows * weight.numel() for rows, weight, _ in _linear_weights(shapes))
    if convolved < LEAST_CONVOLUTIONS * (convolved + multiplied):
        return []
    # Not the layers themselves: a module that is set as an attribute is registered as a layer.
    forwards: dict[nn.Module, Product] = {layer: other.__call__ for layer, other in folded.items()}
    for layer, shape in layers.items():
        executed = folded.get(layer, layer)
        assert isinstance(executed, nn.Conv2d)
        forwards[layer] = packed_convolution(executed, shape)
    return [(layer, "forward", forward) for layer, forward in forwards.items()]


def packed_convolution(layer: nn.Conv2d, shape: Sequence[int]) -> Product:
    """oneDNN's convolution with weights that are packed for this shape of the input."""
    places = (layer.padding, layer.stride, layer.dilation, layer.groups)
    packed = torch.ops.mkldnn._reorder_convolution_weight(layer.weight, *places, list(shape))
    convolve, bias = torch.ops.mkldnn._convolution_pointwise.default, layer.bias

    def forward(images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        answer: Tensor = convolve(images, packed, bias, *places, "none", [], "")
        return answer

    return forward
