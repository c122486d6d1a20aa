"""Merges the requests of a batch, items of different sizes included, and divides its outputs again. Pure NumPy.

With sizes to pad to (`--pad-to`), requests of any size along the model's padded axis share a batch. It is padded to the
smallest listed size that holds its longest item, and each request's outputs are cut back to its own size. A request
larger than every listed size shares a batch only with others of its size. Without sizes only equal shapes share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from servers.engines.settings import EngineError
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array, Axis

BatchKey = Sequence[tuple[str, tuple[int, ...]]]
NO_SIZES = "none"


def parse_pad_to(text: str) -> tuple[int, ...]:
    """The sizes of `--pad-to`, ascending; empty for an empty text and for none. Raises `ValueError`."""
    if text.strip() in ("", NO_SIZES):
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        raise ValueError("give sizes of at least 1 separated by commas, such as 32,64,128, or none")
    return tuple(sorted({int(part) for part in parts}))


def pad_to_text(sizes: Sequence[int]) -> str:
    """The sizes as a server's config shows them."""
    return ",".join(map(str, sizes)) or NO_SIZES


@dataclass(frozen=True, slots=True)
class Padding:
    """The axis along which batches are padded, and the ascending sizes to pad to."""

    axis: Axis
    sizes: tuple[int, ...]

    def item_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor's shape without the batch; -1 for a size that may be padded."""
        place = self.axis.places.get(name)
        if place is None or shape[place] > self.sizes[-1]:
            return shape[1:]
        return (*shape[1:place], -1, *shape[place + 1 :])

    def padded_size(self, size: int) -> int:
        """The smallest listed size that holds `size`; `size` itself if none does."""
        return next((listed for listed in self.sizes if listed >= size), size)


def padding_of(specification: ModelSpecification, sizes: Sequence[int]) -> Padding | None:
    """The padding of a model, None without sizes. Raises `EngineError` for sizes that the model does not have."""
    if not sizes:
        return None
    axis = specification.padded_axis
    if axis is None:
        raise EngineError(f"--pad-to: {specification.cannot_pad}; leave the option out")
    if sizes[-1] > axis.largest:
        raise EngineError(f"--pad-to {sizes[-1]}: the largest {axis.name} of {specification.name} is {axis.largest}")
    return Padding(axis, tuple(sizes))


def batch_key(shapes: Iterable[tuple[str, tuple[int, ...]]], padding: Padding | None = None) -> BatchKey:
    """Requests with the same key can share a batch: the inputs' names and the shapes of their items."""
    if padding is None:
        return tuple([(name, shape[1:]) for name, shape in shapes])
    return tuple([(name, padding.item_shape(name, shape)) for name, shape in shapes])


class Staging:
    """The host memory in which merged batches are assembled: for each input as much as its largest batch needed. Its
    content is valid until the next `gather`."""

    def __init__(self) -> None:
        self._memories: dict[str, Array] = {}

    def gather(self, requests: Sequence[Mapping[str, Array]], padding: Padding | None = None) -> Mapping[str, Array]:
        """The requests' rows one after the other, padded to one size, C-contiguous and aligned. A single request that
        already is all of that is passed on; everything else is copied exactly once."""
        first = requests[0]
        size = 0 if padding is None else padding.padded_size(max(map(padding.axis.size_of, requests)))
        if (
            len(requests) == 1
            and (padding is None or padding.axis.size_of(first) == size)
            and all(array.flags.c_contiguous and array.flags.aligned for array in first.values())
        ):
            return first
        return {name: self._stacked(name, [request[name] for request in requests], padding, size) for name in first}

    def _stacked(self, name: str, parts: Sequence[Array], padding: Padding | None, size: int) -> Array:
        shape, dtype = parts[0].shape[1:], parts[0].dtype
        place = None if padding is None else padding.axis.places.get(name)
        if place is not None:
            shape = (*shape[: place - 1], size, *shape[place:])
        memory = self._memory(name, (sum(map(len, parts)), *shape), dtype)
        fill_rows(memory, parts, name, None if padding is None else padding.axis)
        return memory

    def _memory(self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        if dtype.hasobject:  # kept memory would keep the elements of the last batch
            return np.empty(shape, dtype)
        memory = self._memories.get(name)
        if memory is None or memory.size < prod(shape) or memory.dtype != dtype:
            memory = self._memories[name] = np.empty(prod(shape), dtype)
        return memory[: prod(shape)].reshape(shape)


def fill_rows(memory: Array, parts: Sequence[Array], name: str, axis: Axis | None) -> int:
    """Write an input's rows one after the other, padded along the axis to the memory's size; returns their number."""
    place = None if axis is None else axis.places.get(name)
    row = 0
    for part in parts:
        rows = memory[row : row + len(part)]
        if axis is None or place is None:
            rows[...] = part
        else:
            before, size = (slice(None),) * place, part.shape[place]
            rows[(*before, slice(size))] = part
            rows[(*before, slice(size, None))] = b"" if memory.dtype.hasobject else axis.padding.get(name, 0)
        row += len(part)
    return row


def divide(
    outputs: Mapping[str, Array], rows: Sequence[int], sizes: Sequence[int] = (), padding: Padding | None = None
) -> list[dict[str, Array]]:
    """Each request's outputs as views: its rows, cut back to its own size if the batch was padded. Raises `ValueError`
    when the engine returned another number of rows."""
    total = sum(rows)
    for name, array in outputs.items():
        if array.shape[:1] != (total,):
            raise ValueError(f"the engine returned {name!r} with shape {array.shape} for a batch of {total}")
    answers, row = [], 0
    for count in rows:
        answers.append({name: array[row : row + count] for name, array in outputs.items()})
        row += count
    if padding is None:
        return answers
    return [
        {name: padding.axis.cut(name, array, size) for name, array in answer.items()}
        for answer, size in zip(answers, sizes, strict=True)
    ]
