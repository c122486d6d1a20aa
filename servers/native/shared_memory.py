"""Shared memory that clients have registered: the regions of a front end, and the engine's register of their names.

`RegionRegister`, on the engine's side, decides what is registered, under one set of names, so that all front ends have
the same regions. Every front end then opens those of system memory (`RegionTable`); device memory is opened in the
process that executes (see `cuda_memory`).

A region of system memory is a POSIX shared-memory object, a file in /dev/shm, given by its key, an offset and a size.
Its owner may truncate it at any moment, or leave holes in it that the system has no memory for: touching a mapping of
it would then end this process with SIGBUS. So it is never mapped. Inputs are read with preadv into a slot of the arena,
when the request is passed to the engine, and outputs written with pwrite: a failure concerns only its own request.

A key is its owner's secret: messages and statuses never show one.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from servers.gpu.cuda_library import CudaError
from servers.native.cuda_memory import HANDLE_BYTES, CudaDriver, CudaRegion, CudaWindow
from servers.native.interface import (
    CheckCuda,
    CloseRegions,
    EngineLink,
    FrontEndOperation,
    OpenRegion,
)
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
from servers.protocol.records import MAX_REGION_NAME_CHARACTERS, RegionReference, RegionWindow, shown
from servers.protocol.tensors import Array

log = structlog.get_logger("abserve.cuda")

NO_CUDA_MEMORY = "this server does not offer CUDA shared memory; use system shared memory or send the data"
MAX_ADDRESS = 2**64
MAX_DEVICE = 2**31 - 1

FOLDER = Path("/dev/shm")
MAX_KEY_BYTES = 255
RESERVED_PREFIXES = ("triton_python_backend_shm_region", "abserve_triton_", "sem.")
"""Shared memory of other servers and libraries on the machine: no client has a reason to read it."""


class SystemRegion:
    """A region of a shared-memory object. Its file stays open as long as a request names it."""

    def __init__(self, opening: OpenRegion, *, is_open: bool = False) -> None:
        """The path is a key unless `is_open` in another process: the key's file may be gone by now.

        Raises `ContractError` when there is no such memory.
        """
        self.name = name = opening.name
        self.offset = offset = opening.offset
        self.byte_size = byte_size = opening.byte_size
        try:
            # O_NOFOLLOW: a link would lead out of the folder. O_NONBLOCK: a FIFO would block.
            descriptor = os.open(
                opening.path if is_open else FOLDER / _file_name(opening.path, name),
                os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (0 if is_open else os.O_NOFOLLOW),
            )
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                message = f"no file descriptor is left for region {shown(name)}: unregister one, or try again later"
                raise UnavailableError(message) from exc
            message = f"the memory of region {shown(name)} cannot be opened: create it first, readable and writable"
            raise InvalidRequestError(message) from exc
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        """/proc path of the open descriptor; the name may be unlinked."""
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

    def check(self) -> None:
        """Raises `InvalidRequestError` if the file has become too short."""
        if os.fstat(self._descriptor).st_size < self.offset + self.byte_size:
            raise self._truncated()

    def read(self, offset: int, destination: Array) -> None:
        """See `RegionMemory`. Raises `InvalidRequestError` if the file has become too short."""
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
        """See `RegionMemory`. Raises `ContractError` if it was unregistered or truncated, or no memory is left."""
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


class RegionTable:
    """All registered regions; used from the event loop only, except `find`. Refuses everything unless `allowed`.

    Where a method takes a name and `on_device`, an empty name means all regions on devices, or all of the system.
    """

    def __init__(self, settings: NativeSettings, memory: RequestMemory, link: EngineLink) -> None:
        self.allowed = settings.allow_shared_memory
        self._max_input_bytes = settings.max_body_bytes
        self._memory = memory
        self._link = link
        self._regions: dict[
            str, SystemRegion | OpenRegion
        ] = {}  # `OpenRegion` for device memory, which no front end reads

    def find(self, reference: RegionReference) -> RegionWindow:
        """The piece of a region that a request names. Raises `ContractError`."""
        self.check_allowed()
        region = self._regions.get(reference.region)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(reference.region)} is not registered")
        check_range(f"the piece of region {shown(region.name)}", reference.offset, reference.byte_size, least=0)
        if reference.offset + reference.byte_size > region.byte_size:
            raise InvalidRequestError(
                f"the request uses {reference.byte_size} bytes from byte {reference.offset} of region "
                f"{shown(region.name)}, which has {region.byte_size} bytes"
            )
        return RegionWindow(None if isinstance(region, OpenRegion) else region, reference, self.allocate)

    def allocate(self, byte_size: int) -> Array:
        """Memory for an input, which counts as held while it exists; any thread. Raises `ContractError`."""
        if byte_size > self._max_input_bytes:
            raise TooLargeError(f"an input has {byte_size} bytes, the server takes at most {self._max_input_bytes}")
        return self._memory.allocate(byte_size)

    async def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a client's system memory in every front end. Raises `ContractError`."""
        self.check_allowed()
        check_range(f"region {shown(name)}", offset, byte_size)
        await self._link.control(OpenRegion(name, byte_size, offset, key))

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Map a client's device memory. Raises `ContractError`."""
        self.check_allowed()
        check_range(f"region {shown(name)}", 0, byte_size)
        if abs(device) > MAX_DEVICE:
            raise InvalidRequestError(f"'device_id' is the number of a GPU, at most {MAX_DEVICE}, got {device}")
        await self._link.control(OpenRegion(name, byte_size, device=device, handle=handle))

    async def unregister(self, name: str, *, on_device: bool) -> None:
        """Close regions; returns when no front end finds them and no copy uses device memory any more.

        An unknown name is not an error.
        """
        self.check_allowed()
        await self._link.control(CloseRegions(on_device, (name,) if name else ()))

    def open(self, opening: OpenRegion) -> None:
        """The engine's side has registered a region. Raises `ContractError` when its memory cannot be opened."""
        self._regions[opening.name] = opening if opening.device is not None else SystemRegion(opening, is_open=True)

    def close(self, names: Sequence[str]) -> None:
        """The engine's side has unregistered these."""
        for name in names:
            region = self._regions.pop(name, None)
            if isinstance(region, SystemRegion):
                region.close()

    def rows(self, name: str, *, on_device: bool) -> list[dict[str, object]]:
        """Regions as a status shows them: their keys and handles would give access to the memory.

        Raises `ContractError`.
        """
        self.check_allowed()
        regions = [self._regions.get(name)] if name else list(self._regions.values())
        rows: list[dict[str, object]] = []
        for region in regions:
            if isinstance(region, OpenRegion) and on_device:
                rows.append({"name": region.name, "device_id": region.device, "byte_size": region.byte_size})
            elif isinstance(region, SystemRegion) and not on_device:
                rows.append({"name": region.name, "key": "", "offset": region.offset, "byte_size": region.byte_size})
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
        await self._link.control(CheckCuda())

    def check_allowed(self) -> None:
        """Raises `InvalidRequestError` unless the server was started with shared memory."""
        if not self.allowed:
            raise InvalidRequestError("shared memory is switched off; start the server with --allow-shared-memory")


def check_range(what: str, offset: int, byte_size: int, *, least: int = 1) -> None:
    """Raises `InvalidRequestError` for a range that no memory has, and for one smaller than `least`."""
    if offset < 0 or byte_size < least:
        raise InvalidRequestError(f"{what} needs an offset ≥ 0 and a size ≥ {least}")
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


def open_region(driver: CudaDriver, opening: OpenRegion, own: int | None) -> CudaRegion:
    """Map a client's memory; blocks. Raises `InvalidRequestError`.

    Memory of another GPU than `own`, which executes, is mapped so that `own` reaches it by itself. If `own` cannot, or
    is not known, it is mapped on its own GPU and copied through the host; a peer is refused then.
    """
    name, device = shown(opening.name), opening.device
    assert device is not None
    if len(opening.handle) != HANDLE_BYTES:
        raise InvalidRequestError(f"a raw handle must have {HANDLE_BYTES} bytes, got {len(opening.handle)}")
    if not 0 <= device < driver.device_count:
        raise InvalidRequestError(f"GPU {device} does not exist: this server sees {driver.device_count}, from 0 on")
    if opening.peer and own is None:
        raise InvalidRequestError(f"region {name} is for engines on a GPU")
    place = device if own is None else own
    try:
        try:
            address = driver.open(place, opening.handle)
        except CudaError:
            if opening.peer or place == device:
                raise
            place = device
            address = driver.open(place, opening.handle)
    except CudaError as exc:
        raise InvalidRequestError(
            f"the raw handle of region {name} cannot be opened on GPU {place}: give the one that "
            f"cudaIpcGetMemHandle made in another running process of this machine ({exc})"
        ) from exc
    region = CudaRegion(opening.name, driver, place, address, opening.byte_size)
    try:
        available = driver.bytes_behind(place, address)
    except CudaError as exc:
        region.close()
        raise InvalidRequestError(f"the size of region {name} cannot be read ({exc})") from exc
    if opening.byte_size > available:
        region.close()
        raise InvalidRequestError(f"region {name} ends at byte {opening.byte_size} of an allocation of {available}")
    return region


MAX_REGIONS = 1024
DESCRIPTOR_SHARE = 4
"""Each region of system memory holds a file descriptor in every process: at most a quarter of what a process may have,
since clients need the others."""


class RegionRegister:
    """The names of all regions, and the device memory behind some; any thread, one change at a time."""

    def __init__(
        self,
        notify_all: Callable[[FrontEndOperation], None],
        *,
        device: Callable[[], int | None] = lambda: None,
        others_come: bool = True,
    ) -> None:
        """`notify_all` lets every front end execute an operation, and raises the first `ContractError`.

        `device` says which GPU executes, if that is known. `others_come`: front ends may begin later, and have to open
        what is registered then.
        """
        self._device = device
        self._notify_all = notify_all
        self._others_come = others_come
        self._most = min(MAX_REGIONS, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTOR_SHARE))
        self._lock = threading.Lock()
        self._openings: dict[str, OpenRegion] = {}
        self._of_system: dict[str, SystemRegion] = {}  # open for front ends to come, whose clients may unlink the names
        self._on_device: dict[str, CudaRegion] = {}
        self._cuda: CudaDriver | None = None
        self._cuda_lock = threading.Lock()
        self._without_cuda = ""  # why, as it is logged once

    @property
    def openings(self) -> list[OpenRegion]:
        """What a new front end has to open."""
        return list(self._openings.values())

    def open(self, opening: OpenRegion) -> None:
        """Open a client's memory, that of the system in every front end. Raises `ContractError`."""
        with self._lock:
            self._check_new(opening.name)
            if opening.device is None:
                region = SystemRegion(opening)
                self._offer(msgspec.structs.replace(opening, path=region.path))
                if self._others_come:
                    self._of_system[opening.name] = region
                return
            on_device = open_region(self.cuda(), opening, self._device())
            try:
                self._offer(msgspec.structs.replace(opening, handle=b""))
            except ContractError:
                on_device.close()
                raise
            self._on_device[opening.name] = on_device

    def close(self, closing: CloseRegions) -> None:
        """Close regions; returns when no copy uses device memory any more."""
        with self._lock:
            names = tuple(
                opening.name
                for opening in self._openings.values()
                if (opening.device is not None) == closing.on_device
                and (not closing.names or opening.name in closing.names)
            )
            if not names:
                return
            for name in names:
                del self._openings[name]
                self._of_system.pop(name, None)
            self._notify_all(CloseRegions(closing.on_device, names))
            for region in [self._on_device.pop(name) for name in names if name in self._on_device]:
                region.close()

    def cuda(self) -> CudaDriver:
        """The driver, which is loaded at its first use; blocks for up to a second then.

        Raises `UnsupportedError` unless a device answers.
        """
        with self._cuda_lock:
            if self._cuda is None:
                try:
                    self._cuda = CudaDriver()
                except CudaError as exc:
                    if not self._without_cuda:
                        self._without_cuda = str(exc)
                        log.info("CUDA shared memory is not offered", reason=self._without_cuda)
                    raise UnsupportedError(NO_CUDA_MEMORY) from exc
            return self._cuda

    def window(self, name: str, offset: int, byte_size: int, like: Array | None) -> CudaWindow:
        """The piece of a region on a GPU for a tensor like this one. Raises `NotFoundError`."""
        region = self._on_device.get(name)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return CudaWindow(region, offset, byte_size, like)

    def _offer(self, opening: OpenRegion) -> None:
        try:
            self._notify_all(opening)
        except ContractError:
            self._notify_all(CloseRegions(opening.device is not None, (opening.name,)))
            raise
        self._openings[opening.name] = opening

    def _check_new(self, name: str) -> None:
        if not 0 < len(name) <= MAX_REGION_NAME_CHARACTERS:
            raise InvalidRequestError(f"a region's name must have 1 to {MAX_REGION_NAME_CHARACTERS} characters")
        if name in self._openings:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        if len(self._openings) >= self._most:
            raise TooLargeError(f"{self._most} regions are registered, the server's limit: unregister one first")
