"""What became of a request, whatever carried it, and what every client offers to the users of a block."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol

GRPC_STATUS = 1000
"""Added to a gRPC status, so that it cannot be taken for an HTTP status: OK is 1000, UNAVAILABLE 1014."""

MOST_ANSWER_BYTES = 2**28
"""Of one answer. A client that takes more can be filled by a server that never stops."""


class ConnectionRefused(Exception):  # noqa: N818 (an outcome that callers branch on, named after ECONNREFUSED)
    """No connection could be made; nothing was sent."""


class Exchange:
    """What became of the last request of a connection. Reused: it and its `body` are valid until the next one.

    `status` is HTTP's, or gRPC's + 1000; 0 and a `failure` mean that there was no whole answer. Times are
    `perf_counter_ns`; `first_byte_ns` is 0 where no byte came. `request_bytes` and `response_bytes` count what went
    over the wire: with HTTP headers included, with gRPC the message and its 5 bytes of length, without HTTP/2's
    compressed headers and frames.
    """

    __slots__ = ("body", "end_ns", "failure", "first_byte_ns", "head", "request_bytes", "response_bytes", "send_ns",
                 "status")  # fmt: skip

    def __init__(self) -> None:
        self.send_ns = 0
        self.first_byte_ns = 0
        self.end_ns = 0
        self.status = 0
        self.request_bytes = 0
        self.response_bytes = 0
        self.failure: str | None = None
        self.head = b""
        self.body = memoryview(b"")

    def copy(self) -> Exchange:
        """One that stays valid after the next request."""
        copied = Exchange()
        copied.status, copied.failure, copied.head = self.status, self.failure, self.head
        copied.body = memoryview(bytes(self.body))
        return copied

    @property
    def good(self) -> bool:
        """Whether the inference was answered with its outputs."""
        return self.status in (200, GRPC_STATUS)

    def header(self, name: str) -> str | None:
        """A header's value, by its name in lower case; None for an answer without such headers."""
        start = self.head.find(b"\r\n" + name.encode("latin-1") + b":")
        if start < 0:
            return None
        start = self.head.index(b":", start) + 1
        return self.head[start : self.head.index(b"\r\n", start)].strip().decode("latin-1")


class Deadline:
    """The moment at which an exchange must be over, kept on a socket whose own timeout bounds single waits only.

    While an exchange is young the socket keeps its whole timeout and nothing is set: a system call for every read would
    cost more than the read. So the last wait ends at most a sixteenth of the timeout late.
    """

    __slots__ = ("_changed", "_end_ns", "_timeout_ns", "_young_until_ns")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._changed = True
        self._end_ns = self._young_until_ns = 0

    def begin(self, connection: socket.socket, now_ns: int) -> None:
        """An exchange begins on this socket."""
        if self._changed:
            connection.settimeout(self._timeout_ns / 1e9)
            self._changed = False
        self._young_until_ns = now_ns + (self._timeout_ns >> 4)
        self._end_ns = now_ns + self._timeout_ns

    def check(self, connection: socket.socket) -> None:
        """After a read or a write, before the next one. Raises `TimeoutError` when the exchange should be over."""
        now_ns = perf_counter_ns()
        if now_ns < self._young_until_ns:
            return
        if now_ns >= self._end_ns:
            raise TimeoutError
        self._changed = True
        connection.settimeout((self._end_ns - now_ns) / 1e9)

    def reset(self) -> None:
        """The socket is another one, or somebody else has set its timeout."""
        self._changed = True


class Connection(Protocol):
    """One user's way to a server: one request at a time."""

    @property
    def reconnects(self) -> int:
        """Connections that the server had closed and that were made again for a request, inside its latency."""

    def connect(self) -> None:
        """Connect unless connected. Raises `ConnectionRefused` with a sentence."""

    def send(self, request: Any, patches: Sequence[bytes] = (), /) -> Exchange:
        """Send one prepared request of the transport's own kind, with the patches where it varies, and wait for its
        answer; a failure is told in the result. Raises `ConnectionRefused` when nothing could be sent."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
