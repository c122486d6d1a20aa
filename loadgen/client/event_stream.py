"""Server-sent events over HTTP: received and stamped while the load runs, taken apart afterwards.

While an answer streams, every read costs one system call, one timestamp and the walk over the chunk sizes that finds
the end of the stream. The bytes stay as they came, with the offset after each read; `ReceivedStream.events` later finds
the events among them, and with each the read that completed it, whose time is the event's.

The format is that of the HTML standard: lines end with CR LF, LF or CR; comments and unknown fields are ignored;
several data lines of one event are joined.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from loadgen.client.connection import Address, AnySocket, Exchange, GreenletSocket, PreparedRequest
from loadgen.client.http import HttpConnection, chunk_size

MOST_STREAM_BYTES = 2**26
"""The largest stream that is read; 100,000 tokens with their usage take about half of it."""
_LINE = re.compile(rb"([^\r\n]*)(?:\r\n|\n|\r)")
_END_OF_EVENT = b"\r\n\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class StreamEvent(NamedTuple):
    """One event that has data."""

    kind: bytes
    """Its `event` field; empty without one."""
    data: bytes
    read: int
    """Number of the read that completed it."""
    ended: bool
    """Whether an empty line came after it; only the last event may lack that."""


@dataclass(frozen=True, slots=True)
class ReceivedStream:
    """The body of a response as it came. The reads `i` ended at the offsets `ends[i]`, at the times `moments[i]`."""

    raw: bytes
    ends: array[int]
    moments: array[int]
    chunked: bool = False
    """Whether the bytes are in HTTP's chunked coding."""

    def events(self) -> list[StreamEvent]:
        """All events in order. Raises `ResponseError` for a chunk without a size."""
        body, chunk_ends, chunk_places = _decoded(self.raw) if self.chunked else (self.raw, [len(self.raw)], [0])
        events: list[StreamEvent] = []
        for kind, data, end in _split(body + _END_OF_EVENT):
            last = min(end, len(body)) - 1
            chunk = bisect_right(chunk_ends, last)
            place = chunk_places[chunk] + last - (chunk_ends[chunk - 1] if chunk else 0)
            events.append(StreamEvent(kind, data, bisect_right(self.ends, place), end <= len(body)))
        return events


def _decoded(raw: bytes) -> tuple[bytes, list[int], list[int]]:
    """The body without chunked coding; of each chunk where it ends in the body and where it begins in `raw`. A last
    chunk that is not whole is kept as far as it came."""
    parts: list[bytes] = []
    ends: list[int] = []
    places: list[int] = []
    cursor = total = 0
    while (line_end := raw.find(b"\r\n", cursor)) >= 0:
        size = chunk_size(raw[cursor:line_end])
        if size == 0:
            break
        start = line_end + 2
        part = raw[start : start + size]
        total += len(part)
        parts.append(part)
        ends.append(total)
        places.append(start)
        cursor = start + size + 2
    return b"".join(parts), ends or [0], places or [0]


def _split(body: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """The kind and the data of every event that an empty line ends, and where that line ends."""
    kind = b""
    data: list[bytes] = []
    start = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
    for match in _LINE.finditer(body, start):
        line = match[1]
        if not line:
            if data:
                yield kind, data[0] if len(data) == 1 else b"\n".join(data), match.end()
            kind, data = b"", []
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value[1:] if value[:1] == b" " else value)
        elif field == b"event":
            kind = value.strip()


class StreamExchange(Exchange):
    """The outcome of a request that is answered by a stream, with the offsets and the times of its reads."""

    __slots__ = ("chunked", "ends", "moments", "start")

    def begin(self, send_ns: int, request_bytes: int) -> None:
        super().begin(send_ns, request_bytes)
        self.start = 0
        """Where the body begins in the connection's buffer; 0 before one has begun."""
        self.chunked = False
        self.ends: list[int] = []
        self.moments: list[int] = []


class StreamConnection(HttpConnection):
    """A connection whose good answers are streams of events; others are read as a whole, as by its base."""

    def __init__(self, address: Address, *, timeout_s: float = 60.0) -> None:
        super().__init__(address, timeout_s=timeout_s, most_bytes=MOST_STREAM_BYTES)
        self._exchange = self._stream = StreamExchange()

    def received(self) -> ReceivedStream:
        """A copy of the body of the last response, also of one that broke off."""
        stream = self._stream
        if not stream.start:
            body, moments = bytes(stream.body), stream.moments[-1:]
            return ReceivedStream(body, array("q", [len(body)] * len(moments)), array("q", moments))
        start = stream.start
        raw = bytes(self._view[start : stream.ends[-1]])
        ends = array("q", [end - start for end in stream.ends])
        return ReceivedStream(raw, ends, array("q", stream.moments), stream.chunked)

    def send(self, request: PreparedRequest, patches: Sequence[bytes] = ()) -> Exchange:
        try:
            return super().send(request, patches)
        finally:
            if isinstance(self._socket, GreenletSocket):
                self._socket.end_stream()

    def _read_some(self, connection: AnySocket, exchange: Exchange, filled: int) -> int:
        if filled == len(self._buffer):
            self._grow(filled)
        if type(connection) is GreenletSocket:
            count = connection.recv_stream_into(self._view[filled:] if filled else self._view)
            now_ns = perf_counter_ns()
        else:
            count = connection.recv_into(self._view[filled:])
            now_ns = perf_counter_ns()
            self._deadline.check(connection)
        if count:
            stream = self._stream
            if exchange.first_byte_ns == 0:
                exchange.first_byte_ns = now_ns
            elif stream.ends[-1] != filled:  # an interim response before this one was taken out of the buffer
                stream.ends, stream.moments = [filled], [now_ns]
            stream.ends.append(filled + count)
            stream.moments.append(now_ns)
        return count

    def _receive_chunked(
        self, connection: AnySocket, exchange: Exchange, start: int, filled: int, *, decode: bool = True
    ) -> None:
        if exchange.head[9:12] == b"200" and b"text/event-stream" in exchange.head:
            self._stream.start, self._stream.chunked, decode = start, True, False
        super()._receive_chunked(connection, exchange, start, filled, decode=decode)

    def _receive_until_closed(self, connection: AnySocket, exchange: Exchange, start: int, filled: int) -> None:
        self._stream.start = start
        super()._receive_until_closed(connection, exchange, start, filled)

    def _receive_counted(self, connection: AnySocket, exchange: Exchange, start: int, filled: int, end: int) -> None:
        self._stream.start = start
        super()._receive_counted(connection, exchange, start, filled, end)
