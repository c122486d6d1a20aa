"""Batches: the bucket sizes of CUDA graphs, random and empty inputs, and cosines between rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from servers.contract.tensors import Array
from servers.models.items import random_array as random_array
from servers.models.specification import ModelSpecification


def bucket_sizes(max_batch_size: int, *, halves: bool = True) -> tuple[int, ...]:
    """Powers of two, from 8 on also one and a half times those (12, 24, …), and `max_batch_size` itself.

    So at most half of a small batch and a third of one above 8 is padding. `halves=False` gives fewer, for engines that
    need long to prepare one.
    """
    powers = [2**n for n in range(max_batch_size.bit_length())]
    sizes = {*powers, *(size * 3 // 2 for size in powers if halves and size >= 8), max_batch_size}
    return tuple(sorted(size for size in sizes if size <= max_batch_size))


def warm_up_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The batch sizes to warm up with: powers of two, and `max_batch_size` itself; ascending."""
    return bucket_sizes(max_batch_size, halves=False)


def bucket_of(buckets: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `buckets` that holds `rows`. Raises `ValueError` if all are smaller."""
    for size in buckets:
        if rows <= size:
            return size
    raise ValueError(f"a batch of {rows} exceeds the largest bucket, {buckets[-1]}")


def random_inputs(
    specification: ModelSpecification, batch: int, seed: int, sizes: Mapping[str, int] | None = None
) -> Mapping[str, Array]:
    """A random batch as the engine takes it, by the inputs' names; axes without an entry in `sizes` have their default.

    Values are valid for the model: token ids are of its vocabulary, and no place is padding.
    """
    if specification.make_items is not None:
        axis = specification.padded_axis
        size = 1 if axis is None else (sizes or {}).get(axis.name, axis.default)
        return specification.make_items(seed, [size] * batch)
    generator = np.random.default_rng(seed)
    return {
        tensor.name: random_array(generator, (batch, *specification.item_shape(tensor, sizes)), tensor.dtype)
        for tensor in specification.inputs
    }


def zero_inputs(
    specification: ModelSpecification, rows: int, sizes: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """A batch of zeros; axes without an entry in `sizes` have their default."""
    return {
        tensor.name: np.zeros((rows, *specification.item_shape(tensor, sizes)), tensor.dtype)
        for tensor in specification.inputs
    }


def row_cosines(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Cosine of each row of `a` with the same row of `b`, computed in FP64; NaN where a row is zero or not finite."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines: npt.NDArray[np.float64] = (x * y).sum(axis=1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return cosines
