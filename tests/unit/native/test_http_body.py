"""Bodies as they arrive: chunks however they are cut, alignment, limits, and memory that is used again."""

from __future__ import annotations

import itertools

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.native.errors import HttpError
from servers.native.http_body import (
    ALIGNMENT,
    FREE_CHUNKS,
    MAPPED_BYTES,
    MIN_MEAN_CHUNK_BYTES,
    STEPS_PER_FEED,
    BodyPool,
    ChunkedBody,
    DroppedBody,
    FixedBody,
)


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
    body = ChunkedBody(1000, 10)
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
            feed_in_cuts(ChunkedBody(100, 10), stream, cuts)
        assert caught.value.status == status


def test_one_feed_takes_a_bounded_number_of_chunks() -> None:
    stream = bytearray(b"1\r\n \r\n" * 10_000)
    body = ChunkedBody(100_000, 100_000)
    assert 0 < body.feed(stream, 0, len(stream)) <= 6 * STEPS_PER_FEED
    assert 0 < len(body.content) <= STEPS_PER_FEED


@pytest.mark.parametrize(("size", "refused"), [(MIN_MEAN_CHUNK_BYTES, False), (MIN_MEAN_CHUNK_BYTES - 1, True)])
def test_many_tiny_chunks_are_refused_and_few_are_not(size: int, refused: bool) -> None:
    chunk = b"%x\r\n" % size + b"x" * size + b"\r\n"
    body = ChunkedBody(2**20, 65_536)
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
    body = FixedBody(size, json_bytes)
    address = np.frombuffer(body.view, np.uint8).__array_interface__["data"][0]
    assert (address + json_bytes) % ALIGNMENT == 0
    assert body.view.nbytes == size


def test_a_fixed_body_takes_what_is_its_own() -> None:
    for body in (FixedBody(5, 0), DroppedBody(5)):
        data = bytearray(b"xabcdefg")
        assert body.feed(data, 1, 3) == 3
        assert not body.complete
        assert body.feed(data, 3, 8) == 6
        assert body.complete
    kept = FixedBody(5, 0)
    kept.feed(bytearray(b"abcdefg"), 0, 7)
    assert bytes(kept.view) == b"abcde"


def test_memory_is_used_again_for_the_same_layout_and_bounded() -> None:
    pool = BodyPool(8000)
    first = pool.take(1000, 10)
    assert first is not None
    first.received(1000)
    pool.give(first)
    assert pool.take(1000, 11) is not first
    again = pool.take(1000, 10)
    assert again is first
    assert (again.filled, again.complete) == (0, False)
    assert pool.take(1000, 10) is not first
    large = FixedBody(8001, 0)
    pool.give(large)
    assert pool.take(8001, 0) is not large
    for size in range(1, 1001):
        pool.give(FixedBody(size, 0))
        kept = sum(body.size for bodies in pool._spare.values() for body in bodies)
        assert kept <= 8000
        assert len(pool._spare) <= 66


def test_memory_that_is_lent_counts_among_the_spare_until_it_is_full() -> None:
    """Else clients who announce bodies and send nothing could collect memory that nobody is charged for."""
    pool = BodyPool(8000)
    taken = []
    for _ in range(20):
        pool.give(FixedBody(1000, 0))
        body = pool.take(1000, 0)
        assert body is not None
        taken.append(body)
    assert [body.lent for body in taken] == [True] * 8 + [False] * 12
    assert pool._lent_bytes == 8000
    lent = taken[0]
    assert not pool._spare.get((1000, 0))
    pool.settle(lent)
    pool.settle(lent)
    assert pool._lent_bytes == 7000
    pool.give(lent)
    assert pool.take(1000, 0) is lent


def test_a_large_body_takes_no_memory_before_it_arrives_and_none_afterwards() -> None:
    """Resident bytes of this process, as the kernel reports them."""
    before = resident_bytes()
    bodies = [FixedBody(MAPPED_BYTES, 0) for _ in range(64)]
    for body in bodies:
        body.feed(bytearray(b"x"), 0, 1)
    assert resident_bytes() - before < 16 * MAPPED_BYTES
    for body in bodies:
        body.view[:] = bytes(MAPPED_BYTES)
    assert resident_bytes() - before > 48 * MAPPED_BYTES
    bodies.clear()
    del body
    assert resident_bytes() - before < 16 * MAPPED_BYTES


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss
