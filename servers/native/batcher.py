"""The dynamic batcher: a bounded queue in front of one engine thread, with Triton's rules.

The oldest request waits at most `max_queue_delay_ns` for others to join it; a batch starts as soon as it is full, and
while the engine is busy the queue fills the next one. Requests keep their order, are never split, and are merged only
when their items have the same shapes. Doors hand over references to arrays, never copies, and keep the memory under
them unchanged until the entry is complete. The batcher knows no event loop: `on_complete` is called in the engine
thread (with an engine that works on two batches at once also in a second one, see `pipelining.py`), once for each
executed batch and once for those dropped before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from servers.contract.errors import InternalError
from servers.engines.interface import Engine, Pipeline, pipeline_of
from servers.native.entries import Entry, EntryQueue, Signal, distribute
from servers.native.pipelining import FAILED, PipelinedBatches
from servers.native.staging import Staging
from servers.native.statistics import Statistics

log = structlog.get_logger("abserve.batcher")


def pipeline_in_use(engine: Engine, *, wanted: bool) -> Pipeline | None:
    """The loaded engine's pipeline, None where it has none, or is not to be used."""
    pipeline = pipeline_of(engine) if wanted else None
    return pipeline if pipeline is not None and pipeline.slots > 1 else None


def batch_slots(engine: Engine, *, wanted: bool) -> int | None:
    """How many batches are under way at once; None for an engine that could do no more than one."""
    offered = pipeline_in_use(engine, wanted=True)
    return None if offered is None else offered.slots if wanted else 1


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
        on_broken: Callable[[], None],
        pipeline: bool = True,
    ) -> None:
        """`on_broken` is called once, in the engine thread, when the engine cannot execute anything any more."""
        self._max_batch_size = max_batch_size
        self._max_queue_delay_ns = max_queue_delay_ns
        self._statistics = statistics
        self._on_complete = on_complete
        self._on_broken = on_broken
        self._broken = False
        self._pipeline = pipeline  # use the engine's, where it has one
        self._queue = EntryQueue(queue_size)
        self._held: Entry | None = None  # taken from the queue, did not fit the last batch
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Requests in the queue, not those being executed."""
        return self._queue.waiting

    def start(self, prepare: Callable[[], Engine | None]) -> None:
        """Begin: `prepare` loads the engine in the engine thread; None means that it failed and has said so."""
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        """Queue a request; any thread. Raises `QueueFullError` or `ShuttingDownError` at once."""
        self._queue.put(entry)

    def withdraw(self, entry: Entry) -> bool:
        """Take a request back; any thread. True if the engine will not see it and `on_complete` will not name it."""
        return self._queue.withdraw(entry)

    def stop(self, timeout: float) -> bool:
        """Refuse new requests, execute the queued ones and close the engine. False if that took too long."""
        self._queue.close()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self, prepare: Callable[[], Engine | None]) -> None:
        engine = prepare()
        if engine is None:
            return
        try:
            pipeline = pipeline_in_use(engine, wanted=self._pipeline)
            if pipeline is not None:
                PipelinedBatches(
                    pipeline,
                    self._queue,
                    self._max_batch_size,
                    self._max_queue_delay_ns,
                    self._statistics,
                    self._on_complete,
                    lambda: self._look_into(engine),
                ).run()
                return
            slots = pipeline_of(engine)
            staging = Staging(self._max_batch_size, engines=None if slots is None else slots.staging(0))
            while batch := self._collect():
                if entries := self._claim(batch):
                    self._execute(engine, staging, entries)
        finally:
            engine.close()

    def _collect(self) -> list[Entry]:
        """The next batch, empty when the batcher is to stop; some entries may have been withdrawn meanwhile."""
        first: Entry | Signal = self._held or self._queue.get()
        self._held = None
        while isinstance(first, Entry) and first.taken:
            first = self._queue.get()
        if isinstance(first, Signal):
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
                    entry = self._queue.get(remaining_ns / 1e9)
                except queue.Empty:
                    break
            if isinstance(entry, Signal):
                self._queue.put_back(entry)  # finish this batch, then stop
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
        entries, expired = self._queue.claim(batch)
        if expired:
            self._on_complete(expired)
        return entries

    def _execute(self, engine: Engine, staging: Staging, claimed: Sequence[Entry]) -> None:
        start_ns = time.perf_counter_ns()
        entries = self._fetch(claimed)
        if not entries:
            return
        rows = sum(entry.rows for entry in entries)
        try:
            inputs = staging.gather([entry.inputs for entry in entries])
            gathered_ns = time.perf_counter_ns()
            outputs = engine.infer(inputs)
            inferred_ns = time.perf_counter_ns()
            distribute(outputs, entries, rows)
            end_ns = time.perf_counter_ns()
        except Exception:
            log.exception("inference failed", rows=rows, requests=len(entries))
            for entry in entries:
                entry.outputs = None
                entry.error = InternalError(FAILED)
            self._on_complete(entries)
            self._look_into(engine)
        else:
            self._statistics.record_execution(
                rows,
                [start_ns - entry.enqueued_ns for entry in entries],
                gathered_ns - start_ns,
                inferred_ns - gathered_ns,
                end_ns - inferred_ns,
            )
            self._on_complete(entries)

    def _look_into(self, engine: Engine) -> None:
        """After a batch that failed: was it the batch, or the engine? A lost GPU fails every batch from then on."""
        if self._broken:
            return
        try:
            engine.warm_up([1])
        except Exception:
            log.exception("the engine is broken: it cannot execute zeros any more")
            self._broken = True
            self._on_broken()

    def _fetch(self, claimed: Sequence[Entry]) -> Sequence[Entry]:
        """Those whose inputs can be read; the others are answered."""
        if not any([entry.windows for entry in claimed]):  # noqa: C419  faster, and for every batch
            return claimed
        lost = []
        for entry in claimed:
            entry.error = entry.fetch()
            if entry.error is not None:
                lost.append(entry)
        if lost:
            self._on_complete(lost)
        return [entry for entry in claimed if entry.error is None]
