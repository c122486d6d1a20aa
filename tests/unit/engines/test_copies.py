"""No copy leaves a page-locked range, and a cut is a view."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from servers.engines.torch.copies import cut_copy, page_locked

spans = st.tuples(st.integers(0, 60), st.integers(1, 8))


@given(st.lists(spans, min_size=1, max_size=5), st.sets(st.integers(0, 64), max_size=6))
def test_every_copy_lies_in_one_range(wanted: list[tuple[int, int]], boundaries: set[int]) -> None:
    edges = sorted(boundaries)
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    expected = all(any(start <= at and at + size <= end for start, end in ranges) for at, size in wanted)
    assert all(page_locked(ranges, at, size) for at, size in wanted) == expected


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.sampled_from([None, 1, 2, 3]))
def test_a_cut_is_the_view_of_the_array(rows: int, first: int, size: int, place: int | None) -> None:
    array = np.arange(6 * 4 * 4 * 4, dtype=np.int16).reshape(6, 4, 4, 4)
    copy = cut_copy(0, array.shape, 2, slice(first, first + rows), place, size)
    data = array.tobytes()
    found = b"".join(data[copy.source + row * copy.pitch :][: copy.width] for row in range(copy.rows))
    before = (slice(first, first + rows),) + (slice(None),) * ((place or 1) - 1)
    assert found == (array[before] if place is None else array[(*before, slice(size))]).tobytes()
