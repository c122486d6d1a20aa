"""Header blocks: RFC 7541's own examples, what we write, and what must be refused."""

from __future__ import annotations

import pytest

from loadgen.clients.hpack import HeaderError, decode, encode


def test_what_we_write_we_read() -> None:
    fields = [(b":path", b"/a/b"), (b"te", b"trailers"), (b"grpc-timeout", b"60000m")]
    assert decode(encode(fields)) == dict(fields)


@pytest.mark.parametrize(
    ("hexadecimal", "fields"),
    [
        ("88", {b":status": b"200"}),
        ("8d", {b":status": b"404"}),
        ("0803353033", {b":status": b"503"}),  # literal, its name indexed
        ("4803333032", {b":status": b"302"}),  # C.5.1, to be indexed: in a table without room it is not
        ("4882 6402".replace(" ", ""), {b":status": b"302"}),  # C.6.1, with Huffman
        ("20880006677270632d737461747573".replace(" ", ""), None),
        ("2088000b677270632d7374617475730130", {b":status": b"200", b"grpc-status": b"0"}),
        ("0085 2505 2d6f7f 82 f8ff".replace(" ", ""), None),
    ],
)
def test_blocks(hexadecimal: str, fields: dict[bytes, bytes] | None) -> None:
    block = bytes.fromhex(hexadecimal)
    if fields is None:
        with pytest.raises(HeaderError):
            decode(block)
    else:
        assert decode(block) == fields


@pytest.mark.parametrize(
    ("coded", "text"),
    [
        ("f1e3c2e5f23a6ba0ab90f4ff", b"www.example.com"),  # C.4.1
        ("a8eb10649cbf", b"no-cache"),  # C.4.2
        ("25a849e95ba97d7f", b"custom-key"),  # C.4.3
        ("25a849e95bb8e8b4bf", b"custom-value"),
        ("9d29ad171863c78f0b97c8e9ae82ae43d3", b"https://www.example.com"),  # C.6.1
        ("d07abe941054d444a8200595040b8166e082a62d1bff", b"Mon, 21 Oct 2013 20:13:21 GMT"),
    ],
)
def test_huffman(coded: str, text: bytes) -> None:
    raw = bytes.fromhex(coded)
    assert decode(b"\0\x01x" + bytes([0x80 | len(raw)]) + raw) == {b"x": text}


def test_long_values() -> None:
    value = b"m" * 1337
    block = b"\0\x0cgrpc-message" + bytes([0x7F]) + bytes([(1337 - 127) & 0x7F | 0x80, (1337 - 127) >> 7]) + value
    assert decode(block) == {b"grpc-message": value}


@pytest.mark.parametrize("block", [b"\xbe", b"\x7f\x00\x01a", b"\0", b"\0\x05ab", b"\0\x01x\x82\xff\xff", b"\x80"])
def test_refused(block: bytes) -> None:
    """A dynamic table, blocks that are cut off, Huffman codes of no printable character, the index 0."""
    with pytest.raises(HeaderError):
        decode(block)


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(HeaderError, match="too long"):
        encode([(b":authority", b"h" * 127)])
