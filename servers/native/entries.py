"""Requests on their way through a queue to the engine, as the doors hand them over and the batches take them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from servers.contract.errors import ContractError
from servers.contract.shared_memory import RegionWindow
from servers.contract.tensors import Array
from servers.native.errors import SHUTTING_DOWN, QueueFullError, RequestExpiredError, ShuttingDownError

EXPIRED = "Request timeout expired"


def batch_key(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """What requests must have in common to share a batch: the inputs' names and the shapes of their items."""
    return [(name, shape[1:]) for name, shape in shapes]


class Entry:
    """One request on its way through the queue. Complete when `outputs` or `error` is set, which happens once."""

    __slots__ = ("deadline_ns", "enqueued_ns", "error", "inputs", "key", "outputs", "rows", "taken", "token", "windows")

    def __init__(
        self,
        inputs: Mapping[str, Array],
        rows: int,
        deadline_ns: int | None,
        token: object,
        windows: Sequence[RegionWindow] = (),
        key: Sequence[tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        self.inputs = inputs
        self.rows = rows
        self.deadline_ns = deadline_ns
        self.token = token  # whatever the door needs to find its client again
        self.windows = windows  # shared memory that inputs lie in, to be fetched right before they are read
        self.key = key or batch_key((name, array.shape) for name, array in inputs.items())
        self.enqueued_ns = 0
        self.taken = False
        self.outputs: Mapping[str, Array] | None = None
        self.error: ContractError | None = None

    def fetch(self) -> ContractError | None:
        """Have the inputs in shared memory where they can be read; blocks while they are copied from a device."""
        try:
            for window in self.windows:
                window.fetch()
        except ContractError as error:
            return error
        return None


class Signal(Enum):
    """What the queue hands out beside requests."""

    CLOSED = "nothing comes any more"
    WAKE = "look again at what is not in the queue"


class EntryQueue:
    """Bounded, in order. An entry counts as waiting until it is claimed, refused or withdrawn, wherever it is held."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: queue.SimpleQueue[Entry | Signal] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many do."""
        return self._waiting

    def put(self, entry: Entry) -> None:
        """Any thread. Raises `QueueFullError` or `ShuttingDownError` at once."""
        entry.enqueued_ns = time.perf_counter_ns()
        with self._lock:
            if self._closed:
                raise ShuttingDownError(SHUTTING_DOWN)
            if self._waiting >= self._size:
                raise QueueFullError(f"Exceeds maximum queue size of {self._size} requests")
            self._waiting += 1
            self._queue.put(entry)

    def withdraw(self, entry: Entry) -> bool:
        """Take it back; any thread. True if it will be neither executed nor answered."""
        with self._lock:
            if entry.taken:
                return False
            entry.taken = True
            self._waiting -= 1
            return True

    def close(self) -> None:
        """Take no more. `CLOSED` follows the last entry."""
        with self._lock:
            self._closed = True
            self._queue.put(Signal.CLOSED)

    def wake(self) -> None:
        """Have `get` return; any thread."""
        self._queue.put(Signal.WAKE)

    def get(self, timeout_s: float | None = None) -> Entry | Signal:
        """The next one, perhaps withdrawn meanwhile. Raises `queue.Empty`."""
        return self._queue.get(timeout=timeout_s)

    def get_nowait(self) -> Entry | Signal:
        """Likewise, without waiting. Raises `queue.Empty`."""
        return self._queue.get_nowait()

    def put_back(self, signal: Signal) -> None:
        """For a `CLOSED` that came in the middle of something else; nothing can be behind it."""
        self._queue.put(signal)

    def claim(self, batch: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Those that are still wanted, which can no longer be withdrawn, and those whose time is over."""
        now_ns = time.perf_counter_ns()
        wanted: list[Entry] = []
        expired: list[Entry] = []
        with self._lock:
            for entry in batch:
                if entry.taken:
                    continue
                entry.taken = True
                self._waiting -= 1
                if entry.deadline_ns is not None and now_ns >= entry.deadline_ns:
                    entry.error = RequestExpiredError(EXPIRED)
                    expired.append(entry)
                else:
                    wanted.append(entry)
        return wanted, expired

    def refuse(self, entry: Entry, error: ContractError) -> bool:
        """Complete it with an error; False if it was withdrawn."""
        if not self.withdraw(entry):
            return False
        entry.error = error
        return True


def distribute(outputs: Mapping[str, Array], entries: Sequence[Entry], rows: int) -> None:
    """Give each request its own rows, as views. Raises `ValueError` when the engine returned another number."""
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise ValueError(f"the engine returned {name!r} with shape {array.shape} for a batch of {rows}")
    row = 0
    for entry in entries:
        entry.outputs = {name: array[row : row + entry.rows] for name, array in outputs.items()}
        row += entry.rows
