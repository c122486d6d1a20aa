"""The dynamic batcher: a bounded queue in front of an engine, and the rule for when its next batch starts.

Requests keep their order, are never split, and share a batch only if their items have the same shapes or can be padded
to the same. Front ends pass references to arrays, not copies, and keep the memory unchanged until the request is
complete. One thread forms the batches, starts them, as many at a time as the engine has room for, and finishes them.

`BatchFormer` decides when. If the engine is idle, a batch starts at once, unless waiting pays. An example: the clients
had at most 8 rows outstanding during the last 16 to 32 batches, and 3 rows wait. Executing 3 and then 5 takes
4 + 5 = 9 ms, all 8 together 6 ms: waiting saves 3 ms. The batch waits if clients usually send 5 rows within 2 ms after
a batch, so that the saving is 1.5 times the wait; it waits at most those 3 ms, never longer than `max_queue_delay_us`,
and never for a single row. While a batch executes, the next one starts 0.1 ms (and the time to start and to copy it)
before the predicted end, or when it is full. All predictions are moving averages, in which the newest value counts
25 %. A batch takes all waiting rows, or only as many as fill a bucket if that executes more rows per second.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import structlog

from servers.engines.interface import DeviceMemory, Engine, Finish, HostMemory, Request
from servers.engines.padding import Padding
from servers.native.shared.errors import FailureLog, RefusedError, expired, shutting_down
from servers.native.shared.interface import QueuedRequest
from servers.native.shared.memory import Arena
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.native.shared.traces import tracer_of
from servers.protocol.errors import ContractError, InternalError
from servers.protocol.tensors import Array, like

log = FailureLog("abserve.batcher")

FAILED = "inference failed on the server, the server's log has the cause"
POLL_S = 50e-6
"""How often a batcher's thread checks whether its batch has been executed."""
WATCH_NS = 1_000_000
"""Keep polling this long after a batch: waking a sleeping loop takes 0.1 ms."""

BATCHES_PER_PEAK = 16
"""The peak of outstanding rows is the highest of the last one to two times this many batches."""
MIN_MISSING_ROWS = 2
"""Never wait for fewer rows: a single one may be a client that is slower than the others."""
MIN_GAIN = 1.5
"""Wait only if the saving is this many times the wait: the expected requests may not come."""
NEWEST_SHARE = 0.25
"""How much the newest execution changes the expected time of its bucket."""
LEAD_NS = 100_000
"""A batch starts so long, and the times to start and to copy it, before the predicted end of the one before."""
COPIED_BYTES_PER_NS = 25
"""About the speed of PCI Express 4 and 5 with sixteen lanes; a wrong value only starts a batch earlier or later."""


@dataclass(slots=True)
class _FinishedBatch:
    """A finished batch; `missing` of its rows have not returned yet."""

    ns: int
    rows: int
    missing: int


class BatchFormer:
    """Decides when the next batch of one engine starts and with how many rows: no thread, no clock, no request. All
    times are ns of one monotonic clock."""

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
        self._running: deque[tuple[int, int]] = deque()  # start and bucket of each batch that is not finished
        self._running_rows: deque[int] = deque()
        self._start_ns = 0.0
        self._peaks = [0, 0]  # of outstanding rows: before the last turn, and since
        self._return_ns = math.inf  # from the end of a batch until as many rows were queued
        self._return_rows = 1.0  # of such a batch
        self._ends = deque([_FinishedBatch(0, 0, 0)] * 2)
        self._outstanding_rows = 0  # of the last finished batch, and those that were queued during it
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
            self._outstanding_rows += rows
            self._peaks[1] = max(self._peaks[1], self._outstanding_rows)

    def started(self, now_ns: int, rows: int, took_ns: int = 0) -> None:
        """The next batch is on its way to the device; its start at `now_ns` kept the thread for `took_ns`."""
        self._start_ns += NEWEST_SHARE * (took_ns - self._start_ns)
        self._running.append((now_ns, self._bucket[rows]))
        self._running_rows.append(rows)
        self._batches += 1
        if self._batches % BATCHES_PER_PEAK == 0:
            self._peaks = [self._peaks[1], 0]

    def finished(self, now_ns: int) -> None:
        """The oldest batch on its way has been executed."""
        start_ns, bucket = self._running.popleft()
        took_ns = now_ns - max(start_ns, self._free_from_ns)
        self._outstanding_rows = self._running_rows.popleft()
        before_last = self._ends.popleft()
        if before_last.missing > 0:  # they took longer than a batch, perhaps much longer
            self._returned(before_last, self._ends[0].ns)
        self._ends.append(_FinishedBatch(now_ns, self._outstanding_rows, self._outstanding_rows))
        before = self._execution_ns.get(bucket, took_ns)
        self._execution_ns[bucket] = before + NEWEST_SHARE * (took_ns - before)

    @property
    def _free_from_ns(self) -> int:
        """When the engine finished its last batch."""
        return self._ends[-1].ns

    def wait_ns(self, now_ns: int, rows: int, oldest_ns: int) -> int:
        """How long `rows` waiting rows, the oldest queued at `oldest_ns`, should wait for others; 0: start now."""
        self._peaks[1] = max(self._peaks[1], rows + sum(self._running_rows))
        if rows >= self._max_rows:
            return 0
        free_ns = self._predicted_end_ns() if self._running else self._free_from_ns
        patience_ns = min(self._max_delay_ns, self._saved_ns(rows))
        if patience_ns > 0:
            return max(0, max(free_ns, oldest_ns) + patience_ns - now_ns)
        if not self._running:
            return 0
        return max(0, free_ns - LEAD_NS - round(self._start_ns + rows * self._copy_ns_per_row) - now_ns)

    def rows_to_take(self, rows: int) -> int:
        """How many of the waiting rows the next batch takes at most."""
        most = min(rows, self._max_rows)
        if most in self._buckets or not self._execution_ns:
            return most
        candidates = [bucket for bucket in self._buckets if most // 2 < bucket < most]
        return max([most, *candidates], key=lambda taken: taken / self._expected_ns(taken))

    def _returned(self, end: _FinishedBatch, now_ns: int) -> None:
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
        measured_ns = self._execution_ns.get(bucket)
        if measured_ns is not None or not self._execution_ns:
            return measured_ns or 0.0
        measured: Sequence[int] = sorted(self._execution_ns)
        return float(np.interp(bucket, measured, [self._execution_ns[size] for size in measured]))

    def _predicted_end_ns(self) -> int:
        end_ns = self._free_from_ns
        for start_ns, bucket in self._running:
            end_ns = max(start_ns, end_ns) + round(self._execution_ns.get(bucket, 0))
        return end_ns


@dataclass(frozen=True, slots=True)
class _RunningBatch:
    """A batch on its way through the engine."""

    requests: list[QueuedRequest]
    rows: int
    start_ns: int
    started_ns: int
    finish: Finish


class Batcher:
    """Owns a loaded engine and its queue until `stop`, and executes in one thread, which calls `run`. A request counts
    as waiting until it is claimed for a batch, expired or withdrawn."""

    def __init__(
        self,
        engine: Engine,
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
        which an engine on a GPU page-locks. `wake`: see `LoopBatcher`."""
        self._engine = engine
        self._queue_size = settings.queue_size
        self._max_batch_size = settings.max_batch_size
        self._statistics = statistics
        self._tracer = tracer_of(settings)
        self._on_complete = on_complete
        self._on_broken = on_broken
        self._padding = padding
        self._checks = [] if check_values is None else [check_values]
        if engine.checks_values:
            self._checks.append(engine.check_values)
        self.takes_addresses = engine.takes_addresses and not self._checks
        """Whether the inputs of a request may be `HostMemory`."""
        on_gpu = engine.device_index is not None
        self._page_locks = PageLocks(engine, arena) if on_gpu and arena is not None else None
        engine.prepare_no_more()
        max_delay_ns = settings.max_queue_delay_us * 1000
        self._former = BatchFormer(settings.max_batch_size, max_delay_ns, engine.executed_rows, engine.row_bytes)
        self._lock = threading.Lock()  # guards the two below, and `taken` of every request
        self._closed = False
        self.waiting = 0
        """Requests in the queue, without those being executed."""
        self._queue: queue.SimpleQueue[QueuedRequest | None] = queue.SimpleQueue()  # None ends it
        self._waiting_requests: deque[QueuedRequest] = deque()  # taken from the queue, in no batch yet
        self._running: deque[_RunningBatch] = deque()
        self._idle_from_ns = 0
        self._watch_ns = max(WATCH_NS, settings.busy_poll_us * 1000)
        self._failed: list[QueuedRequest] = []  # of a batch that failed: each is executed again, alone
        self._broken = False
        self._ends = False  # no request comes any more
        self._ended = threading.Event()
        self._wake = wake

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request. Raises `RefusedError` at once."""
        request.enqueued_ns = time.perf_counter_ns()
        with self._lock:
            if self._closed:
                raise shutting_down()
            if self.waiting + request.count > self._queue_size:
                raise RefusedError("queue_full", f"Exceeds maximum queue size of {self._queue_size} requests")
            self._count_waiting(request.count)
            self._enqueue(request)

    def _enqueue(self, request: QueuedRequest) -> None:
        self._queue.put(request)

    def withdraw(self, request: QueuedRequest, remaining: Sequence[QueuedRequest] = ()) -> bool:
        """Take a request back; any thread. True if the engine and `on_complete` will not get it. `remaining` are the
        parts of a group that stay, in its place; only for `LoopBatcher`."""
        with self._lock:
            if request.taken:
                return False
            request.taken = True
            self._count_waiting(sum([part.count for part in remaining]) - request.count)
        if remaining:
            place = self._waiting_requests.index(request)
            for part in reversed(remaining):
                self._waiting_requests.insert(place, part)
        request.drop_inputs()
        return True

    def run(self) -> None:
        """Execute until `stop`; in the thread that has loaded the engine."""
        try:
            while not self._ended.is_set():
                seconds = self._turn()
                if self._ended.is_set():
                    return
                with suppress(queue.Empty):  # while the engine works, the interpreter is left to other threads
                    self._receive(self._queue.get(timeout=None if seconds is None else max(POLL_S, seconds)))
        except Exception:
            log.exception("the thread of an engine failed")
            self.fail()

    def stop(self, timeout: float) -> bool:
        """Refuse new requests, execute the queued ones and close the engine. False if that took too long."""
        with self._lock:
            self._closed = True
            self._end()
        return self._ended.wait(timeout)

    def _end(self) -> None:
        self._queue.put(None)

    def turn(self) -> float | None:
        """See `LoopBatcher`; here the thread does everything."""
        return None

    def _turn(self) -> float | None:
        """Do what can be done now, and wait for nothing. Returns after how many seconds to call again if no request
        comes; None: not before one comes."""
        engine, former, waiting = self._engine, self._former, self._waiting_requests
        while True:
            while not self._queue.empty():  # nobody else takes from it
                self._receive(self._queue.get_nowait())
            if self._running and engine.ready():
                self._finish_batch(self._running[0])
                self._running.popleft()
                continue
            while waiting and waiting[0].taken:
                waiting.popleft()
            if self._running and (not waiting or self._failed or len(self._running) >= engine.flights):
                return 0.0
            if self._failed:
                self._execute_alone()
            elif waiting:
                rows = self._mergeable_rows()
                wait_ns = 0 if self._ends else former.wait_ns(time.perf_counter_ns(), rows, waiting[0].enqueued_ns)
                if wait_ns > 0:
                    return 0.0 if self._running else wait_ns / 1e9
                self._start_batch(self._take(former.rows_to_take(rows)))
            elif self._ends:
                engine.close()
                self._ended.set()
                return None
            else:
                return None

    def _count_waiting(self, change: int) -> None:
        self.waiting += change
        self._statistics.set_queued(self.waiting)

    def _receive(self, item: QueuedRequest | None) -> None:
        if item is None:
            self._ends = True
        else:
            self._accept(item)

    def _accept(self, request: QueuedRequest) -> None:
        self._former.arrived(request.enqueued_ns, request.rows)
        self._waiting_requests.append(request)

    def fail(self) -> None:
        """Nothing can be executed any more: refuse what is here, and what will come."""
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while (request := self._queue.get_nowait()) is not None:
                self._waiting_requests.append(request)
        begun = [*self._failed, *(request for batch in self._running for request in batch.requests)]
        waiting = self._claim(self._waiting_requests)
        self._refuse([*waiting, *(request for request in begun if not request.complete)], InternalError(FAILED))
        self._on_broken()
        with suppress(Exception):
            self._engine.close()
        self._ended.set()

    def _mergeable_rows(self) -> int:
        """Rows at the front that fit into one batch; the largest batch if no later request can join them."""
        first, rows = self._waiting_requests[0], 0
        for request in self._waiting_requests:
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
        while self._waiting_requests:
            request = self._waiting_requests[0]
            if not request.taken:
                if batch and request.key != batch[0].key:
                    break
                if rows + request.rows > most and (batch or request.split is not None):
                    fitting = (most - rows) * request.count // request.rows
                    if request.split is None or (batch and not fitting):
                        break
                    self._waiting_requests.popleft()
                    self._waiting_requests.extendleft(reversed(request.split(max(1, fitting))))
                    continue
                rows += request.rows
                batch.append(request)
            self._waiting_requests.popleft()
        return batch

    def _claim(self, batch: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """The batch without withdrawn and expired requests; the others can no longer be withdrawn."""
        now_ns = time.perf_counter_ns()
        claimed: list[QueuedRequest] = []
        late: list[QueuedRequest] = []
        with self._lock:
            for request in batch:
                if request.taken:
                    continue
                request.taken = True
                is_late = request.deadline_ns is not None and now_ns >= request.deadline_ns
                (late if is_late else claimed).append(request)
            self._count_waiting(-sum([request.count for request in (*claimed, *late)]))
        if late:
            self._refuse(late, expired())
        return claimed

    def _readable(self, claimed: list[QueuedRequest]) -> list[QueuedRequest]:
        """The requests whose inputs can be read and executed; the others are refused."""
        checks = self._checks
        if not checks and not any([request.input_windows or request.output_windows for request in claimed]):  # noqa: C419  faster
            return claimed
        readable = []
        for request in claimed:
            try:
                _open_device_memory(request, None if checks else self._engine.device_index)
                if checks:
                    arrays = {name: array for name, array in request.inputs.items() if isinstance(array, np.ndarray)}
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

    def _start_batch(self, taken: list[QueuedRequest]) -> None:
        requests = self._readable(self._claim(taken))
        batch = self._begin(requests) if requests else None
        if batch is not None:
            self._former.started(batch.start_ns, batch.rows, batch.started_ns - batch.start_ns)
            self._running.append(batch)

    def _begin(self, requests: list[QueuedRequest]) -> _RunningBatch | None:
        """Start a batch; None if that failed, or if the engine takes no batch of this shape."""
        start_ns = time.perf_counter_ns()
        engine = self._engine
        try:
            if self._page_locks is not None:
                self._page_locks.notice([_address(request) for request in requests])
            given_ns = time.perf_counter_ns()
            if any([request.borrowed for request in requests]):  # noqa: C419  as above
                inputs: list[Request] = [{**request.inputs, **request.borrowed_inputs} for request in requests]
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
        return _RunningBatch(requests, rows, start_ns, started_ns, finish)

    def _finish_batch(self, batch: _RunningBatch) -> None:
        """Complete the requests of a batch that is executed, unless it failed."""
        try:
            answers = batch.finish()
        except Exception:
            log.exception("inference failed", rows=batch.rows, requests=len(batch.requests))
            self._former.finished(time.perf_counter_ns())
            self._failed += batch.requests
        else:
            finished_ns = time.perf_counter_ns()
            self._former.finished(finished_ns)
            self._complete(batch, answers, finished_ns)
            self._idle_from_ns = time.perf_counter_ns()

    def _complete(self, batch: _RunningBatch, answers: list[dict[str, Array]], finished_ns: int) -> None:
        complete = []
        for request, answer in zip(batch.requests, answers, strict=True):
            try:
                for name, window in request.output_windows.items() if request.output_windows else ():
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
            batch.rows,
            self._engine.executed_rows(batch.rows),
            [(batch.start_ns - request.enqueued_ns, request.count) for request in batch.requests],
            batch.started_ns - batch.start_ns,
            finished_ns - batch.started_ns,
            time.perf_counter_ns() - finished_ns,
        )
        self._on_complete(complete)
        if self._tracer is not None:
            self._tracer.executed(batch.requests, batch.rows, batch.start_ns, batch.started_ns, finished_ns)

    def _execute_alone(self) -> None:
        """After a batch has failed: each request alone, so that only the cause of the failure fails."""
        failed, self._failed = self._failed, []
        works = self._check_engine()
        alone = [request for group in failed for request in _single_requests(group)]
        if len(alone) == 1 or not works:
            self._refuse(alone, InternalError(FAILED))
            return
        for request in alone:
            batch = self._begin([request])
            if batch is not None:
                self._former.started(batch.start_ns, batch.rows)
                self._finish_batch(batch)
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


class LoopBatcher(Batcher):
    """Executes in the loop of a process, for an engine that executes beside Python. One thread then receives, starts
    and finishes, and no time goes from one to the other. It submits, and it calls `turn`: after `wake`, after `submit`,
    and when the last turn said."""

    _enqueue = Batcher._accept

    def run(self) -> None:
        """Let the loop take over."""
        assert self._wake is not None
        self._wake()

    def _end(self) -> None:
        self._ends = True
        self.run()

    def turn(self) -> float | None:
        """Do what can be done now, and wait for nothing. Returns after how many seconds to call again if nothing comes,
        None: not before `wake` or `submit` is called."""
        if self._ended.is_set():
            return None
        seconds = self._turn()
        if seconds is None and time.perf_counter_ns() - self._idle_from_ns < self._watch_ns:
            return 0.0
        return seconds


def _open_device_memory(request: QueuedRequest, device: int | None) -> None:
    """Let an engine on this device use the memory itself, and read inputs to the host otherwise. Raises
    `ContractError`."""
    inputs: dict[str, DeviceMemory] = {}
    outputs: dict[str, DeviceMemory] = {}
    read: dict[str, Array] = {}
    used = []
    try:
        for borrowed, windows in ((inputs, request.input_windows), (outputs, request.output_windows)):
            for name, window in windows.items() if windows else ():
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


def _single_requests(group: QueuedRequest) -> list[QueuedRequest]:
    """The requests of a group, each for itself."""
    requests = []
    while group.split is not None:
        request, group = group.split(1)
        requests.append(request)
    return [*requests, group]


MAX_SEEN = 4096
"""Capacity of the cache of seen addresses: requests lie in the same slots again and again."""


class PageLocks:
    """Page-locks the warm slots that requests lie in, for one engine; belongs to the thread that starts batches.

    A class of slots is locked when the first request of that size comes, in a thread: until that is done, and for slots
    that are not warm, copies only take longer. Models share the slots: what one engine has locked is locked for all
    engines of the process.
    """

    def __init__(self, engine: Engine, arena: Arena) -> None:
        self._engine = engine
        self._arena = arena
        self._noticed: list[tuple[int, int]] = []
        self._seen: set[int] = set()

    def notice(self, addresses: Sequence[int]) -> None:
        """Requests lie there."""
        if self._seen.issuperset(addresses):
            return
        for address in addresses:
            self._notice(address)
        if len(self._seen) > MAX_SEEN:
            self._seen.clear()
        self._seen.update(addresses)

    def _notice(self, address: int) -> None:
        if any(start <= address < end for start, end in self._noticed):
            return
        arena = self._arena
        warm = arena.warm_range(address - arena.address) if arena.address <= address < arena.end else None
        if warm is None:
            return
        start, size = arena.address + warm[0], warm[1]
        self._noticed.append((start, start + size))
        threading.Thread(target=self._lock, args=(start, size), name="page-locking", daemon=True).start()

    def _lock(self, start: int, size: int) -> None:
        if not self._engine.pin(start, size):
            structlog.get_logger("abserve.engine").warning(
                "memory for requests cannot be page-locked, so copies to the GPU are slower", bytes=size
            )
