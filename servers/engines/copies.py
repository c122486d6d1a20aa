"""Copies of rows, and of page-locked memory, as addresses alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Copy(NamedTuple):
    """`rows` rows of `width` bytes, `pitch` bytes apart at the address `source`, without gaps where they are written.

    `pitch` of a single row is its width.
    """

    source: int
    width: int
    rows: int
    pitch: int


Ranges = Sequence[tuple[int, int]]
"""Page-locked memory: the first address of each range and the one after its last, ascending, without overlaps."""


def page_locked(pinned: Ranges, source: int, size: int) -> bool:
    """Whether one range holds these bytes: the driver refuses a copy that leaves the range in which it begins."""
    index = bisect_right(pinned, source, key=lambda one: one[0]) - 1
    return index >= 0 and source + size <= pinned[index][1]


def cut_copy(
    address: int, shape: Sequence[int], item_bytes: int, rows: slice, place: int | None = None, size: int = 0
) -> Copy:
    """The copy of some rows of a C-contiguous array of `shape`, cut to `size` along dimension `place` if it is given.

    `item_bytes` are those of an element.
    """
    count, start = rows.stop - rows.start, rows.start
    row_bytes = prod(shape[1:]) * item_bytes
    source = address + start * row_bytes
    if place is None or size == shape[place]:
        return Copy(source, count * row_bytes, 1, count * row_bytes)
    inner = prod(shape[place + 1 :]) * item_bytes
    return Copy(source, size * inner, count * prod(shape[1:place]), shape[place] * inner)
