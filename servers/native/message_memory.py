"""One gRPC message while it arrives and until its answer is sent, in a slot of the arena."""

from __future__ import annotations

import numpy as np

from servers.native.arena import ALIGNMENT, Receiver, RequestMemory, Slot

_NOTHING = memoryview(b"")


class Message:
    """Its bytes count as held from their arrival until `release`, and until nothing else refers to them."""

    __slots__ = ("_budget", "_memory", "_slot", "compressed", "filled", "receive_ns", "room", "size", "start_ns")

    def __init__(
        self, memory: RequestMemory, receiver: Receiver, size: int, *, compressed: bool, aligned_at: int, spare: int
    ) -> None:
        """The byte at `aligned_at` is on a 64-byte boundary; `spare` bytes of `room` follow those of the message.

        Raises `MemoryError` when no slot is left for it.
        """
        room_bytes = size + spare + ALIGNMENT
        slot = memory.take_for(receiver, room_bytes) if size else memory.take(room_bytes)
        if slot is None:
            raise MemoryError
        start = -(slot.offset + aligned_at) % ALIGNMENT
        self._memory = memory
        self._budget = memory.budget
        self._slot: Slot | None = slot
        self.size = size
        self.compressed = compressed
        self.filled = 0
        self.start_ns = 0
        """When it began to arrive, and how long that took: for whoever receives it to set."""
        self.receive_ns = 0
        self.room = np.asarray(slot)[start : start + size + spare].data

    @property
    def held(self) -> int:
        """How many of its bytes count as held."""
        return 0 if self._slot is None else self._slot.charged

    @property
    def content(self) -> memoryview:
        """All bytes of the message, until `release`."""
        return self.room[: self.size]

    @property
    def space(self) -> int:
        """How many bytes may be written behind the others now."""
        return min(self.size - self.filled, self._budget.left)

    def received(self, count: int) -> None:
        """`count` bytes, at most `space`, have been written behind the others."""
        self.filled += count
        self.hold(count)
        if self.filled == self.size and self._slot is not None:
            self._memory.arrived(self._slot)

    def hold(self, count: int) -> bool:
        """Let `count` bytes more count as held until `release`; False if they would be too many."""
        slot = self._slot
        if slot is None or not self._budget.hold(count):
            return False
        slot.charged += count
        return True

    def release(self) -> None:
        """Give the memory back, unless the engine still reads it; idempotent."""
        self.room = _NOTHING
        self._slot = None
