"""HTTP/2 frames (RFC 9113): their numbers and heads, settings, and header blocks (RFC 7541)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from hpack import Decoder, Encoder, HPACKError

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
        known = self._known.get(block)
        if known is not None:
            return known
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
