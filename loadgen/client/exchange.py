"""The outcome of a request, whatever transport carried it, and the interface that every client offers."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from loadgen.client.greenlet_socket import AnySocket

GRPC_STATUS = 1000
"""Added to a gRPC status, so that it differs from every HTTP status: OK is 1000, UNAVAILABLE 1014."""

MOST_ANSWER_BYTES = 2**28
"""The largest response that is read, so that a server that never stops sending cannot fill the client's memory."""


class ConnectionRefused(Exception):  # noqa: N818 (an outcome that callers branch on, named after ECONNREFUSED)
    """No connection could be made; nothing was sent."""


class TlsRefused(ConnectionRefused):
    """No connection could be made because of TLS; trying again does not help."""


_EMPTY = memoryview(b"")


class Exchange:
    """The outcome of a connection's last request. Reused: it and its `body` are valid until the next request.

    `status` is HTTP's, or gRPC's + 1000; 0 and a `failure` if there was no complete response. Times are
    `perf_counter_ns`; `first_byte_ns` is 0 if no byte came. `request_bytes` and `response_bytes` count bytes on the
    wire: over HTTP with the headers, over gRPC the message and its 5 bytes of length without HTTP/2's compressed
    headers and frames.
    """

    __slots__ = ("body", "end_ns", "failure", "first_byte_ns", "head", "request_bytes", "response_bytes", "send_ns",
                 "status")  # fmt: skip

    def __init__(self) -> None:
        self.end_ns = 0
        self.begin(0, 0)

    def begin(self, send_ns: int, request_bytes: int) -> None:
        """Start a new request; forget the last response."""
        self.send_ns = send_ns
        self.request_bytes = request_bytes
        self.status = self.first_byte_ns = self.response_bytes = 0
        self.failure: str | None = None
        self.head = b""
        self.body = _EMPTY

    def copy(self) -> Exchange:
        """A copy of the response that stays valid after the next request."""
        copied = Exchange()
        copied.status, copied.failure, copied.head = self.status, self.failure, self.head
        copied.body = memoryview(bytes(self.body))
        return copied

    @property
    def good(self) -> bool:
        """Whether the response is the model's outputs."""
        return self.status in (200, GRPC_STATUS)

    def header(self, name: str) -> str | None:
        """The value of a response header, by its name in lower case; None if there is none."""
        value = find_header(self.head, b"\r\n" + name.encode("latin-1") + b":")
        return None if value is None else value.decode("latin-1")


def find_header(head: bytes, key: bytes) -> bytes | None:
    """The value of the header line that begins with `key`, its line break included; None if there is none."""
    start = head.find(key)
    if start < 0:
        return None
    start += len(key)
    return head[start : head.index(b"\r\n", start)].strip()


class Deadline:
    """Bounds a whole request; the timeout of a socket bounds single reads and writes only.

    Early in a request the socket keeps its full timeout and nothing is set, because a system call for every read would
    cost more than the read. So the last wait ends at most a sixteenth of the timeout late.
    """

    __slots__ = ("_changed", "_end_ns", "_timeout_ns", "_young_until_ns")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._changed = True
        self._end_ns = self._young_until_ns = 0

    def begin(self, connection: AnySocket, now_ns: int) -> None:
        """Start the time of a request on this socket."""
        if self._changed:
            connection.settimeout(self._timeout_ns / 1e9)
            self._changed = False
        self._young_until_ns = now_ns + (self._timeout_ns >> 4)
        self._end_ns = now_ns + self._timeout_ns

    def check(self, connection: AnySocket) -> None:
        """Call it after a read or a write, before the next one. Raises `TimeoutError` when the time is up."""
        now_ns = perf_counter_ns()
        if now_ns < self._young_until_ns:
            return
        if now_ns >= self._end_ns:
            raise TimeoutError
        self._changed = True
        connection.settimeout((self._end_ns - now_ns) / 1e9)

    def reset(self) -> None:
        """Call it when the socket is new or its timeout was changed elsewhere."""
        self._changed = True


class Connection(Protocol):
    """One user's connection to a server: one request at a time."""

    @property
    def reconnects(self) -> int:
        """Connections that the server had closed and that were made again for a request, inside its latency."""

    def connect(self) -> None:
        """Connect unless connected. Raises `ConnectionRefused` with a sentence."""

    def send(self, request: Any, patches: Sequence[bytes] = (), /) -> Exchange:
        """Send one prepared request of this transport, with the patches at the places that vary, and wait for the
        response; a failure is in the result. Raises `ConnectionRefused` when nothing could be sent."""

    def close(self) -> None:
        """Free everything. Idempotent."""
