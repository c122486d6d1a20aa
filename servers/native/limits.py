"""The bytes that all clients together may make the server hold, and the time that they get of an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from servers.native.errors import HOLDS_ENOUGH
from servers.protocol.errors import UnavailableError

CONTROL_BODY_BYTES = 64 * 1024
"""Largest body of a request that is not an inference: no such request needs more."""
UNCOUNTED_BYTES = 64 * 1024
"""Answers with fewer bytes in all that a client has not read do not count as held, like one read of what it sends."""


class ByteBudget:
    """Bytes of requests that have arrived, wait in the queue or are executed, and of answers that are not read yet.

    Each front end counts its own in one of `counters`, which all share: 64-bit integers, one per front end. Any thread
    of a front end holds and releases. Front ends that hold at the same moment may together exceed the limit by one read
    each.
    """

    def __init__(self, limit: int, counters: memoryview | None = None, own: int = 0) -> None:
        self.limit = limit
        self._counters = memoryview(bytearray(8)).cast("q") if counters is None else counters
        self._own = own
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
            self._counters[self._own] += count
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
            self._counters[self._own] -= count


class Turns:
    """Work that waits while others have their turn: one piece after the other, for `most_ns` in each turn of the loop.

    At least one piece is done in each. Belongs to the event loop.
    """

    def __init__(self, most_ns: int) -> None:
        self._most_ns = most_ns
        self._waiting: deque[Callable[[], object]] = deque()
        self._scheduled = False

    def add(self, work: Callable[[], object]) -> None:
        """Do this in a later turn, behind what waits already."""
        self._waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._do)

    def _do(self) -> None:
        self._scheduled = False
        ends_ns = time.perf_counter_ns() + self._most_ns
        for _ in range(len(self._waiting)):  # what these add is for the next turn
            self._waiting.popleft()()
            if time.perf_counter_ns() >= ends_ns:
                break
        if self._waiting:
            self._schedule()


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
