"""The shared memory between tritonserver and its stub: how large it has to be, and what killed servers leave behind.

Every request crosses it once each way. Triton grows the region on demand, which stalls the request that needs it and
happened on first batches under load; so it is large enough from the start.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from pathlib import Path

from servers.models.specification import ModelSpecification
from servers.triton.errors import TritonUnavailableError

FOLDER = Path("/dev/shm")
PREFIX = "abserve_triton_"
MEBIBYTE = 1 << 20
SLACK_BYTES = 16 * MEBIBYTE
YOUNG_SECONDS = 60
FILE_BYTES = MEBIBYTE // 2
"""What an element without a fixed size, an encoded image, is reckoned at."""


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
    free = shutil.disk_usage(FOLDER).free
    if free < needed_bytes:
        raise TritonUnavailableError(
            f"{FOLDER} has {free // MEBIBYTE} MiB free and Triton's python backend needs {needed_bytes // MEBIBYTE} MiB"
            f"; free some, give the container a larger one (docker run --shm-size=1g) or lower --max-batch-size"
        )


def new_prefix() -> str:
    """A name for one launch's regions, found again in its command line and in /dev/shm."""
    return f"{PREFIX}{secrets.token_hex(4)}_"


def remove_regions(prefix: str) -> None:
    """Remove the regions of a server that has ended; a killed one leaves tens of MB of memory behind."""
    for path in FOLDER.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def remove_abandoned_regions() -> None:
    """Remove this user's regions that no running process names in its command line.

    Young ones stay, since a container may share this folder but not the list of processes: both processes of a server
    have to find the region by its name once, at their start, and never again.
    """
    regions = [path for path in FOLDER.glob(f"{PREFIX}*") if _is_old_and_ours(path)]
    if not regions:
        return
    command_lines = b"\0".join(_command_lines())
    for path in regions:
        prefix = "_".join(path.name.split("_")[:3]) + "_"
        if prefix.encode() not in command_lines:
            path.unlink(missing_ok=True)


def _is_old_and_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False  # its server removed it meanwhile
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_SECONDS


def _command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue  # it ended meanwhile
    return found
