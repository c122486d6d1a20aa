"""Slots of the arena: where they are, when they are free again, which pages they keep, and what counts as held."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.native.shared.memory import (
    KEPT_SHARE,
    MAX_WARM_SLOTS,
    MIN_SLOTS,
    SMALLEST_SLOT_BYTES,
    Arena,
    ArenaSlot,
    ByteBudget,
    RequestMemory,
)
from servers.protocol.errors import UnavailableError
from servers.protocol.tensors import Array

MIB = 2**20
HELD = 64 * MIB
LARGEST = 4 * MIB


def memory(held: int = HELD, largest: int = LARGEST) -> RequestMemory:
    return RequestMemory(Arena(1, held, largest), ByteBudget(held))


def taken(partition: RequestMemory, size: int) -> ArenaSlot:
    slot = partition.take(size)
    assert slot is not None
    return slot


class Client:
    """A receiver; it takes its slot at once."""

    def __init__(self, partition: RequestMemory, size: int, *, late: bool = True, greedy: bool = False) -> None:
        self.greedy = greedy
        self._late = late
        self.displaced = False
        self.slot = partition.take_for(self, size)

    def late(self, now: float) -> bool:
        assert now > 0
        return self._late

    def make_way(self) -> None:
        self.displaced, self.slot = True, None


def resident_bytes(array: Array) -> int:
    """Of the arena's pages that lie in this array, as the kernel reports those that exist."""
    address = array.__array_interface__["data"][0]
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // 4096 * 8)
        entries = np.frombuffer(file.read(array.nbytes // 4096 * 8), np.uint64)
    return 4096 * int((entries >> np.uint64(63)).sum())


def whole_arena(partition: RequestMemory) -> Array:
    return partition.arena.view(0, (partition.arena.partition_bytes,), np.dtype(np.uint8))


@given(st.integers(1, LARGEST), st.integers(1, HELD))
def test_a_size_belongs_to_the_smallest_class_that_holds_it(size: int, held: int) -> None:
    arena = Arena(2, held, LARGEST)
    kind = arena.class_of(size)
    assert kind is not None
    assert size <= arena.classes[kind].size
    assert kind == 0 or size > arena.classes[kind - 1].size
    assert arena.class_of(LARGEST + 1) is None
    for slots, behind in zip(arena.classes, [*arena.classes[1:], None], strict=True):
        assert slots.start % slots.size == 0 or slots.start % SMALLEST_SLOT_BYTES == 0
        assert slots.start + slots.count * slots.size == (behind.start if behind else arena.partition_bytes)
        assert slots.count * slots.size >= held
        assert slots.count >= MIN_SLOTS
        assert 1 <= slots.warm <= min(slots.count, MAX_WARM_SLOTS)


def test_slots_of_one_size_lie_side_by_side_and_the_lowest_free_one_is_taken() -> None:
    partition = memory()
    slots = [taken(partition, 5000) for _ in range(4)]
    assert [slot.offset - slots[0].offset for slot in slots] == [0, 8192, 16384, 24576]
    offsets = [slot.offset for slot in slots]
    del slots[2], slots[0]
    assert [taken(partition, 8192).offset for _ in range(1)] == offsets[:1]
    again = [taken(partition, 8192) for _ in range(3)]
    assert [slot.offset for slot in again] == [offsets[0], offsets[2], offsets[3] + 8192]


def test_partitions_do_not_overlap() -> None:
    arena = Arena(2, HELD, LARGEST)
    first, second = (RequestMemory(arena, ByteBudget(HELD), number) for number in range(2))
    assert taken(second, 1).offset - taken(first, 1).offset == arena.partition_bytes


def test_a_slot_is_free_when_no_array_over_it_is_left() -> None:
    partition = memory()
    slot = taken(partition, 10_000)
    offset = slot.offset
    view = np.asarray(slot)[100:200].reshape(10, 10)[::2]
    del slot
    assert taken(partition, 10_000).offset != offset
    view[:] = 7
    buffer = view.data
    del view
    assert taken(partition, 10_000).offset != offset
    assert buffer[0, 0] == 7
    del buffer
    assert taken(partition, 10_000).offset == offset


def test_another_thread_or_the_garbage_collector_may_free_a_slot() -> None:
    partition = memory()
    arrays = [partition.allocate(5000), partition.allocate(5000)]
    assert partition.budget.held == 10_000
    thread = threading.Thread(target=arrays.pop)
    thread.start()
    thread.join()
    assert partition.budget.held == 5000
    circle: list[object] = [arrays.pop()]
    circle.append(circle)
    gc.disable()
    try:
        del circle
        assert partition.budget.held == 5000
        gc.collect()
        assert partition.budget.held == 0
    finally:
        gc.enable()
    assert taken(partition, 5000).index == 0


def test_many_threads_never_get_the_same_slot() -> None:
    partition = memory(largest=SMALLEST_SLOT_BYTES)
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(2000):
            array = partition.allocate(64)
            array[:] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert partition.budget.held == 0
    assert partition.take(1) is not None


def test_what_an_array_has_counts_as_held_until_it_is_gone() -> None:
    partition = memory(held=MIB)
    first = partition.allocate(MIB - 10)
    assert partition.budget.held == MIB - 10
    for size in (11, LARGEST + 1):
        with pytest.raises(UnavailableError, match="memory for requests"):
            partition.allocate(size)
    assert partition.budget.held == MIB - 10
    del first
    assert partition.budget.held == 0


def test_a_class_without_a_free_slot_says_so_and_recovers() -> None:
    partition = memory(held=1)
    slots = [taken(partition, LARGEST) for _ in range(MIN_SLOTS)]
    assert partition.take(LARGEST) is None
    assert partition.take(LARGEST // 2) is not None
    last = slots.pop().offset
    assert taken(partition, LARGEST).offset == last


def test_arrays_are_copied_into_the_arena_only_if_they_are_not_there() -> None:
    partition = memory()
    inside = partition.allocate(4000).view(np.float32).reshape(10, 100)
    assert partition.placed(inside) is inside
    for array in (np.arange(12.0).reshape(3, 4), inside[:, ::2], np.zeros((0, 3), np.int8)):
        placed = partition.placed(array)
        assert partition.arena.offset_of(placed) is not None
        assert placed.flags.c_contiguous
        assert placed.dtype == array.dtype
        np.testing.assert_array_equal(placed, array)


def test_warm_slots_keep_their_pages_and_the_others_give_theirs_back() -> None:
    partition = memory()
    pages = whole_arena(partition)
    kind = partition.arena.class_of(MIB)
    assert kind is not None
    warm = partition.arena.classes[kind].warm
    arrays = [partition.allocate(MIB) for _ in range(warm + 3)]
    assert resident_bytes(pages) == 0  # they are only promised
    for array in arrays:
        array[:] = 1
    assert resident_bytes(pages) == len(arrays) * MIB
    del array
    arrays.clear()
    assert resident_bytes(pages) == warm * MIB
    assert partition.allocate(MIB)[0] == 1  # the lowest, as it was left


def test_all_free_slots_together_keep_a_share_of_what_may_be_held() -> None:
    partition = memory()
    arrays = [partition.allocate(size) for size in (4096, 65536, MIB, 2 * MIB, 4 * MIB) for _ in range(6)]
    for array in arrays:
        array[:] = 1
    del array
    arrays.clear()
    assert 0 < resident_bytes(whole_arena(partition)) <= HELD // KEPT_SHARE


def test_pages_that_an_engine_has_locked_stay() -> None:
    partition = memory()
    partition.arena.page_locks = True
    arrays = [partition.allocate(size) for size in (MIB, 2 * MIB, 4 * MIB)]
    for array in arrays:
        array[:] = 1
    offsets = [partition.arena.offset_of(array) for array in arrays]
    del array
    arrays.clear()
    assert resident_bytes(whole_arena(partition)) == 7 * MIB > HELD // KEPT_SHARE
    for offset in offsets:
        assert offset is not None
        warm = partition.arena.warm_range(offset)
        assert warm is not None
        assert warm[0] <= offset < sum(warm)


def test_a_slot_behind_the_warm_ones_is_in_no_warm_range_and_loses_its_pages() -> None:
    partition = memory()
    partition.arena.page_locks = True
    slots = [taken(partition, LARGEST) for _ in range(2)]
    assert partition.arena.classes[-1].warm == 1
    assert partition.arena.warm_range(slots[0].offset) == (slots[0].offset, LARGEST)
    assert partition.arena.warm_range(slots[1].offset) is None
    for slot in slots:
        np.asarray(slot)[:] = 1
    del slot
    slots.clear()
    assert resident_bytes(whole_arena(partition)) == LARGEST


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000), st.integers(0, 30)), max_size=80))
def test_any_sequence_of_taking_and_freeing_agrees_with_a_simple_model(steps: list[tuple[bool, int, int]]) -> None:
    partition = memory(held=MIB, largest=20_000)
    classes = partition.arena.classes
    held: list[tuple[Array, int]] = []  # with its value
    free: list[set[int]] = [set(range(slot_class.count)) for slot_class in classes]
    for number, (takes, size, which) in enumerate(steps):
        if takes or not held:
            kind = partition.arena.class_of(size)
            assert kind is not None
            if sum(array.nbytes for array, _ in held) + size > MIB:
                with pytest.raises(UnavailableError):
                    partition.allocate(size)
                continue
            array = partition.allocate(size)
            index = min(free[kind])
            free[kind].remove(index)
            assert partition.arena.offset_of(array) == classes[kind].start + index * classes[kind].size
            array[:] = number % 251
            held.append((array, number % 251))
            del array
        else:
            array, _ = held.pop(which % len(held))
            offset = partition.arena.offset_of(array)
            kind = partition.arena.class_of(array.nbytes)
            assert kind is not None
            assert offset is not None
            del array
            free[kind].add((offset - classes[kind].start) // classes[kind].size)
        assert partition.budget.held == sum(array.nbytes for array, _ in held)
    assert all((array == value).all() for array, value in held)
    offsets = Counter(partition.arena.offset_of(array) for array, _ in held)
    assert all(count == 1 for count in offsets.values())


def test_front_ends_share_one_limit_and_each_counts_its_own() -> None:
    counters = memoryview(bytearray(16)).cast("q")
    first, second = (ByteBudget(100, counters, number) for number in range(2))
    assert first.hold(60)
    assert not second.hold(41)
    with pytest.raises(UnavailableError), second.holding(41):
        raise AssertionError("not held")
    with second.holding(40):
        assert (first.left, second.held, counters.tolist()) == (0, 100, [60, 40])
    first.release(60)
    assert counters.tolist() == [0, 0]


def test_announced_bytes_take_half_of_a_class_and_then_each_other_s_slots() -> None:
    """A few bytes of clients that sent nothing more refused every other request for half a minute."""
    partition = memory()
    first = Client(partition, MIB, late=False)
    waiting = [Client(partition, MIB) for _ in range(MIN_SLOTS // 2 - 1)]
    assert not any(client.displaced for client in waiting)
    newcomers = [Client(partition, MIB) for _ in range(3)]
    assert [client.displaced for client in waiting[:4]] == [True, True, True, False]
    assert all(client.slot is not None for client in newcomers)
    assert not first.displaced  # its bytes come as fast as they must
    assert Client(partition, MIB, greedy=True).slot is None
    assert not waiting[3].displaced
    assert Client(partition, 2 * MIB).slot is not None  # of another class
    # Complete requests have the other half.
    complete = [partition.take(MIB) for _ in range(MIN_SLOTS // 2)]
    assert None not in complete
    assert partition.take(MIB) is None


def test_slots_whose_bytes_have_arrived_or_that_are_free_again_displace_nobody() -> None:
    partition = memory()
    kept = [Client(partition, MIB) for _ in range(MIN_SLOTS // 2)]
    assert kept[0].slot is not None
    partition.arrived(kept[0].slot)
    kept[1].slot = None
    again = [Client(partition, MIB) for _ in range(2)]
    assert not any(client.displaced for client in (*kept, *again))
    Client(partition, MIB)
    assert [client.displaced for client in kept[:3]] == [False, False, True]


def test_without_a_late_client_the_next_one_is_refused() -> None:
    partition = memory()
    prompt = [Client(partition, MIB, late=False) for _ in range(MIN_SLOTS // 2)]
    assert Client(partition, MIB).slot is None
    assert not any(client.displaced for client in prompt)


def test_when_complete_requests_fill_a_class_an_announced_one_makes_way() -> None:
    partition = memory()
    announced = Client(partition, MIB)
    complete = [partition.take(MIB) for _ in range(MIN_SLOTS - 1)]
    assert None not in complete
    assert Client(partition, MIB).slot is not None
    assert announced.displaced


def test_the_heap_gives_back_what_many_answers_took() -> None:
    """Pieces of JSON answers: the heap kept 900 of 1,100 MB, since some piece in use lay behind each free one."""
    partition = memory(256 * MIB)
    process, count, size = psutil.Process(), 10_000, 20_000
    before = process.memory_info().rss
    assert not partition.trim_heap(), "nothing was held"
    assert partition.budget.hold(count * size)
    pieces = [bytearray(size) for _ in range(count)]
    assert partition.trim_heap(), "it is due once they are released"
    kept = pieces[::50]
    del pieces
    partition.budget.release(count * size)
    assert not partition.trim_heap()
    ends_s = time.monotonic() + 60
    while process.memory_info().rss - before > count * size // 4:
        assert time.monotonic() < ends_s
    assert len(kept) == count // 50
