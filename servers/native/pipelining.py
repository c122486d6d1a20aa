"""Two batches at once, for engines that can copy one while they compute another: see `Pipeline`.

The engine thread copies each request into the next batch's slot as soon as it is there, while the batch before is
executed; a second thread waits for that one and hands its answers out. A batch is submitted when

- it is full, or the next request does not fit it: even though another one is being executed, or
- nothing is being executed and its oldest request has waited `max_queue_delay_ns`.

So a batch that is not full stays open for as long as the engine is busy, as it does without a pipeline. A request can
be withdrawn, and its time can run out, until its batch is submitted: the rows behind it are then copied again.

Where the time of one request goes, in intervals that follow each other and add up to all of it: `compute_input` is the
copying of its own rows, and from the decision to submit its batch until that is done. `compute_infer` is from there, or
from the end of the batch before if that is later, until its batch is done: of two batches never the same time.
`compute_output` is from there until its rows are handed out. All else is `queue`, other requests' copying included.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from servers.contract.errors import ContractError, InternalError
from servers.contract.tensors import Array
from servers.engines.interface import Pipeline
from servers.native.entries import EXPIRED, Entry, EntryQueue, Signal, distribute
from servers.native.errors import RequestExpiredError
from servers.native.statistics import Statistics

log = structlog.get_logger("abserve.batcher")

FAILED = "inference failed on the server, its log has the cause"


@dataclass(slots=True)
class _Batch:
    """One slot's requests; `copy_ns` is each one's own copying."""

    slot: int
    entries: list[Entry] = field(default_factory=list)
    copy_ns: list[int] = field(default_factory=list)
    rows: int = 0
    closed: bool = False
    """No other request may join."""
    decided_ns: int = 0
    submitted_ns: int = 0


class PipelinedBatches:
    """From the queue to answers; `on_complete` as in `Batcher`, in two threads."""

    def __init__(
        self,
        pipeline: Pipeline,
        entries: EntryQueue,
        max_batch_size: int,
        max_queue_delay_ns: int,
        statistics: Statistics,
        on_complete: Callable[[Sequence[Entry]], None],
        on_failed_batch: Callable[[], None],
    ) -> None:
        """`on_failed_batch` is called in the engine thread after one, when nothing is in flight or in a slot."""
        self._pipeline = pipeline
        self._queue = entries
        self._max_batch_size = max_batch_size
        self._max_queue_delay_ns = max_queue_delay_ns
        self._statistics = statistics
        self._on_complete = on_complete
        self._on_failed_batch = on_failed_batch
        self._staging = [pipeline.staging(slot) for slot in range(pipeline.slots)]
        self._submitted: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the five below
        self._free = deque(range(pipeline.slots))
        self._executing = 0
        self._collected = 0
        self._failed = False  # a batch has, and nobody has looked into it yet
        self._listening = False  # the engine thread waits at the queue for what the other one does

    def run(self) -> None:
        """Until the queue is closed and all that was in it is answered; in the engine thread."""
        collecting = threading.Thread(target=self._collect_all, name="engine-collect", daemon=True)
        collecting.start()
        try:
            self._submit_all()
        finally:
            self._submitted.put(None)
            collecting.join()

    def _submit_all(self) -> None:
        waiting: deque[Entry] = deque()
        batch: _Batch | None = None
        closed = False
        while not closed or waiting or batch is not None:
            closed = self._drain(waiting) or closed
            with self._lock:
                collected, busy = self._collected, self._executing > 0
                failed = self._failed
                if batch is None and waiting and self._free and not failed:
                    batch = _Batch(self._free.popleft())
            if failed and batch is None and not busy:
                self._on_failed_batch()
                self._failed = False
                continue
            if batch is not None:
                self._fill(batch, waiting)
                remaining_ns = self._remaining_ns(batch, busy=busy, last=closed and not waiting)
                if remaining_ns is not None and remaining_ns <= 0:
                    self._submit(batch)
                    batch = None
                    continue
            else:
                remaining_ns = None
            with self._lock:
                if collected != self._collected:
                    continue
                self._listening = closed or bool(waiting) or batch is not None
            if not closed or waiting or batch is not None:
                closed = self._wait(waiting, remaining_ns) or closed

    def _drain(self, waiting: deque[Entry]) -> bool:
        """Take everything that is there; True if nothing comes any more."""
        while True:
            try:
                got = self._queue.get_nowait()
            except queue.Empty:
                return False
            if got is Signal.CLOSED:
                return True
            if isinstance(got, Entry):
                waiting.append(got)

    def _wait(self, waiting: deque[Entry], remaining_ns: int | None) -> bool:
        """For a request, a finished batch or the batch's time; True if nothing comes any more."""
        try:
            got = self._queue.get(None if remaining_ns is None else remaining_ns / 1e9)
        except queue.Empty:
            return False
        if isinstance(got, Entry):
            waiting.append(got)
        return got is Signal.CLOSED

    def _remaining_ns(self, batch: _Batch, *, busy: bool, last: bool) -> int | None:
        """How long the batch may stay open; None: until something happens."""
        if not batch.entries:
            return 0 if last else None
        if batch.closed or last:
            return 0
        if busy:
            return None
        return batch.entries[0].enqueued_ns + self._max_queue_delay_ns - time.perf_counter_ns()

    def _fill(self, batch: _Batch, waiting: deque[Entry]) -> None:
        """Copy those that fit, in order."""
        while waiting and not batch.closed:
            entry = waiting[0]
            if entry.taken:
                waiting.popleft()
                continue
            if batch.entries and (entry.key != batch.entries[0].key or batch.rows + entry.rows > self._max_batch_size):
                batch.closed = True
                return
            waiting.popleft()
            start_ns = time.perf_counter_ns()
            error = self._stage(entry, batch)
            if error is not None:
                if self._queue.refuse(entry, error):
                    self._on_complete([entry])
                continue
            batch.entries.append(entry)
            batch.copy_ns.append(time.perf_counter_ns() - start_ns)
            batch.rows += entry.rows
            batch.closed = batch.rows == self._max_batch_size

    def _stage(self, entry: Entry, batch: _Batch) -> ContractError | None:
        if entry.deadline_ns is not None and time.perf_counter_ns() >= entry.deadline_ns:
            return RequestExpiredError(EXPIRED)
        error = entry.fetch()
        if error is None:
            try:
                self._copy(entry, batch.slot, batch.rows)
            except Exception:
                log.exception("a request could not be copied into its batch", rows=entry.rows)
                error = InternalError(FAILED)
        return error

    def _copy(self, entry: Entry, slot: int, row: int) -> None:
        for name, target in self._staging[slot].items():
            source, place = entry.inputs[name], target[row : row + entry.rows]
            if source.shape != place.shape:  # NumPy would broadcast
                raise ValueError(f"input {name!r} has shape {source.shape}, the engine's place for it {place.shape}")
            np.copyto(place, source, casting="no")

    def _submit(self, batch: _Batch) -> None:
        batch.decided_ns = time.perf_counter_ns()
        entries, expired = self._queue.claim(batch.entries)
        if expired:
            self._on_complete(expired)
        try:
            if len(entries) < len(batch.entries):
                self._close_gaps(batch, entries)
            if entries:
                self._pipeline.submit(batch.slot, batch.rows)
        except Exception:
            log.exception("inference failed", rows=batch.rows, requests=len(entries))
            _fail(batch)
            self._on_complete(batch.entries)
            entries = []
            self._failed = True
        batch.submitted_ns = time.perf_counter_ns()
        with self._lock:
            if not entries:
                self._free.append(batch.slot)
                return
            self._executing += 1
        self._submitted.put(batch)

    def _close_gaps(self, batch: _Batch, entries: list[Entry]) -> None:
        """Leave out the rows of those that are not wanted any more."""
        copied = dict(zip(batch.entries, batch.copy_ns, strict=True))
        kept = 0
        while kept < len(entries) and entries[kept] is batch.entries[kept]:
            kept += 1
        batch.entries, batch.copy_ns = entries, [copied[entry] for entry in entries]
        batch.rows = sum(entry.rows for entry in entries[:kept])
        for entry in entries[kept:]:
            self._copy(entry, batch.slot, batch.rows)
            batch.rows += entry.rows

    def _collect_all(self) -> None:
        done_ns = 0
        while (batch := self._submitted.get()) is not None:
            begun_ns = max(batch.submitted_ns, done_ns)
            done_ns = self._collect(batch, begun_ns)

    def _collect(self, batch: _Batch, begun_ns: int) -> int:
        """Wait for a batch and answer its requests; when it was done."""
        outputs: dict[str, Array] | None = None
        try:
            outputs = dict(self._pipeline.collect(batch.slot))
        except Exception:
            log.exception("inference failed", rows=batch.rows, requests=len(batch.entries))
            _fail(batch)
        done_ns = time.perf_counter_ns()
        with self._lock:  # before the answers, so that the next batch need not wait for them
            self._free.append(batch.slot)
            self._executing -= 1
            self._collected += 1
            self._failed = self._failed or outputs is None
            listening, self._listening = self._listening, False
        if listening or outputs is None:
            self._queue.wake()
        if outputs is not None:
            try:
                distribute(outputs, batch.entries, batch.rows)
            except Exception:
                log.exception("inference failed", rows=batch.rows, requests=len(batch.entries))
                _fail(batch)
            else:
                self._record(batch, begun_ns, done_ns)
        self._on_complete(batch.entries)
        return done_ns

    def _record(self, batch: _Batch, begun_ns: int, done_ns: int) -> None:
        submit_ns = batch.submitted_ns - batch.decided_ns
        after_submit_ns = begun_ns - batch.submitted_ns
        self._statistics.record_execution(
            batch.rows,
            [
                batch.decided_ns - entry.enqueued_ns - copy_ns + after_submit_ns
                for entry, copy_ns in zip(batch.entries, batch.copy_ns, strict=True)
            ],
            sum(batch.copy_ns) + submit_ns,
            done_ns - begun_ns,
            time.perf_counter_ns() - done_ns,
            [copy_ns + submit_ns for copy_ns in batch.copy_ns],
        )


def _fail(batch: _Batch) -> None:
    for entry in batch.entries:
        entry.outputs = None
        entry.error = InternalError(FAILED)
