"""The dynamic batcher: a bounded queue in front of one engine thread, with Triton's rules.

The oldest request waits at most `max_queue_delay_us` for others to join it; a batch starts as soon as it is full, and
while the engine is busy the queue fills the next one. Requests keep their order, are never split, and are merged only
when their items have the same shapes. Front ends pass references to arrays, not copies, and keep the memory unchanged
until the request is complete. `on_complete` is called in the engine thread, once per executed batch, and for requests
that are refused before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from servers.contract.errors import ContractError, InternalError
from servers.contract.records import Window
from servers.contract.tensors import Array
from servers.engines.interface import Engine, staging_of
from servers.native.errors import (
    EXPIRED,
    SHUTTING_DOWN,
    QueueFullError,
    RequestExpiredError,
    ShuttingDownError,
)
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics

log = structlog.get_logger("abserve.batcher")

FAILED = "inference failed on the server, the server's log has the cause"
_NOTHING: Mapping[str, Array] = {}

BatchKey = Sequence[tuple[str, tuple[int, ...]]]


def batch_key(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> BatchKey:
    """Requests with the same key can share a batch: the inputs' names and the shapes of their items."""
    return [(name, shape[1:]) for name, shape in shapes]


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request on its way through the queue, complete when `outputs` or `error` is set, which happens once.

    `waiter` is a `Waiter` (see inference.py), which the batcher never calls. `windows` are those of inputs in shared
    memory, fetched right before they are read. `taken` means claimed for a batch, expired or withdrawn.
    """

    inputs: Mapping[str, Array]
    rows: int
    key: BatchKey
    deadline_ns: int | None
    waiter: Any
    windows: Sequence[Window] = ()
    enqueued_ns: int = 0
    taken: bool = False
    outputs: Mapping[str, Array] | None = None
    error: ContractError | None = None

    @property
    def complete(self) -> bool:
        """Whether the engine is done with it."""
        return self.outputs is not None or self.error is not None

    def drop_inputs(self) -> None:
        """Free the inputs: a withdrawn request can stay in the queue for long, but its memory must not."""
        self.inputs = _NOTHING
        self.windows = ()


class Staging:
    """The host memory in which merged batches are assembled: `rows` rows for each input and item shape seen.

    Its content is valid until the next `gather`; the single engine thread is done with it by then. `engines` is the
    engine's own memory by input name: a batch assembled there is not copied again before the device fetches it.
    """

    def __init__(self, rows: int, engines: Mapping[str, Array] = _NOTHING) -> None:
        self._rows = rows
        self._engines = engines
        self._own: dict[tuple[str, tuple[int, ...], str], Array] = {}

    def gather(self, requests: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
        """The requests' rows one after the other, C-contiguous and aligned.

        A single request that already is both is passed on; everything else is copied exactly once.
        """
        first = requests[0]
        if len(requests) == 1 and all(array.flags.c_contiguous and array.flags.aligned for array in first.values()):
            return first
        return {name: self._stacked(name, [request[name] for request in requests]) for name in first}

    def _stacked(self, name: str, parts: Sequence[Array]) -> Array:
        memory = self._memory(name, parts[0].shape[1:], parts[0].dtype)
        row = 0
        for part in parts:
            memory[row : row + len(part)] = part
            row += len(part)
        return memory[:row]

    def _memory(self, name: str, item_shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        memory = self._engines.get(name)
        if memory is not None and (memory.shape[1:], memory.dtype) == (item_shape, dtype) and len(memory) >= self._rows:
            return memory
        key = (name, item_shape, dtype.str)
        own = self._own.get(key)
        if own is None:
            own = np.empty((self._rows, *item_shape), dtype)
            if len(self._own) < 8:  # variable shapes must not accumulate memory
                self._own[key] = own
        return own


class Batcher:
    """Owns the engine thread from `start` to `stop`.

    A request counts as waiting until it is claimed for a batch, expired or withdrawn.
    """

    def __init__(
        self,
        settings: NativeSettings,
        statistics: Statistics,
        on_complete: Callable[[Sequence[QueuedRequest]], None],
        on_broken: Callable[[], None],
    ) -> None:
        """`on_broken` is called once, in the engine thread, when the engine cannot execute even zeros any more."""
        self._max_batch_size = settings.max_batch_size
        self._max_queue_delay_ns = settings.max_queue_delay_us * 1000
        self._queue_size = settings.queue_size
        self._statistics = statistics
        self._on_complete = on_complete
        self._on_broken = on_broken
        self._broken = False
        self._queue: queue.SimpleQueue[QueuedRequest | None] = queue.SimpleQueue()  # None is the last item
        self._lock = threading.Lock()  # guards the two below, and `taken` of every request
        self._closed = False
        self.waiting = 0
        """Requests in the queue, without those being executed."""
        self._held: QueuedRequest | None = None  # taken from the queue, did not fit the last batch
        self._thread: threading.Thread | None = None

    def start(self, prepare: Callable[[], Engine | None]) -> None:
        """`prepare` loads the engine, in the engine thread; it returns None when that failed."""
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request; any thread. Raises `QueueFullError` or `ShuttingDownError` at once."""
        request.enqueued_ns = time.perf_counter_ns()
        with self._lock:
            if self._closed:
                raise ShuttingDownError(SHUTTING_DOWN)
            if self.waiting >= self._queue_size:
                raise QueueFullError(f"Exceeds maximum queue size of {self._queue_size} requests")
            self.waiting += 1
            self._queue.put(request)

    def withdraw(self, request: QueuedRequest) -> bool:
        """Take a request back; any thread. True if the engine and `on_complete` will not get it."""
        with self._lock:
            if request.taken:
                return False
            request.taken = True
            self.waiting -= 1
        request.drop_inputs()
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
        try:
            staging = Staging(self._max_batch_size, staging_of(engine))
            while batch := self._collect():
                if requests := self._claim(batch):
                    self._execute(engine, staging, requests)
        finally:
            engine.close()

    def _collect(self) -> list[QueuedRequest]:
        """The next batch, empty when the batcher is to stop; some of its requests may have been withdrawn."""
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
                request = self._queue.get_nowait()
            except queue.Empty:
                remaining_ns = start_by_ns - time.perf_counter_ns()
                if remaining_ns <= 0:
                    break
                try:
                    request = self._queue.get(timeout=remaining_ns / 1e9)
                except queue.Empty:
                    break
            if request is None:
                self._queue.put(None)  # finish this batch, then stop
                break
            if request.taken:
                continue
            if rows + request.rows > self._max_batch_size or request.key != first.key:
                self._held = request
                break
            batch.append(request)
            rows += request.rows
        return batch

    def _claim(self, batch: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """The batch without withdrawn and expired requests; the others can no longer be withdrawn."""
        now_ns = time.perf_counter_ns()
        wanted: list[QueuedRequest] = []
        expired: list[QueuedRequest] = []
        with self._lock:
            for request in batch:
                if request.taken:
                    continue
                request.taken = True
                self.waiting -= 1
                late = request.deadline_ns is not None and now_ns >= request.deadline_ns
                (expired if late else wanted).append(request)
        if expired:
            self._refuse(expired, RequestExpiredError(EXPIRED))
        return wanted

    def _execute(self, engine: Engine, staging: Staging, claimed: Sequence[QueuedRequest]) -> None:
        start_ns = time.perf_counter_ns()
        requests = self._fetch(claimed)
        if not requests:
            return
        rows = sum(request.rows for request in requests)
        try:
            inputs = staging.gather([request.inputs for request in requests])
            gathered_ns = time.perf_counter_ns()
            outputs = engine.infer(inputs)
            inferred_ns = time.perf_counter_ns()
            del inputs  # the memory of a single request goes back with its response
            for request in requests:  # this thread refers to its last batch until the next one comes
                request.drop_inputs()
            _distribute(outputs, requests, rows)
            end_ns = time.perf_counter_ns()
        except Exception:
            log.exception("inference failed", rows=rows, requests=len(requests))
            self._refuse(requests, InternalError(FAILED))
            self._check_engine(engine)
        else:
            self._statistics.record_execution(
                rows,
                [start_ns - request.enqueued_ns for request in requests],
                gathered_ns - start_ns,
                inferred_ns - gathered_ns,
                end_ns - inferred_ns,
            )
            self._on_complete(requests)

    def _check_engine(self, engine: Engine) -> None:
        """After a failed batch: execute zeros, which fails if the engine and not the batch was the cause."""
        if self._broken:
            return
        try:
            engine.warm_up([1])
        except Exception:
            log.exception("the engine is broken: it cannot execute zeros any more")
            self._broken = True
            self._on_broken()

    def _fetch(self, claimed: Sequence[QueuedRequest]) -> Sequence[QueuedRequest]:
        """The requests whose inputs can be read; the others are refused."""
        if not any([request.windows for request in claimed]):  # noqa: C419  faster, and runs for every batch
            return claimed
        readable = []
        for request in claimed:
            try:
                for window in request.windows:
                    window.fetch()
            except ContractError as error:
                self._refuse([request], error)
            else:
                readable.append(request)
        return readable

    def _refuse(self, requests: Sequence[QueuedRequest], error: ContractError) -> None:
        for request in requests:
            request.drop_inputs()
            request.outputs = None
            request.error = error
        self._on_complete(requests)


def _distribute(outputs: Mapping[str, Array], requests: Sequence[QueuedRequest], rows: int) -> None:
    """Give each request views of its rows. Raises `ValueError` when the engine returned another number of rows."""
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise ValueError(f"the engine returned {name!r} with shape {array.shape} for a batch of {rows}")
    row = 0
    for request in requests:
        request.outputs = {name: array[row : row + request.rows] for name, array in outputs.items()}
        row += request.rows
