"""CUDA shared memory on the side of the engine: device memory of clients, opened by its IPC handle.

An engine on the same device copies inputs and outputs there itself (`borrow`). For every other engine the batcher
copies an input to the host right before its batch is started, and an output back before its answer is sent. A region's
handle is closed when the region is unregistered and no copy uses it; the call that unregisters it returns after that,
so that the client may then free its memory.

Every driver call makes the device's primary context, which torch and ONNX Runtime use too, current on its thread, and
removes it again, so that an engine finds its thread unchanged.

A handle is its owner's secret, like the key of system shared memory: messages and statuses never show one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from servers.engines.interface import DeviceMemory
from servers.gpu.cuda_library import CudaError, CudaLibrary
from servers.protocol.errors import InternalError, InvalidRequestError
from servers.protocol.records import shown
from servers.protocol.tensors import Array

log = structlog.get_logger("abserve.cuda")

HANDLE_BYTES = 64

_LAZY_ENABLE_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


_POINTER = c_uint64  # CUdeviceptr
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuIpcOpenMemHandle_v2": (POINTER(_POINTER), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuMemGetAddressRange_v2": (POINTER(_POINTER), POINTER(c_size_t), _POINTER),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _POINTER, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (_POINTER, c_void_p, c_size_t, c_void_p),
}


_Device = tuple[c_void_p, c_void_p, c_void_p]
"""The context of a device, and a stream for reading and one for writing.

Streams of the server: a copy does not wait for an engine's kernels, nor reading for writing.
"""


class CudaDriver:
    """An initialised driver, for any thread. Sizes are in bytes; devices are numbered as this process sees them. A
    device's primary context is kept from its first use until the process ends."""

    def __init__(self) -> None:
        """Takes up to a second. Raises `CudaError` unless the driver's library exists and sees a device."""
        self._library = CudaLibrary(_SIGNATURES)
        self._call = self._library.call
        self.device_count = self._library.count()
        if self.device_count < 1:
            raise CudaError("the driver sees no device")
        self._devices: dict[int, _Device] = {}
        self._lock = threading.Lock()

    def open(self, device: int, handle: bytes) -> int:
        """Map memory that another process exported, and return its address here. Raises `CudaError`."""
        address = _POINTER()
        with self._current(device):
            ipc_handle = _IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", byref(address), ipc_handle, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def bytes_behind(self, device: int, address: int) -> int:
        """How many bytes of the allocation follow this address. Raises `CudaError`."""
        base, size = _POINTER(), c_size_t()
        with self._current(device):
            self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value + size.value - address

    def close(self, device: int, address: int) -> None:
        """Unmap what `open` mapped, once nothing uses it. Raises `CudaError`."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    def read(self, device: int, address: int, destination: int, size: int) -> None:
        """Copy device memory to the host address `destination`; returns when it is there. Raises `CudaError`."""
        with self._current(device) as (_, reading, _):
            self._call("cuMemcpyDtoHAsync_v2", destination, address, size, reading)
            self._call("cuStreamSynchronize", reading)

    def write(self, device: int, address: int, source: int, size: int) -> None:
        """Copy from the host address `source`; returns when every process sees it. Raises `CudaError`."""
        with self._current(device) as (_, _, writing):
            self._call("cuMemcpyHtoDAsync_v2", address, source, size, writing)
            self._call("cuStreamSynchronize", writing)

    @contextmanager
    def _current(self, index: int) -> Iterator[_Device]:
        with self._lock:
            device = self._devices.get(index)
            if device is None:
                device = self._devices[index] = self._opened(index)
        with self._pushed(device[0]):
            yield device

    def _opened(self, index: int) -> _Device:
        context, reading, writing = c_void_p(), c_void_p(), c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._library.device(index))
        with self._pushed(context):
            for stream in (reading, writing):
                self._call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        return context, reading, writing

    @contextmanager
    def _pushed(self, context: c_void_p) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))


class CudaRegion:
    """A region of device memory, with the number of copies that use it now; any thread. `device` is the GPU on which
    `address` is mapped: its own, or another that reaches it."""

    def __init__(self, name: str, driver: CudaDriver, device: int, address: int, byte_size: int) -> None:
        self.name = name
        self.device = device
        self.byte_size = byte_size
        self._driver = driver
        self._address = address
        self._lock = threading.Lock()
        self._users = 0
        self.is_closing = False
        self._closed = threading.Event()

    def read(self, offset: int, destination: Array) -> None:
        """Copy to `destination`, an array of bytes; blocks. Raises `InvalidRequestError`."""
        with self._used("its input was read") as address:
            try:
                self._driver.read(self.device, address + offset, destination.ctypes.data, destination.nbytes)
            except CudaError as exc:
                message = f"region {shown(self.name)} cannot be read from GPU {self.device}: {exc}"
                raise InvalidRequestError(message) from exc

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy from `data`; blocks. Raises `ContractError`."""
        if not data:
            return
        source = np.frombuffer(data, np.uint8)
        with self._used("its output was written") as address:
            try:
                self._driver.write(self.device, address + offset, source.ctypes.data, source.nbytes)
            except CudaError as exc:
                message = f"the output cannot be written to region {shown(self.name)} on GPU {self.device}: {exc}"
                raise InternalError(message) from exc

    def borrow(self, offset: int) -> int:
        """The address of a place, where the engine copies until `release`. Raises `InvalidRequestError`."""
        return self._enter("the engine used it") + offset

    def close(self) -> None:
        """Refuse new copies; returns when the last copy has ended and the handle is closed. Idempotent."""
        with self._lock:
            idle = self._users == 0 and not self.is_closing
            self.is_closing = True
        if idle:
            self._unmap()
        self._closed.wait()

    @contextmanager
    def _used(self, purpose: str) -> Iterator[int]:
        """The address, which stays mapped in the block."""
        address = self._enter(purpose)
        try:
            yield address
        finally:
            self.release()

    def _enter(self, purpose: str) -> int:
        with self._lock:
            if self.is_closing:
                raise InvalidRequestError(f"region {shown(self.name)} was unregistered before {purpose}")
            self._users += 1
        return self._address

    def release(self) -> None:
        """The end of one `borrow`."""
        with self._lock:
            self._users -= 1
            last = self._users == 0 and self.is_closing
        if last:
            self._unmap()

    def _unmap(self) -> None:
        try:
            self._driver.close(self.device, self._address)
        except CudaError as exc:  # nothing can be done about it any more
            log.warning("a CUDA shared-memory region could not be closed", region=shown(self.name), reason=str(exc))
        finally:
            self._closed.set()


@dataclass(frozen=True, slots=True)
class CudaWindow:
    """The piece of a region of device memory that one tensor of a request has. Its shape and type are those of `like`,
    which has no content; without it they are not known before the execution."""

    region: CudaRegion
    offset: int
    byte_size: int
    like: Array | None = None

    def read(self) -> Array:
        """A copy of the input on the host; blocks. Raises `ContractError` if the region is gone. It does not count as
        held: of each model at most the batches in flight have copies, and one that is formed."""
        assert self.like is not None
        array = np.empty(self.like.shape, self.like.dtype)
        self.region.read(self.offset, array.reshape(-1).view(np.uint8))
        return array

    def write(self, array: Array) -> None:
        """Write an output; blocks. Raises `ContractError`, also when the output does not fit."""
        self._check_fits(array)
        self.region.write(self.offset, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def on(self, device: int | None) -> bool:
        """Whether an engine on this device can use the memory itself."""
        return self.region.device == device and self.like is not None

    def borrow(self) -> DeviceMemory:
        """The memory itself, which stays open until `release`. Raises `ContractError`."""
        assert self.like is not None
        self._check_fits(self.like)
        return DeviceMemory(self.region.borrow(self.offset), self.region.device, self.like.shape, self.like.dtype)

    def release(self) -> None:
        """The engine does not use the memory any more."""
        self.region.release()

    def _check_fits(self, array: Array) -> None:
        if array.nbytes > self.byte_size:
            raise InvalidRequestError(
                f"the output has {array.nbytes} bytes, but the request gives it {self.byte_size} bytes"
            )
