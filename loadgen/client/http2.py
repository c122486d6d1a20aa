"""HTTP/2 (RFC 9113) for a gRPC client of one server: one stream at a time, request bodies that are not copied.

The gRPC library costs this side two to three times the CPU per request (`tests/benchmarks/client_cpu.py`): its own
threads, queues and events around every call. Here a request is one `sendmsg` of the head and slices of the body as far
as the server's flow control allows, and a response is one `recv_into` a reused buffer.

It uses the `socket` module of its process, so it blocks in a plain process and yields to other users in one that gevent
has patched. No upgrade, no push, no concurrent streams.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from time import perf_counter_ns

from hpack import Decoder, Encoder, HPACKError

from loadgen.client.exchange import Deadline
from loadgen.client.greenlet_socket import AnySocket
from loadgen.client.requests import send_parts

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 1, 2, 4, 5
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_FRAME_BYTES = 9
_WINDOW = 2**31 - 1
_DEFAULT_WINDOW = 65_535
_DEFAULT_FRAME = 16_384
_LARGEST_FRAME = 2**24 - 1
_LAST_STREAM = 2**31 - 1
_MOST_IDLE_FRAMES = 10_000
"""Frames in one request that hold no part of its response. For the DATA that it receives, a server may open its windows
after each frame, and again whenever they are used up."""
_UPDATES_PER_FRAME = _UPDATES_PER_WAIT = 4
_MOST_HEADER_BYTES = 64 * 1024
_MOST_KNOWN_BLOCKS = 64
_FRAME_COST_BYTES = 64
"""Memory of a DATA frame besides its content."""
_MOST_READS_BETWEEN = 16
CANCEL = 8


class Http2Error(Exception):
    """The connection cannot be used any more; the message says why."""


def header_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """These headers as a block without dynamic table entries, which any connection can send any number of times."""
    return Encoder().encode([(name, value, True) for name, value in fields], huffman=False)


def frame_head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """The nine bytes before a frame's content."""
    return _FRAME.pack(length >> 8, length & 0xFF, kind, flags, stream)


class Http2Connection:
    """One connection. After an `Http2Error`, an `OSError` or a `TimeoutError` it can only be closed."""

    def __init__(self, connection: AnySocket, *, timeout_s: float, most_bytes: int) -> None:
        """Takes over a connected socket. `timeout_s` bounds the greeting and each request, `most_bytes` a response.
        Raises `Http2Error`, `OSError` when the server does not speak HTTP/2."""
        self._socket = connection
        self._deadline = Deadline(timeout_s)
        self._most_bytes = most_bytes
        self._room = 0
        self._idle_frames = 0
        self._buffer = bytearray(4 * _DEFAULT_FRAME)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._send_window = _DEFAULT_WINDOW
        self._initial_window = _DEFAULT_WINDOW
        self._stream_window = 0
        self._max_frame = _DEFAULT_FRAME
        self._taken = 0
        self._next_stream = 1
        self._stream = 0
        self._settled = False
        self.leaving = False
        """The server accepts no more streams on this connection."""
        self.answered = False
        """A byte of the current stream's response has come."""
        self.ended = True
        """The current stream's response is complete, or the stream was reset."""
        self.fields: dict[bytes, bytes] = {}
        self.body: list[bytes] = []
        self.reset: int | None = None
        """The code with which the server reset the current stream."""
        self._blocks = b""
        self._block_ends_stream = False
        self._known: dict[bytes, dict[bytes, bytes]] = {}
        self._decoder = Decoder(_MOST_HEADER_BYTES)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        settings = _SETTING.pack(_HEADER_TABLE_SIZE, 0) + _SETTING.pack(_ENABLE_PUSH, 0)
        settings += _SETTING.pack(_INITIAL_WINDOW_SIZE, _WINDOW)
        self._deadline.begin(connection, perf_counter_ns())
        self._socket.sendall(
            _PREFACE
            + frame_head(SETTINGS, 0, 0, len(settings)) + settings
            + frame_head(WINDOW_UPDATE, 0, 0, 4) + _NUMBER.pack(_WINDOW - _DEFAULT_WINDOW)
        )  # fmt: skip
        while not self._settled:
            self.receive()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def usable(self) -> bool:
        """Whether a stream can be opened, after reading the frames that the server has sent since the last request."""
        self._deadline.reset()
        self._socket.settimeout(0.0)
        try:
            for _ in range(_MOST_READS_BETWEEN):
                self.receive()
        except BlockingIOError:
            return not self.leaving and self._next_stream < _LAST_STREAM
        except (Http2Error, OSError):
            return False
        return False  # it never stops sending

    def request(self, head: bytes, pieces: Sequence[bytes | memoryview], now_ns: int) -> None:
        """Open a stream and send the pieces on it, until all are sent or the server has responded. Then `receive` until
        `ended`. The deadline counts from `now_ns`."""
        self._deadline.begin(self._socket, now_ns)
        self._room = self._most_bytes
        sent, total = 0, sum(map(len, pieces))
        self._idle_frames = -_UPDATES_PER_FRAME * (total // self._max_frame)
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._stream, self._stream_window = stream, self._initial_window
        self.answered = self.ended = False
        self.fields, self.body, self.reset = {}, [], None
        parts: list[bytes | memoryview] = [frame_head(HEADERS, END_HEADERS, stream, len(head)), head]
        piece, start = 0, 0
        while sent < total:
            room = min(self._send_window, self._stream_window)
            size = min(room, self._max_frame, total - sent)
            if size <= 0:
                self._send(parts)
                parts = []
                self._idle_frames -= _UPDATES_PER_WAIT
                self.receive()
                if self.ended:
                    break
                continue
            self._send_window -= size
            self._stream_window -= size
            last = sent + size == total
            parts.append(frame_head(DATA, END_STREAM if last else 0, stream, size))
            sent += size
            while size:
                part = pieces[piece][start : start + size]
                parts.append(part)
                size -= len(part)
                start += len(part)
                if start == len(pieces[piece]):
                    piece, start = piece + 1, 0
        if parts:
            self._send(parts)
        if sent < total:  # the server does not want the rest
            self._send([frame_head(RST_STREAM, 0, stream, 4), _NUMBER.pack(CANCEL)])

    def receive(self) -> None:
        """Read once and process every complete frame. Raises `Http2Error`, `OSError`, `TimeoutError`."""
        connection = self._socket
        count = connection.recv_into(self._view[self._filled :])
        if count == 0:
            raise Http2Error("connection closed by the server")
        self._filled += count
        place = 0
        while self._filled - place >= _FRAME_BYTES:
            high, low, kind, flags, stream = _FRAME.unpack_from(self._buffer, place)
            start = place + _FRAME_BYTES
            end = start + (high << 8 | low)
            if end - start > _DEFAULT_FRAME:
                raise Http2Error("the server does not speak HTTP/2, or sends frames larger than allowed")
            if end > self._filled:
                break
            if not self._settled and kind != SETTINGS:
                raise Http2Error("the server does not begin with HTTP/2 settings")
            if kind != DATA or start == end:
                self._idle_frames += 1
                if self._idle_frames > _MOST_IDLE_FRAMES:
                    raise Http2Error(f"the server sends more than {_MOST_IDLE_FRAMES:,} frames that are not a response")
            try:
                self._take(kind, flags, stream & _WINDOW, self._view[start:end])
            except (IndexError, struct.error) as exc:
                raise Http2Error("the server sends frames that are too short for their type") from exc
            place = end
        left = self._filled - place
        if place and left:
            self._view[:left] = bytes(self._view[place : self._filled])
        self._filled = left
        if not self.ended or not self._settled:
            self._deadline.check(connection)

    def _take(self, kind: int, flags: int, stream: int, content: memoryview) -> None:
        if kind == DATA:
            self._take_data(flags, stream, content)
        elif kind in (HEADERS, CONTINUATION):
            self._take_headers(kind, flags, stream, content)
        elif kind == WINDOW_UPDATE:
            increment = _NUMBER.unpack_from(content)[0] & _WINDOW
            if stream == 0:
                self._send_window += increment
            elif stream == self._stream:
                self._stream_window += increment
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(content)
        elif kind == PING and not flags & ACK:
            self._send([frame_head(PING, ACK, 0, len(content)), bytes(content)])
        elif kind == RST_STREAM and stream == self._stream:
            self.reset, self.ended = _NUMBER.unpack_from(content)[0], True
        elif kind == GOAWAY:
            self.leaving = True
            if not self.ended and _NUMBER.unpack_from(content)[0] & _WINDOW < self._stream:
                raise Http2Error("the server closes the connection and has not processed the request")

    def _take_settings(self, content: memoryview) -> None:
        for place in range(0, len(content) - 5, _SETTING.size):
            name, value = _SETTING.unpack_from(content, place)
            if name == _INITIAL_WINDOW_SIZE:
                if value > _WINDOW:
                    raise Http2Error("the server sets a window that HTTP/2 does not allow")
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == _MAX_FRAME_SIZE:
                if not _DEFAULT_FRAME <= value <= _LARGEST_FRAME:
                    raise Http2Error("the server sets a frame size that HTTP/2 does not allow")
                self._max_frame = value
        self._settled = True
        self._send([frame_head(SETTINGS, ACK, 0, 0)])

    def _take_data(self, flags: int, stream: int, content: memoryview) -> None:
        self._taken += len(content)
        if self._taken > _WINDOW // 2:
            self._send([frame_head(WINDOW_UPDATE, 0, 0, 4), _NUMBER.pack(self._taken)])
            self._taken = 0
        self._room -= len(content) + _FRAME_COST_BYTES
        if self._room < 0:
            raise Http2Error(f"the response is larger than the limit of {self._most_bytes:,} bytes")
        if stream != self._stream or self.ended:
            return
        self.answered = True
        if flags & PADDED:
            content = content[1 : len(content) - content[0]]
        self.body.append(bytes(content))
        self.ended = bool(flags & END_STREAM)

    def _take_headers(self, kind: int, flags: int, stream: int, content: memoryview) -> None:
        if kind == HEADERS:
            self._blocks = b""
            self._block_ends_stream = bool(flags & END_STREAM)
            if flags & PADDED:
                content = content[1 : len(content) - content[0]]
            if flags & PRIORITY:
                content = content[5:]
        self._blocks += content
        if len(self._blocks) > _MOST_HEADER_BYTES:
            raise Http2Error(f"the server sends more than {_MOST_HEADER_BYTES:,} bytes of headers")
        if not flags & END_HEADERS or stream != self._stream or self.ended:
            return
        self.answered = True
        self.fields |= self._decoded(self._blocks)
        self.ended = self._block_ends_stream

    def _decoded(self, block: bytes) -> dict[bytes, bytes]:
        """Without a dynamic table equal blocks mean the same, and a server sends few different ones."""
        known = self._known.get(block)
        if known is None:
            try:
                known = dict(self._decoder.decode(block, raw=True))
            except HPACKError as exc:
                raise Http2Error("the server's headers cannot be decoded") from exc
            if len(self._known) < _MOST_KNOWN_BLOCKS:
                self._known[block] = known
        return known

    def _send(self, parts: list[bytes | memoryview]) -> None:
        try:
            send_parts(self._socket, parts, self._deadline)
        except BlockingIOError:  # in `usable`: a frame would be sent in part
            raise Http2Error("the server does not read") from None
