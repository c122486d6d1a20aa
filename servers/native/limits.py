"""What the HTTP door takes from a client before it refuses: sizes, counts and times, all of them settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from servers.contract.errors import UnavailableError
from servers.native.settings import NativeSettings

CONTROL_BODY_BYTES = 64 * 1024
"""Largest body of a request that is not an inference: none of them needs more."""

LINGER_S = 5.0
"""How long a refused client may go on sending before it is cut off; closing at once could destroy its answer."""

LAST_BODY_S = 5.0
"""How long a body that is arriving when the server is told to stop may take to be complete."""

LINGER_BYTES = 256 * 2**20
"""How much of it is read and dropped meanwhile."""


class HttpError(Exception):
    """A request that HTTP itself refuses; `str(error)` is the sentence for the client, whose connection then ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The settings of the same names (see `NativeSettings`)."""

    body_bytes: int
    json_bytes: int
    header_bytes: int
    headers: int
    chunks: int
    held_bytes: int
    read_timeout_s: float
    keep_alive_s: float

    @classmethod
    def of(cls, settings: NativeSettings) -> HttpLimits:
        """From the process's settings."""
        return cls(
            body_bytes=settings.max_body_bytes,
            json_bytes=settings.max_json_bytes,
            header_bytes=settings.max_header_bytes,
            headers=settings.max_headers,
            chunks=settings.max_chunks,
            held_bytes=settings.max_held_bytes,
            read_timeout_s=settings.read_timeout_s,
            keep_alive_s=settings.keep_alive_timeout_s,
        )

    def body_timeout_s(self, size: int) -> float:
        """How long a body of `size` bytes may take: the read timeout, and a second more for each MiB."""
        return self.read_timeout_s + size / 2**20


HOLDS_ENOUGH = "the server holds as many bytes of requests as it may, send this one again later"


class ByteBudget:
    """Bytes of requests held for all clients of both doors together: arriving, queued, or being executed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._lock = threading.Lock()

    def hold(self, count: int) -> bool:
        """Add `count` bytes; False, and nothing added, when they would be too many."""
        with self._lock:
            if self.held + count > self.limit:
                return False
            self.held += count
            return True

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold them meanwhile. Raises `UnavailableError` when they would be too many."""
        if not self.hold(count):
            raise UnavailableError(HOLDS_ENOUGH)
        try:
            yield
        finally:
            self.release(count)

    def release(self, count: int) -> None:
        """Give back what was held; any thread."""
        with self._lock:
            self.held -= count
