"""Whether a run is still going on: its process holds a lock in the folder, which the kernel drops when it is gone.

So a run that was killed is told from one that still runs, on the machine that ran it. Elsewhere, or where the lock
cannot be had (some network folders), nobody holds it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE_NAME = ".running"


@contextmanager
def running(directory: Path) -> Iterator[None]:
    """Hold the lock. Children do not inherit it: it is closed when they are executed."""
    try:
        file = (directory / FILE_NAME).open("w")
    except OSError:  # a folder that cannot be written to says so with its first record
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            (directory / FILE_NAME).unlink(missing_ok=True)


def is_running(directory: Path) -> bool:
    """Whether a process of this machine runs the run in `directory` now."""
    try:
        with (directory / FILE_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
