"""What the server has done so far, in monotone counters: Triton's statistics, stages of a request, and histograms.

The counters are 64-bit integers in shared memory: one row for each process of the server that counts, of which a
snapshot is the sum. A process that dies leaves its row to its successor, so no counter ever falls.

Times are ns. As in Triton, each request of a merged batch is charged the whole batch's compute time, and the batch
appears once in `batch_stats`. Warm-up is not counted.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from servers.native.shared.errors import FAILURE_REASONS

if TYPE_CHECKING:
    from servers.native.shared.traces import RequestTrace

DURATION_BOUNDS_NS = tuple(round(10 ** (4.5 + step / 12)) for step in range(75))
"""Upper bounds from 32 µs to 47 s, twelve per decade: neighbours differ by 21 %, so that a quantile is useful."""

Times = dict[str, dict[str, int]]


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, not cumulated; the last bucket has no upper bound. `total` is the sum of all values."""

    bounds: tuple[int, ...]
    total: int
    counts: Sequence[int]

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class RequestTimes:
    """The stages of one request outside the batcher."""

    start_ns: int
    receive_ns: int = 0
    decode_ns: int = 0
    encode_ns: int = 0
    trace: RequestTrace | None = None
    """None for a request that is not traced."""

    @property
    def trace_context(self) -> bytes | None:
        """See `RequestTrace.context`."""
        return None if self.trace is None else self.trace.context


@dataclass(slots=True)
class Counters:
    """All counters of one model at one moment; durations of requests are of answered ones."""

    max_batch_size: int
    last_inference_ms: int
    inference_count: int
    executed_rows: int
    receive_ns: int
    decode_ns: int
    encode_ns: int
    failed_ns: int
    disconnects: int
    decoding: int
    queued: int
    prompt_tokens: int
    output_tokens: int
    slots_in_use: int
    unrecorded_bytes: int
    failures: dict[str, int]
    compute: Sequence[int]
    """How many requests, and the ns of their inputs, their execution and their outputs."""
    batches: dict[int, Sequence[int]]
    """By batch size: how many batches, and their ns in the same way."""
    request_duration: Histogram
    queue_duration: Histogram
    compute_duration: Histogram
    first_token: Histogram
    """From the head of a request for tokens to the first of them."""

    @property
    def batch_size(self) -> Histogram:
        sizes = range(1, self.max_batch_size + 1)
        counts = [self.batches[rows][0] if rows in self.batches else 0 for rows in sizes]
        return Histogram(tuple(sizes), self.inference_count, [*counts, 0])

    @property
    def stages(self) -> Times:
        """The latency breakdown of answered requests."""
        answered, (computed, *compute_ns) = self.request_duration.count, self.compute
        return {
            "receive": _duration(answered, self.receive_ns),
            "decode": _duration(answered, self.decode_ns),
            "queue": _duration(self.queue_duration.count, self.queue_duration.total),
            "compute": _duration(computed, sum(compute_ns)),
            "encode": _duration(answered, self.encode_ns),
        }

    def as_model_stats(self, name: str, version: str) -> dict[str, object]:
        """One element of Triton's `model_stats`, with `abserve_stages` added."""
        stages = self.stages
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": sum(count for count, *_ in self.batches.values()),
            "inference_stats": {
                "success": _duration(self.request_duration.count, self.request_duration.total),
                "fail": _duration(sum(self.failures.values()), self.failed_ns),
                "queue": stages["queue"],
                **_compute(self.compute),
                "cache_hit": _duration(0, 0),
                "cache_miss": _duration(0, 0),
            },
            "response_stats": {},
            "batch_stats": [{"batch_size": rows, **_compute(times)} for rows, times in sorted(self.batches.items())],
            "memory_usage": [],
            "abserve_stages": stages,
        }


_SCALARS = tuple(field.name for field in fields(Counters) if field.type == "int" and field.name != "max_batch_size")
_LAST_MS, _INFERENCES, _EXECUTED, _RECEIVE_NS, _DECODE_NS, _ENCODE_NS, _FAILED_NS = range(7)
_DISCONNECTS, _DECODING, _QUEUED, _PROMPT_TOKENS, _OUTPUT_TOKENS, _SLOTS_IN_USE, _UNRECORDED_BYTES = range(7, 14)
_FAILURES = len(_SCALARS)
_HISTOGRAMS = _FAILURES + len(FAILURE_REASONS)
_HISTOGRAM_WIDTH = len(DURATION_BOUNDS_NS) + 2  # its buckets, then the sum of its values
_REQUEST_NS, _QUEUE_NS, _COMPUTE_NS, _FIRST_TOKEN_NS = (_HISTOGRAMS + _HISTOGRAM_WIDTH * number for number in range(4))
_COMPUTE = _HISTOGRAMS + 4 * _HISTOGRAM_WIDTH
_BATCHES = _COMPUTE + 4  # from here on, four counters for each batch size, as in `Counters.batches`
_FAILURE_PLACES = {reason: _FAILURES + place for place, reason in enumerate(FAILURE_REASONS)}


def row_width(max_batch_size: int) -> int:
    """How many counters one process needs for one model."""
    return _BATCHES + 4 * max_batch_size


class Statistics:
    """The counters of one model: written to the process's own row, and read as the sum of all; any thread."""

    def __init__(self, max_batch_size: int, rows: Sequence[memoryview] = (), row: int = 0) -> None:
        """`rows` are 64-bit integers, `row_width` in each; without any, this process has them alone."""
        self._max_batch_size = max_batch_size
        width = row_width(max_batch_size)
        self._rows = rows or [memoryview(bytearray(8 * width)).cast("q")]
        self._counters = self._rows[row]
        self._lock = threading.Lock()

    def record_execution(
        self,
        rows: int,
        executed_rows: int,
        queued: Sequence[tuple[int, int]],
        compute_input_ns: int,
        compute_infer_ns: int,
        compute_output_ns: int,
    ) -> None:
        """One executed batch; `queued` holds times in the queue, in ns, each with its number of requests."""
        counters, parts = self._counters, (compute_input_ns, compute_infer_ns, compute_output_ns)
        requests = sum([count for _, count in queued])
        with self._lock:
            counters[_LAST_MS] = time.time_ns() // 1_000_000
            counters[_INFERENCES] += rows
            counters[_EXECUTED] += executed_rows
            for place, times in ((_BATCHES + 4 * (rows - 1), 1), (_COMPUTE, requests)):
                counters[place] += times
                for part, part_ns in enumerate(parts, start=1):
                    counters[place + part] += part_ns * times
            for waited_ns, count in queued:
                self._add(_QUEUE_NS, waited_ns, count)
            self._add(_COMPUTE_NS, sum(parts))

    def record_step(self, rows: int, tokens: int, started_ns: int) -> None:
        """One step of a generating engine, with so many requests in its slots and so many tokens from it."""
        counters, step_ns = self._counters, time.perf_counter_ns() - started_ns
        place = _BATCHES + 4 * (min(rows, self._max_batch_size) - 1)
        with self._lock:
            counters[_LAST_MS] = time.time_ns() // 1_000_000
            counters[_OUTPUT_TOKENS] += tokens
            counters[place] += 1
            counters[place + 2] += step_ns
            self._add(_COMPUTE_NS, step_ns)

    def record_prompt(self, tokens: int, waited_ns: int) -> None:
        """One prompt that has got a slot, after so long."""
        with self._lock:
            self._counters[_INFERENCES] += 1
            self._counters[_PROMPT_TOKENS] += tokens
            self._add(_QUEUE_NS, waited_ns)

    def record_first_token(self, times: RequestTimes) -> None:
        """The first token of an answer; called just before it is sent."""
        with self._lock:
            self._add(_FIRST_TOKEN_NS, time.perf_counter_ns() - times.start_ns)
        if times.trace is not None:
            times.trace.first_token()

    def record_success(self, times: RequestTimes) -> None:
        """One answered request; called just before its answer is sent, so that its sender finds it counted."""
        total_ns = time.perf_counter_ns() - times.start_ns
        counters = self._counters
        with self._lock:
            counters[_RECEIVE_NS] += times.receive_ns
            counters[_DECODE_NS] += times.decode_ns
            counters[_ENCODE_NS] += times.encode_ns
            self._add(_REQUEST_NS, total_ns)
        if times.trace is not None:
            times.trace.answered(times.receive_ns, times.decode_ns, times.encode_ns)

    def record_failure(self, reason: str, times: RequestTimes) -> None:
        """One request that was refused or failed; `reason` is one of `FAILURE_REASONS`."""
        with self._lock:
            self._counters[_FAILED_NS] += time.perf_counter_ns() - times.start_ns
            self._counters[_FAILURE_PLACES[reason]] += 1
        if times.trace is not None:
            times.trace.failed(reason)

    def record_disconnect(self, times: RequestTimes | None = None) -> None:
        """One client that left before its answer; neither a success nor a failure."""
        with self._lock:
            self._counters[_DISCONNECTS] += 1
        if times is not None and times.trace is not None:
            times.trace.failed("disconnected")

    def record_unrecorded(self, count: int) -> None:
        """So many bytes of connections were not shown to the recorder."""
        with self._lock:
            self._counters[_UNRECORDED_BYTES] += count

    def set_queued(self, count: int) -> None:
        """So many requests wait for the engine."""
        self._counters[_QUEUED] = count

    def set_slots_in_use(self, count: int) -> None:
        """So many requests are being generated."""
        self._counters[_SLOTS_IN_USE] = count

    def set_decoding(self, count: int) -> None:
        """The images of so many requests are being decoded."""
        self._counters[_DECODING] = count

    def snapshot(self) -> Counters:
        width = row_width(self._max_batch_size)
        rows = [row[:width].tolist() for row in self._rows]
        sums = rows[0] if len(rows) == 1 else [sum(values) for values in zip(*rows, strict=True)]
        sums[_LAST_MS] = max(row[_LAST_MS] for row in rows)
        batches: dict[int, Sequence[int]] = {}
        for number in range(1, self._max_batch_size + 1):
            place = _BATCHES + 4 * (number - 1)
            if sums[place]:
                batches[number] = sums[place : place + 4]
        return Counters(
            self._max_batch_size,
            **dict(zip(_SCALARS, sums[:_FAILURES], strict=True)),
            failures=dict(zip(FAILURE_REASONS, sums[_FAILURES:_HISTOGRAMS], strict=True)),
            compute=sums[_COMPUTE:_BATCHES],
            batches=batches,
            request_duration=_histogram(sums, _REQUEST_NS),
            queue_duration=_histogram(sums, _QUEUE_NS),
            compute_duration=_histogram(sums, _COMPUTE_NS),
            first_token=_histogram(sums, _FIRST_TOKEN_NS),
        )

    def _add(self, histogram: int, value_ns: int, count: int = 1) -> None:
        counters = self._counters
        counters[histogram + bisect_left(DURATION_BOUNDS_NS, value_ns)] += count
        counters[histogram + _HISTOGRAM_WIDTH - 1] += value_ns * count


def _histogram(counters: Sequence[int], place: int) -> Histogram:
    *counts, total = counters[place : place + _HISTOGRAM_WIDTH]
    return Histogram(DURATION_BOUNDS_NS, total, counts)


def _compute(counters: Sequence[int]) -> Times:
    count, *parts_ns = counters
    names = ("compute_input", "compute_infer", "compute_output")
    return {name: _duration(count, ns) for name, ns in zip(names, parts_ns, strict=True)}


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
