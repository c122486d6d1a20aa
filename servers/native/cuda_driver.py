"""The few calls of NVIDIA's driver API that it takes to read and write another process's device memory, over ctypes.

Every call makes the device's primary context current on its thread, which is the one that torch and ONNX Runtime use,
and takes it away again, so that an engine finds its thread as it left it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from servers.gpu.cuda_library import CudaError, CudaLibrary

HANDLE_BYTES = 64

_LAZY_ENABLE_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


_POINTER = c_uint64  # CUdeviceptr
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuIpcOpenMemHandle_v2": (POINTER(_POINTER), _Handle, c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuMemGetAddressRange_v2": (POINTER(_POINTER), POINTER(c_size_t), _POINTER),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _POINTER, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (_POINTER, c_void_p, c_size_t, c_void_p),
}


@dataclass(frozen=True, slots=True)
class _Device:
    context: c_void_p
    reading: c_void_p
    writing: c_void_p
    """Streams of our own: a copy waits for no engine's kernels, and reading for no writing."""


class CudaDriver:
    """An initialised driver; any thread. Addresses and sizes are in bytes, devices numbered as this process sees them.

    A device's primary context is kept from its first use until the process ends.
    """

    def __init__(self) -> None:
        """Raises `CudaError` unless the driver's library is there and sees a device; may take a second."""
        self._library = CudaLibrary(_SIGNATURES)
        self.device_count = self._library.count()
        if self.device_count < 1:
            raise CudaError("the driver sees no device")
        self._devices: dict[int, _Device] = {}
        self._lock = threading.Lock()

    def open(self, device: int, handle: bytes) -> int:
        """Map what another process has exported; its address here. Raises `CudaError`."""
        address = _POINTER()
        with self._current(device):
            self._call(
                "cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), _LAZY_ENABLE_PEER_ACCESS
            )
        return address.value

    def bytes_behind(self, device: int, address: int) -> int:
        """How many bytes the allocation has from this address on. Raises `CudaError`."""
        base, size = _POINTER(), c_size_t()
        with self._current(device):
            self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value + size.value - address

    def close(self, device: int, address: int) -> None:
        """Unmap what `open` has mapped; nothing may use it. Raises `CudaError`."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    def read(self, device: int, address: int, destination: int, size: int) -> None:
        """Copy device memory to the host address `destination`; returns when it is there. Raises `CudaError`."""
        with self._current(device) as own:
            self._call("cuMemcpyDtoHAsync_v2", destination, address, size, own.reading)
            self._call("cuStreamSynchronize", own.reading)

    def write(self, device: int, address: int, source: int, size: int) -> None:
        """Copy from the host address `source`; returns when every process sees it. Raises `CudaError`."""
        with self._current(device) as own:
            self._call("cuMemcpyHtoDAsync_v2", address, source, size, own.writing)
            self._call("cuStreamSynchronize", own.writing)

    @contextmanager
    def _current(self, device: int) -> Iterator[_Device]:
        own = self._device(device)
        self._call("cuCtxPushCurrent_v2", own.context)
        try:
            yield own
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _device(self, index: int) -> _Device:
        with self._lock:
            known = self._devices.get(index)
            if known is not None:
                return known
            context, reading, writing = c_void_p(), c_void_p(), c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._library.device(index))
            self._call("cuCtxPushCurrent_v2", context)
            try:
                for stream in (reading, writing):
                    self._call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
            finally:
                self._call("cuCtxPopCurrent_v2", byref(c_void_p()))
            self._devices[index] = _Device(context, reading, writing)
            return self._devices[index]

    def _call(self, name: str, *arguments: object) -> None:
        self._library.call(name, *arguments)
