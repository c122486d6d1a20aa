"""What the server has done so far, in monotone counters: Triton's statistics, stages of a request, and histograms.

Times are ns. As in Triton, each request of a merged batch is charged the whole batch's compute time, and the batch
appears once in `batch_stats`. Warm-up is not counted.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from copy import copy
from dataclasses import dataclass, field

from servers.native.errors import FAILURE_REASONS

DURATION_BOUNDS_NS = tuple(round(10 ** (4.5 + step / 12)) for step in range(75))
"""Upper bounds from 32 µs to 47 s, twelve per decade: neighbours differ by 21 %, so that a quantile is useful."""

Times = dict[str, dict[str, int]]


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, not cumulated; the last bucket has no upper bound. `total` is the sum of all values."""

    bounds: tuple[int, ...] = DURATION_BOUNDS_NS
    total: int = 0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: int, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        other = copy(self)
        other.counts = list(self.counts)
        return other


@dataclass(slots=True)
class BatchTimes:
    """The three parts of executing, of one batch size or of all requests."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, count: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Charge one batch's times to each of `count` requests or batches."""
        self.count += count
        self.input_ns += input_ns * count
        self.infer_ns += infer_ns * count
        self.output_ns += output_ns * count

    def as_json(self) -> Times:
        return {
            "compute_input": _duration(self.count, self.input_ns),
            "compute_infer": _duration(self.count, self.infer_ns),
            "compute_output": _duration(self.count, self.output_ns),
        }


@dataclass(slots=True)
class RequestTimes:
    """The stages of one request outside the batcher; `receive_ns` is None over gRPC, which gets only whole requests."""

    start_ns: int
    receive_ns: int | None = 0
    decode_ns: int = 0
    encode_ns: int = 0


@dataclass(slots=True)
class Counters:
    """All counters of one model at one moment; durations of requests are of answered ones."""

    max_batch_size: int
    last_inference_ms: int = 0
    inference_count: int = 0
    received: int = 0
    receive_ns: int = 0
    decode_ns: int = 0
    encode_ns: int = 0
    failed_ns: int = 0
    disconnects: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURE_REASONS, 0))
    compute: BatchTimes = field(default_factory=BatchTimes)
    batches: dict[int, BatchTimes] = field(default_factory=dict)
    request_duration: Histogram = field(default_factory=Histogram)
    queue_duration: Histogram = field(default_factory=Histogram)
    compute_duration: Histogram = field(default_factory=Histogram)

    @property
    def batch_size(self) -> Histogram:
        sizes = Histogram(tuple(range(1, self.max_batch_size + 1)))
        for rows, times in self.batches.items():
            sizes.add(rows, times.count)
        return sizes

    @property
    def stages(self) -> Times:
        """The latency breakdown of answered requests."""
        answered, compute = self.request_duration.count, self.compute
        return {
            "receive": _duration(self.received, self.receive_ns),
            "decode": _duration(answered, self.decode_ns),
            "queue": _duration(self.queue_duration.count, self.queue_duration.total),
            "compute": _duration(compute.count, compute.input_ns + compute.infer_ns + compute.output_ns),
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
            "execution_count": sum(times.count for times in self.batches.values()),
            "inference_stats": {
                "success": _duration(self.request_duration.count, self.request_duration.total),
                "fail": _duration(sum(self.failures.values()), self.failed_ns),
                "queue": stages["queue"],
                **self.compute.as_json(),
                "cache_hit": _duration(0, 0),
                "cache_miss": _duration(0, 0),
            },
            "response_stats": {},
            "batch_stats": [{"batch_size": rows, **times.as_json()} for rows, times in sorted(self.batches.items())],
            "memory_usage": [],
            "abserve_stages": stages,
        }


class Statistics:
    """The counters of one model, written by the front ends and the engine thread; each call locks briefly."""

    def __init__(self, max_batch_size: int) -> None:
        self._lock = threading.Lock()
        self._counters = Counters(max_batch_size)

    def record_execution(
        self, rows: int, queue_ns: list[int], compute_input_ns: int, compute_infer_ns: int, compute_output_ns: int
    ) -> None:
        """One executed batch; `queue_ns` holds each of its requests' time in the queue."""
        counters = self._counters
        with self._lock:
            counters.last_inference_ms = time.time_ns() // 1_000_000
            counters.inference_count += rows
            batch = counters.batches.get(rows)
            if batch is None:
                batch = counters.batches[rows] = BatchTimes()
            batch.add(1, compute_input_ns, compute_infer_ns, compute_output_ns)
            counters.compute.add(len(queue_ns), compute_input_ns, compute_infer_ns, compute_output_ns)
            for waited_ns in queue_ns:
                counters.queue_duration.add(waited_ns)
            counters.compute_duration.add(compute_input_ns + compute_infer_ns + compute_output_ns)

    def record_success(self, times: RequestTimes) -> None:
        """One answered request; called just before its answer is sent, so that its sender finds it counted."""
        total_ns = time.perf_counter_ns() - times.start_ns
        counters = self._counters
        with self._lock:
            if times.receive_ns is not None:
                counters.received += 1
                counters.receive_ns += times.receive_ns
            counters.decode_ns += times.decode_ns
            counters.encode_ns += times.encode_ns
            counters.request_duration.add(total_ns)

    def record_failure(self, reason: str, start_ns: int) -> None:
        """One request that was refused or failed; `reason` is one of `FAILURE_REASONS`."""
        with self._lock:
            self._counters.failed_ns += time.perf_counter_ns() - start_ns
            self._counters.failures[reason] += 1

    def record_disconnect(self) -> None:
        """One client that left before its answer; neither a success nor a failure."""
        with self._lock:
            self._counters.disconnects += 1

    def snapshot(self) -> Counters:
        with self._lock:  # not deepcopy, which takes 0.2 ms
            now = copy(self._counters)
            now.failures = dict(now.failures)
            now.compute = copy(now.compute)
            now.batches = {rows: copy(times) for rows, times in now.batches.items()}
            for histogram in ("request_duration", "queue_duration", "compute_duration"):
                setattr(now, histogram, getattr(now, histogram).copy())
        return now


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
