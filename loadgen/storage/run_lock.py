"""Whether a run is still running: its process holds a lock in the folder, which the kernel releases when it ends.

This separates a killed run from a running one on the same machine. On another machine, or on network folders without
locks, every run looks ended.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE_NAME = ".running"


@contextmanager
def running(directory: Path) -> Iterator[None]:
    """Hold the lock; child processes do not inherit it."""
    try:
        file = (directory / FILE_NAME).open("w")
    except OSError:  # writing the first record reports it
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            (directory / FILE_NAME).unlink(missing_ok=True)


@contextmanager
def only_run(directory: Path) -> Iterator[bool]:
    """Hold the lock like `running`, and tell whether no other process holds it. The file stays, so that all processes
    lock the same one."""
    try:
        file = (directory / FILE_NAME).open("w")
    except OSError:  # writing the first record reports it
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a network folder without locks
            pass
        yield True


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
