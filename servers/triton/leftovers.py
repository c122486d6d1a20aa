"""What tritonserver's python backend puts on the machine, how large it has to be, and what killed servers leave behind.

The shared memory between tritonserver and its stub: every request crosses it once each way. Triton grows the region on
demand, which stalls the request that needs it and happened on first batches under load; so it is large enough from the
start. And one folder per server in /tmp: its place is compiled into the backend, which heeds no TMPDIR. It is for
unpacked Python environments, of which our models have none, so ours are empty.
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
"""What an element without a fixed size, an encoded image, is reckoned at."""
FOLDER = Path("/tmp")
PATTERN = "python_env_??????"
LIBRARY = b"libtriton_python.so"
YOUNG_FOLDER_SECONDS = 3600
"""A container may share /tmp, but not the list of processes."""


def region_bytes(specification: ModelSpecification, max_batch_size: int) -> int:
    """Twice the largest batch with its answers, and slack for the allocator's fragmentation; whole MiB.

    A dimension whose size is not fixed counts as nothing here: such a region grows on demand.
    """
    item_bytes = sum(
        (FILE_BYTES if tensor.dtype.hasobject else tensor.dtype.itemsize) * math.prod(tensor.item_shape)
        for tensor in (*specification.inputs, *specification.outputs)
        if all(dim > 0 for dim in tensor.item_shape)
    )
    return math.ceil((2 * max_batch_size * item_bytes + SLACK_BYTES) / MEBIBYTE) * MEBIBYTE


def assert_space(needed_bytes: int) -> None:
    """Raise `TritonUnavailableError` where /dev/shm is smaller: Triton would die with a bus error under load."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed_bytes:
        raise TritonUnavailableError(
            f"{SHARED_MEMORY} has {free // MEBIBYTE} MiB free and Triton's python backend needs "
            f"{needed_bytes // MEBIBYTE} MiB; free some, give the container a larger one (docker run --shm-size=1g) or "
            "lower --max-batch-size"
        )


def new_prefix() -> str:
    """A name for one launch's regions, found again in its command line and in /dev/shm."""
    return f"{PREFIX}{secrets.token_hex(4)}_"


def remove_regions(prefix: str) -> None:
    """Remove the regions of a server that has ended; a killed one leaves tens of MB of memory behind."""
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def remove_abandoned_regions() -> None:
    """Remove this user's regions that no running process names in its command line.

    Young ones stay, since a container may share this folder but not the list of processes: both processes of a server
    have to find the region by its name once, at their start, and never again.
    """
    regions = [path for path in SHARED_MEMORY.glob(f"{PREFIX}*") if _is_old_and_ours(path)]
    if not regions:
        return
    command_lines = b"\0".join(_of_processes("cmdline"))
    for path in regions:
        prefix = "_".join(path.name.split("_")[:3]) + "_"
        if prefix.encode() not in command_lines:
            path.unlink(missing_ok=True)


def _is_old_and_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False  # its server removed it meanwhile
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_REGION_SECONDS


def remove_abandoned_folders(folder: Path = FOLDER, library: bytes = LIBRARY) -> None:
    """Remove this user's old and empty ones, unless a process lives that has loaded the backend's library."""
    _remove(folder, library, 0, time.time() - YOUNG_FOLDER_SECONDS)


def remove_folders_since(began_s: float, folder: Path = FOLDER, library: bytes = LIBRARY) -> None:
    """Likewise those made since a moment of `time.time`, at which a server began that has been killed."""
    _remove(folder, library, began_s, time.time())


def _remove(folder: Path, library: bytes, earliest_s: float, latest_s: float) -> None:
    found = [path for path in folder.glob(PATTERN) if _is_ours_of(path, earliest_s, latest_s)]
    if not found or any(library in mapped for mapped in _of_processes("maps")):
        return
    for path in found:
        with suppress(OSError):  # not empty, or gone meanwhile
            path.rmdir()


def _is_ours_of(path: Path, earliest_s: float, latest_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and earliest_s <= status.st_mtime <= latest_s


def _of_processes(name: str) -> Iterator[bytes]:
    """One file of /proc for every process that we may read."""
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        try:
            yield path.read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is another user's
