"""Whether a run is still running: its process holds a lock in the folder, which the kernel releases when it ends.

This separates a killed run from a running one on the same machine. On another machine, or on network folders without
locks, every run looks ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from loadgen.documents import DocumentError, open_inside

FILE_NAME = ".running"


@contextmanager
def running(directory: Path) -> Iterator[None]:
    """Hold the lock; child processes do not inherit it."""
    try:
        file = _lock_file(directory)
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
        file = _lock_file(directory)
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
        with open_inside(directory, FILE_NAME) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, DocumentError):
        return False
    return False


def _lock_file(directory: Path) -> TextIO:
    """Open or make the lock's file; a link is not followed, and a pipe is not waited for."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    return open(directory / FILE_NAME, "w", opener=opener)
