"""Shared memory that clients have registered: regions of system memory, which front ends and the engine's side open.

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
import stat
import weakref
from pathlib import Path

from servers.native.shared.interface import OpenRegion
from servers.protocol.errors import InternalError, InvalidRequestError, UnavailableError
from servers.protocol.records import shown
from servers.protocol.tensors import Array

MAX_ADDRESS = 2**64

FOLDER = Path("/dev/shm")
MAX_KEY_BYTES = 255
RESERVED_PREFIXES = ("triton_python_backend_shm_region", "abserve_triton_", "sem.")
"""Shared memory of other servers and libraries on the machine: no client has a reason to read it."""


class SystemRegion:
    """A region of a shared-memory object. Its file stays open as long as a request names it."""

    def __init__(self, opening: OpenRegion, *, is_open: bool = False) -> None:
        """The path is a key unless `is_open` in another process: the key's file may be gone by now. Raises
        `ContractError` when there is no such memory."""
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
