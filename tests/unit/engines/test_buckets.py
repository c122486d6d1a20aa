"""Which batch really executes for how many rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.engines.batches import bucket_of, bucket_sizes, warm_up_sizes


def test_known_ladders() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(32) == (1, 2, 4, 8, 12, 16, 24, 32)
    assert bucket_sizes(40) == (1, 2, 4, 8, 12, 16, 24, 32, 40)
    assert bucket_sizes(32, halves=False) == (1, 2, 4, 8, 16, 32)
    assert bucket_sizes(32, (8, 3, 8)) == (3, 8, 32)


@pytest.mark.parametrize(
    ("maximum", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (20, (1, 2, 4, 8, 16, 20)), (8, (1, 2, 4, 8))]
)
def test_warm_up_sizes(maximum: int, sizes: tuple[int, ...]) -> None:
    assert warm_up_sizes(maximum) == sizes


@given(st.integers(1, 4096), st.booleans(), st.data())
def test_every_batch_has_a_bucket_and_little_of_it_is_padding(largest: int, halves: bool, data: st.DataObject) -> None:
    buckets = bucket_sizes(largest, halves=halves)
    assert list(buckets) == sorted(set(buckets))
    assert (buckets[0], buckets[-1]) == (1, largest)
    rows = data.draw(st.integers(1, largest))
    executed = bucket_of(buckets, rows)
    assert executed >= rows
    assert executed - rows < executed * (1 / 3 if halves and rows > 8 else 1 / 2)
    assert all(size < rows for size in buckets if size < executed)


def test_beyond_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 9 exceeds the largest bucket, 8"):
        bucket_of((1, 2, 4, 8), 9)
