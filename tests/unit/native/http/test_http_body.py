"""Bodies as they arrive: chunks however they are cut, alignment, limits, and the memory that they take."""

from __future__ import annotations

import itertools

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.native.http.parser import (
    FREE_CHUNKS,
    MIN_MEAN_CHUNK_BYTES,
    STEPS_PER_FEED,
    ChunkedBody,
    DroppedBody,
)
from servers.native.shared.errors import HttpError
from servers.native.shared.memory import ALIGNMENT, Arena, ArrivingBytes, ByteBudget, RequestMemory

LARGE_BYTES = 2**20
MEMORY = RequestMemory(Arena(1, 64 * LARGE_BYTES, 2 * LARGE_BYTES), ByteBudget(64 * LARGE_BYTES))


def chunked(max_bytes: int, max_chunks: int) -> ChunkedBody:
    slot = MEMORY.take(max_bytes)
    assert slot is not None
    return ChunkedBody(slot, max_bytes, max_chunks)


class Receiving:
    """A receiver whose bytes come fast enough."""

    greedy = False

    def late(self, _now: float) -> bool:
        return False

    def make_way(self) -> None:
        raise AssertionError("it is not late")


def fixed(size: int, json_bytes: int = 0) -> ArrivingBytes:
    return ArrivingBytes(MEMORY, Receiving(), size, aligned_at=json_bytes)


def feed_in_cuts(body: ChunkedBody, stream: bytes, cuts: list[int]) -> bytes:
    """As a connection does it: what is not taken comes again with more behind it. Gives back what is left."""
    pending = bytearray()
    edges = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for start, end in itertools.pairwise(edges):
        pending += stream[start:end]
        while not body.complete and (taken := body.feed(pending, 0, len(pending))):
            del pending[:taken]
    return bytes(pending)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    st.sampled_from([b"", b";name=value", b' ; a="b"']),
    st.sampled_from([b"", b"Trailer: x\r\n", b"A: 1\r\nB: 2\r\n"]),
    st.lists(st.integers(0, 600), max_size=12),
    st.binary(max_size=20),
)
def test_chunks_are_joined_however_the_stream_is_cut(
    chunks: list[bytes], extension: bytes, trailers: bytes, cuts: list[int], after: bytes
) -> None:
    stream = b"".join(b"%x" % len(chunk) + extension + b"\r\n" + chunk + b"\r\n" for chunk in chunks)
    stream += b"0\r\n" + trailers + b"\r\n"
    body = chunked(1000, 10)
    left = feed_in_cuts(body, stream + after, cuts)
    assert body.complete
    assert bytes(body.content) == b"".join(chunks)
    assert left == after


@pytest.mark.parametrize(
    ("stream", "status"),
    [
        (b"zz\r\n", 400),
        (b"-2\r\n", 400),
        (b"+2\r\n", 400),
        (b"0x2\r\n", 400),
        (b"1_0\r\n", 400),
        (b" 2\r\n", 400),
        (b"2\n{}\n", 400),
        (b"2\r\n{}x\r\n", 400),
        (b"\r\n", 400),
        (b"ffffffffffffffffff\r\n", 400),
        (b"ffffffffffffffff\r\n", 413),
        (b"65\r\n", 413),
        (b"1" * 300, 400),
        (b"1;" + b"e" * 300 + b"\r\n", 400),
        (b"0\r\nTrailer: x\n", 400),
        (b"0\r\n" + b"T: x\r\n" * 5000, 400),
        (b"0\r\n" + b"T" * 5000, 400),
        (b"1\r\na\r\n" * 11, 400),
    ],
)
def test_what_is_no_chunk_is_refused(stream: bytes, status: int) -> None:
    for cuts in ([], list(range(0, len(stream), 3))):
        with pytest.raises(HttpError) as caught:
            feed_in_cuts(chunked(100, 10), stream, cuts)
        assert caught.value.status == status


def test_one_feed_takes_a_bounded_number_of_chunks() -> None:
    stream = bytearray(b"1\r\n \r\n" * 10_000)
    body = chunked(100_000, 100_000)
    assert 0 < body.feed(stream, 0, len(stream)) <= 6 * STEPS_PER_FEED
    assert 0 < len(body.content) <= STEPS_PER_FEED


@pytest.mark.parametrize(("size", "refused"), [(MIN_MEAN_CHUNK_BYTES, False), (MIN_MEAN_CHUNK_BYTES - 1, True)])
def test_many_tiny_chunks_are_refused_and_few_are_not(size: int, refused: bool) -> None:
    chunk = b"%x\r\n" % size + b"x" * size + b"\r\n"
    body = chunked(2**20, 65_536)
    feed_in_cuts(body, chunk * FREE_CHUNKS, [])
    assert len(body.content) == size * FREE_CHUNKS
    if refused:
        with pytest.raises(HttpError, match="less than 64 bytes on average"):
            feed_in_cuts(body, chunk * (FREE_CHUNKS + 10), [])
    else:
        feed_in_cuts(body, chunk * (FREE_CHUNKS + 10) + b"0\r\n\r\n", [])
        assert body.complete


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_the_first_tensor_is_aligned(size: int, json_bytes: int) -> None:
    body = fixed(size, json_bytes)
    address = np.frombuffer(body.content, np.uint8).__array_interface__["data"][0]
    assert (address + json_bytes) % ALIGNMENT == 0
    assert body.content.nbytes == size


def test_a_fixed_body_takes_what_is_its_own() -> None:
    for body in (fixed(5), DroppedBody(5)):
        data = bytearray(b"xabcdefg")
        assert body.feed(data, 1, 3) == 3
        assert not body.complete
        assert body.feed(data, 3, 8) == 6
        assert body.complete
    kept = fixed(5)
    kept.feed(bytearray(b"abcdefg"), 0, 7)
    assert bytes(kept.content) == b"abcde"


def test_a_body_for_which_no_slot_is_left_is_none() -> None:
    with pytest.raises(MemoryError):
        fixed(4 * LARGE_BYTES)


def test_a_large_body_takes_no_memory_before_it_arrives_and_none_afterwards() -> None:
    """Resident bytes of this process, as the kernel reports them."""
    before = resident_bytes()
    bodies = [fixed(LARGE_BYTES) for _ in range(64)]
    for body in bodies:
        body.feed(bytearray(b"x"), 0, 1)
    assert resident_bytes() - before < 16 * LARGE_BYTES
    for body in bodies:
        body.content[:] = bytes(LARGE_BYTES)
    assert resident_bytes() - before > 48 * LARGE_BYTES
    bodies.clear()
    del body
    assert resident_bytes() - before < 16 * LARGE_BYTES


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss
