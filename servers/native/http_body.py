"""Request bodies while they arrive.

The transport receives a `FixedBody` straight into the memory that the engine reads; only the bytes that came in one
read with the head, at most 64 KiB, are copied once. The memory costs nothing before the bytes arrive: a large body is a
mapping, whose pages come with their first byte and go with the body. A `ChunkedBody` is copied once, out of its
framing. A `DroppedBody` belongs to a request that is refused already: its bytes are read and dropped, so that the
connection can go on.

`arrived` is the number of bytes taken so far. `feed` takes the body's bytes of `data[start:end]` and returns where they
end. Bytes that an incomplete body does not take must come again: with more behind them if it took none, else as soon as
other connections have had their turn.
"""

from __future__ import annotations

import contextlib
import mmap
import re

import numpy as np

from servers.native.errors import HttpError

ALIGNMENT = 64
SPARE_SHARE = 16
"""Of the bytes that may be held, 1/SPARE_SHARE are kept as memory for later bodies."""
SPARE_LAYOUTS = 64
MAPPED_BYTES = 2**20
"""Bodies of this size and more are mapped: the heap may keep memory that it was given."""
HUGE_PAGE_BYTES = 2 * 2**20
"""Once this much has arrived, the rest may use huge pages, which cost less CPU; before, one byte would take one."""
MAX_CHUNK_LINE = 256
FREE_CHUNKS = 256
MIN_MEAN_CHUNK_BYTES = 64
"""Chunks beyond the free ones must have this many bytes on average: a chunk costs as much work as some KiB."""
STEPS_PER_FEED = 128
"""A chunk takes two or three steps. The rest is read after the other connections had their turn."""
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\r\n\x00]*)?\r\n")


class FixedBody:
    """A body of known size, in memory whose first binary tensor, after `json_bytes`, begins on a 64-byte boundary."""

    __slots__ = ("_mapping", "complete", "filled", "key", "lent", "size", "view")

    def __init__(self, size: int, json_bytes: int) -> None:
        self._mapping = _mapped(size + ALIGNMENT) if size >= MAPPED_BYTES else None
        memory: np.ndarray[tuple[int], np.dtype[np.uint8]]
        if self._mapping is None:
            memory = np.empty(size + ALIGNMENT, np.uint8)  # unlike bytearray, not cleared first
        else:
            memory = np.frombuffer(self._mapping, np.uint8)
        offset = -(memory.__array_interface__["data"][0] + json_bytes) % ALIGNMENT
        self.view = memory[offset : offset + size].data
        self.key = (size, json_bytes)
        self.size = size
        self.filled = 0
        self.complete = size == 0
        self.lent = False  # by the pool, which counts its memory until it is full

    @property
    def arrived(self) -> int:
        return self.filled

    @property
    def memory(self) -> object:
        """The object that all views of the content refer to."""
        return self.view.obj

    def feed(self, data: bytearray, start: int, end: int) -> int:
        taken = min(end - start, self.size - self.filled)
        self.view[self.filled : self.filled + taken] = memoryview(data)[start : start + taken]
        self.received(taken)
        return start + taken

    def received(self, count: int) -> None:
        """`count` bytes have been written behind the others."""
        self.filled += count
        self.complete = self.filled == self.size
        if self._mapping is not None and self.filled >= HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without them
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self._mapping = None


def _mapped(size: int) -> mmap.mmap:
    """Memory whose pages come with the first write. Raises `MemoryError`."""
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError from exc
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


class BodyPool:
    """Keeps bodies of answered requests for new ones of the same layout: their memory is mapped and warm already.

    A body that is taken again counts as spare until it is full, since its client is charged only for what has arrived.
    `take` and `settle` belong to one thread.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._spare: dict[tuple[int, int], list[FixedBody]] = {}
        self._bytes = 0  # of spare bodies, approximately: threads may lose an update, until the next clearing
        self._lent_bytes = 0

    def take(self, size: int, json_bytes: int) -> FixedBody | None:
        """An empty body; None when the system has no memory for it."""
        try:
            body = self._spare[size, json_bytes].pop()
        except (KeyError, IndexError):
            try:
                return FixedBody(size, json_bytes)
            except MemoryError:
                return None
        self._bytes -= size
        self._lent_bytes += size
        body.filled = 0
        body.complete = False
        body.lent = True
        return body

    def settle(self, body: FixedBody) -> None:
        """A body that was taken has become full, or never will be."""
        if body.lent:
            body.lent = False
            self._lent_bytes -= body.size

    def give(self, body: FixedBody) -> None:
        """Keep a body that nothing reads any more, if there is room; any thread."""
        full = self._bytes + self._lent_bytes + body.size > self._limit
        if full and (self._spare.get(body.key) or body.size > self._limit):
            return
        if full or len(self._spare) > SPARE_LAYOUTS:
            # The spare bodies are probably of layouts that do not come any more.
            self._spare = {}
            self._bytes = 0
            if self._lent_bytes + body.size > self._limit:
                return
        self._bytes += body.size
        self._spare.setdefault(body.key, []).append(body)


class DroppedBody:
    """A body of known size whose bytes are not needed."""

    __slots__ = ("_left", "_size", "complete")

    def __init__(self, size: int) -> None:
        self._left = self._size = size
        self.complete = size == 0

    @property
    def arrived(self) -> int:
        return self._size - self._left

    def feed(self, data: bytearray, start: int, end: int) -> int:  # noqa: ARG002  the bytes are dropped
        taken = min(end - start, self._left)
        self._left -= taken
        self.complete = self._left == 0
        return start + taken


class _Content(bytearray):
    """A bytearray that can have weak references."""


class ChunkedBody:
    """A body in chunks: at most `max_bytes` in at most `max_chunks`, and trailers, which are dropped."""

    __slots__ = ("_chunks", "_left", "_limit", "_max_chunks", "_trailers", "complete", "content")

    def __init__(self, max_bytes: int, max_chunks: int) -> None:
        self.content = _Content()
        self.complete = False
        self._limit = max_bytes
        self._max_chunks = max_chunks
        self._chunks = 0
        self._left = 0  # of the current chunk, with the CR LF behind it
        self._trailers = -1  # bytes of them so far; -1 until the last chunk

    @property
    def arrived(self) -> int:
        return len(self.content)

    @property
    def memory(self) -> object:
        return self.content

    @property
    def view(self) -> memoryview:
        return memoryview(self.content)

    def feed(self, data: bytearray, start: int, end: int) -> int:
        """Take up to `STEPS_PER_FEED` pieces of chunks. Raises `HttpError`."""
        view = memoryview(data)
        for _ in range(STEPS_PER_FEED):
            if start == end or self.complete:
                break
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
        if self._chunks > FREE_CHUNKS and len(self.content) < (self._chunks - 1) * MIN_MEAN_CHUNK_BYTES:
            raise HttpError(400, f"the body's chunks have less than {MIN_MEAN_CHUNK_BYTES} bytes on average")
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
