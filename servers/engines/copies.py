"""The copies that bring the arrays of a batch to a device, planned from addresses alone.

The rows of a batch lie one after the other on the device, but anywhere on the host. A copy of page-locked memory needs
one call of the driver however many rows it has, if they are equally far apart. No copy leaves the page-locked range in
which it begins: the driver refuses a copy across such a boundary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

MAX_PITCH_BYTES = 2**31 - 1
"""The driver's limit on the distance of two rows."""


_NOWHERE = (0, 0)

Part = tuple[int, int, int]
"""An address, the offset in the target where its bytes belong, and their number."""


class Copy(NamedTuple):
    """`rows` rows of `width` bytes, `pitch` bytes apart at the address `source`, without gaps from `offset` on.

    `pitch` of a single row is its width.
    """

    source: int
    offset: int
    width: int
    rows: int
    pitch: int
    pinned: bool = True


Ranges = Sequence[tuple[int, int]]
"""Page-locked memory: the first address of each range and the one after its last, ascending, without overlaps."""


def plan_copies(parts: Iterable[Part], pinned: Ranges = ()) -> list[Copy]:
    """The fewest copies of the parts in their order: neighbours in one row, rows at one distance in one copy."""
    copies: list[Copy] = []
    source, offset, width, rows, pitch, own = 0, 0, 0, 0, 0, _NOWHERE  # the copy that the next row may belong to
    for start, place, size, found in _rows(parts, pinned):
        distance = start - source - (rows - 1) * pitch
        if (
            own == found != _NOWHERE
            and size == width
            and place == offset + width * rows
            and (distance == pitch if rows > 1 else width <= distance <= MAX_PITCH_BYTES)
        ):
            rows, pitch = rows + 1, distance
            continue
        if rows:
            copies.append(Copy(source, offset, width, rows, pitch, own != _NOWHERE))
        source, offset, width, rows, pitch, own = start, place, size, 1, size, found
    if rows:
        copies.append(Copy(source, offset, width, rows, pitch, own != _NOWHERE))
    return copies


def _rows(parts: Iterable[Part], pinned: Ranges) -> list[tuple[int, int, int, tuple[int, int]]]:
    """The parts with their page-locked range; those that lie and belong side by side in one range are one part."""
    rows: list[tuple[int, int, int, tuple[int, int]]] = []
    source, offset, size, own = 0, 0, 0, _NOWHERE  # the row that the next part may belong to
    for start, place, length in parts:
        found = own if own[0] <= start and start + length <= own[1] else range_of(pinned, start, length)
        if start == source + size and place == offset + size and own == found != _NOWHERE:
            size += length
            continue
        if size:
            rows.append((source, offset, size, own))
        source, offset, size, own = start, place, length, found
    if size:
        rows.append((source, offset, size, own))
    return rows


def range_of(pinned: Ranges, source: int, size: int) -> tuple[int, int]:
    """The page-locked range that holds these bytes; an empty one if none does."""
    index = bisect_right(pinned, source, key=lambda one: one[0]) - 1
    return pinned[index] if index >= 0 and source + size <= pinned[index][1] else _NOWHERE


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
        return Copy(source, 0, count * row_bytes, 1, count * row_bytes)
    inner = prod(shape[place + 1 :]) * item_bytes
    return Copy(source, 0, size * inner, count * prod(shape[1:place]), shape[place] * inner)
