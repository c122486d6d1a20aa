"""The shared-memory regions that clients have registered, of the system and of GPUs, as a front end has them.

The engine's side (`RegionRegister`) decides what is registered, under one set of names; every front end then opens it.

A region of system memory is a POSIX shared-memory object, a file in /dev/shm, given by its key, an offset and a size.
Its owner may truncate it at any moment, or leave holes in it that the system has no memory for: touching a mapping of
it would then end this process with SIGBUS. So it is never mapped. Inputs are read with preadv into a slot of the arena,
when the request is passed to the engine, and outputs written with pwrite: a failure concerns only its own request.

A key is its owner's secret: messages and statuses never show one.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from servers.native.arena import RequestMemory
from servers.native.inference import EngineLink
from servers.native.settings import NativeSettings
from servers.protocol.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from servers.protocol.records import RegionReference, Window, shown
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
