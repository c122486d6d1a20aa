"""Batches: the sizes that really execute where graphs of fixed shape are replayed, random and empty ones, cosines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from servers.contract.tensors import Array, TensorSpec
from servers.models.specification import ModelSpecification


def bucket_sizes(max_batch_size: int, *, halves: bool = True) -> tuple[int, ...]:
    """Powers of two, from 8 on those and a half as well (12, 24, …), and the largest itself.

    So at most half of a small batch and a third of one above 8 is padding. Without `halves`: fewer, for engines that
    take long to prepare one.
    """
    sizes = {max_batch_size}
    for power in count():
        size = 2**power
        if size >= max_batch_size:
            return tuple(sorted(sizes))
        sizes.add(size)
        if halves and size >= 8 and size * 3 // 2 < max_batch_size:
            sizes.add(size * 3 // 2)
    raise AssertionError


def bucket_of(buckets: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `buckets` that holds `rows`. Raises `ValueError` where none does."""
    for size in buckets:
        if rows <= size:
            return size
    raise ValueError(f"a batch of {rows} exceeds the largest bucket, {buckets[-1]}")


def random_array(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Of `dtype`; the values are drawn as FP32 where they are not bytes."""
    if dtype == np.uint8:
        return generator.integers(0, 256, shape, np.uint8)
    values: Array = generator.standard_normal(shape, np.float32).astype(dtype, copy=False)
    return values


def random_inputs(specification: ModelSpecification, batch: int, seed: int) -> Mapping[str, Array]:
    """A batch as the engine takes it, by the inputs' names."""
    generator = np.random.default_rng(seed)
    return {
        tensor.name: random_array(generator, (batch, *tensor.item_shape), tensor.dtype)
        for tensor in specification.inputs
    }


def zero_inputs(tensors: Sequence[TensorSpec], rows: int) -> dict[str, Array]:
    """A batch of zeros, to warm up with."""
    return {tensor.name: np.zeros((rows, *tensor.item_shape), tensor.dtype) for tensor in tensors}


def row_cosines(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Cosine of each row of `a` with the same row of `b`, computed in FP64; NaN where a row is zero or not finite."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines: npt.NDArray[np.float64] = (x * y).sum(axis=1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return cosines
