"""Compressed bodies: every size comes out whole, and what ends early, goes on or is too large is refused."""

from __future__ import annotations

import gzip
import os
import zlib

import pytest

from servers.native.shared.limits import INFLATED_STEP_BYTES, decompress
from servers.protocol.errors import InvalidRequestError, TooLargeError

STEP = INFLATED_STEP_BYTES
LIMIT = 9 * STEP
SIZES = (0, 1, STEP - 1, STEP, STEP + 1, 4 * STEP, 4 * STEP + 1, LIMIT)


def content(size: int) -> bytes:
    noise = os.urandom(1000)  # within a step compressible, so that input and output steps do not fall together
    return (noise * (size // len(noise) + 1))[:size]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_comes_out_whole(size: int) -> None:
    data = content(size)
    for packed in (gzip.compress(data), zlib.compress(data), gzip.compress(data, 0)):
        assert bytes(decompress(memoryview(packed), LIMIT)) == data
        with pytest.raises(InvalidRequestError, match="ends too early"):
            decompress(memoryview(packed)[:-1], LIMIT)
        with pytest.raises(InvalidRequestError, match="bytes follow"):
            decompress(memoryview(packed + b"x"), LIMIT)


@pytest.mark.parametrize("limit", [10, STEP - 1, STEP, 4 * STEP])
def test_one_byte_over_the_limit_is_refused(limit: int) -> None:
    assert len(decompress(memoryview(gzip.compress(content(limit))), limit)) == limit
    for size in (limit + 1, 100 * STEP):
        with pytest.raises(TooLargeError, match=f"more than {limit} bytes"):
            decompress(memoryview(gzip.compress(content(size))), limit)


def test_what_is_no_compressed_body_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not what its Content-Encoding says"):
        decompress(memoryview(b"plain text"), LIMIT)
