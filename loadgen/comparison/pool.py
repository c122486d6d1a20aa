"""The values of many blocks in bounded memory, for what needs those of all blocks together: percentiles, medians.

A run by time may last a day and measure a billion requests. A pool keeps at most `MOST_VALUES` values, all of them as
long as there are no more. Beyond that it keeps of each block's values, in ascending order, every second, every fourth
and so on, from a random place among the first ones. Such a systematic sample has, for every threshold, the block's
share of values below it as expected value, and varies no more than one value per block, which is less than a random
sample of the same size does (Cochran, Sampling Techniques, 3rd ed., 8.2). So intervals that take the kept values for a
random sample are valid, and wider than those of all values.
"""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

MOST_VALUES = 2**19
"""4 MB. The p99.9 of so many rests on 524 values beyond it."""

Values = npt.NDArray[np.float64]


class Pool:
    """Add each block once, under its index; `blocks` are the kept values of each, in ascending order."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self.blocks: dict[int, Values] = {}
        self.count = 0
        """Values that were added."""
        self.total = 0.0
        """Their sum."""
        self._most = most
        self._step = 1
        self._kept = 0

    def add(self, index: int, values: npt.ArrayLike) -> None:
        """Add the values of one block."""
        own = np.sort(np.asarray(values, dtype=np.float64))
        self.count += len(own)
        self.total += float(own.sum())
        self._keep(index, own, self._step)
        while self._kept > self._most and any(len(kept) > 1 for kept in self.blocks.values()):
            self._step *= 2
            for place, kept in self.blocks.items():
                self._keep(place, kept, 2)

    def _keep(self, index: int, ordered: Values, step: int) -> None:
        """Keep every `step`-th value of a block; at least one, so that no block is missing."""
        self._kept -= len(self.blocks.get(index, ()))
        if step > 1 and len(ordered):
            first = Random(f"{index} {self._step}").randrange(step)
            ordered = ordered[min(first, len(ordered) - 1) :: step].copy()
        self.blocks[index] = ordered
        self._kept += len(ordered)

    @property
    def mean(self) -> float | None:
        """The mean of all values that were added; None without any."""
        return self.total / self.count if self.count else None

    @property
    def values(self) -> Values:
        """The kept values of all blocks."""
        return np.concatenate([np.empty(0), *self.blocks.values()])
