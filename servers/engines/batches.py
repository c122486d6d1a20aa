"""Buckets of batch sizes and shapes, and batches of random or zero inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from servers.engines.settings import EngineError, EngineSettings, engine_kind
from servers.models.items import random_batch
from servers.models.specification import ModelSpecification
from servers.options.defaults import MOST_WARM_ON_CPU
from servers.protocol.tensors import Array, Axis, Shaped, TensorSpec

SMALLEST_AXIS_BUCKET = 16
GRAPH_MODES = ("graph", "compile")
"""Modes that need the shape of every batch in advance."""


class Bucket(NamedTuple):
    """The shape of the batches that one CUDA graph executes."""

    rows: int
    size: int | None = None
    """The size along the model's padded axis; None for a model without one."""

    def shape_of(self, specification: ModelSpecification, tensor: TensorSpec) -> tuple[int, ...]:
        """The shape of an input or output."""
        return (self.rows, *specification.item_shape(tensor, specification.along(self.size)))


def bucket_sizes(max_batch_size: int, listed: Sequence[int] = (), *, halves: bool = True) -> tuple[int, ...]:
    """The `listed` sizes and `max_batch_size` itself; if none is listed, powers of two, and from 8 on also one and a
    half times those (12, 24, …). So at most half of a small batch and a third of one above 8 is padding. `halves=False`
    gives fewer, for engines that need long to prepare one."""
    if listed:
        return tuple(sorted({*listed, max_batch_size}))
    powers = [2**n for n in range(max_batch_size.bit_length())]
    sizes = {*powers, *(size * 3 // 2 for size in powers if halves and size >= 8), max_batch_size}
    return tuple(sorted(size for size in sizes if size <= max_batch_size))


def warm_up_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The batch sizes to warm up with: powers of two, and `max_batch_size` itself; ascending."""
    return bucket_sizes(max_batch_size, halves=False)


def warm_on_cpu(batch_sizes: Sequence[int]) -> Sequence[int]:
    """Those of the ascending batch sizes with which a CPU warms up, the smallest in any case."""
    return [size for size in batch_sizes if size <= MOST_WARM_ON_CPU] or batch_sizes[:1]


def axis_buckets(axis: Axis, pad_to: Sequence[int] = (), *, only: bool = False) -> tuple[int, ...]:
    """Sizes to which batches are padded along the axis: `pad_to`, then powers of two and the axis' largest size; with
    `only` no sizes beyond `pad_to` and the one of the axis' default."""
    listed = {size for size in pad_to if size <= axis.largest}
    powers = (2**n for n in range(SMALLEST_AXIS_BUCKET.bit_length() - 1, axis.largest.bit_length()))
    every = sorted(listed | {size for size in (*powers, axis.largest) if size > max(listed, default=0)})
    return tuple(size for size in every if not only or size in listed or size <= bucket_of(every, axis.default))


def has_buckets(specification: ModelSpecification) -> bool:
    """Whether every shape is known from the batch and the size of the padded axis, as CUDA graphs need it."""
    axis = specification.padded_axis
    places = {} if axis is None else axis.places
    return all(
        dimension != -1 or places.get(tensor.name) == place
        for tensor in (*specification.inputs, *specification.outputs)
        for place, dimension in enumerate(tensor.item_shape, start=1)
    )


def executed_mode(specification: ModelSpecification, settings: EngineSettings, device: str) -> tuple[str, str | None]:
    """The mode in which an engine executes a model on "cpu" or "cuda"; and why it is not the one that `auto` would
    choose otherwise, as a clause. Raises `EngineError` where the requested one does not fit the model."""
    mode = settings.mode_on(device)
    if mode not in GRAPH_MODES or has_buckets(specification):
        return mode, None
    reason = f"{specification.name} has dimensions of any size that cannot be padded, so CUDA graphs do not fit it"
    other = next((other for other in engine_kind(settings.kind).modes[device] if other not in GRAPH_MODES), None)
    if other is None:
        raise EngineError(f"{reason}; use the engine torch or onnxruntime")
    if settings.mode != "auto":
        raise EngineError(f"mode {mode}: {reason}; use mode {other}")
    return other, reason


def bucket_of(buckets: Sequence[int], size: int) -> int:
    """The smallest of the ascending `buckets` that holds `size`. Raises `ValueError` if all are smaller."""
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise ValueError(f"a batch of {size} exceeds the largest bucket, {buckets[-1]}")


def check_sizes(specification: ModelSpecification, inputs: Mapping[str, Shaped]) -> None:
    """Raise `ValueError` for a batch beyond the largest size of an axis, which would stop a GPU's context."""
    for axis in specification.axes:
        for name, place in axis.places.items():
            if name in inputs and (size := inputs[name].shape[place]) > axis.largest:
                raise ValueError(f"{name} has {axis.name} {size}, more than the largest, {axis.largest}")


def random_inputs(
    specification: ModelSpecification, batch: int, seed: int, sizes: Mapping[str, int] | None = None
) -> Mapping[str, Array]:
    """A random batch as the engine takes it, by the inputs' names; axes without an entry in `sizes` have their default.
    Values are valid for the model: token ids are of its vocabulary, and no place is padding."""
    if specification.make_items is not None:
        axis = specification.padded_axis
        size = 1 if axis is None else (sizes or {}).get(axis.name, axis.default)
        return specification.make_items(seed, [size] * batch)
    return random_batch(specification, batch, seed, sizes)


def valid_inputs(
    specification: ModelSpecification, rows: int, sizes: Mapping[str, int] | None = None
) -> Mapping[str, Array]:
    """A batch that the model can execute, quickly made: zeros (empty elements for BYTES), or valid random items where
    the model describes them. Axes without an entry in `sizes` have their default."""
    if specification.make_items is not None:
        return random_inputs(specification, rows, 0, sizes)
    return {
        tensor.name: np.full(
            (rows, *specification.item_shape(tensor, sizes)), b"" if tensor.dtype.hasobject else 0, tensor.dtype
        )
        for tensor in specification.inputs
    }
