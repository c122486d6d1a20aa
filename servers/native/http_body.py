"""Request bodies while they arrive, in slots of the arena.

The transport receives a `FixedBody` straight into the slot that the engine reads; only the bytes that came in one read
with the head, at most 64 KiB, are copied once. A slot costs nothing before the bytes arrive, and each byte is charged
when it does. A `ChunkedBody` is copied once, out of its framing. A `DroppedBody` belongs to a request that is refused
already: its bytes are read and dropped, so that the connection can go on.

`arrived` is the number of bytes taken so far. `feed` takes the body's bytes of `data[start:end]` and returns where they
end. Bytes that an incomplete body does not take must come again: with more behind them if it took none, else as soon as
other connections have had their turn.
"""

from __future__ import annotations

import re

import numpy as np

from servers.native.arena import ALIGNMENT, Receiver, RequestMemory, Slot
from servers.native.errors import HttpError

MAX_CHUNK_LINE = 256
FREE_CHUNKS = 256
MIN_MEAN_CHUNK_BYTES = 64
"""Chunks beyond the free ones must have this many bytes on average: a chunk costs as much work as some KiB."""
STEPS_PER_FEED = 128
"""A chunk takes two or three steps. The rest is read after the other connections had their turn."""
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\r\n\x00]*)?\r\n")


class FixedBody:
    """A body of known size, in a slot where its first binary tensor, after `json_bytes`, is aligned to 64 bytes."""

    __slots__ = ("complete", "filled", "size", "slot", "view")

    def __init__(self, slot: Slot, size: int, json_bytes: int) -> None:
        """The slot has room for `size` + `ALIGNMENT` bytes."""
        memory = np.asarray(slot)
        offset = -(slot.offset + json_bytes) % ALIGNMENT
        self.slot = slot
        self.view = memory[offset : offset + size].data
        self.size = size
        self.filled = 0
        self.complete = size == 0

    @classmethod
    def take(cls, memory: RequestMemory, receiver: Receiver, size: int, json_bytes: int) -> FixedBody | None:
        """An empty body; None when no slot is left for it."""
        slot = memory.take_for(receiver, size + ALIGNMENT)
        return None if slot is None else cls(slot, size, json_bytes)

    @property
    def arrived(self) -> int:
        return self.filled

    def feed(self, data: bytearray, start: int, end: int) -> int:
        taken = min(end - start, self.size - self.filled)
        self.view[self.filled : self.filled + taken] = memoryview(data)[start : start + taken]
        self.received(taken)
        return start + taken

    def received(self, count: int) -> None:
        """`count` bytes have been written behind the others."""
        self.filled += count
        self.complete = self.filled == self.size


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


class ChunkedBody:
    """A body in chunks: at most as many bytes as its slot has, in at most `max_chunks`, and trailers, which are
    dropped."""

    __slots__ = ("_chunks", "_left", "_limit", "_max_chunks", "_memory", "_trailers", "arrived", "complete", "slot")

    def __init__(self, slot: Slot, max_bytes: int, max_chunks: int) -> None:
        """The slot has room for `max_bytes`."""
        self.slot = slot
        self._memory = np.asarray(slot)[:max_bytes].data
        self.complete = False
        self.arrived = 0
        self._limit = max_bytes
        self._max_chunks = max_chunks
        self._chunks = 0
        self._left = 0  # of the current chunk, with the CR LF behind it
        self._trailers = -1  # bytes of them so far; -1 until the last chunk

    @property
    def view(self) -> memoryview:
        return self._memory[: self.arrived]

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
            self._memory[self.arrived : self.arrived + content] = view[start : start + content]
            self.arrived += content
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
        if self._chunks > FREE_CHUNKS and self.arrived < (self._chunks - 1) * MIN_MEAN_CHUNK_BYTES:
            raise HttpError(400, f"the body's chunks have less than {MIN_MEAN_CHUNK_BYTES} bytes on average")
        if self.arrived + size > self._limit:
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
