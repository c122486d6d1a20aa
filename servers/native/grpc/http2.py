"""HTTP/2 frames (RFC 9113), header blocks (RFC 7541), and what gRPC writes into them: methods, timeouts, statuses."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote

from hpack import Decoder, Encoder, HPACKError

from servers.native.shared.errors import grpc_status
from servers.native.shared.keys import KeyLimit
from servers.native.shared.traces import trace_headers
from servers.protocol.errors import ContractError

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

HEADER_TABLE_SIZE, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 1, 3, 4, 5, 6

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0, 1, 3, 6, 7, 8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
DEFAULT_FRAME = 16_384
LARGEST_FRAME = 2**24 - 1

MAX_BLOCK_BYTES = 32 * 1024
"""Of a compressed header block; decoding takes time that grows with its square."""
MAX_DECODED_BYTES = 32 * 1024
"""Of a header block's fields, where each counts 32 bytes more: at most 1,024 of them, which take four milliseconds."""
MAX_SETTINGS = 32
"""Entries of one frame; HTTP/2 has seven."""
MAX_KNOWN_BYTES = 16 * 1024
"""Of the header blocks that are remembered for one connection."""
_MAX_SIZE_UPDATES = 2
"""At the start of a block, where RFC 7541 allows no more: each takes two microseconds."""

_HEAD = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
NUMBER = struct.Struct(">I")

MAX_METADATA_BYTES = 16 * 1024
MAX_DETAILS = 1000
"""Characters of an error message: a client takes 8 KiB of trailers, where a character may need twelve bytes."""
LONGEST_NS = 24 * 3_600_000_000_000
"""A call's deadline is at most a day from now: eight digits of hours are beyond 64 bits of nanoseconds."""

T = TypeVar("T")


class Http2Error(Exception):
    """The client broke the protocol, or a limit, and its connection ends with `code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A whole frame."""
    return frame_head(kind, flags, stream, len(content)) + content


def frame_head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """The nine bytes before a frame's content."""
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def read_head(data: bytes | bytearray, place: int) -> tuple[int, int, int, int]:
    """Kind, flags, stream and length of the frame whose head begins at `place`."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, place)
    return kind, flags, stream & LARGEST_WINDOW, high << 8 | low


def window_update(stream: int, increment: int) -> bytes:
    """The frame that lets the client send `increment` bytes more; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, NUMBER.pack(increment))


def reset_frame(stream: int, code: int) -> bytes:
    """The frame that ends a call at once."""
    return frame(RST_STREAM, 0, stream, NUMBER.pack(code))


def ending_frame(stream: int, block: bytes) -> bytes:
    """The frame that ends a response."""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, block)


def settings_frame(settings: Iterable[tuple[int, int]]) -> bytes:
    """The frame that tells the client these settings."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in settings))


def read_settings(content: bytes) -> Iterator[tuple[int, int]]:
    """Names and values. Raises `Http2Error` for a value that HTTP/2 does not allow."""
    if len(content) % _SETTING.size:
        raise Http2Error(FRAME_SIZE_ERROR, "settings have six bytes each")
    if len(content) > MAX_SETTINGS * _SETTING.size:
        raise Http2Error(ENHANCE_YOUR_CALM, "the settings are too many")
    for name, value in _SETTING.iter_unpack(content):
        if name == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "the window is too large")
        if name == MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise Http2Error(PROTOCOL_ERROR, "the frame size is out of range")
        yield name, value


def unpadded(flags: int, content: bytes) -> bytes:
    """The header block fragment of a HEADERS frame. Raises `Http2Error`."""
    padding = start = 0
    if flags & PADDED:
        padding, start = (content[0] if content else 0), 1
    if flags & WITH_PRIORITY:
        start += 5
    if start + padding > len(content):
        raise Http2Error(PROTOCOL_ERROR, "the padding is longer than the frame")
    return content[start : len(content) - padding]


def header_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """These headers as a block without dynamic table entries, which any connection can send any number of times."""
    return Encoder().encode([(name, value, True) for name, value in fields], huffman=False)


class HeaderBlocks(Generic[T]):
    """What `interpret` makes of the header blocks of one connection.

    A block whose meaning does not depend on the dynamic table is decoded once: it is kept while that table is empty.
    The server asks for an empty one by its settings.
    """

    def __init__(self, interpret: Callable[[list[tuple[bytes, bytes]]], T]) -> None:
        self._interpret = interpret
        self._decoder = Decoder(MAX_DECODED_BYTES)
        self._known: dict[bytes, T] = {}
        self._known_bytes = 0
        self.decoded_fields = 0
        """Of the last block, which cost time each; 0 if it was known."""

    def forget(self) -> None:
        """Give the memory back: the connection has ended."""
        self._known.clear()
        self._known_bytes = 0

    def read(self, block: bytes) -> T:
        """Raises `Http2Error`; the decoder's state is lost then."""
        self.decoded_fields = 0
        meaning = self._known.get(block)
        if meaning is not None:
            return meaning
        _check_size_updates(block)
        decoder = self._decoder
        size_before = decoder.header_table_size
        try:
            fields = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
        except (HPACKError, ValueError, IndexError) as exc:
            raise Http2Error(COMPRESSION_ERROR, "the headers cannot be decoded, or are too many") from exc
        self.decoded_fields = len(fields)
        meaning = self._interpret(fields)
        if decoder.header_table.dynamic_entries or decoder.header_table_size != size_before:
            self.forget()
        elif self._known_bytes + len(block) <= MAX_KNOWN_BYTES:
            self._known[block] = meaning
            self._known_bytes += len(block)
        return meaning


def _check_size_updates(block: bytes) -> None:
    """Raises `Http2Error` for more changes of the table's size at the start of a block than a client may send."""
    updates = place = 0
    while place < len(block) and block[place] & 0xE0 == 0x20:
        updates += 1
        if updates > _MAX_SIZE_UPDATES:
            raise Http2Error(COMPRESSION_ERROR, "a header block changes the table's size too often")
        longer = block[place] & 0x1F == 0x1F
        place += 1
        while longer and place < len(block):
            longer = block[place] & 0x80 != 0
            place += 1


# gRPC in HTTP/2 headers

STATUS_CODES = {
    "OK": 0, "CANCELLED": 1, "UNKNOWN": 2, "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5,
    "RESOURCE_EXHAUSTED": 8, "UNIMPLEMENTED": 12, "INTERNAL": 13, "UNAVAILABLE": 14, "UNAUTHENTICATED": 16,
}  # fmt: skip
ENCODINGS = ("identity", "gzip", "deflate")

_FIELDS = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
)
RESPONSE_HEADERS = header_block(_FIELDS)
TRAILERS_OK = header_block([(b"grpc-status", b"0")])
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_NS = {b"H": 3_600_000_000_000, b"M": 60_000_000_000, b"S": 1_000_000_000, b"m": 1_000_000, b"u": 1000, b"n": 1}
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


@dataclass(frozen=True, slots=True)
class CallStatus:
    """How a call fails. `http_status` is not 200 for a client that does not speak gRPC."""

    status: str
    details: str
    http_status: int = 200

    def block(self, *, alone: bool) -> bytes:
        """The header block of its trailers; `alone`: no headers came before, so it has those as well."""
        fields = [
            (b"grpc-status", b"%d" % STATUS_CODES[self.status]),
            (b"grpc-message", quote(shortened(self.details), safe=_PRINTABLE).encode()),
        ]
        if self.http_status != 200:
            return header_block([(b":status", b"%d" % self.http_status)])
        return header_block([*_FIELDS, *fields] if alone else fields)


def status_of(error: ContractError) -> CallStatus:
    """The status that a client gets for an error."""
    return CallStatus(grpc_status(error), str(error))


def shortened(details: str) -> str:
    """A message that is never too long to arrive."""
    return details if len(details) <= MAX_DETAILS else details[: MAX_DETAILS - 1] + "…"


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """A method of the service."""

    name: str
    infers: bool
    streams: bool
    max_message_bytes: int
    decoupled: bool = False
    """Messages of one call are answered side by side, each by any number of messages."""


@dataclass(frozen=True, slots=True)
class CallHead:
    """What the headers of a call say."""

    method: GrpcMethod | None = None
    timeout_ns: int | None = None
    encoding: str = "identity"
    refusal: CallStatus | None = None
    trace_headers: dict[str, str] | None = None
    keyless: bool = False
    """Whether the server has keys, and the call did not have to bring one of them, or did not."""
    limit: KeyLimit | None = None
    """Of its key; None: it has none."""


def read_call_head(fields: list[tuple[bytes, bytes]], methods: Mapping[bytes, GrpcMethod]) -> CallHead:
    """Read a call's headers, which are not trusted."""
    headers = dict(fields)
    if sum(len(name) + len(value) + 32 for name, value in fields) > MAX_METADATA_BYTES:
        most = f"the call's metadata has more than {MAX_METADATA_BYTES} bytes"
        return CallHead(refusal=CallStatus("RESOURCE_EXHAUSTED", most))
    if headers.get(b":method") != b"POST":
        return CallHead(refusal=CallStatus("UNIMPLEMENTED", "gRPC calls are POST requests", 405))
    if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
        return CallHead(refusal=CallStatus("UNIMPLEMENTED", "the content type must be application/grpc", 415))
    method = methods.get(headers.get(b":path", b""))
    if method is None:
        return CallHead(refusal=CallStatus("UNIMPLEMENTED", "the service has no such method"))
    encoding = headers.get(b"grpc-encoding", b"identity").decode("latin-1")
    if encoding not in ENCODINGS:
        return CallHead(refusal=CallStatus("UNIMPLEMENTED", "unsupported grpc-encoding; use identity, gzip or deflate"))
    timeout = headers.get(b"grpc-timeout")
    match = None if timeout is None else _TIMEOUT.fullmatch(timeout)
    if timeout is not None and match is None:
        return CallHead(refusal=CallStatus("INTERNAL", "grpc-timeout must be up to eight digits and a unit"))
    timeout_ns = None if match is None else min(int(match[1]) * _UNIT_NS[match[2]], LONGEST_NS)
    return CallHead(method, timeout_ns, encoding, trace_headers=trace_headers(fields))
