"""What all clients together may make the server hold, and how HTTP refuses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from servers.contract.errors import TooLargeError, UnavailableError
from servers.contract.tensors import Array

CONTROL_BODY_BYTES = 64 * 1024
"""Largest body of a request that is not an inference: none of them needs more."""


class HttpError(Exception):
    """A request that HTTP itself refuses; `str(error)` is the sentence for the client, whose connection then ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


HOLDS_ENOUGH = "the server holds as many bytes of requests as it may, send this one again later"


class ByteBudget:
    """Bytes of requests held for all clients together: arrived, queued, or being executed.

    One thread holds, so that what is `left` there can only become more; any thread releases.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._lock = threading.RLock()  # again in the same thread: the garbage collector may call `release` anywhere

    @property
    def left(self) -> int:
        """How many more may be held."""
        return self.limit - self.held

    def hold(self, count: int) -> bool:
        """Add `count` bytes; False, and nothing added, when they would be too many."""
        with self._lock:
            if self.held + count > self.limit:
                return False
            self.held += count
            return True

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold them meanwhile. Raises `UnavailableError` when they would be too many."""
        if not self.hold(count):
            raise UnavailableError(HOLDS_ENOUGH)
        try:
            yield
        finally:
            self.release(count)

    def release_with(self, memory: object, count: int) -> None:
        """Give back what was held when nobody refers to `memory` any more."""
        weakref.finalize(memory, self.release, count).atexit = False

    def release(self, count: int) -> None:
        """Give back what was held; any thread."""
        with self._lock:
            self.held -= count


class InputMemory:
    """Memory of ours for inputs that clients keep in shared memory, bounded as bodies are."""

    def __init__(self, input_bytes: int, budget: ByteBudget) -> None:
        self._input_bytes = input_bytes
        self._budget = budget

    def take(self, byte_size: int) -> Array:
        """Bytes that count as held as long as anybody refers to them; their pages are taken when they are written.

        Raises `TooLargeError` or `UnavailableError`.
        """
        if byte_size > self._input_bytes:
            raise TooLargeError(
                f"an input in shared memory has {byte_size} bytes, the server takes at most {self._input_bytes}"
            )
        if not self._budget.hold(byte_size):
            raise UnavailableError(HOLDS_ENOUGH)
        memory = np.empty(byte_size, np.uint8)
        self._budget.release_with(memory, byte_size)
        return memory
