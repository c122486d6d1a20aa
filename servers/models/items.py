"""Random items of a model: valid values by datatype and range, padded to the longest item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array

Values = Mapping[str, tuple[int, int]]
"""By input, the least value and the one above the largest."""


def random_array(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    values: tuple[int, int] | None = None,
) -> Array:
    """Values in the given range, else uniform bytes for UINT8, 0 or 1 for other integers and booleans, short words for
    BYTES, and standard normal values drawn as FP32 for the rest."""
    if dtype.kind == "O":
        words = generator.integers(ord("a"), ord("z") + 1, (*shape, 8), np.uint8)
        array = np.empty(shape, object)
        array.reshape(-1)[:] = [bytes(word) for word in words.reshape(-1, 8)]
        return array
    if values is not None:
        drawn = generator.integers(*values, shape) if dtype.kind in "iub" else generator.uniform(*values, shape)
        return drawn.astype(dtype)
    if dtype == np.uint8:
        return generator.integers(0, 256, shape, np.uint8)
    if dtype.kind in "iub":
        return generator.integers(0, 2, shape, np.uint8).astype(dtype)
    normal: Array = generator.standard_normal(shape, np.float32).astype(dtype, copy=False)
    return normal


def valid_items(specification: ModelSpecification, seed: int, lengths: Sequence[int]) -> Mapping[str, Array]:
    """One item per length, padded to the longest: the model's own items if it describes some, else random ones."""
    return (specification.make_items or partial(random_items, specification))(seed, lengths)


def random_items(
    specification: ModelSpecification, seed: int, lengths: Sequence[int], values: Values | None = None
) -> dict[str, Array]:
    """One item per length, the size along the first axis; where that is padded, items end with their padding.

    Lengths may differ only on a padded axis. Other axes have their default size.
    """
    generator, axis, sizes = np.random.default_rng(seed), specification.main_axis, specification.along(max(lengths))
    made = {}
    for tensor in specification.inputs:
        shape = (len(lengths), *specification.item_shape(tensor, sizes))
        array = random_array(generator, shape, tensor.dtype, (values or {}).get(tensor.name))
        if axis is not None:
            axis.pad(tensor.name, array, lengths)
        made[tensor.name] = array
    return made


def item_bytes(specification: ModelSpecification, length: int | None) -> int:
    """The size of one item's inputs; a BYTES element counts as 8 bytes."""
    sizes = specification.along(length)
    return sum(prod(specification.item_shape(one, sizes)) * one.dtype.itemsize for one in specification.inputs)
