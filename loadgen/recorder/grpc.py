"""Reads the gRPC calls of one HTTP/2 connection from the bytes that pass, which it neither changes nor delays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpack import Decoder

from loadgen.client.grpc import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    GOAWAY,
    HEADERS,
    MOST_WINDOW,
    NUMBER,
    PADDED,
    PREFIX,
    PRIORITY,
    RST_STREAM,
    SERVICE,
    frame_head,
)
from loadgen.recorder.recorder import Observer, PassedRequest

RECORDED = (f"{SERVICE}ModelInfer", f"{SERVICE}ModelStreamInfer")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGEST_TABLE = 2**20
_FAREWELL = frame_head(GOAWAY, 0, 0, 8) + NUMBER.pack(MOST_WINDOW) + NUMBER.pack(0)
"""Of all streams that the client has opened, none is refused."""
Control = Callable[[int, int, int, bytes], None]
"""Gets the kind, the flags, the stream and the content of each frame that does not belong to a message."""


class _Frames:
    """One direction of a connection."""

    def __init__(self, skipped: int, control: Control | None = None) -> None:
        self._skipped = skipped
        """Bytes before the first frame."""
        self._control = control
        self._buffer = bytearray()
        self._block = b""
        self._ends_stream = False
        self._decoder = Decoder()
        self._decoder.max_allowed_table_size = _LARGEST_TABLE  # whatever the two have agreed on

    @property
    def is_between(self) -> bool:
        """Whether the last frame is whole, and not followed by a part of its headers."""
        return not (self._buffer or self._skipped or self._block)

    def read(self, data: bytes) -> Iterator[tuple[int, dict[str, str] | bytes | None, bool]]:
        """Per frame the stream, its headers or data (None: it was reset), and whether it ends the stream."""
        self._buffer += data
        place = self._skipped
        while len(self._buffer) - place >= FRAME.size:
            high, low, kind, flags, stream = FRAME.unpack_from(self._buffer, place)
            start = place + FRAME.size
            end = start + (high << 8 | low)
            if end > len(self._buffer):
                break
            place, stream = end, stream & MOST_WINDOW
            ends_stream = bool(flags & END_STREAM)
            if kind == RST_STREAM:
                yield stream, None, True
            is_message = kind in (DATA, HEADERS, CONTINUATION)
            if not is_message and self._control is None:
                continue
            content = bytes(memoryview(self._buffer)[start:end])
            if not is_message:
                if self._control is not None:
                    self._control(kind, flags, stream, content)
                continue
            if flags & PADDED and kind != CONTINUATION:
                content = content[1 : len(content) - content[0]]
            if kind == DATA:
                yield stream, content, ends_stream
                continue
            if kind == HEADERS:
                self._block, self._ends_stream = b"", ends_stream
                content = content[5:] if flags & PRIORITY else content
            self._block += content
            if flags & END_HEADERS:
                headers = {str(name): str(value) for name, value in self._decoder.decode(self._block)}
                self._block = b""
                yield stream, headers, self._ends_stream
        self._skipped = max(0, place - len(self._buffer))
        del self._buffer[:place]


class _Messages:
    """The messages of one direction of a call."""

    def __init__(self) -> None:
        self._prefix = b""
        self._left = 0
        self.is_between = True
        """Whether no message has begun and not ended."""

    def read(self, data: bytes) -> Iterator[tuple[bool | None, bytes]]:
        """The pieces of messages as they come. With the first of each, whether the message is compressed; with others
        None. `is_between` says whether a piece is the last one."""
        place = 0
        while place < len(data):
            is_compressed = None
            if not self._left:
                self.is_between = False
                begun = len(self._prefix)
                self._prefix += data[place : place + PREFIX.size - begun]
                place += len(self._prefix) - begun
                if len(self._prefix) < PREFIX.size:
                    return
                is_compressed, self._left = PREFIX.unpack(self._prefix)
                self._prefix = b""
            piece = data[place : place + self._left]
            place += len(piece)
            self._left -= len(piece)
            self.is_between = not self._left
            yield is_compressed, piece


@dataclass(slots=True)
class _Call:
    """One stream. Of a `ModelStreamInfer` each message is a request; the answers belong to them in order, and what
    comes after those to the last one."""

    path: str
    headers: dict[str, str]
    began_ns: int = 0
    """When the first byte of the next message came, or its headers; 0: it has not."""
    waiting: deque[PassedRequest] = field(default_factory=deque)
    coming: PassedRequest | None = None
    """The request of the message that comes."""
    sent: _Messages = field(default_factory=_Messages)
    received: _Messages = field(default_factory=_Messages)
    answer_headers: dict[str, str] = field(default_factory=dict)


class GrpcTap:
    """The calls of one connection."""

    def __init__(self, recorder: Observer, control: Control | None = None) -> None:
        """`control` gets what the server says of the connection."""
        self._recorder = recorder
        self._calls: dict[int, _Call] = {}
        self._requests, self._answers = _Frames(len(_PREFACE)), _Frames(0, control)

    def sent(self, data: bytes, now_ns: int) -> None:
        """Bytes on their way to the server."""
        for stream, part, _ in self._requests.read(data):
            if isinstance(part, dict) and part.get(":path") in RECORDED:
                self._calls[stream] = _Call(part[":path"], part, now_ns)
            elif part is None:
                self._end(stream, None, now_ns, by_server=False)
            elif isinstance(part, bytes) and (call := self._calls.get(stream)) is not None:
                if call.sent.is_between and not call.began_ns:
                    call.began_ns = now_ns
                for is_compressed, piece in call.sent.read(part):
                    if is_compressed is not None:
                        self._begin(call, call.began_ns or now_ns, is_compressed=is_compressed)
                    if call.coming is not None:
                        call.coming.add_content(piece)
                        if call.sent.is_between:
                            call.coming.forwarded(now_ns)

    def _begin(self, call: _Call, at_ns: int, *, is_compressed: bool) -> None:
        headers, call.began_ns = _of_message(call.headers, is_compressed=is_compressed), 0
        call.coming = self._recorder.begin("grpc", call.path, headers, at_ns)
        if call.coming is not None:
            call.waiting.append(call.coming)

    def expect(self, stream: int, request: PassedRequest) -> None:
        """A request is on its way in a stream of its own."""
        self._calls[stream] = _Call(request.route, request.headers, waiting=deque([request]))

    def received(self, data: bytes, now_ns: int) -> None:
        """Bytes on their way to the client."""
        for stream, part, ends in self._answers.read(data):
            call = self._calls.get(stream)
            if call is None:
                continue
            if isinstance(part, dict) and not ends:
                call.answer_headers = part
            if isinstance(part, bytes):
                for is_compressed, piece in call.received.read(part):
                    if is_compressed is not None:
                        self._begin_answer(call, now_ns, is_compressed=is_compressed)
                    if call.waiting:
                        call.waiting[0].add_answer(piece, now_ns)
            if ends:
                status = part.get("grpc-status", "2") if isinstance(part, dict) else "2"
                self._end(stream, int(status) if part is not None else None, now_ns)

    @staticmethod
    def _begin_answer(call: _Call, now_ns: int, *, is_compressed: bool) -> None:
        """An answer begins: of a stream that of the next request, if there is one."""
        if len(call.waiting) > 1 and call.waiting[0].answered:
            call.waiting.popleft().end(0, now_ns)
        if call.waiting:
            call.waiting[0].answer_headers = _of_message(call.answer_headers, is_compressed=is_compressed)

    def _end(self, stream: int, status: int | None, now_ns: int, *, by_server: bool = True) -> None:
        call = self._calls.pop(stream, None)
        for request in call.waiting if call is not None else ():
            if status is not None and not request.answered:
                request.add_answer(b"", now_ns)
            request.is_cut_off = by_server and status is None
            request.end(status, now_ns, whole=status is not None)

    is_between = False
    """A connection cannot go over to another server: it has a state."""

    def farewell(self) -> bytes:
        """Have the client make a new connection, where the last frame has passed whole."""
        return _FAREWELL if self._answers.is_between else b""

    def lose(self) -> None:
        """Bytes are missing: no request under way can be recorded."""
        for call in self._calls.values():
            for request in call.waiting:
                request.lost = True

    def closed(self, now_ns: int, *, by_server: bool = False) -> None:
        """The connection has ended, and with it every call."""
        for stream in [*self._calls]:
            self._end(stream, None, now_ns, by_server=by_server)


def _of_message(headers: dict[str, str], *, is_compressed: bool) -> dict[str, str]:
    """The headers of one message: those of the call say what compression its messages may have."""
    return headers if is_compressed else {name: value for name, value in headers.items() if name != "grpc-encoding"}
