"""Request bodies while they arrive: where the next bytes belong, and when the last one has come.

A `FixedBody` is received by the transport straight into the memory that the engine reads; only what came in one read
with the head, at most 64 KiB, is copied once. A `ChunkedBody` is copied once, out of its framing. A `DroppedBody` is
of a request that is refused already: its bytes are read, so that the connection can go on, and kept nowhere.
"""

from __future__ import annotations

import re
from typing import Protocol

import numpy as np

from servers.native.limits import HttpError

ALIGNMENT = 64
SPARE_BYTES = 32 * 2**20
"""Most memory that is kept for bodies to come."""
SPARE_LAYOUTS = 64
MAX_CHUNK_LINE = 256
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\r\n\x00]*)?\r\n")


class Body(Protocol):
    """A body that is not complete yet."""

    complete: bool

    def feed(self, data: bytearray, start: int, end: int) -> int:
        """Take what belongs to this body of `data[start:end]`; where that ends. Raises `HttpError`.

        Bytes that are not taken although the body is not complete have to come again, with more behind them.
        """


class FixedBody:
    """A body of known size, in memory whose first binary tensor, after `json_bytes`, begins on a 64-byte boundary."""

    __slots__ = ("complete", "filled", "key", "size", "view")

    def __init__(self, size: int, json_bytes: int) -> None:
        memory = np.empty(size + ALIGNMENT, np.uint8)  # unlike bytearray it is not cleared first
        offset = -(memory.__array_interface__["data"][0] + json_bytes) % ALIGNMENT
        self.view = memory[offset : offset + size].data
        self.key = (size, json_bytes)
        self.size = size
        self.filled = 0
        self.complete = size == 0

    def feed(self, data: bytearray, start: int, end: int) -> int:
        """See `Body`."""
        taken = min(end - start, self.size - self.filled)
        self.view[self.filled : self.filled + taken] = memoryview(data)[start : start + taken]
        self.received(taken)
        return start + taken

    def received(self, count: int) -> None:
        """So many bytes have been written behind the others."""
        self.filled += count
        self.complete = self.filled == self.size


class BodyPool:
    """Bodies whose requests are answered, for others of the same layout: their memory is mapped and warm already."""

    def __init__(self, limit_bytes: int = SPARE_BYTES) -> None:
        self._limit = limit_bytes
        self._spare: dict[tuple[int, int], list[FixedBody]] = {}
        self._bytes = 0  # of the spare ones, nearly: two threads may lose an update, which the next clearing mends

    def take(self, size: int, json_bytes: int) -> FixedBody:
        """An empty body."""
        try:
            body = self._spare[size, json_bytes].pop()
        except (KeyError, IndexError):
            return FixedBody(size, json_bytes)
        self._bytes -= size
        body.filled = 0
        body.complete = False
        return body

    def give(self, body: FixedBody) -> None:
        """A body that nobody reads any more; any thread."""
        if body.size > self._limit // 8:
            return
        if self._bytes + body.size > self._limit or len(self._spare) > SPARE_LAYOUTS:
            # Of layouts that do not come any more, as likely as not.
            self._spare = {}
            self._bytes = 0
        self._bytes += body.size
        self._spare.setdefault(body.key, []).append(body)


class DroppedBody:
    """A body of known size that nobody wants."""

    __slots__ = ("_left", "complete")

    def __init__(self, size: int) -> None:
        self._left = size
        self.complete = size == 0

    def feed(self, data: bytearray, start: int, end: int) -> int:  # noqa: ARG002  see `Body`
        """See `Body`."""
        taken = min(end - start, self._left)
        self._left -= taken
        self.complete = self._left == 0
        return start + taken


class ChunkedBody:
    """A body in chunks: at most `max_bytes` in at most `max_chunks`, and trailers, which are dropped."""

    __slots__ = ("_chunks", "_left", "_limit", "_max_chunks", "_trailers", "complete", "content")

    def __init__(self, max_bytes: int, max_chunks: int) -> None:
        self.content = bytearray()
        self.complete = False
        self._limit = max_bytes
        self._max_chunks = max_chunks
        self._chunks = 0
        self._left = 0  # of the current chunk, the CR LF behind it included
        self._trailers = -1  # bytes of them so far; -1 until the last chunk

    def feed(self, data: bytearray, start: int, end: int) -> int:
        """See `Body`."""
        view = memoryview(data)
        while start < end and not self.complete:
            if self._trailers >= 0:
                at = self._trailer(data, start, end)
            elif self._left:
                at = self._chunk(view, start, end)
            else:
                at = self._size_line(data, start, end)
            if at == start:
                break
            start = at
        view.release()
        return start

    def _chunk(self, view: memoryview, start: int, end: int) -> int:
        content = min(end - start, self._left - 2)
        if content > 0:
            self.content += view[start : start + content]
            self._left -= content
            return start + content
        if end - start < 2:
            return start
        if bytes(view[start : start + 2]) != b"\r\n":
            raise HttpError(400, "a chunk of the body is not as long as it says")
        self._left = 0
        return start + 2

    def _size_line(self, data: bytearray, start: int, end: int) -> int:
        match = _SIZE_LINE.match(data, start, end)
        if match is None:
            if end - start > MAX_CHUNK_LINE or data.find(b"\n", start, end) >= 0:
                raise HttpError(400, "a chunk of the body has no valid size")
            return start
        if match.end() - start > MAX_CHUNK_LINE:
            raise HttpError(400, "a chunk of the body has too long an extension")
        size = int(match[1], 16)
        if size == 0:
            self._trailers = 0
            return match.end()
        self._chunks += 1
        if self._chunks > self._max_chunks:
            raise HttpError(400, f"the body has more than {self._max_chunks} chunks")
        if len(self.content) + size > self._limit:
            raise HttpError(413, f"the body has more than {self._limit} bytes, the server's limit")
        self._left = size + 2
        return match.end()

    def _trailer(self, data: bytearray, start: int, end: int) -> int:
        line = data.find(b"\n", start, end) + 1
        self._trailers += max(0, line - start)
        if self._trailers + (end - start if line == 0 else 0) > 16 * MAX_CHUNK_LINE:
            raise HttpError(400, "the trailers of the body are too long")
        if line == 0:
            return start
        if data[line - 2 : line] != b"\r\n":
            raise HttpError(400, "a trailer of the body does not end with CR LF")
        self.complete = line - start == 2
        return line
