"""HTTP/2 header blocks (RFC 7541), as much of them as a gRPC client needs that keeps no header table.

Requests are written as literals. Answers are read from a server that was told to keep no table either
(SETTINGS_HEADER_TABLE_SIZE 0), so that every block stands alone; the names of RFC 7541's static table other than
:status are not needed and not told. Of the Huffman code only printable ASCII is known, which gRPC's fields are made of
(its messages are percent-encoded).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

STATUS = b":status"
_STATIC_ENTRIES = 61
_STATUSES = {8: b"200", 9: b"204", 10: b"206", 11: b"304", 12: b"400", 13: b"404", 14: b"500"}
_STATUS_NAMES = range(8, 15)

_SYMBOLS_OF_LENGTH: Mapping[int, bytes] = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\0$@[]~",
    14: b"^}",
    15: b"<`{",
    19: b"\\",
}
"""The code is canonical: ascending by length, then by symbol."""


class HeaderError(Exception):
    """A header block cannot be read."""


def _huffman_codes() -> dict[tuple[int, int], int]:
    codes: dict[tuple[int, int], int] = {}
    code, previous = 0, 5
    for length, symbols in _SYMBOLS_OF_LENGTH.items():
        code <<= length - previous
        for symbol in symbols:
            codes[length, code] = symbol
            code += 1
        previous = length
    return codes


_CODES = _huffman_codes()


def encode(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Literals without indexing, names in full; every name and value is shorter than 127 bytes."""
    parts = []
    for name, value in fields:
        if max(len(name), len(value)) > 126:
            raise HeaderError(f"{name.decode()} is too long for this client")
        parts.append(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value)
    return b"".join(parts)


def decode(block: bytes) -> dict[bytes, bytes]:
    """The fields whose names are told, and :status. Raises `HeaderError`."""
    fields: dict[bytes, bytes] = {}
    place = 0
    try:
        while place < len(block):
            first = block[place]
            if first & 0x80:
                index, place = _integer(block, place, 7)
                if not 0 < index <= _STATIC_ENTRIES:
                    raise HeaderError("the server refers to a header table that it was told not to keep")
                if index in _STATUSES:
                    fields[STATUS] = _STATUSES[index]
            elif first & 0xE0 == 0x20:
                _, place = _integer(block, place, 5)  # the size of that table: 0
            else:
                index, place = _integer(block, place, 6 if first & 0x40 else 4)
                name = STATUS if index in _STATUS_NAMES else b""
                if index == 0:
                    name, place = _string(block, place)
                elif index > _STATIC_ENTRIES:
                    raise HeaderError("the server refers to a header table that it was told not to keep")
                value, place = _string(block, place)
                if name:
                    fields[name] = value
    except IndexError:
        raise HeaderError("a header block is cut off") from None
    return fields


def _integer(block: bytes, place: int, prefix: int) -> tuple[int, int]:
    most = (1 << prefix) - 1
    value = block[place] & most
    place += 1
    if value < most:
        return value, place
    shift = 0
    while True:
        byte = block[place]
        place += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, place


def _string(block: bytes, place: int) -> tuple[bytes, int]:
    coded = block[place] & 0x80
    length, place = _integer(block, place, 7)
    if place + length > len(block):
        raise HeaderError("a header block is cut off")
    raw = block[place : place + length]
    return (_huffman(raw) if coded else raw), place + length


def _huffman(raw: bytes) -> bytes:
    found = bytearray()
    code = length = 0
    for bit in (byte >> shift & 1 for byte in raw for shift in range(7, -1, -1)):
        code, length = code << 1 | bit, length + 1
        symbol = _CODES.get((length, code))
        if symbol is not None:
            found.append(symbol)
            code = length = 0
        elif length > 19:
            raise HeaderError("a header holds more than printable characters")
    if length > 7 or code != (1 << length) - 1:
        raise HeaderError("a header holds more than printable characters")
    return bytes(found)
