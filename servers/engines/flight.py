"""The memory and events of one started batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from servers.engines.device_copies import HostCopies
from servers.engines.padding import fill_rows
from servers.models.specification import Axis, ModelSpecification
from servers.protocol.tensors import Array, TensorSpec

TORCH_TYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
"""Protocol datatype → torch's; torch has none for BYTES."""

COPIED_BYTES = 2**18
"""An output up to this size is copied out of memory that stays pinned; a larger one is fetched into its own.

The allocator of pinned memory takes longer than a small copy, and a large copy longer than the allocator.
"""


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that measure the device time between them."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def new_host_bytes(size: int, *, pinned: bool) -> Array:
    """New memory of the host, page-locked for a GPU."""
    array: Array = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy()
    return array


class Memory:
    """Memory of one tensor on a device, or page-locked on the host, at a fixed address once it is large enough."""

    def __init__(self, tensor: TensorSpec, device: torch.device, *, pinned: bool = False) -> None:
        self.tensor, self._device, self._pinned = tensor, device, pinned
        self.dtype = tensor.dtype
        self.reserve((0,))

    def reserve(self, shape: Sequence[int]) -> None:
        """Replace it by zeros for this shape."""
        dtype = TORCH_TYPES[self.tensor.datatype]
        self._size = prod(shape)
        self._elements = torch.zeros(self._size, dtype=dtype, device=self._device, pin_memory=self._pinned)
        self.address = self._elements.data_ptr()

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether it is large enough."""
        return prod(shape) <= self._size

    def view(self, shape: Sequence[int]) -> Tensor:
        """Its start in this shape."""
        return self._elements[: prod(shape)].view(*shape)


class Flight:
    """Used by one batch from its start to its end."""

    def __init__(self, specification: ModelSpecification, device: torch.device, copies: HostCopies) -> None:
        pinned, host = device.type == "cuda", torch.device("cpu")
        self.inputs = [Memory(tensor, device) for tensor in specification.inputs]
        self.padded = [Memory(tensor, host, pinned=pinned) for tensor in specification.inputs]
        self.outputs = [Memory(tensor, device) for tensor in specification.outputs]
        self._small = [new_host_bytes(COPIED_BYTES, pinned=pinned) for _ in specification.outputs]
        self._small_addresses = [memory.ctypes.data for memory in self._small]
        self.arrived, self.executed, self.done = (copies.event() for _ in range(3))
        self.kept: list[object] = []
        """What must live until the batch is finished."""

    def small_array(self, index: int, shape: Sequence[int]) -> tuple[int, Array]:
        """Page-locked memory for a small output: its address, and an array of this shape over it."""
        return self._small_addresses[index], np.ndarray(shape, self.outputs[index].dtype, self._small[index])

    def merged(self, index: int, arrays: Sequence[Array], shape: Sequence[int], axis: Axis) -> tuple[int, int]:
        """Merge an input, padded to `shape`, in page-locked memory: its address and bytes. Missing rows repeat the last
        one."""
        memory = self.padded[index]
        if not memory.holds(shape):
            memory.reserve(shape)
        filled = memory.view(shape).numpy()
        rows = fill_rows(filled, arrays, memory.tensor.name, axis)
        filled[rows:] = filled[rows - 1]
        return memory.address, filled.nbytes
