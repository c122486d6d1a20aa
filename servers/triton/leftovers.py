"""Shared memory and folders of tritonserver's python backend: the size they need, and removal after a killed server.

Every request crosses the shared memory between tritonserver and its stub once each way. Triton would grow the region
on demand and stall that request, so it starts large enough. The backend also makes one folder per server in /tmp,
not in TMPDIR. It is for unpacked Python environments, which these models do not have, so the folders stay empty.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from servers.models.specification import ModelSpecification
from servers.triton.errors import TritonUnavailableError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "abserve_triton_"
MEBIBYTE = 1 << 20
SLACK_BYTES = 16 * MEBIBYTE
YOUNG_REGION_SECONDS = 60
FILE_BYTES = MEBIBYTE // 2
"""Assumed size of an element without a fixed size, an encoded image."""
FOLDER = Path("/tmp")
PATTERN = "python_env_??????"
LIBRARY = b"libtriton_python.so"
YOUNG_FOLDER_SECONDS = 3600
"""Younger ones stay: another container may share /tmp but not the list of processes."""


def region_bytes(specification: ModelSpecification, max_batch_size: int) -> int:
    """Twice the largest batch with its outputs, and slack for the allocator's fragmentation; whole MiB.

    An axis counts with its largest size, a dimension without an axis as nothing: its region grows on demand.
    """
    largest = {axis.name: axis.largest for axis in specification.axes}
    item_bytes = sum(
        (FILE_BYTES if tensor.dtype.hasobject else tensor.dtype.itemsize) * math.prod(shape)
        for tensor in (*specification.inputs, *specification.outputs)
        if min(shape := specification.item_shape(tensor, largest), default=1) > 0
    )
    return math.ceil((2 * max_batch_size * item_bytes + SLACK_BYTES) / MEBIBYTE) * MEBIBYTE


def assert_space(needed_bytes: int) -> None:
    """Raise `TritonUnavailableError` if /dev/shm is too small: Triton would die with a bus error under load."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed_bytes:
        raise TritonUnavailableError(
            f"{SHARED_MEMORY} has {free // MEBIBYTE} MiB free and Triton's python backend needs "
            f"{needed_bytes // MEBIBYTE} MiB; enlarge it (docker run --shm-size=1g) or lower --max-batch-size"
        )


def new_prefix() -> str:
    """A name for the regions of one launch, in its command line and in /dev/shm."""
    return f"{PREFIX}{secrets.token_hex(4)}_"


def remove_regions(prefix: str) -> None:
    """Remove the regions of a server that has ended; a killed one leaves tens of MB of memory behind."""
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def remove_abandoned_regions() -> None:
    """Remove this user's regions that no running process names in its command line.

    Young ones stay: a container may share /dev/shm but not the list of processes, and a server opens its region by
    name only once, at its start.
    """
    latest_s = time.time() - YOUNG_REGION_SECONDS
    regions = [path for path in SHARED_MEMORY.glob(f"{PREFIX}*") if _is_own(path, 0, latest_s)]
    command_lines = b"\0".join(_of_processes("cmdline")) if regions else b""
    for path in regions:
        prefix = "_".join(path.name.split("_")[:3]) + "_"
        if prefix.encode() not in command_lines:
            path.unlink(missing_ok=True)


def remove_abandoned_folders(folder: Path = FOLDER, library: bytes = LIBRARY) -> None:
    """Remove this user's old, empty folders, unless a running process has loaded the backend's library."""
    remove_folders(0, time.time() - YOUNG_FOLDER_SECONDS, folder, library)


def remove_folders(earliest_s: float, latest_s: float, folder: Path = FOLDER, library: bytes = LIBRARY) -> None:
    """Remove this user's empty folders last changed in that time (`time.time`), unless a backend is running."""
    found = [path for path in folder.glob(PATTERN) if _is_own(path, earliest_s, latest_s)]
    if not found or any(library in mapped for mapped in _of_processes("maps")):
        return
    for path in found:
        with suppress(OSError):  # not empty, or already gone
            path.rmdir()


def _is_own(path: Path, earliest_s: float, latest_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False  # already gone
    return status.st_uid == os.getuid() and earliest_s <= status.st_mtime <= latest_s


def _of_processes(name: str) -> Iterator[bytes]:
    """One file of /proc for every process that this user may read."""
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):  # the process ended, or belongs to another user
            yield path.read_bytes()
