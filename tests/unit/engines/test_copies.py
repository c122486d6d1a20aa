"""The plan of copies brings every byte to its place, and never leaves a page-locked range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from servers.engines.copies import MAX_PITCH_BYTES, Copy, Part, cut_copy, plan_copies

SLOT = 256
BASE = 10_000


def side_by_side(*spans: tuple[int, int]) -> list[Part]:
    """Parts of (source, size) that belong one after the other."""
    parts, offset = list[Part](), 0
    for source, size in spans:
        parts.append((source, offset, size))
        offset += size
    return parts


def everywhere(*spans: tuple[int, int]) -> list[Copy]:
    """Their plan where all memory is page-locked."""
    return plan_copies(side_by_side(*spans), [(0, 2**40)])


def test_neighbours_are_one_copy() -> None:
    assert everywhere((100, 10), (110, 10), (120, 5)) == [Copy(100, 0, 25, 1, 25)]
    assert everywhere((110, 10), (100, 10)) == [Copy(110, 0, 10, 1, 10), Copy(100, 10, 10, 1, 10)]


def test_rows_at_one_distance_are_one_copy() -> None:
    assert everywhere(*((100 + SLOT * row, 150) for row in range(64))) == [Copy(100, 0, 150, 64, SLOT)]
    # Two rows of each slot side by side, then another distance, then another width.
    spans = [(start + own, 10) for start in (0, SLOT, 2 * SLOT) for own in (0, 10)]
    assert everywhere(*spans, (3 * SLOT + 1, 20), (3 * SLOT + 31, 20), (5000, 7)) == [
        Copy(0, 0, 20, 3, SLOT),
        Copy(3 * SLOT + 1, 60, 20, 2, 30),
        Copy(5000, 100, 7, 1, 7),
    ]


def test_a_distance_beyond_the_drivers_limit_is_two_copies() -> None:
    assert len(everywhere((0, 8), (MAX_PITCH_BYTES, 8))) == 1
    assert len(everywhere((0, 8), (MAX_PITCH_BYTES + 1, 8))) == 2


def test_no_copy_crosses_a_boundary_of_page_locked_memory() -> None:
    ranges = [(0, 100), (100, 200), (300, 400)]
    parts = side_by_side((80, 20), (100, 20), (180, 20), (200, 20), (220, 20), (300, 20), (320, 20))
    assert plan_copies(parts, ranges) == [
        Copy(80, 0, 20, 1, 20),
        Copy(100, 20, 20, 2, 80),
        Copy(200, 60, 20, 1, 20, pinned=False),
        Copy(220, 80, 20, 1, 20, pinned=False),
        Copy(300, 100, 40, 1, 40),
    ]
    assert not any(copy.pinned for copy in plan_copies(side_by_side((90, 20), (0, 101)), ranges))


def test_a_gap_in_the_target_ends_a_copy() -> None:
    """Where a tensor that is on the device already belongs between two of the host."""
    parts = [(0, 0, 10), (10, 20, 10), (20, 30, 10)]
    assert plan_copies(parts, [(0, 100)]) == [Copy(0, 0, 10, 1, 10), Copy(10, 20, 20, 1, 20)]


spans = st.tuples(st.integers(0, 39), st.sampled_from([0, 1, 8, 8, 8, 16, 24]))


@given(st.lists(spans, max_size=40), st.sets(st.integers(0, 64), max_size=6))
def test_every_byte_arrives(wanted: list[tuple[int, int]], boundaries: set[int]) -> None:
    host = np.random.default_rng(0).integers(0, 256, 512, dtype=np.uint8)
    edges = [8 * edge for edge in sorted(boundaries)]
    ranges = [(BASE + start, BASE + stop) for start, stop in zip(edges[::2], edges[1::2], strict=False)]
    parts = side_by_side(*((BASE + 8 * place, size) for place, size in wanted))
    target = np.zeros(sum(size for _, size in wanted), np.uint8)
    for copy in plan_copies(parts, ranges):
        stop = copy.source + (copy.rows - 1) * copy.pitch + copy.width
        assert any(start <= copy.source and stop <= end for start, end in ranges) == copy.pinned
        assert copy.pinned or copy.rows == 1
        for row in range(copy.rows):
            source = copy.source - BASE + row * copy.pitch
            place = copy.offset + row * copy.width
            target[place : place + copy.width] = host[source : source + copy.width]
    expected = [host[8 * place : 8 * place + size] for place, size in wanted]
    np.testing.assert_array_equal(target, np.concatenate([*expected, host[:0]]))


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.sampled_from([None, 1, 2, 3]))
def test_a_cut_is_the_view_of_the_array(rows: int, first: int, size: int, place: int | None) -> None:
    array = np.arange(6 * 4 * 4 * 4, dtype=np.int16).reshape(6, 4, 4, 4)
    copy = cut_copy(0, array.shape, 2, slice(first, first + rows), place, size)
    data = array.tobytes()
    found = b"".join(data[copy.source + row * copy.pitch :][: copy.width] for row in range(copy.rows))
    before = (slice(first, first + rows),) + (slice(None),) * ((place or 1) - 1)
    assert found == (array[before] if place is None else array[(*before, slice(size))]).tobytes()
