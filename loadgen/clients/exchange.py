"""What became of a request, whatever carried it, and what every client offers to the users of a block."""

from __future__ import annotations

from typing import Any, Protocol

GRPC_STATUS = 1000
"""Added to a gRPC status, so that it cannot be taken for an HTTP status: OK is 1000, UNAVAILABLE 1014."""


_MOST_WORDS = 300


def one_line(words: str) -> str:
    """A server's own words as they go into records and onto terminals: one line, no control characters, not long."""
    line = " ".join(words.split())[:_MOST_WORDS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


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


class Connection(Protocol):
    """One user's way to a server: one request at a time."""

    @property
    def reconnects(self) -> int:
        """Connections that the server had closed and that were made again before a request was sent."""

    def connect(self) -> None:
        """Connect unless connected. Raises `ConnectionRefused` with a sentence."""

    def send(self, request: Any, /) -> Exchange:
        """Send one prepared request of the transport's own kind and wait for its answer; a failure is told in the
        result. Raises `ConnectionRefused` when nothing could be sent."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
