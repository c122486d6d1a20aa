"""The dynamic batcher: a bounded queue in front of one engine thread, with Triton's rules.

The oldest request waits at most `max_queue_delay_ns` for others to join it; a batch starts as soon as it is full, and
while the engine is busy the queue fills the next one. Requests keep their order, are never split, and are merged only
when their items have the same shapes. Doors hand over references to arrays, never copies, and keep the memory under
them unchanged until the entry is complete. The batcher knows no event loop: `on_complete` is called in the engine
thread, once for each executed batch and once for those dropped before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from servers.contract.errors import ContractError, InternalError
from servers.contract.shared_memory import RegionWindow
from servers.contract.tensors import Array
from servers.engines.interface import Engine
from servers.native.errors import SHUTTING_DOWN, QueueFullError, RequestExpiredError, ShuttingDownError
from servers.native.staging import Staging
from servers.native.statistics import Statistics

log = structlog.get_logger("abserve.batcher")


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
        self.windows = windows  # shared memory that inputs lie in, to be checked right before they are read
        self.key = key or batch_key((name, array.shape) for name, array in inputs.items())
        self.enqueued_ns = 0
        self.taken = False
        self.outputs: Mapping[str, Array] | None = None
        self.error: ContractError | None = None


class Batcher:
    """Owns the engine thread from `start` to `stop`; `prepare` runs in it first and gives the loaded engine."""

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_queue_delay_ns: int,
        queue_size: int,
        statistics: Statistics,
        on_complete: Callable[[Sequence[Entry]], None],
    ) -> None:
        self._max_batch_size = max_batch_size
        self._max_queue_delay_ns = max_queue_delay_ns
        self._queue_size = queue_size
        self._statistics = statistics
        self._on_complete = on_complete
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()  # None: stop when all before it is done
        self._lock = threading.Lock()
        self._waiting = 0
        self._closed = False
        self._held: Entry | None = None  # taken from the queue, did not fit the last batch
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Requests in the queue, not those being executed."""
        return self._waiting

    def start(self, prepare: Callable[[], Engine | None]) -> None:
        """Begin: `prepare` loads the engine in the engine thread; None means that it failed and has said so."""
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        """Queue a request; any thread. Raises `QueueFullError` or `ShuttingDownError` at once."""
        entry.enqueued_ns = time.perf_counter_ns()
        with self._lock:
            if self._closed:
                raise ShuttingDownError(SHUTTING_DOWN)
            if self._waiting >= self._queue_size:
                raise QueueFullError(f"Exceeds maximum queue size of {self._queue_size} requests")
            self._waiting += 1
            self._queue.put(entry)

    def withdraw(self, entry: Entry) -> bool:
        """Take a request back; any thread. True if the engine will not see it and `on_complete` will not name it."""
        with self._lock:
            if entry.taken:
                return False
            entry.taken = True
            self._waiting -= 1
            return True

    def stop(self, timeout: float) -> bool:
        """Refuse new requests, execute the queued ones and close the engine. False if that took too long."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self, prepare: Callable[[], Engine | None]) -> None:
        engine = prepare()
        if engine is None:
            return
        staging = Staging(self._max_batch_size)
        try:
            while batch := self._collect():
                if entries := self._claim(batch):
                    self._execute(engine, staging, entries)
        finally:
            engine.close()

    def _collect(self) -> list[Entry]:
        """The next batch, empty when the batcher is to stop; some entries may have been withdrawn meanwhile."""
        first = self._held or self._queue.get()
        self._held = None
        while first is not None and first.taken:
            first = self._queue.get()
        if first is None:
            return []
        batch, rows = [first], first.rows
        start_by_ns = first.enqueued_ns + self._max_queue_delay_ns
        while rows < self._max_batch_size:
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                remaining_ns = start_by_ns - time.perf_counter_ns()
                if remaining_ns <= 0:
                    break
                try:
                    entry = self._queue.get(timeout=remaining_ns / 1e9)
                except queue.Empty:
                    break
            if entry is None:
                self._queue.put(None)  # nothing can come after it: finish this batch, then stop
                break
            if entry.taken:
                continue
            if rows + entry.rows > self._max_batch_size or entry.key != first.key:
                self._held = entry
                break
            batch.append(entry)
            rows += entry.rows
        return batch

    def _claim(self, batch: Sequence[Entry]) -> list[Entry]:
        """Those of the batch that are still wanted; from here on they can no longer be withdrawn."""
        now_ns = time.perf_counter_ns()
        entries: list[Entry] = []
        dropped: list[Entry] = []
        with self._lock:
            for entry in batch:
                if entry.taken:
                    continue
                entry.taken = True
                self._waiting -= 1
                if entry.deadline_ns is not None and now_ns >= entry.deadline_ns:
                    entry.error = RequestExpiredError("Request timeout expired")
                elif entry.windows:
                    entry.error = _lost_memory(entry.windows)
                (entries if entry.error is None else dropped).append(entry)
        if dropped:
            self._on_complete(dropped)
        return entries

    def _execute(self, engine: Engine, staging: Staging, entries: list[Entry]) -> None:
        start_ns = time.perf_counter_ns()
        rows = sum(entry.rows for entry in entries)
        try:
            inputs = staging.gather([entry.inputs for entry in entries])
            gathered_ns = time.perf_counter_ns()
            outputs = engine.infer(inputs)
            inferred_ns = time.perf_counter_ns()
            _distribute(outputs, entries, rows)
            end_ns = time.perf_counter_ns()
        except Exception:
            log.exception("inference failed", rows=rows, requests=len(entries))
            for entry in entries:
                entry.outputs = None
                entry.error = InternalError("inference failed on the server, its log has the cause")
        else:
            self._statistics.record_execution(
                rows,
                [start_ns - entry.enqueued_ns for entry in entries],
                gathered_ns - start_ns,
                inferred_ns - gathered_ns,
                end_ns - inferred_ns,
            )
        self._on_complete(entries)


def _lost_memory(windows: Sequence[RegionWindow]) -> ContractError | None:
    try:
        for window in windows:
            window.check()
    except ContractError as error:
        return error
    return None


def _distribute(outputs: Mapping[str, Array], entries: Sequence[Entry], rows: int) -> None:
    """Give each request its own rows, as views. Raises `ValueError` when the engine returned another number."""
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise ValueError(f"the engine returned {name!r} with shape {array.shape} for a batch of {rows}")
    row = 0
    for entry in entries:
        entry.outputs = {name: array[row : row + entry.rows] for name, array in outputs.items()}
        row += entry.rows
