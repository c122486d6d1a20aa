"""A message in a slot: where it begins, what it holds while it arrives, and when that is given back."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from servers.native.grpc.call import GrpcMessage
from servers.native.shared.memory import Arena, ByteBudget, RequestMemory

MIB = 2**20


def memory_of(limit: int = 64 * MIB) -> RequestMemory:
    return RequestMemory(Arena(1, limit, 4 * MIB), ByteBudget(limit))


class Announced:
    """A receiver that is late and makes way by giving its message back."""

    greedy = False
    message: GrpcMessage | None = None

    def late(self, now: float) -> bool:
        return True

    def make_way(self) -> None:
        assert self.message is not None
        self.message.release()


def message(memory: RequestMemory, size: int, aligned_at: int = 0) -> GrpcMessage:
    return GrpcMessage(memory, Announced(), size, aligned_at=aligned_at, spare=9)


@pytest.mark.parametrize("size", [0, 1, 4000, 150_528, 3 * MIB])
@pytest.mark.parametrize("aligned_at", [0, 1, 63])
def test_the_tensor_begins_on_a_boundary(size, aligned_at) -> None:
    memory = memory_of()
    for _ in range(2):  # a new slot, then the same again
        arriving = message(memory, size, aligned_at)
        array = np.frombuffer(arriving.room, np.uint8)
        assert (array.__array_interface__["data"][0] + aligned_at) % 64 == 0
        assert (len(arriving.content), len(arriving.room)) == (size, size + 9)
        assert memory.arena.offset_of(array) is not None
        del array
        arriving.release()
    assert memory.budget.held == 0


def test_it_counts_as_it_fills_and_is_given_back_once() -> None:
    memory = memory_of()
    for _ in range(2):
        arriving = message(memory, MIB)
        assert (arriving.held, memory.budget.held) == (0, 0)
        arriving.received(1000)
        assert (arriving.held, memory.budget.held) == (1000, 1000)
        arriving.received(MIB - 1000)
        assert memory.budget.held == MIB
        arriving.release()
        arriving.release()
        assert (arriving.held, memory.budget.held) == (0, 0)


def test_what_it_holds_beside_its_bytes_is_given_back_with_them() -> None:
    memory = memory_of(100_000)
    arriving = message(memory, 1000)
    arriving.received(1000)
    assert arriving.hold(4096)
    assert not arriving.hold(100_000)
    assert memory.budget.held == 5096
    arriving.release()
    assert memory.budget.held == 0
    assert not arriving.hold(1)


def test_there_is_only_as_much_space_as_the_budget_has_room() -> None:
    memory = memory_of(100_000)
    arriving, other = (message(memory, 80_000) for _ in range(2))
    assert arriving.space == 80_000
    arriving.received(80_000)
    assert other.space == 20_000
    other.received(20_000)
    assert other.space == 0
    arriving.release()
    assert other.space == 60_000


def test_memory_that_may_still_be_read_is_held_until_nothing_refers_to_it() -> None:
    memory = memory_of()
    arriving = message(memory, MIB)
    arriving.received(MIB)
    array = np.frombuffer(arriving.content, np.uint8)
    arriving.release()
    assert memory.budget.held == MIB
    del array
    gc.collect()
    assert memory.budget.held == 0


def test_a_message_without_a_slot_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        message(memory_of(), 5 * MIB)
