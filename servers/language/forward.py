"""One step of a decoder: all decoding rows and pieces of prompts, over static KV slots.

Slot i is row i: the rows that decode are 0 … n-1, so the keys and values of a batch are a slice and nothing is
gathered. `SlotForward` is the interface, `TorchForward` runs on every device, `triton_forward` on GPUs, `jax_forward`
with JAX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from servers.language.decoder import Affine, DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Consecutive tokens of one prompt, from position `start`; with the last piece the first token is chosen."""

    slot: int
    start: int
    ids: Sequence[int]
    last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step executes. Row i takes the token that the step before chose for slot i."""

    lengths: Sequence[int]
    """By row: how many tokens its slot holds, which is the position of the token that it takes now."""
    pieces: Sequence[PromptPiece] = ()


class SlotForward(ABC):
    """The weights of a decoder and its slots; executes one step at a time, without waiting for a GPU."""

    alignment = 1
    """A piece of a prompt takes a multiple of so many tokens of a step."""
    most_pieces: int
    """How many pieces of prompts a step takes."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """The memory of all slots."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """What executes, for the settings in effect."""

    @abstractmethod
    def warm_up(self) -> None:
        """Execute what the first steps would otherwise wait for."""

    @abstractmethod
    def step(self, plan: StepPlan) -> Any:
        """Start a step: the tokens chosen for the rows, then for the last pieces of prompts, on the device."""

    def prompt_tokens_beside(self, rows: int) -> int:
        """How many tokens of prompts a step of so many rows should take at most; 0: it has not been measured."""
        del rows
        return 0

    @abstractmethod
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot and its next token to another slot."""


class TensorSlots(SlotForward):
    """Slots in torch's memory."""

    def __init__(self, weights: DecoderWeights, slots: int, max_length: int) -> None:
        shape, device, dtype = weights.shape, weights.embedding.device, weights.embedding.dtype
        self.weights, self.slots, self.max_length, self.device, self.dtype = weights, slots, max_length, device, dtype
        self.most_pieces = slots
        sizes = (shape.layers, slots, max_length, 2, shape.kv_heads, shape.head_size)
        self.cache = torch.zeros(sizes, dtype=dtype, device=device)
        """[layers, slots, length, keys and values, kv_heads, head_size]"""
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """The next token of each slot."""

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    @abstractmethod
    def step(self, plan: StepPlan) -> Tensor:
        """See `SlotForward`: int64. There may be more behind them. The next step may overwrite the tensor."""

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        self.cache[:, target, :length] = self.cache[:, source, :length]
        self.tokens[target] = self.tokens[source]


class TorchForward(TensorSlots):
    """Runs on every device, by torch's operators, one call each. Takes the layers out of `weights`."""

    def __init__(self, weights: DecoderWeights, slots: int, max_length: int) -> None:
        super().__init__(weights, slots, max_length)
        if not weights.layers:
            raise ValueError("another TorchForward has these weights: it has laid them out anew")
        layers, weights.layers = weights.layers, []  # no matrix is in memory twice
        self.weights = weights = replace(weights, layers=layers, norm=replace(weights.norm))
        shape = weights.shape
        self._lines = self.cache.view(shape.layers, slots * max_length, shape.cached_size)
        # Each is [slots, kv_heads, length, head_size] of one layer.
        self._keys = [layer[:, :, 0].transpose(1, 2) for layer in self.cache]
        self._values = [layer[:, :, 1].transpose(1, 2) for layer in self.cache]
        self._rotations = None if weights.frequencies is None else weights.rotations(max_length)[:, None]
        self._range = torch.arange(max_length, device=self.device)
        self._floor: Tensor | None = None
        if self.device.type == "cpu" and not shape.centred:
            self._floor = torch.tensor((shape.hidden * shape.epsilon) ** 0.5, dtype=self.dtype)
            for norm in (weights.norm, *(norm for layer in weights.layers for norm in (layer.norm_1, layer.norm_2))):
                norm.weight = norm.weight * shape.hidden**0.5
        for layer in weights.layers:
            layer.qkv, layer.out = _inputs_first(layer.qkv), _inputs_first(layer.out)
            if not shape.experts:
                layer.up, layer.down = _inputs_first(layer.up), _inputs_first(layer.down)
        self._head = _inputs_first(Affine(weights.head)).weight

    def describe(self) -> dict[str, object]:
        return {"mode": "eager", "attention": "scaled_dot_product_attention", "kernels": "torch", "cuda_graphs": 0}

    def warm_up(self) -> None:
        for rows in {1, self.slots}:
            self.step(StepPlan([0] * rows))
        self.step(StepPlan([], [PromptPiece(0, 0, [0] * min(16, self.max_length), last=True)]))

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Tensor:
        rows = len(plan.lengths)
        places, positions = self._places(plan)
        ids = self.tokens[:rows]
        if plan.pieces:
            prompts = torch.tensor([token for piece in plan.pieces for token in piece.ids], device=self.device)
            ids = torch.cat((ids, prompts))
        chosen = self._choose(self._layers(ids, places, positions, plan), plan)
        self.tokens[:rows] = chosen[:rows]
        for index, piece in enumerate(piece for piece in plan.pieces if piece.last):
            self.tokens[piece.slot] = chosen[rows + index]
        return chosen

    def _places(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Of each token, the line of the cache that it writes, and its position."""
        positions = list(plan.lengths)
        places = [slot * self.max_length + length for slot, length in enumerate(positions)]
        for piece in plan.pieces:
            span = range(piece.start, piece.start + len(piece.ids))
            positions += span
            places += [piece.slot * self.max_length + position for position in span]
        return torch.tensor(places, device=self.device), torch.tensor(positions, device=self.device)

    def _choose(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """The greedy token of each row and of each prompt's last token."""
        rows = len(plan.lengths)
        if plan.pieces:
            wanted, end = list(range(rows)), rows
            for piece in plan.pieces:
                end += len(piece.ids)
                if piece.last:
                    wanted.append(end - 1)
            hidden = hidden[wanted]
        return torch.mm(self._norm(hidden, self.weights.norm), self._head).argmax(-1)

    def _layers(self, ids: Tensor, places: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        weights, shape = self.weights, self.weights.shape
        hidden = functional.embedding(ids, weights.embedding)
        if weights.positions is not None:
            hidden += functional.embedding(positions, weights.positions)
        turned_heads = shape.heads + shape.kv_heads
        rotations = None if self._rotations is None else self._rotations[positions]
        mask = {window: self._row_mask(plan.lengths, window) for window in {layer.window for layer in weights.layers}}
        for index, layer in enumerate(weights.layers):
            qkv = _product(self._norm(hidden, layer.norm_1), layer.qkv)
            if rotations is not None:
                pairs = qkv[:, : turned_heads * shape.head_size].view(len(qkv), turned_heads, -1, 2)
                if qkv.dtype == torch.float32:
                    torch.view_as_complex(pairs).mul_(rotations)
                else:
                    pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotations))
            self._lines[index].index_copy_(0, places, qkv[:, shape.query_size :])
            mixed = self._attention(index, layer, qkv[:, : shape.query_size], plan, mask[layer.window])
            _add_product(hidden, mixed, layer.out)
            self._feed_forward(hidden, layer)
        return hidden

    def _norm(self, hidden: Tensor, norm: Affine) -> Tensor:
        shape = self.weights.shape
        if shape.centred:
            return functional.layer_norm(hidden, (shape.hidden,), norm.weight, norm.bias, shape.epsilon)
        if self._floor is None:
            return functional.rms_norm(hidden, (shape.hidden,), norm.weight, shape.epsilon)
        # On a CPU torch's own is nine operators: x·√n / √(Σx² + n·epsilon) are four.
        lengths = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return torch.div(hidden, torch.hypot(lengths, self._floor)).mul_(norm.weight)

    def _row_mask(self, lengths: Sequence[int], window: int) -> Tensor | None:
        """[rows, 1, 1, longest] to add to the logits of attention; None where every row sees all of the slice."""
        if not lengths or (min(lengths) == max(lengths) and (not window or max(lengths) < window)):
            return None
        ends = torch.tensor(lengths, device=self.device)
        return self._mask(ends, max(lengths) + 1, window)[:, None, None]

    def _mask(self, positions: Tensor, longest: int, window: int) -> Tensor:
        """[positions, longest] to add to the logits of attention of a query at each position."""
        queries, places = positions[:, None], self._range[:longest]
        hidden = places > queries
        if window:
            hidden |= places <= queries - window
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)

    def _attention(self, index: int, layer: LayerWeights, query: Tensor, plan: StepPlan, mask: Tensor | None) -> Tensor:
        """[tokens, query_size]: the attention of each token to its slot's tokens up to its own."""
        shape, rows = self.weights.shape, len(plan.lengths)
        keys, values = self._keys[index], self._values[index]
        parts = []
        if rows:
            live = max(plan.lengths) + 1
            # The queries that share keys are one sequence: no key is copied for each of them.
            grouped = query[:rows].view(rows, shape.kv_heads, shape.group, shape.head_size)
            mixed = self._mix(grouped, keys[:rows, :, :live], values[:rows, :, :live], mask, layer.sinks)
            parts.append(mixed.reshape(rows, shape.query_size))
        begin = rows
        for piece in plan.pieces:
            count, live = len(piece.ids), piece.start + len(piece.ids)
            heads = query[begin : begin + count].view(1, count, shape.heads, shape.head_size).transpose(1, 2)
            grouped = heads.reshape(1, shape.kv_heads, shape.group * count, shape.head_size)
            slot = slice(piece.slot, piece.slot + 1)
            piece_mask = self._mask(self._range[piece.start : live], live, layer.window).repeat(shape.group, 1)
            sinks = None if layer.sinks is None else layer.sinks.repeat_interleave(count)
            mixed = self._mix(grouped, keys[slot, :, :live], values[slot, :, :live], piece_mask, sinks)
            mixed = mixed.reshape(shape.heads, count, shape.head_size).transpose(0, 1)
            parts.append(mixed.reshape(count, shape.query_size))
            begin += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mix(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """softmax(Q Kᵀ) V for [rows, kv_heads, queries, head_size]; a sink is one more logit without a value."""
        scale = self.weights.shape.scale
        if sinks is None:
            return functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale)
        logits = query @ keys.transpose(2, 3) * scale
        if mask is not None:
            logits += mask
        sink = sinks.view(1, query.shape[1], query.shape[2], 1).expand(query.shape[0], -1, -1, 1)
        shares = torch.cat((logits, sink), -1).softmax(-1, dtype=torch.float32)
        return shares[..., :-1].to(values.dtype) @ values

    def _feed_forward(self, hidden: Tensor, layer: LayerWeights) -> None:
        """Add the feed-forward part of a layer to `hidden`."""
        shape = self.weights.shape
        normal = self._norm(hidden, layer.norm_2)
        if shape.experts:
            self._experts(hidden, normal, layer)
            return
        inner = _product(normal, layer.up)
        if shape.activation == "silu":
            inner = functional.silu(inner[:, : shape.inner]).mul_(inner[:, shape.inner :])
        else:
            inner = functional.gelu(inner, approximate=shape.activation)
        _add_product(hidden, inner, layer.down)

    def _experts(self, hidden: Tensor, normal: Tensor, layer: LayerWeights) -> None:
        shape, router = self.weights.shape, layer.router
        assert router is not None
        assert layer.up.bias is not None
        assert layer.down.bias is not None
        logits, chosen = functional.linear(normal, router.weight, router.bias).topk(shape.chosen_experts, -1)
        shares = logits.softmax(-1)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            inner = torch.addmm(layer.up.bias[expert], normal[rows], layer.up.weight[expert])
            gate = inner[:, ::2].clamp(max=shape.swiglu_limit)
            up = inner[:, 1::2].clamp(-shape.swiglu_limit, shape.swiglu_limit)
            mixed = (up + 1) * gate * torch.sigmoid(gate * shape.swiglu_alpha)
            answer = torch.addmm(layer.down.bias[expert], mixed, layer.down.weight[expert])
            hidden.index_add_(0, rows, answer * shares[rows, places, None])


def _inputs_first(part: Affine) -> Affine:
    """The matrix as [inputs, outputs]; on a CPU in that order in memory too, which halves the time of few rows."""
    weight = part.weight.t()
    return Affine(weight.contiguous() if weight.device.type == "cpu" else weight, part.bias)


def _product(inputs: Tensor, part: Affine) -> Tensor:
    """inputs W + bias, with W [inputs, outputs]."""
    return torch.mm(inputs, part.weight) if part.bias is None else torch.addmm(part.bias, inputs, part.weight)


def _add_product(hidden: Tensor, inputs: Tensor, part: Affine) -> None:
    """hidden += inputs W + bias, without a copy of `hidden`."""
    hidden.addmm_(inputs, part.weight)
    if part.bias is not None:
        hidden += part.bias
