"""The dynamic batcher: a bounded queue in front of an engine.

One thread forms the batches, starts them on the engine, with as many in flight as it has room for, and finishes them.
When a batch starts and how large it is, `BatchFormer` says; nothing waits longer
than `max_queue_delay_us` for others. Requests keep their order, are never split, and are merged only when their items
have the same shapes, or can be padded to the same. Front ends pass references to arrays, not copies, and keep the
memory unchanged until the request is complete. `on_complete` is called there, once per executed batch, and
for requests that are refused before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from servers.engines.interface import DeviceMemory, Engine, Finish, HostMemory, Request
from servers.engines.padding import Padding
from servers.native.arena import Arena
from servers.native.batch_former import BatchFormer
from servers.native.errors import (
    EXPIRED,
    SHUTTING_DOWN,
    QueueFullError,
    RequestExpiredError,
    ShuttingDownError,
)
from servers.native.failure_log import FailureLog
from servers.native.page_locks import PageLocks
from servers.native.queued_request import QueuedRequest, singles
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics
from servers.protocol.errors import ContractError, InternalError
from servers.protocol.tensors import Array, like

log = FailureLog("abserve.batcher")

FAILED = "inference failed on the server, the server's log has the cause"
POLL_S = 50e-6
"""How often a batcher's own thread looks whether its batch is executed."""
WATCH_NS = 1_000_000
"""So long after a batch a loop goes on looking for the next request: one that sleeps takes 0.1 ms longer for it."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch on its way through the engine."""

    requests: list[QueuedRequest]
    rows: int
    start_ns: int
    started_ns: int
    finish: Finish


class Batcher:
    """Owns the engine and its threads from `start` to `stop`.

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
        arena: Arena | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`on_broken` is called once, when the engine cannot execute even zeros any more or its thread has failed.

        `check_values` raises `ContractError` for inputs that the engine must not get. Requests lie in the `arena`,
        which an engine on a GPU page-locks. With `wake` an engine that executes beside Python belongs to a loop that
        calls `turn`: after `wake`, after `submit`, and when the last turn said. It waits for nothing, so one thread
        receives, starts and finishes, and no time goes from one to the other. Other engines have a thread.
        """
        self._wake = wake
        self.takes_addresses = False
        self._turned = False  # the loop has taken over
        self._ended = threading.Event()
        self._arena = arena
        self._page_locks: PageLocks | None = None
        self._max_batch_size = settings.max_batch_size
        self._max_queue_delay_ns = settings.max_queue_delay_us * 1000
        self._queue_size = settings.queue_size
        self._statistics = statistics
        self._on_complete = on_complete
        self._on_broken = on_broken
        self._padding = padding
        self._checks = [] if check_values is None else [check_values]
        self._broken = False
        self._queue: queue.SimpleQueue[QueuedRequest | None] = queue.SimpleQueue()  # None ends it
        self._lock = threading.Lock()  # guards the two below, and `taken` of every request
        self._closed = False
        self.waiting = 0
        """Requests in the queue, without those being executed."""
        self._lined_up: deque[QueuedRequest] = deque()  # taken from the queue, in no batch yet
        self._flights: deque[_Flight] = deque()
        self._idle_from_ns = 0
        self._failed: list[QueuedRequest] = []  # of a batch that failed: each is executed again, alone
        self._ends = False  # None came out of the queue
        self._thread: threading.Thread | None = None
        self._engine: Engine
        self._former: BatchFormer

    def start(self, prepare: Callable[[], Engine | None]) -> None:
        """`prepare` loads the engine, in the batcher's own thread; it returns None when that failed."""
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request; any thread, with `wake` the one that turns.

        Raises `QueueFullError` or `ShuttingDownError` at once.
        """
        request.enqueued_ns = time.perf_counter_ns()
        with self._lock:
            if self._closed:
                raise ShuttingDownError(SHUTTING_DOWN)
            if self.waiting + request.count > self._queue_size:
                raise QueueFullError(f"Exceeds maximum queue size of {self._queue_size} requests")
            self._count_waiting(request.count)
            if not self._turned:
                self._queue.put(request)
                return
        self._accept(request)  # in the thread that turns

    def withdraw(self, request: QueuedRequest, instead: Sequence[QueuedRequest] = ()) -> bool:
        """Take a request back; any thread. True if the engine and `on_complete` will not get it.

        `instead` are those that it stood for and that stay: they get its place. Only for the thread that turns.
        """
        with self._lock:
            if request.taken:
                return False
            request.taken = True
            self._count_waiting(sum([one.count for one in instead]) - request.count)
        if instead:
            self._line_up()
            place = self._lined_up.index(request)
            for one in reversed(instead):
                self._lined_up.insert(place, one)
        request.drop_inputs()
        return True

    def stop(self, timeout: float) -> bool:
        """Refuse new requests, execute the queued ones and close the engine. False if that took too long."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread is None:
            return True
        if self._wake is not None:
            self._wake()
        return self._ended.wait(timeout)

    def turn(self) -> float | None:
        """Do what can be done now; in the thread of the loop that gave `wake`.

        Returns after how many seconds to call again if nothing comes, None: not before `wake` or `submit` is called.
        """
        return self._turn() if self._turned and not self._ended.is_set() else None

    def _count_waiting(self, change: int) -> None:
        self.waiting += change
        self._statistics.set_queued(self.waiting)

    def _run(self, prepare: Callable[[], Engine | None]) -> None:
        try:
            engine = prepare()
            if engine is None:
                self._ended.set()
            else:
                self._use(engine)
        except Exception:
            log.exception("the thread of an engine failed")
            self._abandon()

    def _abandon(self) -> None:
        """Nothing can be executed any more: refuse what is here, and what will come."""
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while (request := self._queue.get_nowait()) is not None:
                self._lined_up.append(request)
        begun = [*self._failed, *(request for flight in self._flights for request in flight.requests)]
        waiting = self._claim(self._lined_up)
        self._refuse([*waiting, *(one for one in begun if not one.complete)], InternalError(FAILED))
        self._on_broken()
        with suppress(Exception):
            self._engine.close()
        self._ended.set()

    def _use(self, engine: Engine) -> None:
        if self._arena is not None and engine.device_index is not None:
            self._page_locks = PageLocks(engine, self._arena)
        engine.prepare_no_more()
        if engine.checks_values:
            self._checks.append(engine.check_values)
        self._former = BatchFormer(
            self._max_batch_size, self._max_queue_delay_ns, engine.executed_rows, engine.row_bytes
        )
        self._engine = engine
        self.takes_addresses = engine.takes_addresses and not self._checks
        if engine.flights > 1 and self._wake is not None:
            self._turned = True
            self._wake()
            return
        while not self._ended.is_set():
            seconds = self._turn()
            if self._ended.is_set():
                return
            with suppress(queue.Empty):  # while the engine works, the interpreter is left to other threads
                self._accept(self._queue.get(timeout=None if seconds is None else max(POLL_S, seconds)))

    def _turn(self) -> float | None:
        """See `turn`."""
        engine, former, lined_up = self._engine, self._former, self._lined_up
        while True:
            self._line_up()
            if self._flights and engine.ready():
                self._land(self._flights[0])
                self._flights.popleft()
                continue
            while lined_up and lined_up[0].taken:
                lined_up.popleft()
            if self._flights and (not lined_up or self._failed or len(self._flights) >= engine.flights):
                return 0.0
            if self._failed:
                self._execute_alone()
            elif lined_up:
                rows = self._mergeable_rows()
                wait_ns = 0 if self._ends else former.wait_ns(time.perf_counter_ns(), rows, lined_up[0].enqueued_ns)
                if wait_ns > 0:
                    return 0.0 if self._flights else wait_ns / 1e9
                self._depart(self._take(former.rows_to_take(rows)))
            elif self._ends:
                engine.close()
                self._ended.set()
                return None
            elif self._turned and time.perf_counter_ns() - self._idle_from_ns < WATCH_NS:
                return 0.0
            else:
                return None

    def _line_up(self) -> None:
        """Take everything out of the queue that is there; nobody else takes from it."""
        while not self._queue.empty():
            self._accept(self._queue.get_nowait())

    def _accept(self, item: QueuedRequest | None) -> None:
        if item is None:
            self._ends = True
        else:
            self._former.arrived(item.enqueued_ns, item.rows)
            self._lined_up.append(item)

    def _mergeable_rows(self) -> int:
        """Rows at the front that fit into one batch; the largest batch if no later request can join them."""
        first, rows = self._lined_up[0], 0
        for request in self._lined_up:
            if request.taken:
                continue
            if request.key != first.key or rows + request.rows > self._max_batch_size:
                return self._max_batch_size
            rows += request.rows
        return rows

    def _take(self, most: int) -> list[QueuedRequest]:
        """The requests at the front, in order, with `most` rows at most; at least one."""
        batch: list[QueuedRequest] = []
        rows = 0
        while self._lined_up:
            request = self._lined_up[0]
            if not request.taken:
                if batch and request.key != batch[0].key:
                    break
                if rows + request.rows > most and (batch or request.apart is not None):
                    fitting = (most - rows) * request.count // request.rows
                    if request.apart is None or (batch and not fitting):
                        break
                    self._lined_up.popleft()
                    self._lined_up.extendleft(reversed(request.apart(max(1, fitting))))
                    continue
                rows += request.rows
                batch.append(request)
            self._lined_up.popleft()
        return batch

    def _claim(self, batch: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """The batch without withdrawn and expired requests; the others can no longer be withdrawn."""
        now_ns = time.perf_counter_ns()
        wanted: list[QueuedRequest] = []
        expired: list[QueuedRequest] = []
        with self._lock:
            for request in batch:
                if request.taken:
                    continue
                request.taken = True
                late = request.deadline_ns is not None and now_ns >= request.deadline_ns
                (expired if late else wanted).append(request)
            self._count_waiting(-sum([request.count for request in (*wanted, *expired)]))
        if expired:
            self._refuse(expired, RequestExpiredError(EXPIRED))
        return wanted

    def _readable(self, claimed: list[QueuedRequest]) -> list[QueuedRequest]:
        """The requests whose inputs can be read and executed; the others are refused."""
        checks = self._checks
        if not checks and not any([one.device_inputs or one.device_outputs for one in claimed]):  # noqa: C419  faster
            return claimed
        readable = []
        for request in claimed:
            try:
                _open_device_memory(request, None if checks else self._engine.device_index)
                if checks:
                    arrays = {name: one for name, one in request.inputs.items() if isinstance(one, np.ndarray)}
                    for check in checks:
                        check(arrays)
            except ContractError as error:
                self._refuse([request], error)
            except Exception:
                log.exception("the inputs of a request could not be read")
                self._refuse([request], InternalError(FAILED))
            else:
                readable.append(request)
        return readable

    def _depart(self, batch: list[QueuedRequest]) -> None:
        requests = self._readable(self._claim(batch))
        flight = self._begin(requests) if requests else None
        if flight is not None:
            self._former.started(flight.start_ns, flight.rows, flight.started_ns - flight.start_ns)
            self._flights.append(flight)

    def _begin(self, requests: list[QueuedRequest]) -> _Flight | None:
        """Start a batch; None if that failed, or if the engine takes no batch of this shape."""
        start_ns = time.perf_counter_ns()
        engine = self._engine
        try:
            if self._page_locks is not None:
                self._page_locks.notice([_address(request) for request in requests])
            given_ns = time.perf_counter_ns()
            if any([request.borrowed for request in requests]):  # noqa: C419  as above
                inputs: list[Request] = [{**one.inputs, **one.borrowed_inputs} for one in requests]
                finish = engine.start(inputs, self._padding, [request.borrowed_outputs for request in requests])
            else:
                finish = engine.start([request.inputs for request in requests], self._padding)
        except ContractError as error:  # all of them have this shape
            self._refuse(requests, error)
            return None
        except Exception:
            log.exception("inference failed", requests=len(requests))
            self._failed += requests
            return None
        rows = sum([request.rows for request in requests])
        started_ns = time.perf_counter_ns() if engine.flights > 1 else given_ns  # else it has been executed as well
        return _Flight(requests, rows, start_ns, started_ns, finish)

    def _land(self, flight: _Flight) -> None:
        """Complete the requests of a batch that is executed, unless it failed."""
        try:
            answers = flight.finish()
        except Exception:
            log.exception("inference failed", rows=flight.rows, requests=len(flight.requests))
            self._former.finished(time.perf_counter_ns())
            self._failed += flight.requests
        else:
            finished_ns = time.perf_counter_ns()
            self._former.finished(finished_ns)
            self._complete(flight, answers, finished_ns)
            self._idle_from_ns = time.perf_counter_ns()

    def _complete(self, flight: _Flight, answers: list[dict[str, Array]], finished_ns: int) -> None:
        complete = []
        for request, answer in zip(flight.requests, answers, strict=True):
            try:
                for name, window in request.device_outputs.items():
                    memory = request.borrowed_outputs.get(name)
                    if memory is None:
                        window.write(answer[name])
                    else:
                        answer[name] = like(memory.dtype, memory.shape)
            except ContractError as error:
                self._refuse([request], error)
            else:
                request.drop_inputs()
                request.outputs = answer
                complete.append(request)
        self._statistics.record_execution(
            flight.rows,
            self._engine.executed_rows(flight.rows),
            [(flight.start_ns - one.enqueued_ns, one.count) for one in flight.requests],
            flight.started_ns - flight.start_ns,
            finished_ns - flight.started_ns,
            time.perf_counter_ns() - finished_ns,
        )
        self._on_complete(complete)

    def _execute_alone(self) -> None:
        """After a batch has failed: each request alone, so that only the cause of the failure fails."""
        failed, self._failed = self._failed, []
        works = self._check_engine()
        alone = [one for request in failed for one in singles(request)]
        if len(alone) == 1 or not works:
            self._refuse(alone, InternalError(FAILED))
            return
        for request in alone:
            flight = self._begin([request])
            if flight is not None:
                self._former.started(flight.start_ns, flight.rows)
                self._land(flight)
            if self._failed:
                self._failed = []
                self._refuse([request], InternalError(FAILED))
                self._check_engine()

    def _check_engine(self) -> bool:
        """After a failed batch: execute zeros, which fails if the engine and not the batch was the cause."""
        if self._broken:
            return False
        try:
            self._engine.warm_up([1])
        except Exception:
            log.exception("the engine is broken: it cannot execute zeros any more")
            self._broken = True
            self._on_broken()
        return not self._broken

    def _refuse(self, requests: Sequence[QueuedRequest], error: ContractError) -> None:
        for request in requests:
            request.drop_inputs()
            request.outputs = None
            request.error = error
        self._on_complete(requests)


def _open_device_memory(request: QueuedRequest, device: int | None) -> None:
    """Let an engine on this device use the memory itself, and read inputs to the host otherwise.

    Raises `ContractError`.
    """
    inputs: dict[str, DeviceMemory] = {}
    outputs: dict[str, DeviceMemory] = {}
    read: dict[str, Array] = {}
    used = []
    try:
        for borrowed, windows in ((inputs, request.device_inputs), (outputs, request.device_outputs)):
            for name, window in windows.items():
                if window.on(device):
                    borrowed[name] = window.borrow()
                    used.append(window)
                elif borrowed is inputs:
                    read[name] = window.read()
    finally:
        request.borrowed = used
    request.inputs = {**request.inputs, **read}
    request.borrowed_inputs, request.borrowed_outputs = inputs, outputs


def _address(request: QueuedRequest) -> int:
    """Where the first input lies."""
    first = next(iter(request.inputs.values()))
    if isinstance(first, HostMemory):
        return first.addresses[0]
    address: int = first.__array_interface__["data"][0]
    return address
