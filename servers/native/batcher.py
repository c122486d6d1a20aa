"""One request on its way from a front end through the queue to the engine, and back.

Decides when the next batch starts and with how many rows: no thread, no clock, no request.

A request that finds the engine idle starts at once, unless waiting pays: when so many others will come so soon that
executing all together ends earlier than executing these now and the others after them. Others means as many as the
clients have had outstanding at once lately: a closed loop whose requests all wait brings no more. Soon means as fast
as they came back lately: the time from the end of a batch until as many rows were queued as it had. A batch waits for
them no longer than what that saves, and never longer than the maximum delay. While a batch executes, the next one
starts just before the predicted end of it, or when it is full, unless waiting beyond that end pays.

A batch takes all rows that wait, or only as many as fill a bucket, if that executes more rows per second.

All times are ns of one monotonic clock.

The dynamic batcher: a bounded queue in front of an engine.

One thread forms the batches, starts them on the engine, with as many in flight as it has room for, and finishes them.
When a batch starts and how large it is, `BatchFormer` says; nothing waits longer
than `max_queue_delay_us` for others. Requests keep their order, are never split, and are merged only when their items
have the same shapes, or can be padded to the same. Front ends pass references to arrays, not copies, and keep the
memory unchanged until the request is complete. `on_complete` is called there, once per executed batch, and
for requests that are refused before it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from servers.engines.interface import DeviceMemory, Engine, Finish, HostMemory, Request
from servers.engines.padding import BatchKey, Padding
from servers.native.errors import (
    EXPIRED,
    SHUTTING_DOWN,
    FailureLog,
    QueueFullError,
    RequestExpiredError,
    ShuttingDownError,
)
from servers.native.memory import Arena, PageLocks
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics
from servers.protocol.errors import ContractError, InternalError
from servers.protocol.tensors import Array, like

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request on its way through the queue, complete when `outputs` or `error` is set, which happens once.

    `inputs` are arrays, or `HostMemory` for an engine that takes it.
    `waiter`, `owner` and `number` belong to whoever queued it; the batcher never uses them. `device_inputs` and
    `device_outputs` are tensors in CUDA shared memory: as region, offset and size, and as windows once they are queued.
    One can stand for `count` requests of as many rows each that came together: `apart` makes two of it, of which the
    first stands for as many as it is told.
    `taken` means claimed for a batch, expired or withdrawn.
    """

    inputs: Mapping[str, Any]
    rows: int
    key: BatchKey
    deadline_ns: int | None
    waiter: Any
    device_inputs: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    device_outputs: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    enqueued_ns: int = 0
    taken: bool = False
    outputs: Mapping[str, Array] | None = None
    error: ContractError | None = None
    count: int = 1
    apart: Callable[[int], tuple[QueuedRequest, QueuedRequest]] | None = None
    owner: Any = None
    number: int = 0
    borrowed: Sequence[Any] = ()  # the windows that the engine uses itself, as the two below, until it is done
    borrowed_inputs: Mapping[str, DeviceMemory] = field(default_factory=lambda: _NOTHING)
    borrowed_outputs: Mapping[str, DeviceMemory] = field(default_factory=lambda: _NOTHING)

    @property
    def complete(self) -> bool:
        """Whether the engine is done with it."""
        return self.outputs is not None or self.error is not None

    def drop_inputs(self) -> None:
        """Free the inputs: a withdrawn request can stay in the queue for long, but its memory must not."""
        self.inputs = _NOTHING
        for window in self.borrowed:
            window.release()
        self.device_inputs, self.borrowed_inputs, self.borrowed = _NOTHING, _NOTHING, ()


def singles(request: QueuedRequest) -> list[QueuedRequest]:
    """One for each request that it stands for."""
    found = []
    while request.apart is not None:
        one, request = request.apart(1)
        found.append(one)
    return [*found, request]


BATCHES_PER_PEAK = 16
"""The peak of outstanding rows is that of one to two times so many of the latest batches."""
MIN_MISSING_ROWS = 2
"""Nothing waits for fewer rows than this: one may be a client that is slower than the others."""
MIN_GAIN = 1.5
"""Waiting pays if it saves so many times the time that it takes: those who are expected may not come."""
NEWEST_SHARE = 0.25
"""How much the newest execution changes the expected time of its bucket."""
LEAD_NS = 100_000
"""A batch starts so long, and the times to start and to copy it, before the predicted end of the one before."""
COPIED_BYTES_PER_NS = 25
"""About the speed of PCI Express 4 and 5 with sixteen lanes; a wrong value only starts a batch earlier or later."""


@dataclass(slots=True)
class _End:
    """Of a batch of so many rows, of which `missing` have not been queued again."""

    ns: int
    rows: int
    missing: int


class BatchFormer:
    """Belongs to one thread, and to one engine."""

    def __init__(
        self, max_rows: int, max_delay_ns: int, executed_rows: Callable[[int], int], row_bytes: int = 0
    ) -> None:
        """`executed_rows` gives the bucket in which a batch is executed; `row_bytes` is the size of a row's inputs."""
        self._max_rows = max_rows
        self._max_delay_ns = max_delay_ns
        self._bucket = {rows: executed_rows(rows) for rows in range(1, max_rows + 1)}
        self._buckets = sorted(set(self._bucket.values()) & set(self._bucket))
        self._copy_ns_per_row = row_bytes / COPIED_BYTES_PER_NS
        self._execution_ns: dict[int, float] = {}
        self._flights: deque[tuple[int, int]] = deque()  # start and bucket of each batch that is not finished
        self._flying_rows: deque[int] = deque()
        self._start_ns = 0.0
        self._peaks = [0, 0]  # of outstanding rows: before the last turn, and since
        self._return_ns = math.inf  # from the end of a batch until as many rows were queued
        self._return_rows = 1.0  # of such a batch
        self._ends: deque[_End] = deque([_End(0, 0, 0)] * 2)  # of the last two batches
        self._met_rows = 0  # of the last finished batch, and those that were queued during it
        self._batches = 0

    def arrived(self, now_ns: int, rows: int) -> None:
        """A request has been queued at `now_ns`."""
        before_last, last = self._ends
        end = last if now_ns >= last.ns else before_last
        if end.missing > 0 and now_ns >= end.ns:
            end.missing -= rows
            if end.missing <= 0:
                self._returned(end, now_ns)
        if now_ns < last.ns:  # queued during the last execution, when nobody could say so
            self._met_rows += rows
            self._peaks[1] = max(self._peaks[1], self._met_rows)

    def started(self, now_ns: int, rows: int, took_ns: int = 0) -> None:
        """The next batch is on its way to the device; its start at `now_ns` kept the thread for `took_ns`."""
        self._start_ns += NEWEST_SHARE * (took_ns - self._start_ns)
        self._flights.append((now_ns, self._bucket[rows]))
        self._flying_rows.append(rows)
        self._batches += 1
        if self._batches % BATCHES_PER_PEAK == 0:
            self._peaks = [self._peaks[1], 0]

    def finished(self, now_ns: int) -> None:
        """The oldest batch on its way has been executed."""
        start_ns, bucket = self._flights.popleft()
        took_ns = now_ns - max(start_ns, self._free_from_ns)
        self._met_rows = self._flying_rows.popleft()
        before_last = self._ends.popleft()
        if before_last.missing > 0:  # they took longer than a batch, perhaps much longer
            self._returned(before_last, self._ends[0].ns)
        self._ends.append(_End(now_ns, self._met_rows, self._met_rows))
        before = self._execution_ns.get(bucket, took_ns)
        self._execution_ns[bucket] = before + NEWEST_SHARE * (took_ns - before)

    @property
    def _free_from_ns(self) -> int:
        """When the engine finished its last batch."""
        return self._ends[-1].ns

    @property
    def in_flight(self) -> int:
        """Batches that have started and not finished."""
        return len(self._flights)

    def wait_ns(self, now_ns: int, rows: int, oldest_ns: int) -> int:
        """How long `rows` waiting rows, the oldest queued at `oldest_ns`, should wait for others; 0: start now."""
        self._peaks[1] = max(self._peaks[1], rows + sum(self._flying_rows))
        if rows >= self._max_rows:
            return 0
        free_ns = self._predicted_end_ns() if self._flights else self._free_from_ns
        patience_ns = min(self._max_delay_ns, self._saved_ns(rows))
        if patience_ns > 0:
            return max(0, max(free_ns, oldest_ns) + patience_ns - now_ns)
        if not self._flights:
            return 0
        return max(0, free_ns - LEAD_NS - round(self._start_ns + rows * self._copy_ns_per_row) - now_ns)

    def rows_to_take(self, rows: int) -> int:
        """How many of the waiting rows the next batch takes at most."""
        most = min(rows, self._max_rows)
        if most in self._buckets or not self._execution_ns:
            return most
        candidates = [bucket for bucket in self._buckets if most // 2 < bucket < most]
        return max([most, *candidates], key=lambda taken: taken / self._expected_ns(taken))

    def _returned(self, end: _End, now_ns: int) -> None:
        """The clients of a batch have asked again, or have at least taken so long."""
        took_ns = now_ns - end.ns
        before = self._return_ns if self._return_ns < math.inf else took_ns
        self._return_ns = before + NEWEST_SHARE * (took_ns - before)
        self._return_rows += NEWEST_SHARE * (end.rows - self._return_rows)

    def _saved_ns(self, rows: int) -> int:
        """What executing `rows` with those that are missing saves; 0 if they come too late for that, or are few."""
        missing = min(self._max_rows, max(self._peaks)) - rows
        if missing < MIN_MISSING_ROWS:
            return 0
        apart_ns = self._expected_ns(rows) + self._expected_ns(missing)
        saved_ns = apart_ns - self._expected_ns(rows + missing)
        wait_ns = self._return_ns * max(1, missing / self._return_rows)
        return round(saved_ns) if MIN_GAIN * wait_ns < saved_ns else 0

    def _expected_ns(self, rows: int) -> float:
        bucket = self._bucket[min(rows, self._max_rows)]
        known = self._execution_ns.get(bucket)
        if known is not None or not self._execution_ns:
            return known or 0.0
        measured: Sequence[int] = sorted(self._execution_ns)
        return float(np.interp(bucket, measured, [self._execution_ns[one] for one in measured]))

    def _predicted_end_ns(self) -> int:
        end_ns = self._free_from_ns
        for start_ns, bucket in self._flights:
            end_ns = max(start_ns, end_ns) + round(self._execution_ns.get(bucket, 0))
        return end_ns


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
