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
from pathlib import Path

from servers.contract.errors import InternalError, InvalidRequestError
from servers.contract.shared_memory import RegionReference
from servers.native.served_models import shown

FOLDER = Path("/dev/shm")
MAX_KEY_BYTES = 255
RESERVED_PREFIXES = ("triton_python_backend_shm_region", "abserve_triton_", "sem.")
"""Memory of servers and libraries that may live on the same machine: no client has a reason to look into it."""


class Region:
    """One registered piece of a shared-memory object. Its mapping lives as long as anything looks into it."""

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

    def window(self, reference: RegionReference) -> Window:
        """A piece that is inside it."""
        return Window(self, reference)

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
    on_device = False

    def __init__(self, region: Region, reference: RegionReference) -> None:
        self._region = region
        self.reference = reference

    def view(self) -> memoryview:
        """Its bytes, checked just now. Raises `InvalidRequestError`."""
        self._region.check()
        return self._region.view(self.reference.offset, self.reference.byte_size)

    def write(self, data: bytes | memoryview) -> None:
        """Raises `ContractError` when it is too small or gone."""
        self.reference.check_room(len(data))
        self._region.write(self.reference.offset, data)

    def fetch(self) -> None:
        """Nothing to copy. Raises `InvalidRequestError` if the memory has been taken away."""
        self._region.check()


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
