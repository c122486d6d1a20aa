"""System shared memory that clients have registered: found by name, looked into without a copy, written in place.

A region is a POSIX shared-memory object, a file in /dev/shm, of which a client says the key, an offset and a size.
Its owner may unlink it (the mapping stays) or truncate it, after which touching the mapping would kill this process
with SIGBUS. So the file's size is read again before every use: by the door when a request names the region, and in the
engine thread right before its inputs are read. Outputs are written with pwrite, which cannot fault at all. What remains
is a client that truncates its own region while its request's inputs are read: while they are copied into a merged
batch, or, alone in a batch, for as long as the engine reads them in place, which is up to a whole inference on the CPU.

Keys are secrets of their owners: no message and no status says one.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from servers.contract.errors import InternalError, InvalidRequestError, NotFoundError, TooLargeError
from servers.contract.shared_memory import MAX_NAME_CHARACTERS, RegionReference
from servers.native.served_models import shown

FOLDER = Path("/dev/shm")
MAX_REGIONS = 1024
"""Each holds two file descriptors."""
MAX_KEY_BYTES = 255
MAX_ADDRESS = 2**64
RESERVED_PREFIXES = ("triton_python_backend_shm_region", "abserve_triton_", "sem.")
"""Memory of servers and libraries that may live on the same machine: no client has a reason to look into it."""

NO_CUDA_MEMORY = "this server does not offer CUDA shared memory; use system shared memory or send the data"


class Region:
    """One registered piece of a shared-memory object. Its mapping lives as long as anything looks into it."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises `ContractError` when there is no such memory."""
        self.name = name
        self.offset = offset
        self.byte_size = byte_size
        try:
            # Not followed: a link would lead out of the folder. Not blocking: a FIFO would.
            descriptor = os.open(FOLDER / key, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            raise InvalidRequestError(
                f"the shared memory of region {shown(name)} cannot be opened: create it first, readable and writable"
            ) from exc
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise InvalidRequestError(f"the key of region {shown(name)} does not name a shared-memory object")
        if offset + byte_size > status.st_size:
            self.close()
            raise InvalidRequestError(
                f"region {shown(name)} would end at byte {offset + byte_size} of a shared-memory object of "
                f"{status.st_size} bytes"
            )
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        self._skipped = offset - start
        try:
            self._mapping = mmap.mmap(descriptor, self._skipped + byte_size, prot=mmap.PROT_READ, offset=start)
        except (OSError, ValueError, OverflowError) as exc:
            self.close()
            raise InvalidRequestError(f"the shared memory of region {shown(name)} cannot be mapped") from exc

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Some of its bytes."""
        start = self._skipped + offset
        return memoryview(self._mapping)[start : start + byte_size]

    def check(self) -> None:
        """Raises `InvalidRequestError` if the file has become too short to be looked into."""
        if self._mapping.size() < self.offset + self.byte_size:
            raise InvalidRequestError(f"the shared memory of region {shown(self.name)} has been truncated")

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Raises `ContractError` if it has been unregistered or truncated, or the memory is exhausted."""
        if self._file.closed:
            raise InvalidRequestError(f"region {shown(self.name)} was unregistered before its output was written")
        self.check()
        try:
            written = os.pwrite(self._file.fileno(), data, self.offset + offset)
        except OSError as exc:
            raise InternalError(f"the output cannot be written to region {shown(self.name)}") from exc
        if written != len(data):
            raise InternalError(f"the output cannot be written to region {shown(self.name)}: no memory is left")

    def close(self) -> None:
        """Take no more outputs; views that exist keep the mapping."""
        self._file.close()


class Window:
    """A piece of a region that one request names."""

    __slots__ = ("_region", "reference")

    def __init__(self, region: Region, reference: RegionReference) -> None:
        self._region = region
        self.reference = reference

    def view(self) -> memoryview:
        """Its bytes, checked just now. Raises `InvalidRequestError`."""
        self._region.check()
        return self._region.view(self.reference.offset, self.reference.byte_size)

    def write(self, data: bytes | memoryview) -> None:
        """Raises `ContractError` when it is too small or gone."""
        if len(data) > self.reference.byte_size:
            raise InvalidRequestError(
                f"the output takes {len(data)} bytes, but the request gives it {self.reference.byte_size} bytes of "
                f"region {shown(self.reference.region)}"
            )
        self._region.write(self.reference.offset, data)

    def check(self) -> None:
        """Raises `InvalidRequestError` if the memory has been taken away."""
        self._region.check()


class RegionTable:
    """The registered regions by name; used from the event loop alone. Everything is refused unless `allowed`."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, Region] = {}

    def find(self, reference: RegionReference) -> Window:
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
        return Window(region, reference)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a client's memory. Raises `ContractError`."""
        self.check_allowed()
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise InvalidRequestError(f"a region's name must have 1 to {MAX_NAME_CHARACTERS} characters")
        if name in self._regions:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise TooLargeError(f"{MAX_REGIONS} regions are registered, the server's limit: unregister one first")
        _check_range(f"region {shown(name)}", offset, byte_size)
        self._regions[name] = Region(name, _file_name(key, name), offset, byte_size)

    def unregister(self, name: str) -> None:
        """Forget one region, or all for an empty name; one that is not there is not missed."""
        self.check_allowed()
        for known in [name] if name else list(self._regions):
            region = self._regions.pop(known, None)
            if region is not None:
                region.close()

    def status(self, name: str) -> Iterable[Region]:
        """One region, or all for an empty name. Raises `ContractError`."""
        self.check_allowed()
        if not name:
            return tuple(self._regions.values())
        region = self._regions.get(name)
        if region is None:
            raise NotFoundError(f"shared-memory region {shown(name)} is not registered")
        return (region,)

    def check_allowed(self) -> None:
        """Raises `InvalidRequestError` unless the server was started for it."""
        if not self.allowed:
            raise InvalidRequestError(
                "shared memory is switched off on this server; it is started with --allow-shared-memory to allow it"
            )


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
