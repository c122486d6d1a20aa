"""Server-sent events over HTTP: received and stamped while the load runs, taken apart afterwards.

While an answer streams, every read costs one system call and one timestamp, within the event loop: its user's greenlet
wakes only where the stream may have ended. The bytes stay as they came, with the offset after each read;
`ReceivedStream.events` later finds the events among them, and with each the read that completed it, whose time is the
event's.

A stream fails when the server sends nothing for `timeout_s`, before the first byte or between two, so an answer that
comes slowly but steadily is whole. `answer_limit_s` bounds it all the same.

The format is that of the HTML standard: lines end with CR LF, LF or CR; comments and unknown fields are ignored;
several data lines of one event are joined.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from loadgen.client.connection import Address, AnySocket, Deadline, Exchange, GreenletSocket, PreparedRequest
from loadgen.client.http import MAX_HEAD_BYTES, HttpConnection, chunk_size

MOST_STREAM_BYTES = 2**26
"""The largest stream that is read; 100,000 tokens with their usage take about half of it."""
_LEAST_BYTES, _BYTES_PER_TOKEN = 2**20, 2**14
"""A stream may have so many bytes, and so many more per token that was asked for: 400 are usual, and servers that
repeat the whole text with each token send more."""
TOKEN_SECONDS = 4.0
"""How long a token may take on average: 64 users whose server makes 16 tokens per second in all wait so long."""
_LINE = re.compile(rb"([^\r\n]*)(?:\r\n|\n|\r)")
_EMPTY_LINES = re.compile(rb"[\r\n]+")
_END_OF_EVENT = b"\r\n\r\n"
_CR = _END_OF_EVENT[0]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def answer_limit_s(timeout_s: float, output_tokens: int) -> float:
    """Most seconds of a whole answer of so many tokens, each piece of which comes within `timeout_s` of the last."""
    return timeout_s + TOKEN_SECONDS * output_tokens


def most_stream_bytes(request: PreparedRequest) -> int:
    """The largest answer to a request: a server that goes on after what was asked for is cut off. The prompt may come
    back with it."""
    return min(MOST_STREAM_BYTES, _LEAST_BYTES + 4 * len(request.body) + _BYTES_PER_TOKEN * request.output_tokens)


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
    head: bytes = b""
    """The head of the response, in lower case."""

    def body(self) -> bytes:
        """The body without chunked coding. Raises `ResponseError` for a chunk without a size."""
        return _decoded(self.raw)[0] if self.chunked else self.raw

    def events(self) -> Iterator[StreamEvent]:
        """All events in order, but those without data. Raises `ResponseError` for a chunk without a size."""
        body, chunk_ends, chunk_places = _decoded(self.raw) if self.chunked else (self.raw, [len(self.raw)], [0])
        for kind, data, end in _split(body + _END_OF_EVENT):
            last = min(end, len(body)) - 1
            chunk = bisect_right(chunk_ends, last)
            place = chunk_places[chunk] + last - (chunk_ends[chunk - 1] if chunk else 0)
            yield StreamEvent(kind, data, bisect_right(self.ends, place), end <= len(body))


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
    """The kind and the data of every event that an empty line ends, and the end of that line's first byte, since an LF
    after a CR may come later."""
    kind = b""
    data: list[bytes] = []
    place = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
    while (match := _LINE.match(body, place)) is not None:
        line, place = match[1], match.end()
        if not line:
            joined = b"\n".join(data) if len(data) != 1 else data[0]
            if joined.strip():
                yield kind, joined, match.start() + 1
            kind, data = b"", []
            more = _EMPTY_LINES.match(body, place)
            place = place if more is None else more.end()
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


class StreamDeadline(Deadline):
    """The time limits of a stream: `timeout_s` without a byte, and `whole_s` for all of it."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.whole_s = timeout_s
        """Set it before `begin`."""
        self._whole_end_ns = 0

    def begin(self, connection: AnySocket, now_ns: int) -> None:
        super().begin(connection, now_ns)
        self._whole_end_ns = now_ns + int(self.whole_s * 1e9)

    def check(self, connection: AnySocket) -> None:
        left_ns = self._whole_end_ns - perf_counter_ns()
        if left_ns <= 0:
            raise TimeoutError
        if left_ns < self._timeout_ns:
            self._changed = True
            connection.settimeout(left_ns / 1e9)

    def left_s(self, heard_ns: int) -> float:
        """Seconds until the next byte must come if the last one came at `heard_ns`."""
        return (min(heard_ns + self._timeout_ns, self._whole_end_ns) - perf_counter_ns()) / 1e9

    @property
    def is_whole_over(self) -> bool:
        return perf_counter_ns() >= self._whole_end_ns


class StreamConnection(HttpConnection):
    """A connection whose good answers are streams of events; others are read as a whole, as by its base. `timeout_s`
    bounds connecting and each wait for a byte; the whole answer has the time that its tokens may take."""

    def __init__(self, address: Address, *, timeout_s: float = 60.0) -> None:
        super().__init__(address, timeout_s=timeout_s, most_bytes=MOST_STREAM_BYTES)
        self._exchange = self._stream = StreamExchange()
        self._deadline = self._limits = StreamDeadline(timeout_s)
        self._enough = 0
        """With how many bytes in the buffer the response is whole, if that is known."""

    def send(self, request: PreparedRequest, patches: Sequence[bytes] = ()) -> Exchange:
        self._limits.whole_s = answer_limit_s(self.timeout_s, request.output_tokens)
        self._most_bytes = most_stream_bytes(request) + MAX_HEAD_BYTES
        return super().send(request, patches)

    def _time_is_up(self) -> str:
        if self._limits.is_whole_over:
            return f"no complete answer within {self._limits.whole_s:g} s"
        return f"the server sent nothing for {self.timeout_s:g} s"

    def _left_s(self) -> float:
        return self._limits.left_s(self._stream.moments[-1])

    def received(self) -> ReceivedStream:
        """A copy of the body of the last response, also of one that broke off."""
        stream = self._stream
        if not stream.start:
            body, moments = bytes(stream.body), stream.moments[-1:]
            return ReceivedStream(body, array("q", [len(body)] * len(moments)), array("q", moments), head=stream.head)
        start = stream.start
        raw = bytes(self._view[start : stream.ends[-1]])
        ends = array("q", [end - start for end in stream.ends])
        return ReceivedStream(raw, ends, array("q", stream.moments), stream.chunked, stream.head)

    def _read_some(self, connection: AnySocket, exchange: Exchange, filled: int) -> int:
        if filled == len(self._buffer):
            self._grow(filled)
        stream = self._stream
        if stream.start:
            if type(connection) is GreenletSocket:
                connection.receive_stream(self._take, self._left_s)
            else:
                self._take(connection.recv_into)
            count = stream.ends[-1] - filled
        else:
            count = connection.recv_into(self._view[filled:] if filled else self._view)
            now_ns = perf_counter_ns()
            exchange.first_byte_ns = exchange.first_byte_ns or (now_ns if count else 0)
            stream.moments = [now_ns] if count else stream.moments
        self._deadline.check(connection)
        return count

    def _take(self, recv_into: Callable[[memoryview], int]) -> bool:
        """Read what there is, and say whether to look at it: at the end of the connection, where the end of the stream
        may be, and when the buffer is full."""
        stream, view = self._stream, self._view
        filled = stream.ends[-1]
        count = recv_into(view[filled:])
        if not count:
            return True
        stream.moments.append(perf_counter_ns())
        filled += count
        stream.ends.append(filled)
        return view[filled - 4] == _CR or filled >= self._enough or filled == len(view)

    def _begin_body(self, start: int, filled: int, enough: int = sys.maxsize) -> None:
        """The body begins at `start`, and `filled` bytes came with the read that ended the head. It is whole with the
        bytes up to `enough`, or with an empty line."""
        self._stream.start, self._stream.ends, self._enough = start, [filled], enough

    def _receive_chunked(
        self, connection: AnySocket, exchange: Exchange, start: int, filled: int, *, decode: bool = True
    ) -> None:
        if exchange.head[9:12] == b"200":  # whatever its type is called
            self._begin_body(start, filled)
            self._stream.chunked, decode = True, False
        super()._receive_chunked(connection, exchange, start, filled, decode=decode)

    def _receive_until_closed(self, connection: AnySocket, exchange: Exchange, start: int, filled: int) -> None:
        self._begin_body(start, filled)
        super()._receive_until_closed(connection, exchange, start, filled)

    def _receive_counted(self, connection: AnySocket, exchange: Exchange, start: int, filled: int, end: int) -> None:
        self._begin_body(start, filled, end)
        super()._receive_counted(connection, exchange, start, filled, end)
