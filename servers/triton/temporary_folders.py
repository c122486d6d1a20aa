"""The folders that the python backend makes in /tmp, one a server, and that only a killed server leaves behind.

Their place is compiled into the backend, which heeds no TMPDIR. They are for unpacked Python environments, of which our
models have none, so ours are empty.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/tmp")
PATTERN = "python_env_??????"
LIBRARY = b"libtriton_python.so"
YOUNG_SECONDS = 3600
"""A container may share /tmp, but not the list of processes."""


def remove_abandoned_folders(folder: Path = FOLDER, library: bytes = LIBRARY) -> None:
    """Remove this user's old and empty ones, unless a process lives that has loaded the backend's library."""
    _remove(folder, library, 0, time.time() - YOUNG_SECONDS)


def remove_folders_since(began_s: float, folder: Path = FOLDER, library: bytes = LIBRARY) -> None:
    """Likewise those made since a moment of `time.time`, at which a server began that has been killed."""
    _remove(folder, library, began_s, time.time())


def _remove(folder: Path, library: bytes, earliest_s: float, latest_s: float) -> None:
    found = [path for path in folder.glob(PATTERN) if _is_ours_of(path, earliest_s, latest_s)]
    if not found or any(library in mapped for mapped in _mapped_files()):
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


def _mapped_files() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            yield path.read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is another user's
