"""The dynamic batcher: a bounded queue in front of one engine thread, with Triton's rules.

The oldest request waits at most `max_queue_delay_us` for others to join it; a batch starts as soon as it is full, and
while the engine is busy the queue fills the next one. Requests keep their order, are never split, and are merged only
when their items have the same shapes, or can be padded to the same. Front ends pass references to arrays, not copies,
and keep the memory unchanged until the request is complete. `on_complete` is called in the engine thread, once per
executed batch, and for requests that are refused before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from servers.contract.errors import ContractError, InternalError
from servers.contract.records import Window
from servers.contract.tensors import Array
from servers.engines.interface import Engine, staging_of
from servers.engines.padding import BatchKey, Padding, Staging, divide
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
        padding: Padding | None = None,
        check_values: Callable[[Mapping[str, Array]], None] | None = None,
    ) -> None:
        """`on_broken` is called once, in the engine thread, when the engine cannot execute even zeros any more.

        `check_values` raises `ContractError` for inputs that the engine must not get.
        """
        self._max_batch_size = settings.max_batch_size
        self._max_queue_delay_ns = settings.max_queue_delay_us * 1000
        self._queue_size = settings.queue_size
        self._statistics = statistics
        self._on_complete = on_complete
        self._on_broken = on_broken
        self._padding = padding
        self._check_values = check_values
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
            staging = Staging(self._max_batch_size, staging_of(engine), self._padding)
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
        if requests := self._fetch(claimed):
            self._infer(engine, staging, requests, start_ns)

    def _infer(self, engine: Engine, staging: Staging, requests: Sequence[QueuedRequest], start_ns: int) -> None:
        """Execute the requests as one batch; if that fails, each alone, so that only the cause of the failure fails."""
        rows = [request.rows for request in requests]
        try:
            inputs = staging.gather([request.inputs for request in requests])
            gathered_ns = time.perf_counter_ns()
            outputs = engine.infer(inputs)
            inferred_ns = time.perf_counter_ns()
            sizes = [] if self._padding is None else [self._padding.axis.size_of(one.inputs) for one in requests]
            answers = divide(outputs, rows, sizes, self._padding)
        except Exception:
            log.exception("inference failed", rows=sum(rows), requests=len(requests))
            inputs = {}
            works = self._check_engine(engine)
            if len(requests) == 1 or not works:
                self._refuse(requests, InternalError(FAILED))
                return
            for request in requests:
                self._infer(engine, staging, [request], time.perf_counter_ns())
            return
        del inputs  # the memory of a single request goes back with its response
        for request, answer in zip(requests, answers, strict=True):
            request.drop_inputs()  # this thread refers to its last batch until the next one comes
            request.outputs = answer
        end_ns = time.perf_counter_ns()
        self._statistics.record_execution(
            sum(rows),
            [start_ns - request.enqueued_ns for request in requests],
            gathered_ns - start_ns,
            inferred_ns - gathered_ns,
            end_ns - inferred_ns,
        )
        self._on_complete(requests)

    def _check_engine(self, engine: Engine) -> bool:
        """After a failed batch: execute zeros, which fails if the engine and not the batch was the cause."""
        if self._broken:
            return False
        try:
            engine.warm_up([1])
        except Exception:
            log.exception("the engine is broken: it cannot execute zeros any more")
            self._broken = True
            self._on_broken()
        return not self._broken

    def _fetch(self, claimed: Sequence[QueuedRequest]) -> Sequence[QueuedRequest]:
        """The requests whose inputs can be read and executed; the others are refused."""
        check = self._check_values
        if check is None and not any([request.windows for request in claimed]):  # noqa: C419  faster, for every batch
            return claimed
        readable = []
        for request in claimed:
            try:
                for window in request.windows:
                    window.fetch()
                if check is not None:
                    check(request.inputs)
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
