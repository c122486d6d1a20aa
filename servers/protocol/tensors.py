"""Tensors as the Open Inference Protocol V2 names them: a name, a datatype, a shape and little-endian bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.generic]
_Batch = TypeVar("_Batch", Array, "torch.Tensor")


class Shaped(Protocol):
    """What has a shape: an array, or a tensor in device memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions; the first is the batch."""


@lru_cache(1024)
def like(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    """An array with this type and shape and without content: it stands for a tensor that is elsewhere, read-only."""
    return np.broadcast_to(np.zeros((), dtype), shape)


DATATYPES: Mapping[str, np.dtype[np.generic]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "UINT8": np.dtype(np.uint8),
        "UINT16": np.dtype("<u2"),
        "UINT32": np.dtype("<u4"),
        "UINT64": np.dtype("<u8"),
        "INT8": np.dtype(np.int8),
        "INT16": np.dtype("<i2"),
        "INT32": np.dtype("<i4"),
        "INT64": np.dtype("<i8"),
        "FP16": np.dtype("<f2"),
        "FP32": np.dtype("<f4"),
        "FP64": np.dtype("<f8"),
    }
)
"""Protocol datatype → NumPy dtype. BYTES is not here: its elements have no fixed size (object arrays of `bytes`)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model as its metadata gives it.

    `shape` includes the batch dimension, which is always the first and always -1 (any), unless the model has none;
    other dimensions are fixed or -1. A request may leave out an `optional` input.

    Raises `ValueError` for another datatype than the protocol's; BF16, which only Triton has, is one.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPES and self.datatype != "BYTES":
            raise ValueError(f"tensor {self.name}: {self.datatype} is not one of {', '.join(DATATYPES)}, BYTES")

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of one item, without the batch dimension."""
        return self.shape[1:]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype of the elements; `object` for BYTES."""
        return DATATYPES.get(self.datatype, np.dtype(object))


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of variable size besides the batch, such as the length of a sequence."""

    name: str
    default: int
    largest: int
    places: Mapping[str, int]
    """By tensor, the index of this dimension; the batch is dimension 0."""
    padding: Mapping[str, int] = field(default_factory=dict)
    """By input, the value that fills the positions beyond an item's length. Empty: items cannot be padded."""

    @property
    def padded(self) -> bool:
        """Whether an item can be padded without changing its answer."""
        return bool(self.padding)

    def size_of(self, arrays: Mapping[str, Shaped]) -> int:
        """The size of a batch along the axis."""
        return next(int(arrays[name].shape[place]) for name, place in self.places.items() if name in arrays)

    def cut(self, name: str, batch: _Batch, size: int) -> _Batch:
        """The view of a tensor's batch up to `size` along the axis; all of a tensor without it."""
        place = self.places.get(name)
        return batch if place is None else batch[(slice(None),) * place + (slice(size),)]

    def pad(self, name: str, batch: Array, lengths: Iterable[int]) -> None:
        """Fill the positions beyond each item's length with the padding, with zero for an output."""
        place = self.places.get(name)
        if place is not None and place < batch.ndim:
            value = b"" if batch.dtype.hasobject else self.padding.get(name, 0)
            for row, length in enumerate(lengths):
                batch[row][(slice(None),) * (place - 1) + (slice(length, None),)] = value
