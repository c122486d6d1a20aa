"""CUDA shared memory that clients have registered: device memory of another process, opened by its IPC handle.

The engines take their batches from host memory, so an input is copied from the device to the host in the engine thread
right before its batch is gathered, and an output back in a worker thread before its answer is sent. Each copy counts as
a use of the region: its handle is closed when it is unregistered and no copy is under way, and whoever unregistered it
is answered after that, so that a client may then free its memory.

Every call of the driver makes the device's primary context current on its thread, which is the one that torch and ONNX
Runtime use, and takes it away again, so that an engine finds its thread as it left it.

A handle is a secret of its owner, as a key of system shared memory is: no message and no status has one.
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

from servers.contract.errors import InternalError, InvalidRequestError, UnsupportedError
from servers.contract.tensors import Array
from servers.gpu.cuda_library import CudaError, CudaLibrary
from servers.native.served_models import shown

log = structlog.get_logger("abserve.cuda")

NO_CUDA_MEMORY = "this server does not offer CUDA shared memory; use system shared memory or send the data"

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


class CudaAccess:
    """The driver, loaded when somebody first needs it; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._driver: CudaDriver | None = None
        self._told = False

    def driver(self) -> CudaDriver:
        """Blocks for up to a second the first time. Raises `UnsupportedError` where no device answers."""
        with self._lock:
            if self._driver is None:
                try:
                    self._driver = CudaDriver()
                except CudaError as exc:
                    if not self._told:
                        log.info("CUDA shared memory is not offered", reason=str(exc))
                        self._told = True
                    raise UnsupportedError(NO_CUDA_MEMORY) from exc
            return self._driver

    def open(self, name: str, handle: bytes, device: int, byte_size: int) -> CudaRegion:
        """Map a client's memory; blocks. Raises `ContractError`."""
        driver = self.driver()
        if len(handle) != HANDLE_BYTES:
            raise InvalidRequestError(
                f"the raw handle of region {shown(name)} must have {HANDLE_BYTES} bytes, got {len(handle)}"
            )
        if not 0 <= device < driver.device_count:
            raise InvalidRequestError(
                f"region {shown(name)} cannot be on GPU {device}: this server sees {driver.device_count} of them, "
                "numbered from 0"
            )
        try:
            address = driver.open(device, handle)
        except CudaError as exc:
            raise InvalidRequestError(
                f"the raw handle of region {shown(name)} cannot be opened on GPU {device}: give the one that "
                f"cudaIpcGetMemHandle made in another process of this machine that still runs ({exc})"
            ) from exc
        region = CudaRegion(name, driver, device, address, byte_size)
        try:
            available = driver.bytes_behind(device, address)
        except CudaError as exc:
            region.close()
            raise InvalidRequestError(f"the size of region {shown(name)} cannot be read ({exc})") from exc
        if byte_size > available:
            region.close()
            raise InvalidRequestError(
                f"region {shown(name)} would end at byte {byte_size} of an allocation of {available} bytes"
            )
        return region


class CudaRegion:
    """One registered piece of device memory, with the number of those who use it at this moment; any thread."""

    on_device = True

    def __init__(self, name: str, driver: CudaDriver, device: int, address: int, byte_size: int) -> None:
        self.name = name
        self.device = device
        self.byte_size = byte_size
        self._driver = driver
        self._address = address
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        self._closed = threading.Event()

    def check(self) -> None:
        """Nothing can be told before it is read."""

    def read(self, offset: int, destination: Array) -> None:
        """Fill `destination`, a contiguous array of bytes; blocks. Raises `InvalidRequestError`."""
        with self._used("its input was read"):
            try:
                self._driver.read(self.device, self._address + offset, destination.ctypes.data, destination.nbytes)
            except CudaError as exc:
                raise InvalidRequestError(
                    f"region {shown(self.name)} cannot be read from GPU {self.device}: is its owner gone? ({exc})"
                ) from exc

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Blocks, so never in the event loop. Raises `ContractError`."""
        if not data:
            return
        source = np.frombuffer(data, np.uint8)
        with self._used("its output was written"):
            try:
                self._driver.write(self.device, self._address + offset, source.ctypes.data, source.nbytes)
            except CudaError as exc:
                raise InternalError(
                    f"the output cannot be written to region {shown(self.name)} on GPU {self.device} ({exc})"
                ) from exc

    def close(self) -> None:
        """Let nobody use it from now on; returns when the last copy has ended and the handle is closed. Idempotent."""
        with self._lock:
            idle = self._users == 0 and not self._closing
            self._closing = True
        if idle:
            self._unmap()
        self._closed.wait()

    @contextmanager
    def _used(self, purpose: str) -> Iterator[None]:
        with self._lock:
            if self._closing:
                raise InvalidRequestError(f"region {shown(self.name)} was unregistered before {purpose}")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._users == 0 and self.is_closing
            if last:
                self._unmap()

    @property
    def is_closing(self) -> bool:
        """Whether `close` has been called."""
        return self._closing

    def _unmap(self) -> None:
        try:
            self._driver.close(self.device, self._address)
        except CudaError as exc:  # there is nothing left that anybody could do about it
            log.warning("a CUDA shared-memory region could not be closed", region=shown(self.name), reason=str(exc))
        finally:
            self._closed.set()
