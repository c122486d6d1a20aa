"""The bytes that all clients together may make the server hold."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from servers.contract.errors import UnavailableError
from servers.contract.tensors import Array
from servers.native.errors import HOLDS_ENOUGH

CONTROL_BODY_BYTES = 64 * 1024
"""Largest body of a request that is not an inference: no such request needs more."""


class ByteBudget:
    """Bytes of requests that have arrived, wait in the queue or are executed.

    Only one thread holds, so what is `left` there can only grow; any thread releases.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._lock = threading.RLock()  # reentrant: the garbage collector may call `release` anywhere

    @property
    def left(self) -> int:
        return self.limit - self.held

    def hold(self, count: int) -> bool:
        """Add `count` bytes; False, and nothing is added, when they would be too many."""
        with self._lock:
            if self.held + count > self.limit:
                return False
            self.held += count
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

    def allocate(self, count: int) -> Array:
        """Bytes that count as held while the array exists. Raises `UnavailableError` when they would be too many."""
        if not self.hold(count):
            raise UnavailableError(HOLDS_ENOUGH)
        memory = np.empty(count, np.uint8)
        self.release_with(memory, count)
        return memory

    def release_with(self, memory: object, count: int) -> None:
        """Give back `count` bytes when nothing refers to `memory` any more."""
        weakref.finalize(memory, self.release, count).atexit = False

    def release(self, count: int) -> None:
        with self._lock:
            self.held -= count
