"""Ports on the loopback interface for servers that take a while to listen, kept from other comparisons meanwhile.

A server listens seconds after its port was chosen, Triton only when its models are loaded. Until then two things can
take the port: another comparison that chooses at the same time, so a chosen port is locked by a file that all of a
user's comparisons look at; and an outgoing connection, so ports come from below the range that the kernel gives those.
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
    """Different ports that nobody listens on, and that no other reservation of this user has until `release`."""

    def __init__(self, count: int, candidates: range | None = None) -> None:
        """Raises `OSError` where too few are free."""
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
        """Let others have them. Idempotent."""
        for port, descriptor in self._locks.items():
            if descriptor is not None:
                # Unlinked while locked: who waits with the file open sees that it has lost its name.
                _path(port).unlink(missing_ok=True)
                os.close(descriptor)
        self._locks = {}

    def _take(self, port: int) -> None:
        try:
            descriptor = _lock(port)
        except BlockingIOError:
            return
        except OSError:  # no folder to lock in: then only a server that listens already is seen
            descriptor = None
        if _is_free(port):
            self._locks[port] = descriptor
        elif descriptor is not None:
            _path(port).unlink(missing_ok=True)
            os.close(descriptor)


def port_range() -> range:
    """From 20000 up to the kernel's ports of outgoing connections; where those begin lower, 20000 to 60000."""
    first = 32_768
    with suppress(OSError, ValueError, IndexError):
        first = int(EPHEMERAL.read_text().split()[0])
    return range(LOWEST, first if first - LOWEST >= _FEWEST else 60_000)


def _path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"abserve-ports-{os.getuid()}" / str(port)


def _lock(port: int) -> int:
    """A descriptor of the locked file, closed in children. Raises `BlockingIOError` where another one has it."""
    path = _path(port)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_named(descriptor, path):
            raise BlockingIOError
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the locked file is the one that others would open now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
