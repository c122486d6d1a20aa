"""The host memory that a merged batch is assembled in, allocated once and used again for every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from servers.contract.tensors import Array

Allocate = Callable[[tuple[int, ...], np.dtype[np.generic]], Array]


class Staging:
    """One slot of `max_batch_size` rows for each input and item shape seen.

    A slot's content is valid until the next `gather`, so the engine must be done with it by then, which the batcher's
    single engine thread ensures. `engines` is memory of the engine's own by input name, as a slot of its `Pipeline`:
    what is assembled there it need not copy again before the device fetches it. `allocate` makes all other slots.
    """

    def __init__(
        self, max_batch_size: int, allocate: Allocate = np.empty, engines: Mapping[str, Array] | None = None
    ) -> None:
        self._max_batch_size = max_batch_size
        self._engines = engines or {}
        self._allocate = allocate
        self._slots: dict[tuple[str, tuple[int, ...], str], Array] = {}

    def gather(self, requests: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
        """The requests' rows below each other, C-contiguous and aligned.

        A single request that is so already is passed on as it is; anything else is copied exactly once.
        """
        first = requests[0]
        if len(requests) == 1 and all(array.flags.c_contiguous and array.flags.aligned for array in first.values()):
            return first
        return {name: self._merge(name, [request[name] for request in requests]) for name in first}

    def _merge(self, name: str, parts: Sequence[Array]) -> Array:
        item_shape, dtype = parts[0].shape[1:], parts[0].dtype
        own = self._engines.get(name)
        if own is not None and own.shape[1:] == item_shape and own.dtype == dtype and len(own) >= self._max_batch_size:
            return _stacked(parts, own)
        key = (name, item_shape, dtype.str)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._allocate((self._max_batch_size, *item_shape), dtype)
            if len(self._slots) < 8:  # variable shapes must not collect slots for ever
                self._slots[key] = slot
        return _stacked(parts, slot)


def _stacked(parts: Sequence[Array], slot: Array) -> Array:
    row = 0
    for part in parts:
        slot[row : row + len(part)] = part
        row += len(part)
    return slot[:row]
