"""Header blocks are decoded once where their bytes alone say what they mean, and every time where they do not."""

from __future__ import annotations

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from servers.native.grpc.http2 import HeaderBlocks, Http2Error, header_block

FIELDS = [(b":path", b"/a"), (b"x", b"1")]
Fields = list[tuple[bytes, bytes]]


class Interpreted:
    """Header blocks, and how many of them were decoded."""

    def __init__(self) -> None:
        self.count = 0
        self.blocks: HeaderBlocks[Fields] = HeaderBlocks(self._interpret)

    def _interpret(self, fields: Fields) -> Fields:
        self.count += 1
        return fields


def test_a_block_without_the_table_is_decoded_once():
    interpreted = Interpreted()
    for _ in range(3):
        assert interpreted.blocks.read(header_block(FIELDS)) == FIELDS
    assert interpreted.count == 1


def test_equal_bytes_with_another_table_have_another_meaning():
    """0xbe is the table's newest entry."""
    blocks = Interpreted().blocks
    plain = header_block(FIELDS)
    assert blocks.read(plain) == FIELDS
    for value in (b"1", b"2"):
        assert blocks.read(b"\x40\x01x\x01" + value) == [(b"x", value)]
        assert blocks.read(b"\xbe") == [(b"x", value)]
        assert blocks.read(plain) == FIELDS


def test_a_table_that_is_switched_off_and_on_again_is_not_forgotten():
    blocks = Interpreted().blocks
    entry = b"\x40\x01x\x011"
    assert blocks.read(b"\x20" + entry) == [(b"x", b"1")]  # a table of no bytes takes no entry
    assert blocks.read(entry) == [(b"x", b"1")]
    assert blocks.read(entry) == [(b"x", b"1")]
    with pytest.raises(Http2Error):
        blocks.read(b"\xbe")


def test_a_known_block_still_fills_a_table_that_has_grown():
    blocks = Interpreted().blocks
    entry = b"\x40\x01x\x011"
    blocks.read(b"\x20" + entry)
    blocks.read(entry)
    blocks.read(b"\x3f\xe1\x1f\x88")  # 4096 bytes again
    blocks.read(entry)
    assert blocks.read(b"\xbe") == [(b"x", b"1")]


@given(
    st.lists(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"te"]), st.binary(max_size=3)), max_size=4), max_size=30)
)
def test_any_client_s_blocks_are_read_as_they_were_meant(sent):
    """An encoder that indexes everything."""
    encoder, blocks = Encoder(), Interpreted().blocks
    for index, fields in enumerate(sent):
        if index % 7 == 5:
            encoder.header_table_size = 0 if index % 2 else 4096
        assert blocks.read(encoder.encode(fields)) == fields


@given(st.binary(max_size=100))
def test_any_bytes_give_headers_or_an_error(block):
    try:
        blocks = Interpreted().blocks
        assert blocks.read(block) == blocks.read(block)
    except Http2Error:
        pass


def test_only_so_many_bytes_of_blocks_are_remembered():
    interpreted = Interpreted()
    blocks = [header_block([(b"x", b"%04d" % number + b"y" * 1000)]) for number in range(40)]
    for _ in range(3):
        for block in blocks:
            interpreted.blocks.read(block)
    remembered = 40 - (interpreted.count - 40) // 2
    assert 10 <= remembered <= 16
    interpreted.blocks.forget()
    for block in blocks:
        interpreted.blocks.read(block)
    assert interpreted.count == 40 + 2 * (40 - remembered) + 40


@pytest.mark.parametrize(("updates", "allowed"), [(b"\x20", True), (b"\x20\x3f\xe1\x1f", True), (b"\x20" * 3, False)])
def test_a_block_changes_the_table_s_size_twice_at_most(updates, allowed):
    """Each took two microseconds: a block of them held the event loop for 60 ms."""
    blocks = Interpreted().blocks
    if allowed:
        assert blocks.read(updates + b"\x82") == [(b":method", b"GET")]
    else:
        with pytest.raises(Http2Error, match="too often"):
            blocks.read(updates + b"\x82")


def test_fields_that_are_decoded_are_counted():
    blocks = Interpreted().blocks
    blocks.read(b"\x82" * 500)
    assert blocks.decoded_fields == 500
    blocks.read(b"\x82" * 500)
    assert blocks.decoded_fields == 0
    with pytest.raises(Http2Error, match="too many"):
        blocks.read(b"\x82" * 1024)
