"""Reads the gRPC calls of one HTTP/2 connection from the bytes that pass, which it neither changes nor delays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpack import Decoder

from loadgen.client.grpc import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    MOST_WINDOW,
    PADDED,
    PREFIX,
    PRIORITY,
    RST_STREAM,
    SERVICE,
)
from loadgen.recorder.recorder import Observer, PassedRequest

RECORDED = (f"{SERVICE}ModelInfer", f"{SERVICE}ModelStreamInfer")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGEST_TABLE = 2**20


class _Frames:
    """One direction of a connection."""

    def __init__(self, skipped: int) -> None:
        self._skipped = skipped
        """Bytes before the first frame."""
        self._buffer = bytearray()
        self._block = b""
        self._ends_stream = False
        self._decoder = Decoder()
        self._decoder.max_allowed_table_size = _LARGEST_TABLE  # whatever the two have agreed on

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
            if kind not in (DATA, HEADERS, CONTINUATION):
                continue
            content = bytes(memoryview(self._buffer)[start:end])
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
                yield stream, headers, self._ends_stream
        self._skipped = max(0, place - len(self._buffer))
        del self._buffer[:place]


@dataclass(slots=True)
class _Call:
    """One stream. Of a `ModelStreamInfer` each message is a request; the answers belong to them in order, and what
    comes after those to the last one."""

    path: str
    headers: dict[str, str]
    waiting: deque[PassedRequest] = field(default_factory=deque)
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    began_ns: int = 0
    """When the first byte of the next message came."""
    messages: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answers_end: bool = False
    """Whether the last answer is whole."""


class GrpcTap:
    """The calls of one connection."""

    def __init__(self, recorder: Observer) -> None:
        self._recorder = recorder
        self._calls: dict[int, _Call] = {}
        self._requests, self._answers = _Frames(len(_PREFACE)), _Frames(0)

    def sent(self, data: bytes, now_ns: int) -> None:
        """Bytes on their way to the server."""
        for stream, part, _ in self._requests.read(data):
            if isinstance(part, dict) and part.get(":path") in RECORDED:
                self._calls[stream] = _Call(part[":path"], part, began_ns=now_ns)
            elif part is None:
                self._end(stream, None, now_ns)
            elif isinstance(part, bytes) and (call := self._calls.get(stream)) is not None:
                if not call.sent and call.messages:
                    call.began_ns = now_ns
                for message in _messages(call.sent, part):
                    call.messages += 1
                    request = self._recorder.begin("grpc", call.path, call.headers, call.began_ns)
                    if request is not None:
                        request.add_content(message)
                        call.waiting.append(request)
                    call.began_ns = now_ns

    def received(self, data: bytes, now_ns: int) -> None:
        """Bytes on their way to the client."""
        for stream, part, ends in self._answers.read(data):
            call = self._calls.get(stream)
            if call is None:
                continue
            if isinstance(part, dict) and not ends:
                call.answer_headers = part
            if isinstance(part, bytes):
                if part and not call.received:
                    self._begin_answer(call, now_ns)
                for message in _messages(call.received, part):
                    if call.answers_end:
                        self._begin_answer(call, now_ns)
                    if call.waiting:
                        call.waiting[0].add_answer(message, now_ns)
                    call.answers_end = True
                if call.received and call.answers_end:
                    self._begin_answer(call, now_ns)
            if ends:
                status = part.get("grpc-status", "2") if isinstance(part, dict) else "2"
                self._end(stream, int(status) if part is not None else None, now_ns)

    @staticmethod
    def _begin_answer(call: _Call, now_ns: int) -> None:
        """An answer begins: of a stream that of the next request, if there is one."""
        call.answers_end = False
        if len(call.waiting) > 1 and call.waiting[0].answered:
            call.waiting.popleft().end(0, now_ns)
        if call.waiting:
            call.waiting[0].answer_headers = call.answer_headers
            call.waiting[0].add_answer(b"", now_ns)

    def _end(self, stream: int, status: int | None, now_ns: int) -> None:
        call = self._calls.pop(stream, None)
        for request in call.waiting if call is not None else ():
            if status is not None and not request.answered:
                request.add_answer(b"", now_ns)
            request.end(status, now_ns, whole=status is not None)

    def closed(self, now_ns: int) -> None:
        """The connection has ended, and with it every call."""
        for stream in [*self._calls]:
            self._end(stream, None, now_ns)


def _messages(buffer: bytearray, data: bytes) -> Iterator[bytes]:
    """The messages that are whole with these bytes; the rest stays in the buffer."""
    buffer += data
    while len(buffer) >= PREFIX.size:
        _, size = PREFIX.unpack_from(buffer)
        if len(buffer) < PREFIX.size + size:
            return
        yield bytes(memoryview(buffer)[PREFIX.size : PREFIX.size + size])
        del buffer[: PREFIX.size + size]
