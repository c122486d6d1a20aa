"""Pictures made byte by byte: JPEGs of any claimed or real size in one flat colour, and a PNG. No image library."""

from __future__ import annotations

import struct
import zlib

# One code in each table: category 0 (no difference) and end-of-block, one bit each, so a flat block takes two bits.
_DC_TABLE = bytes([0x00, 1, *[0] * 15, 0x00])
_AC_TABLE = bytes([0x10, 1, *[0] * 15, 0x00])
_BLOCK = 8


def flat_jpeg(width: int, height: int, components: int = 3) -> bytes:
    """A valid baseline JPEG of mid-grey: 1 component is grey, 3 YCbCr, 4 CMYK. About 2 bits a block of 64 pixels."""
    blocks = -(-width // _BLOCK) * -(-height // _BLOCK) * components
    bits = 2 * blocks
    data = b"\x00" * (bits // 8)
    if bits % 8:
        data += bytes([0xFF >> (bits % 8)])  # the rest of the last byte is filled with ones
    return jpeg_header(width, height, components) + data + b"\xff\xd9"


def jpeg_header(width: int, height: int, components: int = 3) -> bytes:
    """Everything before the coded blocks."""
    parts = [b"\xff\xd8"]
    if components == 4:
        parts.append(_segment(0xEE, b"Adobe" + struct.pack(">HHHB", 100, 0, 0, 0)))
    else:
        parts.append(_segment(0xE0, b"JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"))
    parts.append(_segment(0xDB, b"\x00" + b"\x10" * 64))
    frame = b"".join(bytes([index + 1, 0x11, 0]) for index in range(components))
    parts.append(_segment(0xC0, struct.pack(">BHHB", 8, height, width, components) + frame))
    parts.extend((_segment(0xC4, _DC_TABLE), _segment(0xC4, _AC_TABLE)))
    scan = b"".join(bytes([index + 1, 0x00]) for index in range(components))
    parts.append(_segment(0xDA, bytes([components]) + scan + b"\x00\x3f\x00"))
    return b"".join(parts)


def claiming_jpeg(width: int, height: int, total_bytes: int) -> bytes:
    """A JPEG whose header claims that size and whose data ends after `total_bytes`."""
    header = jpeg_header(width, height)
    return header + b"\x00" * (total_bytes - len(header) - 2) + b"\xff\xd9"


def flat_png(width: int, height: int) -> bytes:
    """A valid 8-bit RGB PNG, all black."""
    row = b"\x00" + b"\x00\x00\x00" * width
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * height)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content
