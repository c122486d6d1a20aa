"""A folder that appears whole or not at all: written beside its place under a temporary name, then renamed."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderError(Exception):
    """The folder cannot be written; the message names the remedy."""


@contextmanager
def atomic_folder(final: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder beside `final` that takes its place when the block ends well and is removed otherwise.

    Readers see the old content, for a moment no folder, then the new content; never a part. Of two writers at once the
    later one wins. Raises `FolderError` when the disk is full (`needed_bytes` is checked before the work starts) or the
    place cannot be written.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(final.parent).free
        if free_bytes < needed_bytes:
            raise FolderError(
                f"no space left on the disk of {final.parent}: {needed_bytes / 1e6:.0f} MB are needed, "
                f"{free_bytes / 1e6:.0f} MB are free; free some, or choose another folder"
            )
        fresh = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent))
        fresh.chmod(0o755)
    except OSError as exc:
        raise _wrapped(exc, final) from exc
    try:
        yield fresh
        _replace(fresh, final)
    except OSError as exc:
        raise _wrapped(exc, final) from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock file beside `folder`; the system releases it when the process dies."""
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise FolderError(f"cannot write {lock.parent}: {exc.strerror}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(final: Path) -> None:
    """Remove the temporary folders that killed writers of `final` left beside it. No other process may write it now."""
    left = re.compile(rf"\.{re.escape(final.name)}\.[a-z0-9_]{{8}}\.(part|old)")  # as mkdtemp names them
    for path in final.parent.glob(f".{glob.escape(final.name)}.*"):
        if left.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(fresh: Path, final: Path) -> None:
    """A folder cannot be renamed onto one with content, so the old one is moved aside first."""
    aside = fresh.with_suffix(".old")
    for _ in range(8):
        try:
            fresh.rename(final)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        try:
            final.rename(aside)
        except FileNotFoundError:
            continue  # another writer moved it aside in between
        shutil.rmtree(aside, ignore_errors=True)
    raise FolderError(f"another process keeps rewriting {final}; wait for it and try again")


def _wrapped(exc: OSError, final: Path) -> FolderError:
    if exc.errno in _FULL:
        return FolderError(f"no space left on the disk of {final.parent}: free some, or choose another folder")
    return FolderError(f"cannot write {final}: {os.strerror(exc.errno) if exc.errno else exc}")
