"""Random inputs for measurements, profiles and proofs: uniform bytes, or standard normal values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from servers.contract.tensors import Array
from servers.models.specification import ModelSpecification


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
