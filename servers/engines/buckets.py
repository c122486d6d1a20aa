"""The batch sizes that really execute where a graph of fixed shape is replayed: a batch is padded to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count


def bucket_sizes(max_batch_size: int, *, halves: bool = True) -> tuple[int, ...]:
    """Powers of two, from 8 on those and a half as well (12, 24, …), and the largest itself.

    So at most half of a small batch and a third of one above 8 is padding. Without `halves`: fewer, for engines that
    take long to prepare one.
    """
    sizes = {max_batch_size}
    for power in count():
        size = 2**power
        if size >= max_batch_size:
            return tuple(sorted(sizes))
        sizes.add(size)
        if halves and size >= 8 and size * 3 // 2 < max_batch_size:
            sizes.add(size * 3 // 2)
    raise AssertionError


def bucket_of(buckets: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `buckets` that holds `rows`. Raises `ValueError` where none does."""
    for size in buckets:
        if rows <= size:
            return size
    raise ValueError(f"a batch of {rows} exceeds the largest bucket, {buckets[-1]}")
