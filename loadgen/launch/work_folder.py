"""Temporary folders, including the removal of those that killed processes left behind.

Each folder holds a file that its process has locked. The kernel drops the lock when the process ends, and the next
process that makes a folder removes all folders without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER = ".owner"
_PREFIX = "abserve-"


@contextmanager
def work_folder(purpose: str) -> Iterator[Path]:
    """An empty folder, removed at the end; `purpose` is part of its name."""
    remove_abandoned()
    folder = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-")
    lock = _claim(Path(folder.name))
    try:
        yield Path(folder.name)
    finally:
        folder.cleanup()  # while locked, so that no other process removes it at the same time
        if lock is not None:
            os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose processes have ended; what cannot be removed stays."""
    with suppress(OSError):
        for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{OWNER}"):
            with suppress(OSError):
                if owner.parent.lstat().st_uid == os.getuid():
                    _remove_unless_held(owner)


def _remove_unless_held(owner: Path) -> None:
    """Raises `BlockingIOError` for a folder in use."""
    lock = os.open(owner, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(owner.parent, ignore_errors=True)
    finally:
        os.close(lock)


def _claim(folder: Path) -> int | None:
    """The locked file's descriptor, closed in children; None where files cannot be locked: then no other process ever
    removes the folder."""
    unlocked = folder / f"{OWNER}.new"
    try:
        lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / OWNER)  # so the file is never seen under this name without its lock
    except OSError:
        os.close(lock)
        return None
    return lock
