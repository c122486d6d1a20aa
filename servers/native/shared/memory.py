"""The memory of requests: slots of one shared-memory file, which all processes of a server map at the same address.

The file is divided into one partition per front end, and each partition into classes of equal slots, in powers of two.
The file is sparse; pages appear on first write. The lowest free slot is taken first, so requests of the same size lie
side by side. The first slots of a class are its warm ones: they keep their pages when they are free. An engine on a GPU
page-locks them (`PageLocks`), so that copies run beside Python; after that no page of them may be given back.

Bytes that are announced have a slot before they come. At most half of a class is lent so: beyond that, the next client
gets the slot of another one whose bytes have been coming for longest, and too slowly. `ByteBudget` counts the bytes
that have come.

A process maps the file before it forks, so nothing has a name and nothing is left behind when all have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import Protocol

import numpy as np

from servers.native.shared.errors import HOLDS_ENOUGH
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import UnavailableError
from servers.protocol.tensors import Array

SMALLEST_SLOT_BYTES = 4096
MIN_SLOTS = 1024
"""Minimum number of slots per size class and partition."""
MAX_WARM_SLOTS = 256
WARM_SHARE = 32
"""The warm slots of one class have at most 1/WARM_SHARE of the bytes that may be held, or are a single one."""
KEPT_SHARE = 16
"""Warm slots that are not page-locked keep at most 1/KEPT_SHARE of the bytes that may be held."""
UNCOUNTED_BYTES = 64 * 1024
"""Answers with fewer bytes in all that a client has not read do not count as held, like one read of what it sends."""
TRIM_SHARE = 16
"""Once 1/TRIM_SHARE of the bytes that may be held were held and three quarters of them are released, the heap gives its
free pages back: after many answers in pieces it would keep nearly all of them."""
ALIGNMENT = 64
SLACK_BYTES = 128 * 1024
"""Room in the largest slots beside the largest body: for what surrounds the tensors of a gRPC message."""


_NOTHING = memoryview(b"")


class ByteBudget:
    """Bytes of requests that have arrived, wait in the queue or are executed, and of answers that are not read yet.

    Each front end counts its own in one of `counters`, which all share: 64-bit integers, one per front end. Any thread
    of a front end holds and releases. Front ends that hold at the same moment may together exceed the limit by one read
    each.
    """

    def __init__(self, limit: int, counters: memoryview | None = None, number: int = 0) -> None:
        self.limit = limit
        self._counters = memoryview(bytearray(8)).cast("q") if counters is None else counters
        self._number = number
        self._lock = threading.RLock()  # reentrant: the garbage collector may call `release` anywhere

    @property
    def held(self) -> int:
        return sum(self._counters)

    @property
    def left(self) -> int:
        return self.limit - sum(self._counters)

    def hold(self, count: int) -> bool:
        """Add `count` bytes; False, and nothing is added, when they would be too many."""
        with self._lock:
            if sum(self._counters) + count > self.limit:
                return False
            self._counters[self._number] += count
            return True

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold `count` bytes inside the `with` block. Raises `UnavailableError` when they would be too many."""
        if not self.hold(count):
            raise UnavailableError(HOLDS_ENOUGH)
        try:
            yield
        finally:
            self.release(count)

    def release(self, count: int) -> None:
        with self._lock:
            self._counters[self._number] -= count


class UnreadAnswers:
    """The bytes of one client's answers that it has not read yet, as far as they count as held."""

    __slots__ = ("_budget", "_counted")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._counted = 0

    def count(self, unread: int) -> bool:
        """The client has `unread` bytes now; False, and nothing changes, when all clients would have too many."""
        counted = unread if unread > UNCOUNTED_BYTES else 0
        more = counted - self._counted
        if more > 0 and not self._budget.hold(more):
            return False
        if more < 0:
            self._budget.release(-more)
        self._counted = counted
        return True


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of `size` bytes, one after the other from `start` in each partition; the first `warm` are kept."""

    size: int
    start: int
    count: int
    warm: int


class Arena:
    """The mapped file, and 64-bit counters that all processes share: one per partition for the bytes that are `held`,
    one per engine and partition for the `rows` that are not answered yet, and `counters` for whatever is counted."""

    def __init__(
        self, partitions: int, held_bytes: int, largest_bytes: int, counters: int = 0, engines: int = 1
    ) -> None:
        """Slots for requests of up to `largest_bytes`, in each partition at least for `held_bytes` of them. Raises
        `MemoryError` if the system does not have the addresses."""
        self.classes: list[SlotClass] = []
        size, start = SMALLEST_SLOT_BYTES, 0
        while not self.classes or self.classes[-1].size < largest_bytes:
            count = max(MIN_SLOTS, -(-held_bytes // size))
            warm = max(1, min(MAX_WARM_SLOTS, held_bytes // WARM_SHARE // size))
            self.classes.append(SlotClass(size, start, count, warm))
            start += size * count
            size *= 2
        self.partition_bytes = start
        self.partitions = partitions
        lengths = (1, partitions, *[partitions] * engines, counters)
        shared = memoryview(mmap.mmap(-1, 8 * sum(lengths))).cast("q")
        self._flags, self.held, *self.rows, self.counters = (
            shared[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
        )
        descriptor = os.memfd_create("abserve-requests", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, partitions * self.partition_bytes)
            self._mapping = mmap.mmap(descriptor, 0)
        except (OSError, ValueError) as exc:
            raise MemoryError("the memory for requests cannot be mapped") from exc
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self.address: int = self._bytes.__array_interface__["data"][0]
        self.end = self.address + self._bytes.nbytes

    @classmethod
    def of_settings(cls, partitions: int, settings: NativeSettings, counters: int = 0) -> Arena:
        """Slots for the bodies and messages that a server takes."""
        largest_bytes = settings.max_body_bytes + SLACK_BYTES
        return cls(partitions, settings.max_held_bytes, largest_bytes, counters, len(settings.devices))

    def class_of(self, size: int) -> int | None:
        """The index of the smallest class whose slots hold `size` bytes."""
        index = max(0, (size - 1).bit_length() - SMALLEST_SLOT_BYTES.bit_length() + 1)
        return index if index < len(self.classes) else None

    @property
    def page_locks(self) -> bool:
        """Whether an engine page-locks warm slots, so that their pages must stay; set before the first request."""
        return self._flags[0] != 0

    @page_locks.setter
    def page_locks(self, value: bool) -> None:
        self._flags[0] = int(value)

    def offset_of(self, array: Array) -> int | None:
        """Where a contiguous array begins in the file; None for one in other memory."""
        address: int = array.__array_interface__["data"][0]
        return address - self.address if self.address <= address < self.end else None

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """An array over bytes of the file. Raises `ValueError` for bytes outside of it."""
        return np.ndarray(shape, dtype, self._mapping, offset)

    def warm_range(self, offset: int) -> tuple[int, int] | None:
        """Offset and size of the warm slots of the class in which `offset` lies; None if its slot is not warm."""
        partition, inside = divmod(offset, self.partition_bytes)
        slots = next(slots for slots in reversed(self.classes) if slots.start <= inside)
        if inside >= slots.start + slots.warm * slots.size:
            return None
        return partition * self.partition_bytes + slots.start, slots.warm * slots.size

    def remove(self, offset: int, size: int) -> None:
        """Give the pages back to the system; the next bytes find zeros."""
        with contextlib.suppress(OSError):  # a kernel without it keeps the pages
            self._mapping.madvise(mmap.MADV_REMOVE, offset, size)


class ArenaSlot:
    """One slot in use. It is free again when no array over it is left: `np.asarray(slot)` keeps it. `charged` bytes of
    it count as held, and are given back with it."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory", "charged", "index", "kind", "offset")

    def __init__(self, memory: RequestMemory, kind: int, index: int, offset: int, address: int, size: int) -> None:
        self._memory = memory
        self.kind = kind
        self.index = index
        self.offset = offset
        self.charged = 0
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}

    def __del__(self) -> None:
        self._memory.free(self)


class Receiver(Protocol):
    """What receives bytes that a client has announced, into a slot; belongs to the event loop."""

    @property
    def greedy(self) -> bool:
        """Whether its client has so many of them that no other should make way for this one."""

    def late(self, now: float) -> bool:
        """Whether the bytes come too slowly, at a time of `time.monotonic`."""

    def make_way(self) -> None:
        """Refuse the bytes and give the slot back."""


class RequestMemory:
    """One front end's partition of the arena, and the bytes that all front ends may hold; any thread."""

    def __init__(self, arena: Arena, budget: ByteBudget, number: int = 0) -> None:
        self.arena = arena
        self.budget = budget
        self.number = number
        """Of the partition: no other front end that runs has it."""
        self._start = number * arena.partition_bytes
        self._keep_at_most = budget.limit // KEPT_SHARE
        # Reentrant: the garbage collector may free a slot anywhere. Each step below leaves everything consistent.
        self._lock = threading.RLock()
        self._free: list[list[int]] = [[] for _ in arena.classes]
        self._used = [0] * len(arena.classes)  # slots that have been used at least once: these are the first
        self._receivers: list[dict[int, Receiver]] = [{} for _ in arena.classes]
        self._kept: set[tuple[int, int]] = set()
        self._kept_bytes = 0
        self._peak_held = 0  # since the heap was trimmed

    @classmethod
    def alone(cls, settings: NativeSettings) -> RequestMemory:
        """The memory of a server that is one process."""
        return cls(Arena.of_settings(1, settings), ByteBudget(settings.max_held_bytes))

    def trim_heap(self) -> bool:
        """Give the heap's free pages back to the system if that is due; to be called now and then. Returns whether it
        will be due."""
        held = self.budget.held
        self._peak_held = max(self._peak_held, held)
        if self._peak_held < self.budget.limit // TRIM_SHARE or held > self._peak_held // 4:
            return self._peak_held >= self.budget.limit // TRIM_SHARE
        self._peak_held = held
        with contextlib.suppress(AttributeError):  # a system without glibc
            trim = ctypes.CDLL(None).malloc_trim
            threading.Thread(target=trim, args=(0,), daemon=True).start()  # a gigabyte takes a tenth of a second
        return False

    def take(self, size: int) -> ArenaSlot | None:
        """A slot of at least `size` bytes with any content, not charged yet; None if no slot is free."""
        kind = self.arena.class_of(size)
        if kind is None:
            return None
        slots = self.arena.classes[kind]
        with self._lock:
            if self._free[kind]:
                index = heappop(self._free[kind])
            elif self._used[kind] < slots.count:
                index = self._used[kind]
                self._used[kind] += 1
            else:
                return None
            if (kind, index) in self._kept:
                self._kept.discard((kind, index))
                self._kept_bytes -= slots.size
        offset = self._start + slots.start + index * slots.size
        return ArenaSlot(self, kind, index, offset, self.arena.address + offset, size)

    def take_for(self, receiver: Receiver, size: int) -> ArenaSlot | None:
        """A slot for announced bytes, until `arrived`; None if no slot is free. In the event loop. When few are left,
        another receiver makes way for it."""
        kind = self.arena.class_of(size)
        if kind is None:
            return None
        receivers = self._receivers[kind]
        slot = None
        if len(receivers) < self.arena.classes[kind].count // 2:
            slot = self.take(size)
        if slot is None and not receiver.greedy:
            now = time.monotonic()
            late = next((other for other in receivers.values() if other.late(now)), None)
            if late is not None:
                late.make_way()
                slot = self.take(size)
        if slot is not None:
            receivers[slot.index] = receiver
        return slot

    def arrived(self, slot: ArenaSlot) -> None:
        """The bytes of a slot from `take_for` have all come."""
        self._receivers[slot.kind].pop(slot.index, None)

    def allocate(self, size: int) -> Array:
        """Bytes that count as held while the array exists. Raises `UnavailableError` when they would be too many."""
        slot = self.take(size) if self.budget.hold(size) else None
        if slot is None:
            raise UnavailableError(HOLDS_ENOUGH)
        slot.charged = size
        return np.asarray(slot)

    def placed(self, array: Array) -> Array:
        """The same values in the arena, contiguous; copied only if they are not. Raises `UnavailableError`."""
        if array.flags.c_contiguous and self.arena.offset_of(array) is not None:
            return array
        copy = self.allocate(max(1, array.nbytes))[: array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def free(self, slot: ArenaSlot) -> None:
        """Called when nothing refers to the slot any more."""
        slots = self.arena.classes[slot.kind]
        self.budget.release(slot.charged)
        self._receivers[slot.kind].pop(slot.index, None)
        with self._lock:
            warm = slot.index < slots.warm
            if warm and not self.arena.page_locks:
                warm = self._kept_bytes + slots.size <= self._keep_at_most
                if warm:
                    self._kept.add((slot.kind, slot.index))
                    self._kept_bytes += slots.size
            if not warm:
                self.arena.remove(slot.offset, slots.size)
            heappush(self._free[slot.kind], slot.index)


class ArrivingBytes:
    """Bytes of known size on their way from a client into a slot, and there until they are answered.

    They count as held from their arrival until `release`, and until nothing else refers to them.
    """

    __slots__ = ("_budget", "_memory", "arrived", "complete", "room", "size", "slot")

    def __init__(
        self, memory: RequestMemory, receiver: Receiver, size: int, aligned_at: int = 0, spare: int = 0
    ) -> None:
        """The byte at `aligned_at` is on a 64-byte boundary; `spare` bytes of `room` follow the others. Raises
        `MemoryError` when no slot is left."""
        room_bytes = size + spare + ALIGNMENT
        slot = memory.take_for(receiver, room_bytes) if size else memory.take(room_bytes)
        if slot is None:
            raise MemoryError
        start = -(slot.offset + aligned_at) % ALIGNMENT
        self._memory = memory
        self._budget = memory.budget
        self.slot: ArenaSlot | None = slot
        """Until `release`."""
        self.size = size
        self.arrived = 0
        self.complete = not size
        self.room = np.asarray(slot)[start : start + size + spare].data

    @property
    def held(self) -> int:
        """How many of them count as held."""
        return 0 if self.slot is None else self.slot.charged

    @property
    def content(self) -> memoryview:
        """All of them, until `release`."""
        return self.room[: self.size]

    @property
    def space(self) -> int:
        """How many may be written behind the others now: no more than the budget has room for."""
        return min(self.size - self.arrived, self._budget.left)

    def feed(self, data: bytes | bytearray, start: int, end: int) -> int:
        """Copy as much of `data[start:end]` as there is room for. Returns the index of the first byte left out."""
        taken = min(end - start, self.size - self.arrived, self._budget.left)
        if taken <= 0:
            return start
        view = memoryview(data)
        self.room[self.arrived : self.arrived + taken] = view[start : start + taken]
        view.release()
        self.received(taken)
        return start + taken

    def received(self, count: int) -> None:
        """`count` bytes, at most `space`, have been written behind the others."""
        self.arrived += count
        self.hold(count)
        if self.arrived == self.size:
            self.complete = True
            if self.slot is not None:
                self._memory.arrived(self.slot)

    def hold(self, count: int) -> bool:
        """Let `count` bytes more count as held until `release`; False if they would be too many."""
        slot = self.slot
        if slot is None or not self._budget.hold(count):
            return False
        slot.charged += count
        return True

    def release(self) -> None:
        """Give the memory back, unless the engine still reads it; idempotent."""
        self.room = _NOTHING
        self.slot = None
