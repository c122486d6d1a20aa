"""Reserves loopback ports for servers that listen only seconds later, such as Triton after it has loaded its models.

Until then two things can take a port: another comparison, so each reserved port has a locked file that all comparisons
of a user check; and an outgoing connection, so ports come from below the kernel's range for those.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

LOWEST = 20_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEWEST = 1000


class PortReservation:
    """Distinct free ports, which no other reservation of this user gets until `release`."""

    def __init__(self, count: int, candidates: range | None = None) -> None:
        """Raises `OSError` when too few are free."""
        self._locks: dict[int, int | None] = {}
        places = port_range() if candidates is None else candidates
        for port in random.SystemRandom().sample(places, len(places)):
            if len(self._locks) == count:
                break
            self._take(port)
        if len(self._locks) < count:
            self.release()
            raise OSError(f"fewer than {count} of the ports {places.start} to {places.stop - 1} are free")
        self.ports = tuple(self._locks)

    def release(self) -> None:
        """Release the ports. Idempotent."""
        for port, descriptor in self._locks.items():
            _unlock(port, descriptor)
        self._locks = {}

    def _take(self, port: int) -> None:
        try:
            descriptor = _lock(port)
        except BlockingIOError:
            return
        except OSError:  # no folder for lock files: then only ports in use are avoided
            descriptor = None
        if _is_free(port):
            self._locks[port] = descriptor
        else:
            _unlock(port, descriptor)


def port_range() -> range:
    """From 20000 to the kernel's range for outgoing connections; 20000 to 60000 when that range begins lower."""
    first = 32_768
    with suppress(OSError, ValueError, IndexError):
        first = int(EPHEMERAL.read_text().split()[0])
    return range(LOWEST, first if first - LOWEST >= _FEWEST else 60_000)


def _path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"abserve-ports-{os.getuid()}" / str(port)


def _lock(port: int) -> int:
    """The descriptor of the locked file, closed in children. Raises `BlockingIOError` when another process holds it."""
    path = _path(port)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:  # unlinked by its owner since it was opened
            raise BlockingIOError
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _unlock(port: int, descriptor: int | None) -> None:
    if descriptor is not None:
        _path(port).unlink(missing_ok=True)  # while locked, so that a process with the file open sees that it is gone
        os.close(descriptor)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
