"""The shared-memory regions that clients have registered, of the system and of GPUs, as a front end has them.

The engine's side (`RegionRegister`) decides what is registered, under one set of names; every front end then opens it.

A region of system memory is a POSIX shared-memory object, a file in /dev/shm, given by its key, an offset and a size.
Its owner may truncate it at any moment, or leave holes in it that the system has no memory for: touching a mapping of
it would then end this process with SIGBUS. So it is never mapped. Inputs are read with preadv into a slot of the arena,
when the request is passed to the engine, and outputs written with pwrite: a failure concerns only its own request.

A key is its owner's secret: messages and statuses never show one.

CUDA shared memory that clients have registered: device memory of another process, opened by its IPC handle.

An engine on the same device copies inputs and outputs there itself (`borrow`). For every other engine the batcher
copies an input to the host right before its batch is started, and an output back before its answer is sent. A region's
handle is closed when the region is unregistered and no copy uses it; the call that unregisters it returns after that,
so that the client may then free its memory.

Every driver call makes the device's primary context, which torch and ONNX Runtime use too, current on its thread, and
removes it again, so that an engine finds its thread unchanged.

A handle is its owner's secret, like the key of system shared memory: messages and statuses never show one.

The shared-memory regions of a server: which names are taken, and the device memory behind them.

It belongs to the engine's side, so that all front ends have the same regions, and so that device memory is opened in
the process that executes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import structlog

from servers.engines.interface import DeviceMemory
from servers.gpu.cuda_library import CudaError, CudaLibrary
from servers.native.inference import EngineLink
from servers.native.memory import RequestMemory
from servers.native.settings import NativeSettings
from servers.protocol.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.protocol.records import MAX_REGION_NAME_CHARACTERS, RegionReference, Window, shown
from servers.protocol.tensors import Array

MAX_ADDRESS = 2**64
MAX_DEVICE = 2**31 - 1

FOLDER = Path("/dev/shm")
MAX_KEY_BYTES = 255
RESERVED_PREFIXES = ("triton_python_backend_shm_region", "abserve_triton_", "sem.")
"""Shared memory of other servers and libraries on the machine: no client has a reason to read it."""


class SystemRegion:
    """A `Region` of a shared-memory object. Its file stays open as long as a request names it."""

    on_device = False

    def __init__(self, name: str, key: str, offset: int, byte_size: int, path: str | None = None) -> None:
        """`path` is that of the file where another process has it open: the key's may be gone by now.

        Raises `ContractError` when there is no such memory.
        """
        self.name = name
        self.offset = offset
        self.byte_size = byte_size
        try:
            # O_NOFOLLOW: a link would lead out of the folder. O_NONBLOCK: a FIFO would block.
            descriptor = os.open(
                FOLDER / _file_name(key, name) if path is None else path,
                os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if path is None else 0),
            )
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                message = f"no file descriptor is left for region {shown(name)}: unregister one, or try again later"
                raise UnavailableError(message) from exc
            message = f"the memory of region {shown(name)} cannot be opened: create it first, readable and writable"
            raise InvalidRequestError(message) from exc
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        """Where another process of this user can open the same file."""
        self._registered = True
        # Not closed when it is unregistered: requests that wait in the queue may still read it.
        weakref.finalize(self, os.close, descriptor).atexit = False
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequestError(f"the key of region {shown(name)} does not name a shared-memory object")
        if offset + byte_size > status.st_size:
            raise InvalidRequestError(
                f"region {shown(name)} ends at byte {offset + byte_size} of an object of {status.st_size} bytes"
            )

    def row(self) -> dict[str, object]:
        """The region as a status shows it; its key stays empty, since it would give access to the memory."""
        return {"name": self.name, "key": "", "offset": self.offset, "byte_size": self.byte_size}

    def check(self) -> None:
        """Raises `InvalidRequestError` if the file has become too short."""
        if os.fstat(self._descriptor).st_size < self.offset + self.byte_size:
            raise self._truncated()

    def read(self, offset: int, destination: Array) -> None:
        """See `Region`. Raises `InvalidRequestError` if the file has become too short."""
        filled = 0
        while filled < destination.nbytes:
            try:
                count = os.preadv(self._descriptor, [destination.data[filled:]], self.offset + offset + filled)
            except OSError as exc:
                raise InvalidRequestError(f"the shared memory of region {shown(self.name)} cannot be read") from exc
            if count == 0:
                raise self._truncated()
            filled += count

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """See `Region`. Raises `ContractError` if it was unregistered or truncated, or no memory is left."""
        if not self._registered:
            raise InvalidRequestError(f"region {shown(self.name)} was unregistered before its output was written")
        self.check()
        try:
            written = os.pwrite(self._descriptor, data, self.offset + offset)
        except OSError as exc:
            raise InternalError(f"the output cannot be written to region {shown(self.name)}") from exc
        if written != len(data):
            raise InternalError(f"the output cannot be written to region {shown(self.name)}: no memory is left")

    def close(self) -> None:
        """Refuse outputs from now on; requests in the queue can still read their inputs."""
        self._registered = False

    def _truncated(self) -> InvalidRequestError:
        return InvalidRequestError(f"the shared memory of region {shown(self.name)} has been truncated")


class DeviceRegion:
    """A `Region` of device memory, which only the engine's side reads and writes."""

    on_device = True

    def __init__(self, name: str, device: int, byte_size: int) -> None:
        self.name = name
        self.device = device
        self.byte_size = byte_size

    def row(self) -> dict[str, object]:
        """The region as a status shows it, without its handle."""
        return {"name": self.name, "device_id": self.device, "byte_size": self.byte_size}

    def check(self) -> None:
        """Lost device memory shows only when it is read."""

    def read(self, offset: int, destination: Array) -> NoReturn:
        raise AssertionError(f"only the engine's side reads {destination.nbytes} bytes at {offset}")

    def write(self, offset: int, data: bytes | memoryview) -> NoReturn:
        raise AssertionError(f"only the engine's side writes {len(data)} bytes at {offset}")

    def close(self) -> None:
        """Nothing is open here."""


R = TypeVar("R", SystemRegion, DeviceRegion)


class RegionTable:
    """All registered regions; used from the event loop only, except `find`. Refuses everything unless `allowed`.

    Where a method takes a kind of region and a name, an empty name means all regions of that kind.
    """

    def __init__(self, settings: NativeSettings, memory: RequestMemory, link: EngineLink) -> None:
        self.allowed = settings.allow_shared_memory
        self._max_input_bytes = settings.max_body_bytes
        self._memory = memory
        self._link = link
        self._regions: dict[str, SystemRegion | DeviceRegion] = {}

    def find(self, reference: RegionReference) -> Window:
        """The piece of a region that a request names. Raises `ContractError`."""
        self.check_allowed()
        region = self._regions.get(reference.region)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(reference.region)} is not registered")
        check_range(f"the piece of region {shown(region.name)}", reference.offset, reference.byte_size)
        if reference.offset + reference.byte_size > region.byte_size:
            raise InvalidRequestError(
                f"the request uses {reference.byte_size} bytes from byte {reference.offset} of region "
                f"{shown(region.name)}, which has {region.byte_size} bytes"
            )
        return Window(region, reference, self.allocate)

    def allocate(self, byte_size: int) -> Array:
        """Memory for an input, which counts as held while it exists; any thread. Raises `ContractError`."""
        if byte_size > self._max_input_bytes:
            raise TooLargeError(f"an input has {byte_size} bytes, the server takes at most {self._max_input_bytes}")
        return self._memory.allocate(byte_size)

    async def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a client's system memory in every front end. Raises `ContractError`."""
        self.check_allowed()
        check_range(f"region {shown(name)}", offset, byte_size)
        await self._link.ask("register_system", name, key, offset, byte_size)

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Map a client's device memory. Raises `ContractError`."""
        self.check_allowed()
        check_range(f"region {shown(name)}", 0, byte_size)
        if abs(device) > MAX_DEVICE:
            raise InvalidRequestError(f"'device_id' is the number of a GPU, at most {MAX_DEVICE}, got {device}")
        await self._link.ask("register_cuda", name, handle, device, byte_size)

    async def unregister(self, kind: type[R], name: str) -> None:
        """Forget regions; returns when no front end finds them and no copy uses device memory any more.

        An unknown name is not an error.
        """
        self.check_allowed()
        await self._link.ask("unregister", kind is DeviceRegion, name)

    async def open(self, name: str, path: str | None, offset_or_device: int, byte_size: int) -> None:
        """The engine's side has registered a region: of the system, which it has open at this path, or of a GPU.

        Raises `ContractError` when its memory cannot be opened.
        """
        self._regions[name] = (
            DeviceRegion(name, offset_or_device, byte_size)
            if path is None
            else SystemRegion(name, "", offset_or_device, byte_size, path)
        )

    async def forget(self, names: Sequence[str]) -> None:
        """The engine's side has unregistered these."""
        for name in names:
            region = self._regions.pop(name, None)
            if region is not None:
                region.close()

    def rows(self, kind: type[R], name: str) -> list[dict[str, object]]:
        """Regions as a status shows them. Raises `ContractError`."""
        self.check_allowed()
        found = [self._regions.get(name)] if name else list(self._regions.values())
        rows = [region.row() for region in found if isinstance(region, kind)]
        if name and not rows:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return rows

    async def offers_cuda(self) -> bool:
        """Whether CUDA shared memory is allowed and a device answers."""
        try:
            await self.check_cuda()
        except ContractError:
            return False
        return True

    async def check_cuda(self) -> None:
        """Raises `ContractError` unless CUDA shared memory is allowed and a device answers."""
        self.check_allowed()
        await self._link.ask("check_cuda")

    def check_allowed(self) -> None:
        """Raises `InvalidRequestError` unless the server was started with shared memory."""
        if not self.allowed:
            raise InvalidRequestError("shared memory is switched off; start the server with --allow-shared-memory")


def check_range(what: str, offset: int, byte_size: int) -> None:
    """Raises `InvalidRequestError` for a range that no memory has."""
    if offset < 0 or byte_size < 1:
        raise InvalidRequestError(f"{what} needs an offset ≥ 0 and a size ≥ 1")
    if offset + byte_size >= MAX_ADDRESS:
        raise InvalidRequestError(f"offset and size of {what} overflow: their sum does not fit 64 bits")


def _file_name(key: str, name: str) -> str:
    """The file of a key such as `/weights`, as shm_open finds it. Raises `InvalidRequestError`."""
    file_name = key.removeprefix("/")
    plain = file_name not in ("", ".", "..") and "/" not in file_name and "\0" not in file_name
    try:
        plain = plain and len(file_name.encode()) <= MAX_KEY_BYTES
    except UnicodeEncodeError:
        plain = False
    if not plain:
        raise InvalidRequestError(f"a key must be a name of at most {MAX_KEY_BYTES} bytes without further slashes")
    if file_name.startswith(RESERVED_PREFIXES):
        raise InvalidRequestError(f"the key of region {shown(name)} has a prefix that is reserved for servers")
    return file_name


log = structlog.get_logger("abserve.cuda")

NO_CUDA_MEMORY = "this server does not offer CUDA shared memory; use system shared memory or send the data"

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


@dataclass(frozen=True, slots=True)
class _DeviceStreams:
    context: c_void_p
    reading: c_void_p
    writing: c_void_p
    """Separate streams: a copy does not wait for an engine's kernels, nor reading for writing."""


class CudaDriver:
    """An initialised driver, for any thread. Sizes are in bytes; devices are numbered as this process sees them.

    A device's primary context is kept from its first use until the process ends.
    """

    def __init__(self) -> None:
        """Takes up to a second. Raises `CudaError` unless the driver's library exists and sees a device."""
        self._library = CudaLibrary(_SIGNATURES)
        self._call = self._library.call
        self.device_count = self._library.count()
        if self.device_count < 1:
            raise CudaError("the driver sees no device")
        self._devices: dict[int, _DeviceStreams] = {}
        self._lock = threading.Lock()

    def open(self, device: int, handle: bytes) -> int:
        """Map memory that another process exported, and return its address here. Raises `CudaError`."""
        address = _POINTER()
        with self._current(device):
            own_handle = _IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", byref(address), own_handle, _LAZY_ENABLE_PEER_ACCESS)
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
        with self._current(device) as own:
            self._call("cuMemcpyDtoHAsync_v2", destination, address, size, own.reading)
            self._call("cuStreamSynchronize", own.reading)

    def write(self, device: int, address: int, source: int, size: int) -> None:
        """Copy from the host address `source`; returns when every process sees it. Raises `CudaError`."""
        with self._current(device) as own:
            self._call("cuMemcpyHtoDAsync_v2", address, source, size, own.writing)
            self._call("cuStreamSynchronize", own.writing)

    @contextmanager
    def _current(self, device: int) -> Iterator[_DeviceStreams]:
        own = self._device(device)
        self._call("cuCtxPushCurrent_v2", own.context)
        try:
            yield own
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _device(self, index: int) -> _DeviceStreams:
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
            self._devices[index] = _DeviceStreams(context, reading, writing)
            return self._devices[index]


class CudaAccess:
    """Loads the driver at its first use; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._driver: CudaDriver | None = None
        self._logged = False

    def driver(self) -> CudaDriver:
        """Blocks for up to a second the first time. Raises `UnsupportedError` where no device answers."""
        with self._lock:
            if self._driver is None:
                try:
                    self._driver = CudaDriver()
                except CudaError as exc:
                    if not self._logged:
                        log.info("CUDA shared memory is not offered", reason=str(exc))
                        self._logged = True
                    raise UnsupportedError(NO_CUDA_MEMORY) from exc
            return self._driver

    def open(self, name: str, handle: bytes, device: int, byte_size: int) -> CudaRegion:
        """Map a client's memory; blocks. Raises `ContractError`."""
        driver = self.driver()
        if len(handle) != HANDLE_BYTES:
            raise InvalidRequestError(f"a raw handle must have {HANDLE_BYTES} bytes, got {len(handle)}")
        if not 0 <= device < driver.device_count:
            raise InvalidRequestError(f"GPU {device} does not exist: this server sees {driver.device_count}, from 0 on")
        try:
            address = driver.open(device, handle)
        except CudaError as exc:
            raise InvalidRequestError(
                f"the raw handle of region {shown(name)} cannot be opened on GPU {device}: give the one that "
                f"cudaIpcGetMemHandle made in another running process of this machine ({exc})"
            ) from exc
        region = CudaRegion(name, driver, device, address, byte_size)
        try:
            available = driver.bytes_behind(device, address)
        except CudaError as exc:
            region.close()
            raise InvalidRequestError(f"the size of region {shown(name)} cannot be read ({exc})") from exc
        if byte_size > available:
            region.close()
            raise InvalidRequestError(f"region {shown(name)} ends at byte {byte_size} of an allocation of {available}")
        return region


class CudaRegion:
    """A `Region` of device memory, with the number of copies that use it now; any thread."""

    on_device = True

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

    def check(self) -> None:
        """Checks nothing: lost device memory shows only when it is read."""

    def row(self) -> dict[str, object]:
        """The region as a status shows it, without its handle."""
        return {"name": self.name, "device_id": self.device, "byte_size": self.byte_size}

    def read(self, offset: int, destination: Array) -> None:
        """See `Region`; blocks."""
        with self._used("its input was read"):
            try:
                self._driver.read(self.device, self._address + offset, destination.ctypes.data, destination.nbytes)
            except CudaError as exc:
                message = f"region {shown(self.name)} cannot be read from GPU {self.device}: {exc}"
                raise InvalidRequestError(message) from exc

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """See `Region`; blocks, so not for the event loop."""
        if not data:
            return
        source = np.frombuffer(data, np.uint8)
        with self._used("its output was written"):
            try:
                self._driver.write(self.device, self._address + offset, source.ctypes.data, source.nbytes)
            except CudaError as exc:
                message = f"the output cannot be written to region {shown(self.name)} on GPU {self.device}: {exc}"
                raise InternalError(message) from exc

    def borrow(self, offset: int) -> int:
        """The address of a place, where the engine copies until `release`. Raises `InvalidRequestError`."""
        self._enter("the engine used it")
        return self._address + offset

    def release(self) -> None:
        """The end of one `borrow`."""
        self._leave()

    def close(self) -> None:
        """Refuse new copies; returns when the last copy has ended and the handle is closed. Idempotent."""
        with self._lock:
            idle = self._users == 0 and not self.is_closing
            self.is_closing = True
        if idle:
            self._unmap()
        self._closed.wait()

    @contextmanager
    def _used(self, purpose: str) -> Iterator[None]:
        self._enter(purpose)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, purpose: str) -> None:
        with self._lock:
            if self.is_closing:
                raise InvalidRequestError(f"region {shown(self.name)} was unregistered before {purpose}")
            self._users += 1

    def _leave(self) -> None:
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


MAX_REGIONS = 1024
DESCRIPTOR_SHARE = 4
"""Each region of system memory holds a file descriptor in every process: at most a quarter of what a process may have,
since clients need the others."""

Tell = Callable[..., None]
"""Call a method of every front end and wait for all. Raises the first `ContractError`."""
Opening = tuple[str, str | None, int, int]
"""The arguments of `RegionTable.open`."""


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """The piece of a region of device memory that one tensor of a request has.

    Its shape and type are those of `like`, which has no content; without it they are not known before the execution.
    """

    region: CudaRegion
    offset: int
    byte_size: int
    like: Array | None = None

    def read(self) -> Array:
        """A copy of the input on the host; blocks. Raises `ContractError` if the region is gone.

        It does not count as held: of each model at most the batches in flight have copies, and one that is formed.
        """
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


class RegionRegister:
    """All registered regions; any thread, one change at a time."""

    def __init__(self, tell: Tell, *, others_come: bool = True) -> None:
        """`others_come`: front ends may begin later, and have to open what is registered then."""
        self._tell = tell
        self._others_come = others_come
        self._most = min(MAX_REGIONS, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTOR_SHARE))
        self._lock = threading.Lock()
        self._openings: dict[str, Opening] = {}
        self._of_system: dict[str, SystemRegion] = {}  # open for front ends to come, whose clients may unlink the names
        self._on_device: dict[str, CudaRegion] = {}
        self._cuda = CudaAccess()

    @property
    def openings(self) -> list[Opening]:
        """What a new front end has to open."""
        return list(self._openings.values())

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open system memory in every front end. Raises `ContractError`."""
        with self._lock:
            self._check_new(name, offset, byte_size)
            region = SystemRegion(name, key, offset, byte_size)
            self._open((name, region.path, offset, byte_size))
            if self._others_come:
                self._of_system[name] = region

    def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Map device memory of a client. Raises `ContractError`."""
        with self._lock:
            self._check_new(name, 0, byte_size)
            region = self._cuda.open(name, handle, device, byte_size)
            try:
                self._open((name, None, device, byte_size))
            except ContractError:
                region.close()
                raise
            self._on_device[name] = region

    def unregister(self, on_device: bool, name: str) -> None:
        """Forget a region of this kind, for an empty name all; returns when no copy uses device memory any more."""
        with self._lock:
            names = [
                one for one, path, *_ in self._openings.values() if (path is None) == on_device and name in ("", one)
            ]
            for one in names:
                del self._openings[one]
                self._of_system.pop(one, None)
            self._tell("forget", names)
            for region in [self._on_device.pop(one) for one in names if one in self._on_device]:
                region.close()

    def check_cuda(self) -> None:
        """Raises `ContractError` unless a device answers."""
        self._cuda.driver()

    def window(self, name: str, offset: int, byte_size: int, like: Array | None) -> DeviceWindow:
        """The piece of a region on a GPU for a tensor like this one. Raises `NotFoundError`."""
        region = self._on_device.get(name)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return DeviceWindow(region, offset, byte_size, like)

    def _open(self, opening: Opening) -> None:
        try:
            self._tell("open", *opening)
        except ContractError:
            self._tell("forget", [opening[0]])
            raise
        self._openings[opening[0]] = opening

    def _check_new(self, name: str, offset: int, byte_size: int) -> None:
        if not 0 < len(name) <= MAX_REGION_NAME_CHARACTERS:
            raise InvalidRequestError(f"a region's name must have 1 to {MAX_REGION_NAME_CHARACTERS} characters")
        if name in self._openings:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        if len(self._openings) >= self._most:
            raise TooLargeError(f"{self._most} regions are registered, the server's limit: unregister one first")
        check_range(f"region {shown(name)}", offset, byte_size)
