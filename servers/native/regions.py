"""The shared-memory regions that clients have registered, of both kinds, by name: one name means one region.

A region of system memory is a POSIX shared-memory object, a file in /dev/shm, of which a client says the key, an offset
and a size. Its owner may truncate it at any moment, or leave holes in it that the system has no memory for: touching a
mapping of it would then end this process with SIGBUS. So it is never mapped. Inputs are read with preadv, in the engine
thread right before they are used, and outputs written with pwrite: where either fails, only its own request does.

Keys are secrets of their owners: no message and no status says one.
"""

from __future__ import annotations

import asyncio
import os
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from servers.contract.errors import ContractError, InternalError, InvalidRequestError, NotFoundError, TooLargeError
from servers.contract.shared_memory import MAX_NAME_CHARACTERS, RegionReference, RegionWindow
from servers.contract.tensors import Array
from servers.native.cuda_regions import CudaAccess, CudaRegion
from servers.native.limits import InputMemory
from servers.native.served_models import shown

MAX_REGIONS = 1024
"""Each in system shared memory holds a file descriptor."""
MAX_ADDRESS = 2**64

FOLDER = Path("/dev/shm")
MAX_KEY_BYTES = 255
RESERVED_PREFIXES = ("triton_python_backend_shm_region", "abserve_triton_", "sem.")
"""Memory of servers and libraries that may live on the same machine: no client has a reason to look into it."""


class Region:
    """One registered piece of a shared-memory object. Its file stays open as long as a request names it."""

    on_device = False

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises `ContractError` when there is no such memory."""
        self.name = name
        self.offset = offset
        self.byte_size = byte_size
        try:
            # Not followed: a link would lead out of the folder. Not blocking: a FIFO would.
            descriptor = os.open(
                FOLDER / _file_name(key, name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError as exc:
            raise InvalidRequestError(
                f"the shared memory of region {shown(name)} cannot be opened: create it first, readable and writable"
            ) from exc
        self._descriptor = descriptor
        self._registered = True
        # Not when it is unregistered: requests that name it may still wait for their turn, in another thread.
        weakref.finalize(self, os.close, descriptor).atexit = False
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequestError(f"the key of region {shown(name)} does not name a shared-memory object")
        if offset + byte_size > status.st_size:
            raise InvalidRequestError(
                f"region {shown(name)} would end at byte {offset + byte_size} of a shared-memory object of "
                f"{status.st_size} bytes"
            )

    def check(self) -> None:
        """Raises `InvalidRequestError` if the file has become too short."""
        if os.fstat(self._descriptor).st_size < self.offset + self.byte_size:
            raise self._truncated()

    def read(self, offset: int, destination: Array) -> None:
        """Fill `destination` with its bytes from `offset` on. Raises `InvalidRequestError` if it is too short."""
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
        """Raises `ContractError` if it has been unregistered or truncated, or the memory is exhausted."""
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
        """Take no more outputs; requests that wait can still read their inputs."""
        self._registered = False

    def _truncated(self) -> InvalidRequestError:
        return InvalidRequestError(f"the shared memory of region {shown(self.name)} has been truncated")


class Window:
    """A piece of a region that one request names, and memory of ours of the same size when it is an input."""

    __slots__ = ("_input", "_memory", "_region", "on_device", "reference")

    def __init__(self, region: Region | CudaRegion, reference: RegionReference, memory: InputMemory) -> None:
        self._region = region
        self._memory = memory
        self._input: Array | None = None
        self.reference = reference
        self.on_device = region.on_device

    def view(self) -> memoryview:
        """Memory that `fetch` fills. Raises `ContractError` if it is too large, or cannot be filled as things are."""
        return self._host().data

    def fetch(self) -> None:
        """Read the input; blocks for a large one. Raises `ContractError` if its memory has been taken away."""
        self._region.read(self.reference.offset, self._host())

    def write(self, data: bytes | memoryview) -> None:
        """Write an output; blocks if it is `on_device`. Raises `ContractError` when the piece is too small or gone."""
        self.reference.check_room(len(data))
        self._region.write(self.reference.offset, data)

    def _host(self) -> Array:
        if self._input is None:
            self._region.check()
            self._input = self._memory.take(self.reference.byte_size)
        return self._input


R = TypeVar("R", Region, CudaRegion)


class RegionTable:
    """Used from the event loop alone, but for `find`. Everything is refused unless `allowed`."""

    def __init__(self, allowed: bool, memory: InputMemory) -> None:
        self.allowed = allowed
        self._memory = memory
        self._regions: dict[str, Region | CudaRegion] = {}
        self._opening: set[str] = set()
        self._cuda = CudaAccess()

    def find(self, reference: RegionReference) -> RegionWindow:
        """The piece of a region that a request names. Raises `ContractError`."""
        self.check_allowed()
        region = self._regions.get(reference.region)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(reference.region)} is not registered")
        _check_range(f"the piece of region {shown(region.name)}", reference.offset, reference.byte_size)
        if reference.offset + reference.byte_size > region.byte_size:
            raise InvalidRequestError(
                f"the request uses {reference.byte_size} bytes from byte {reference.offset} of region "
                f"{shown(region.name)}, which has {region.byte_size} bytes"
            )
        return Window(region, reference, self._memory)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a client's system memory. Raises `ContractError`."""
        self._check_new(name)
        _check_range(f"region {shown(name)}", offset, byte_size)
        self._regions[name] = Region(name, key, offset, byte_size)

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Map a client's device memory. Raises `ContractError`."""
        self._check_new(name)
        _check_range(f"region {shown(name)}", 0, byte_size)
        self._opening.add(name)
        opening = asyncio.ensure_future(asyncio.to_thread(self._cuda.open, name, handle, device, byte_size))
        try:
            region = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        finally:
            self._opening.discard(name)
        self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Forget one region of system memory, or all for an empty name; one that is not there is not missed."""
        self.check_allowed()
        for region in self._named(name, Region):
            del self._regions[region.name]
            region.close()

    async def unregister_cuda(self, name: str) -> None:
        """Likewise for device memory; returns when no copy uses it any more and it is unmapped."""
        self.check_allowed()
        regions = self._named(name, CudaRegion)
        for region in regions:  # at once, so that no request finds one while another is being closed
            del self._regions[region.name]
        for region in regions:
            await asyncio.to_thread(region.close)

    def status(self, name: str) -> Iterable[Region]:
        """One region of system memory, or all for an empty name. Raises `ContractError`."""
        self.check_allowed()
        return self._existing(name, Region)

    def cuda_status(self, name: str) -> Iterable[CudaRegion]:
        """Likewise for device memory."""
        self.check_allowed()
        return self._existing(name, CudaRegion)

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
        await asyncio.to_thread(self._cuda.driver)

    def check_allowed(self) -> None:
        """Raises `InvalidRequestError` unless the server was started for it."""
        if not self.allowed:
            raise InvalidRequestError(
                "shared memory is switched off on this server; it is started with --allow-shared-memory to allow it"
            )

    def _check_new(self, name: str) -> None:
        self.check_allowed()
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise InvalidRequestError(f"a region's name must have 1 to {MAX_NAME_CHARACTERS} characters")
        if name in self._regions or name in self._opening:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        if len(self._regions) + len(self._opening) >= MAX_REGIONS:
            raise TooLargeError(f"{MAX_REGIONS} regions are registered, the server's limit: unregister one first")

    def _named(self, name: str, kind: type[R]) -> list[R]:
        found = [self._regions.get(name)] if name else list(self._regions.values())
        return [region for region in found if isinstance(region, kind)]

    def _existing(self, name: str, kind: type[R]) -> list[R]:
        found = self._named(name, kind)
        if name and not found:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return found


def _close_unwanted(opening: asyncio.Future[CudaRegion]) -> None:
    """Of a client that did not wait for its registration."""
    if not opening.cancelled() and opening.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, opening.result().close)


def _check_range(what: str, offset: int, byte_size: int) -> None:
    if offset < 0 or byte_size < 1:
        raise InvalidRequestError(f"{what} needs an offset ≥ 0 and a size ≥ 1")
    if offset + byte_size >= MAX_ADDRESS:
        raise InvalidRequestError(f"offset and size of {what} overflow: their sum does not fit 64 bits")


def _file_name(key: str, name: str) -> str:
    """The file of a key such as `/weights`, as shm_open understands it. Raises `InvalidRequestError`."""
    file_name = key.removeprefix("/")
    plain = file_name not in ("", ".", "..") and "/" not in file_name and "\0" not in file_name
    try:
        plain = plain and len(file_name.encode()) <= MAX_KEY_BYTES
    except UnicodeEncodeError:
        plain = False
    if not plain:
        raise InvalidRequestError(
            f"the key of region {shown(name)} must be a name without further slashes, of at most {MAX_KEY_BYTES} bytes"
        )
    if file_name.startswith(RESERVED_PREFIXES):
        raise InvalidRequestError(f"the key of region {shown(name)} has a prefix that is reserved for servers")
    return file_name
