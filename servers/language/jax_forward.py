"""One step of a decoder in JAX: a jitted executable for each size of a step, over static KV slots that are donated.

The size of a step is its rows, its blocks of prompt tokens and the positions that attention sees, each rounded up to a
bucket. What differs between steps of one size is one array of integers. A row or token that only fills a bucket has the
position behind the last one, so that writing its key and value is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from servers.language.decoder import Affine, DecoderShape, DecoderWeights, LayerWeights
from servers.language.forward import SlotForward, StepPlan
from servers.options.defaults import usable_cores

QUERIES = 32
"""Tokens of one prompt in a block: they share the keys that a block gathers."""
SHORTEST = 256
"""The fewest positions that attention is compiled for."""
FEW_ROWS = 8
"""Up to so many tokens a step reads the chosen experts only."""
_PER_BLOCK = 4

jax.tree_util.register_dataclass(Affine, data_fields=["weight", "bias"], meta_fields=[])
jax.tree_util.register_dataclass(
    LayerWeights,
    data_fields=[field.name for field in fields(LayerWeights) if field.name != "window"],
    meta_fields=["window"],
)


@dataclass(frozen=True, slots=True)
class JaxStepSize:
    """The buckets of one executable. Tokens are flat: rows first, then the blocks of prompts."""

    rows: int
    blocks: int
    length: int
    """Positions that attention sees, from 0."""

    @property
    def integers(self) -> int:
        return self.rows + self.blocks * (_PER_BLOCK + QUERIES)


class ChosenTokens(NamedTuple):
    """The tokens of a step on their way to the host, and the places of those that a request wants."""

    array: Any
    wanted: list[int]

    def tolist(self) -> list[int]:
        """Waits for them."""
        tokens: list[int] = np.asarray(self.array)[self.wanted].tolist()
        return tokens


class JaxForward(SlotForward):
    """See this module. `weights` hold arrays of JAX; `chunk` and `largest_chunk`: tokens of prompts beside running
    answers, and without any. `precision` is JAX's name of the precision of products."""

    alignment = QUERIES

    def __init__(
        self, weights: DecoderWeights, slots: int, max_length: int, chunk: int, largest_chunk: int, precision: str
    ) -> None:
        shape: DecoderShape = weights.shape
        self._weights, self._slots, self._max_length, self._precision = weights, slots, max_length, precision
        embedding: Any = weights.embedding
        self._device = next(iter(embedding.devices()))
        # Keys, then values, of each layer: [slots, kv_heads, length, head_size].
        sizes = (slots, shape.kv_heads, max_length, shape.head_size)
        self._cache = [
            tuple(jnp.zeros(sizes, embedding.dtype, device=self._device) for _ in range(2)) for _ in range(shape.layers)
        ]
        self._tokens = jnp.zeros(slots, jnp.int32, device=self._device)
        """The next token of each slot."""
        self._parts = {
            "embedding": weights.embedding,
            "positions": weights.positions,
            "layers": weights.layers,
            "norm": weights.norm,
            "head": weights.head,
            "frequencies": weights.frequencies,
        }
        self._rows = _buckets(1, slots, 2)
        self._rows_beside = _buckets(min(FEW_ROWS, slots), slots, 4)
        """Rows of steps that also read prompts, which take longer anyway: fewer executables."""
        self._lengths = _buckets(min(SHORTEST, max_length), max_length, 4 if self._device.platform == "cpu" else 2)
        self._blocks, self._most_blocks = -(-chunk // QUERIES), -(-largest_chunk // QUERIES)
        self.most_pieces = self._most_blocks
        self._executables: dict[JaxStepSize, Callable[..., Any]] = {}
        self._move = jax.jit(_moved, donate_argnums=(0, 1))

    @property
    def cache_bytes(self) -> int:
        return sum(part.nbytes for layer in self._cache for part in layer)

    def describe(self) -> dict[str, object]:
        return {
            "mode": "jit",
            "attention": "products of XLA over the positions of a bucket",
            "kernels": f"XLA of JAX {jax.__version__}",
            "cuda_graphs": None,  # XLA decides
            "executables": len(self._executables),
        }

    def warm_up(self) -> None:
        """Compile every size of a step, several at once, and execute each."""
        sizes = [JaxStepSize(rows, 0, length) for rows in self._rows for length in self._lengths]
        sizes += [JaxStepSize(rows, self._blocks, length) for rows in self._rows_beside for length in self._lengths]
        sizes += [JaxStepSize(self._rows_beside[0], self._most_blocks, length) for length in self._lengths]
        sizes = [size for size in dict.fromkeys(sizes) if size not in self._executables]
        with ThreadPoolExecutor(min(8, usable_cores())) as threads:
            lowered = [self._lowered(size) for size in sizes]
            compiled = threads.map(lambda program: program.compile(), lowered)
            self._executables.update(zip(sizes, compiled, strict=True))
        for size in sizes:
            self._execute(size, self._integers(StepPlan([]), size))
        self._cache, self._tokens = self._move(self._cache, self._tokens, 0, 0)
        jax.block_until_ready(self._tokens)

    def step(self, plan: StepPlan) -> ChosenTokens:
        size = self._size(plan)
        chosen = self._execute(size, self._integers(plan, size))
        chosen.copy_to_host_async()
        rows = len(plan.lengths)
        wanted, block = list(range(rows)), size.rows - 1
        for piece in plan.pieces:
            block += -(-len(piece.ids) // QUERIES)
            if piece.last:
                wanted.append(block)
        return ChosenTokens(chosen, wanted)

    def move(self, source: int, target: int, length: int) -> None:  # noqa: ARG002  # the whole slot: one executable
        self._cache, self._tokens = self._move(self._cache, self._tokens, source, target)

    def _execute(self, size: JaxStepSize, integers: Any) -> Any:
        executable = self._executables.get(size)
        if executable is None:
            executable = self._executables[size] = self._lowered(size).compile()
        self._cache, self._tokens, chosen = executable(
            self._parts, self._cache, self._tokens, jax.device_put(integers, self._device)
        )
        return chosen

    def _lowered(self, size: JaxStepSize) -> Any:
        weights = self._weights
        function = partial(_step, shape=weights.shape, size=size, rope_scale=weights.rope_scale)
        integers = jax.device_put(np.zeros(size.integers, np.int32), self._device)
        with jax.default_matmul_precision(self._precision):
            return jax.jit(function, donate_argnums=(1, 2)).lower(self._parts, self._cache, self._tokens, integers)

    def _size(self, plan: StepPlan) -> JaxStepSize:
        longest = max((*plan.lengths, *(piece.start + len(piece.ids) - 1 for piece in plan.pieces))) + 1
        length = _bucket(self._lengths, longest)
        if not plan.pieces:
            return JaxStepSize(_bucket(self._rows, len(plan.lengths)), 0, length)
        blocks = sum(-(-len(piece.ids) // QUERIES) for piece in plan.pieces)
        blocks = self._blocks if blocks <= self._blocks else self._most_blocks
        return JaxStepSize(_bucket(self._rows_beside, len(plan.lengths)), blocks, length)

    def _integers(self, plan: StepPlan, size: JaxStepSize) -> Any:
        """The position of each row; of each block its slot, first position, number of tokens, and the slot whose next
        token is chosen or one that does not exist; then the tokens of the blocks."""
        integers = np.zeros(size.integers, np.int32)
        integers[: size.rows] = self._max_length
        integers[: len(plan.lengths)] = plan.lengths
        blocks = integers[size.rows :][: size.blocks * _PER_BLOCK].reshape(size.blocks, _PER_BLOCK)
        ids = integers[size.rows + size.blocks * _PER_BLOCK :].reshape(size.blocks, QUERIES)
        blocks[:, 3] = self._slots
        block = 0
        for piece in plan.pieces:
            for begin in range(0, len(piece.ids), QUERIES):
                part = piece.ids[begin : begin + QUERIES]
                ends = piece.last and begin + QUERIES >= len(piece.ids)
                blocks[block] = (piece.slot, piece.start + begin, len(part), piece.slot if ends else self._slots)
                ids[block, : len(part)] = part
                block += 1
        return integers


def _buckets(first: int, largest: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * factor, largest))
    return tuple(sizes)


def _bucket(buckets: tuple[int, ...], size: int) -> int:
    return next(bucket for bucket in buckets if bucket >= size)


def _moved(cache: Any, tokens: Any, source: Any, target: Any) -> Any:
    """A slot and its next token copied to another slot."""
    cache = [tuple(part.at[target].set(part[source]) for part in layer) for layer in cache]
    return cache, tokens.at[target].set(tokens[source])


def _step(
    parts: Any, cache: Any, tokens: Any, integers: Any, *, shape: DecoderShape, size: JaxStepSize, rope_scale: float
) -> Any:
    """The cache, the next tokens and the tokens chosen by one step: for each row, then for each block."""
    rows, blocks = size.rows, size.blocks
    slots, max_length = len(tokens), cache[0][0].shape[2]
    row_positions = integers[:rows]
    about = integers[rows : rows + blocks * _PER_BLOCK].reshape(blocks, _PER_BLOCK)
    ids = integers[rows + blocks * _PER_BLOCK :]
    block_slots, starts, counts, targets = (about[:, column] for column in range(_PER_BLOCK))
    places = jnp.arange(QUERIES)
    block_positions = jnp.where(places < counts[:, None], starts[:, None] + places, max_length)
    positions = jnp.concatenate((row_positions, block_positions.reshape(-1)))
    token_slots = jnp.concatenate((jnp.arange(rows), jnp.repeat(block_slots, QUERIES)))
    hidden = parts["embedding"][jnp.concatenate((tokens[:rows], ids))]
    if parts["positions"] is not None:
        hidden += parts["positions"][jnp.minimum(positions, max_length - 1)]
    turns = None
    if parts["frequencies"] is not None:
        angles = positions[:, None].astype(jnp.float32) * parts["frequencies"]
        turns = (jnp.cos(angles)[:, None] * rope_scale, jnp.sin(angles)[:, None] * rope_scale)
    heads, kv_heads, width = shape.heads, shape.kv_heads, shape.head_size
    fresh = []
    for layer, (keys, values) in zip(parts["layers"], cache, strict=True):
        qkv = _product(_norm(hidden, layer.norm_1, shape), layer.qkv).reshape(len(hidden), -1, width)
        turned, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if turns is not None:
            turned = _turned(turned, *turns)
        query, key = turned[:, :heads], turned[:, heads:]
        keys = keys.at[token_slots, :, positions].set(key, mode="drop", unique_indices=True)
        values = values.at[token_slots, :, positions].set(value, mode="drop", unique_indices=True)
        fresh.append((keys, values))
        mixed = []
        if rows:
            seen_keys, seen_values = (part[:rows, :, : size.length] for part in (keys, values))
            mixed.append(_attention(query[:rows, None], seen_keys, seen_values, row_positions[:, None], layer, shape))
        if blocks:
            seen_keys, seen_values = (part[:, :, : size.length][block_slots] for part in (keys, values))
            grouped = query[rows:].reshape(blocks, QUERIES, heads, width)
            mixed.append(_attention(grouped, seen_keys, seen_values, block_positions, layer, shape))
        hidden += _product(jnp.concatenate(mixed), layer.out)
        normal = _norm(hidden, layer.norm_2, shape)
        hidden += _experts(normal, layer, shape) if shape.experts else _feed_forward(normal, layer, shape)
    ends = rows + jnp.arange(blocks) * QUERIES + jnp.maximum(counts - 1, 0)
    picked = _norm(hidden[jnp.concatenate((jnp.arange(rows), ends))], parts["norm"], shape)
    logits = lax.dot_general(picked, parts["head"], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    chosen = jnp.argmax(logits, -1).astype(jnp.int32)
    row_targets = jnp.where(row_positions < max_length, jnp.arange(rows), slots)
    tokens = tokens.at[jnp.concatenate((row_targets, targets))].set(chosen, mode="drop")
    return fresh, tokens, chosen


def _product(inputs: Any, part: Any) -> Any:
    """inputs Wᵀ + bias, with W [outputs, inputs]."""
    outputs = lax.dot_general(inputs, part.weight, (((1,), (1,)), ((), ())))
    return outputs if part.bias is None else outputs + part.bias


def _norm(hidden: Any, norm: Any, shape: DecoderShape) -> Any:
    wide = hidden.astype(jnp.float32)
    if shape.centred:
        wide -= wide.mean(-1, keepdims=True)
    wide *= lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + shape.epsilon)
    if shape.centred:
        return (wide * norm.weight + norm.bias).astype(hidden.dtype)
    return wide.astype(hidden.dtype) * norm.weight


def _turned(heads: Any, cosine: Any, sine: Any) -> Any:
    """RoPE of neighbours (2i, 2i + 1)."""
    pairs = heads.reshape(*heads.shape[:-1], -1, 2).astype(jnp.float32)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1)
    return turned.reshape(heads.shape).astype(heads.dtype)


def _attention(query: Any, keys: Any, values: Any, positions: Any, layer: Any, shape: DecoderShape) -> Any:
    """[n·queries, query_size] for query [n, queries, heads, head_size] at `positions` [n, queries] of n slots, whose
    keys and values are [n, kv_heads, length, head_size]."""
    count, queries = positions.shape
    grouped = query.reshape(count, queries, shape.kv_heads, shape.group, shape.head_size)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(count, shape.kv_heads, queries * shape.group, shape.head_size)
    logits = jnp.einsum("nkqd,nkld->nkql", grouped, keys, preferred_element_type=jnp.float32) * shape.scale
    logits = logits.reshape(count, shape.kv_heads, queries, shape.group, -1)
    places = jnp.arange(keys.shape[2])
    seen = places <= positions[..., None]
    if layer.window:
        seen &= places > positions[..., None] - layer.window
    logits = jnp.where(seen[:, None, :, None], logits, -jnp.inf)
    largest = logits.max(-1, keepdims=True)
    sinks = None
    if layer.sinks is not None:
        sinks = layer.sinks.astype(jnp.float32).reshape(shape.kv_heads, 1, shape.group, 1)
        largest = jnp.maximum(largest, sinks)
    largest = jnp.maximum(largest, -1e30)  # a row that only fills a bucket may see nothing
    shares = jnp.exp(logits - largest)
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - largest)
    shares = (shares / jnp.maximum(total, 1e-30)).astype(values.dtype)
    shares = shares.reshape(count, shape.kv_heads, queries * shape.group, -1)
    mixed = jnp.einsum("nkql,nkld->nkqd", shares, values)
    mixed = mixed.reshape(count, shape.kv_heads, queries, shape.group, shape.head_size).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(count * queries, shape.query_size)


def _feed_forward(normal: Any, layer: Any, shape: DecoderShape) -> Any:
    inner = _product(normal, layer.up)
    if shape.activation == "silu":
        inner = jax.nn.silu(inner[:, : shape.inner]) * inner[:, shape.inner :]
    else:
        inner = jax.nn.gelu(inner, approximate=shape.activation == "tanh")
    return _product(inner, layer.down)


def _experts(normal: Any, layer: Any, shape: DecoderShape) -> Any:
    """The answers of each token's chosen experts, weighted.

    The inputs are the last dimension of `up` and `down`, so that few tokens read whole rows of their experts' matrices:
    XLA fuses the choice into a sum along rows, where products would get copies of the matrices, and sums along columns
    reach an eighth of the memory's bandwidth. Many tokens choose nearly all experts, so every expert computes every
    token, as two large products.
    """
    tokens = len(normal)
    router, up, down = layer.router, layer.up, layer.down
    logits, chosen = lax.top_k(_product(normal, router), shape.chosen_experts)
    weights = jax.nn.softmax(logits, axis=-1)
    if tokens <= FEW_ROWS:
        inner = (_wide(normal)[:, None, None] * _wide(up.weight[chosen])).sum(-1).astype(normal.dtype)
        active = _clamped(inner + up.bias[chosen], shape)
        answers = (_wide(active) * _wide(down.weight[:, chosen])).sum(-1).astype(normal.dtype)
        return ((jnp.moveaxis(answers, 0, -1) + down.bias[chosen]) * weights[..., None]).sum(1)
    share = jnp.zeros((tokens, shape.experts), normal.dtype).at[jnp.arange(tokens)[:, None], chosen].set(weights)
    # The experts are a dimension of both operands: else XLA copies all matrices to bring them into another order.
    repeated = jnp.broadcast_to(normal, (shape.experts, *normal.shape))
    inner = jnp.einsum("eth,ejh->etj", repeated, up.weight) + up.bias[:, None]
    weighted = _clamped(inner, shape) * share.T[..., None]
    flat = weighted.transpose(1, 0, 2).reshape(tokens, -1)
    flat_down = down.weight.reshape(len(down.weight), -1)
    return lax.dot_general(flat, flat_down, (((1,), (1,)), ((), ()))) + share @ down.bias


def _wide(part: Any) -> Any:
    return part.astype(jnp.float32)


def _clamped(inner: Any, shape: DecoderShape) -> Any:
    """gpt-oss's gated activation; gate and up in turns."""
    pairs = inner.reshape(*inner.shape[:-1], -1, 2)
    gate = jnp.minimum(pairs[..., 0], shape.swiglu_limit)
    up = jnp.clip(pairs[..., 1], -shape.swiglu_limit, shape.swiglu_limit)
    return (up + 1) * gate * jax.nn.sigmoid(gate * shape.swiglu_alpha)
