"""The gRPC client for measured requests, over its own HTTP/2 (RFC 9113).

It sends messages that were serialised beforehand and returns raw messages. One TCP connection per user, one call at a
time, and no call is sent twice. The call's deadline is sent to the server (`grpc-timeout`) and enforced here too; a
call that misses it closes the connection, which is made again for the next.

The gRPC library costs this side two to three times the CPU per request (`tests/benchmarks/client_cpu.py`): its own
threads, queues and events around every call. Here a request is one `sendmsg` of the head and slices of the body as far
as the server's flow control allows, and a response is one `recv_into` a reused buffer. No upgrade, no push, no
concurrent streams.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from urllib.parse import unquote

from hpack import Decoder, Encoder, HPACKError

from loadgen.base.documents import one_line
from loadgen.base.headers import secret_of
from loadgen.client.connection import (
    GRPC_STATUS,
    MOST_ANSWER_BYTES,
    Address,
    AddressError,
    AnySocket,
    ConnectionRefused,
    Deadline,
    Exchange,
    Pieces,
    PreparedRequest,
    ResponseError,
    assemble,
    is_host,
    open_socket,
    send_parts,
)
from loadgen.client.tls import failure_reason
from loadgen.records.run import DEFAULT_ACCESS, Access

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">HBBBI")
SETTING = struct.Struct(">HI")
NUMBER = struct.Struct(">I")
_FRAME_HEAD_BYTES = 9
MOST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
_LARGEST_FRAME = 2**24 - 1
_LAST_STREAM = 2**31 - 1
_MOST_IDLE_FRAMES = 10_000
"""Frames in one request that hold no part of its response. For the DATA that it receives, a server may open its windows
after each frame, and again whenever they are used up."""
_UPDATES_PER_FRAME = _UPDATES_PER_WAIT = 4
_MOST_HEADER_BYTES = 64 * 1024
_MOST_DECODED_BLOCKS = 64
_FRAME_COST_BYTES = 64
"""Memory of a DATA frame besides its content."""
_MOST_READS_BETWEEN = 16
CANCEL = 8

SERVICE = "/inference.GRPCInferenceService/"
MOST_ADDRESS_BYTES = 126
"""Longer than any real host and port."""
MOST_PORT = 65_535
STATUS_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 2, 4, 8, 13, 14
_OF_RESET = {0x7: UNAVAILABLE, 0x8: 1, 0xB: RESOURCE_EXHAUSTED}
"""HTTP/2's error code → gRPC's status (gRPC over HTTP2, "Errors"): REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM; any
other is INTERNAL."""
_OF_HTTP = {b"400": INTERNAL, b"401": 16, b"403": 7, b"404": 12, b"429": UNAVAILABLE, b"502": UNAVAILABLE,
            b"503": UNAVAILABLE, b"504": UNAVAILABLE}  # fmt: skip
"""HTTP's status → gRPC's, for a response without one; any other is UNKNOWN."""
PREFIX = struct.Struct(">BI")
_PREFIX_BYTES = 5
"""gRPC's compression flag and length before a message."""


def header_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """These headers as a block without dynamic table entries, which any connection can send any number of times."""
    return Encoder().encode([(name, value, True) for name, value in fields], huffman=False)


def frame_head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """The nine bytes before a frame's content."""
    return FRAME.pack(length >> 8, length & 0xFF, kind, flags, stream)


_SETTINGS = b"".join(
    SETTING.pack(name, value)
    for name, value in ((_HEADER_TABLE_SIZE, 0), (_ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, MOST_WINDOW))
)
GREETING = (
    _PREFACE
    + frame_head(SETTINGS, 0, 0, len(_SETTINGS)) + _SETTINGS
    + frame_head(WINDOW_UPDATE, 0, 0, 4) + NUMBER.pack(MOST_WINDOW - DEFAULT_WINDOW)
)  # fmt: skip
"""What a client says first: no dynamic table of headers, no pushes, and windows that no answer fills."""


class SendLimits:
    """What the server at the other end lets its client send, by the frames that it has sent so far."""

    def __init__(self) -> None:
        self.window = self.stream_window = self._initial_window = DEFAULT_WINDOW
        """Bytes for which the connection and the current stream have room, and what a new stream has."""
        self.max_frame = DEFAULT_FRAME
        self.has_settings = False
        self.stream = 0

    def open(self, stream: int) -> None:
        """A new stream is the current one."""
        self.stream, self.stream_window = stream, self._initial_window

    def take(self, kind: int, flags: int, stream: int, content: bytes | memoryview) -> list[bytes | memoryview]:
        """Heed a frame; the parts that answer it. Raises `ResponseError` for what HTTP/2 does not allow."""
        if kind == WINDOW_UPDATE:
            increment = NUMBER.unpack_from(content)[0] & MOST_WINDOW
            if stream == 0:
                self.window += increment
            elif stream == self.stream:
                self.stream_window += increment
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(content)
            return [frame_head(SETTINGS, ACK, 0, 0)]
        elif kind == PING and not flags & ACK:
            return [frame_head(PING, ACK, 0, len(content)), bytes(content)]
        return []

    def _take_settings(self, content: bytes | memoryview) -> None:
        for place in range(0, len(content) - 5, SETTING.size):
            name, value = SETTING.unpack_from(content, place)
            if name == INITIAL_WINDOW_SIZE:
                if value > MOST_WINDOW:
                    raise ResponseError("the server sets a window that HTTP/2 does not allow")
                self.stream_window += value - self._initial_window
                self._initial_window = value
            elif name == MAX_FRAME_SIZE:
                if not DEFAULT_FRAME <= value <= _LARGEST_FRAME:
                    raise ResponseError("the server sets a frame size that HTTP/2 does not allow")
                self.max_frame = value
        self.has_settings = True


class Http2Connection:
    """One connection. After a `ResponseError`, an `OSError` or a `TimeoutError` it can only be closed."""

    def __init__(self, connection: AnySocket, *, timeout_s: float, most_bytes: int) -> None:
        """Takes over a connected socket. `timeout_s` bounds the greeting and each request, `most_bytes` a response.
        Raises `ResponseError`, `OSError` when the server does not speak HTTP/2."""
        self._socket = connection
        self._deadline = Deadline(timeout_s)
        self._most_bytes = most_bytes
        self._bytes_left = 0
        self._idle_frames = 0
        self._buffer = bytearray(4 * DEFAULT_FRAME)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._limits = SendLimits()
        self._unacknowledged = 0
        self._next_stream = 1
        self.going_away = False
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
        self._decoded_blocks: dict[bytes, dict[bytes, bytes]] = {}
        self._decoder = Decoder(_MOST_HEADER_BYTES)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._deadline.begin(connection, perf_counter_ns())
        self._socket.sendall(GREETING)
        while not self._limits.has_settings:
            self.receive()

    def close(self) -> None:
        self._socket.close()

    def usable(self) -> bool:
        """Whether a stream can be opened, after reading the frames that the server has sent since the last request."""
        self._deadline.reset()
        self._socket.settimeout(0.0)
        try:
            for _ in range(_MOST_READS_BETWEEN):
                self.receive()
        except BlockingIOError:
            return not self.going_away and self._next_stream < _LAST_STREAM
        except (ResponseError, OSError):
            return False
        return False  # it never stops sending

    def request(self, head: bytes, pieces: Sequence[bytes | memoryview], now_ns: int) -> None:
        """Open a stream and send the pieces on it, until all are sent or the server has responded. Then `receive` until
        `ended`. The deadline counts from `now_ns`."""
        self._deadline.begin(self._socket, now_ns)
        self._bytes_left = self._most_bytes
        sent, total, limits = 0, sum(map(len, pieces)), self._limits
        self._idle_frames = -_UPDATES_PER_FRAME * (total // limits.max_frame)
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        limits.open(stream)
        self.answered = self.ended = False
        self.fields, self.body, self.reset = {}, [], None
        parts: list[bytes | memoryview] = [frame_head(HEADERS, END_HEADERS, stream, len(head)), head]
        piece, start = 0, 0
        while sent < total:
            size = min(limits.window, limits.stream_window, limits.max_frame, total - sent)
            if size <= 0:
                self._send(parts)
                parts = []
                self._idle_frames -= _UPDATES_PER_WAIT
                self.receive()
                if self.ended:
                    break
                continue
            limits.window -= size
            limits.stream_window -= size
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
            self._send([frame_head(RST_STREAM, 0, stream, 4), NUMBER.pack(CANCEL)])

    def receive(self) -> None:
        """Read once and process every complete frame. Raises `ResponseError`, `OSError`, `TimeoutError`."""
        connection = self._socket
        count = connection.recv_into(self._view[self._filled :])
        if count == 0:
            raise ResponseError("connection closed by the server")
        self._filled += count
        place = 0
        while self._filled - place >= _FRAME_HEAD_BYTES:
            high, low, kind, flags, stream = FRAME.unpack_from(self._buffer, place)
            start = place + _FRAME_HEAD_BYTES
            end = start + (high << 8 | low)
            if end - start > DEFAULT_FRAME:
                raise ResponseError("the server does not speak HTTP/2, or sends frames larger than allowed")
            if end > self._filled:
                break
            if not self._limits.has_settings and kind != SETTINGS:
                raise ResponseError("the server does not begin with HTTP/2 settings")
            if kind != DATA or start == end:
                self._idle_frames += 1
                if self._idle_frames > _MOST_IDLE_FRAMES:
                    raise ResponseError(
                        f"the server sends more than {_MOST_IDLE_FRAMES:,} frames that are not a response"
                    )
            try:
                self._process(kind, flags, stream & MOST_WINDOW, self._view[start:end])
            except (IndexError, struct.error) as exc:
                raise ResponseError("the server sends frames that are too short for their type") from exc
            place = end
        left = self._filled - place
        if place and left:
            self._view[:left] = bytes(self._view[place : self._filled])
        self._filled = left
        if not self.ended or not self._limits.has_settings:
            self._deadline.check(connection)

    def _process(self, kind: int, flags: int, stream: int, content: memoryview) -> None:
        if kind == DATA:
            self._process_data(flags, stream, content)
        elif kind in (HEADERS, CONTINUATION):
            self._process_headers(kind, flags, stream, content)
        elif kind == RST_STREAM and stream == self._limits.stream:
            self.reset, self.ended = NUMBER.unpack_from(content)[0], True
        elif kind == GOAWAY:
            self.going_away = True
            if not self.ended and NUMBER.unpack_from(content)[0] & MOST_WINDOW < self._limits.stream:
                raise ResponseError("the server closes the connection and has not processed the request")
        elif answer := self._limits.take(kind, flags, stream, content):
            self._send(answer)

    def _process_data(self, flags: int, stream: int, content: memoryview) -> None:
        self._unacknowledged += len(content)
        if self._unacknowledged > MOST_WINDOW // 2:
            self._send([frame_head(WINDOW_UPDATE, 0, 0, 4), NUMBER.pack(self._unacknowledged)])
            self._unacknowledged = 0
        self._bytes_left -= len(content) + _FRAME_COST_BYTES
        if self._bytes_left < 0:
            raise ResponseError(f"the response is larger than the limit of {self._most_bytes:,} bytes")
        if stream != self._limits.stream or self.ended:
            return
        self.answered = True
        if flags & PADDED:
            content = content[1 : len(content) - content[0]]
        self.body.append(bytes(content))
        self.ended = bool(flags & END_STREAM)

    def _process_headers(self, kind: int, flags: int, stream: int, content: memoryview) -> None:
        if kind == HEADERS:
            self._blocks = b""
            self._block_ends_stream = bool(flags & END_STREAM)
            if flags & PADDED:
                content = content[1 : len(content) - content[0]]
            if flags & PRIORITY:
                content = content[5:]
        self._blocks += content
        if len(self._blocks) > _MOST_HEADER_BYTES:
            raise ResponseError(f"the server sends more than {_MOST_HEADER_BYTES:,} bytes of headers")
        if not flags & END_HEADERS or stream != self._limits.stream or self.ended:
            return
        self.answered = True
        self.fields |= self._decoded(self._blocks)
        self.ended = self._block_ends_stream

    def _decoded(self, block: bytes) -> dict[bytes, bytes]:
        """Without a dynamic table equal blocks mean the same, and a server sends few different ones."""
        fields = self._decoded_blocks.get(block)
        if fields is None:
            try:
                fields = dict(self._decoder.decode(block, raw=True))
            except HPACKError as exc:
                raise ResponseError("the server's headers cannot be decoded") from exc
            if len(self._decoded_blocks) < _MOST_DECODED_BLOCKS:
                self._decoded_blocks[block] = fields
        return fields

    def _send(self, parts: list[bytes | memoryview]) -> None:
        try:
            send_parts(self._socket, parts, self._deadline)
        except BlockingIOError:  # in `usable`: a frame would be sent in part
            raise ResponseError("the server does not read") from None


def grpc_request(message: bytes, payload_bytes: int, pieces: Pieces = ()) -> PreparedRequest:
    """The call for a serialised `ModelInferRequest`, which has `payload_bytes` of tensors."""
    return PreparedRequest(PREFIX.pack(0, len(message)), message, payload_bytes, pieces)


def parse_grpc_address(address: str, access: Access = DEFAULT_ACCESS) -> Address:
    """HOST:PORT, grpc://HOST:PORT or, with TLS, grpcs://HOST:PORT; after a scheme also a path. Raises
    `AddressError`."""
    scheme, separator, rest = address.rpartition("://")
    authority, slash, path = rest.partition("/") if separator else (rest, "", "")
    host, colon, port = authority.rpartition(":")
    host = host.strip("[]")
    possible = colon and host and is_host(host) and "/" not in authority and "@" not in authority
    possible = possible and scheme in ("", "grpc", "grpcs") and len(authority) <= MOST_ADDRESS_BYTES
    if not possible or not port.isascii() or not port.isdigit() or not 0 < int(port) <= MOST_PORT:
        raise AddressError(
            f"no gRPC address can be read from {address!r}; give one like 127.0.0.1:8101 or grpcs://HOST:PORT"
        )
    return Address(host, int(port), (slash + path).rstrip("/"), scheme == "grpcs", access)


class GrpcConnection:
    """One connection. `timeout_s` bounds connecting, the HTTP/2 greeting and, as its deadline, each call; a response of
    more than `most_bytes` is a failure."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        most_bytes: int = MOST_ANSWER_BYTES,
        access: Access = DEFAULT_ACCESS,
    ) -> None:
        """Raises `AddressError`."""
        self.address = address
        self.timeout_s = timeout_s
        self._most_bytes = most_bytes
        self.reconnects = 0
        self._peer = peer = parse_grpc_address(address, access)
        self._connection: Http2Connection | None = None
        self._exchange = Exchange()
        fields = {
            ":method": "POST",
            ":scheme": "https" if peer.tls else "http",
            ":path": f"{peer.base_path}{SERVICE}ModelInfer",
            ":authority": peer.authority,
            "te": "trailers",
            "content-type": "application/grpc",
            "user-agent": "abserve",
            "grpc-timeout": f"{max(1, round(timeout_s * 1000))}m",
        }
        for name, value in access.header.items():
            fields[":authority" if name == "Host" else name.lower()] = secret_of(value)
        self._head = header_block((name.encode(), value.encode()) for name, value in fields.items())

    def connect(self) -> None:
        """Connect unless connected. Raises `ConnectionRefused`, also if the server does not speak gRPC."""
        if self._connection is not None:
            return
        opened = open_socket(self._peer, self.timeout_s, "h2")
        try:
            self._connection = Http2Connection(opened, timeout_s=self.timeout_s, most_bytes=self._most_bytes)
        except (ResponseError, OSError) as exc:
            opened.close()
            words = f"no response within {self.timeout_s:g} s" if isinstance(exc, TimeoutError) else failure_reason(exc)
            raise ConnectionRefused(f"the server at {self.address} does not speak gRPC: {words}") from None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def send(self, request: PreparedRequest, patches: Sequence[bytes] = ()) -> Exchange:
        """Call `ModelInfer` once."""
        pieces = assemble(request.head, request.pieces or (memoryview(request.body),), patches)
        due_ns = perf_counter_ns()
        if self._connection is not None and not self._connection.usable():
            self.close()
            self.reconnects += 1
        if self._connection is None:
            self.connect()
        connection = self._connection
        assert connection is not None
        exchange = self._exchange
        exchange.begin(due_ns, len(request.head) + len(request.body))
        try:
            connection.request(self._head, pieces, due_ns)
            while not connection.ended:
                connection.receive()
                if exchange.first_byte_ns == 0 and connection.answered:
                    exchange.first_byte_ns = perf_counter_ns()
            exchange.end_ns = perf_counter_ns()
            exchange.first_byte_ns = exchange.first_byte_ns or exchange.end_ns
            self._finish(exchange, connection)
        except TimeoutError:
            self._fail(exchange, DEADLINE_EXCEEDED, f"no complete response within {self.timeout_s:g} s", midway=True)
        except ResponseError as exc:
            self._fail(exchange, UNAVAILABLE, str(exc), midway=True)
        except OSError as exc:
            self._fail(exchange, UNAVAILABLE, failure_reason(exc), midway=True)
        return exchange

    def _finish(self, exchange: Exchange, connection: Http2Connection) -> None:
        """The outcome of a stream that has ended."""
        fields, http_status = connection.fields, connection.fields.get(b":status", b"none")
        if connection.reset is not None and b"grpc-status" not in fields:
            code = _OF_RESET.get(connection.reset, INTERNAL)
            self._fail(exchange, code, f"the server reset the stream (HTTP/2 error {connection.reset})")
            return
        status = fields.get(b"grpc-status", b"")
        if not status.isdigit() or len(status) > 2:
            code = _OF_HTTP.get(http_status, UNKNOWN)
            self._fail(exchange, code, f"HTTP status {http_status.decode('latin-1')} and no gRPC status")
        elif status != b"0":
            self._fail(exchange, int(status), unquote(fields.get(b"grpc-message", b"").decode("latin-1")))
        else:
            body = connection.body[0] if len(connection.body) == 1 else b"".join(connection.body)
            if len(body) < _PREFIX_BYTES or PREFIX.unpack_from(body) != (0, len(body) - _PREFIX_BYTES):
                self._fail(exchange, INTERNAL, "the response is not one uncompressed message")
                return
            exchange.status = GRPC_STATUS
            exchange.response_bytes = len(body)
            exchange.body = memoryview(body)[_PREFIX_BYTES:]

    def _fail(self, exchange: Exchange, code: int, words: str, *, midway: bool = False) -> None:
        if midway:  # the server may still send parts of the response, so the connection cannot be used again
            exchange.end_ns = perf_counter_ns()
            self.close()
        name = STATUS_NAMES[code] if code < len(STATUS_NAMES) else f"status {code}"
        exchange.status = GRPC_STATUS + code
        exchange.first_byte_ns = exchange.response_bytes = 0
        exchange.body = memoryview(b"")
        exchange.failure = f"gRPC {name}: {one_line(words)}"
