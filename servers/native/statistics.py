"""What the server has done so far, in monotone counters: Triton's statistics, our stages, and histograms.

Times are ns. As in Triton, each request of a merged batch is charged the whole batch's compute time, and the batch
itself appears once in `batch_stats`. Warm-up is not counted. One lock guards all; every call holds it for microseconds.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field

from servers.native.errors import FAILURE_REASONS

DURATION_BOUNDS_NS = tuple(round(10 ** (4.5 + step / 12)) for step in range(75))
"""Upper bounds from 32 µs to 47 s, twelve a decade: neighbours differ by 21 %, so that a quantile means something."""

Times = dict[str, dict[str, int]]


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, not cumulated; the last bucket has no upper bound. `total` is the sum of all values."""

    bounds: tuple[int, ...]
    counts: list[int] = field(default_factory=list)
    total: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: int, times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """A snapshot that later values do not change."""
        snapshot = Histogram(self.bounds)
        snapshot.counts = list(self.counts)
        snapshot.total = self.total
        return snapshot


@dataclass(slots=True)
class BatchTimes:
    """The three parts of executing, of one batch size or of all requests."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, count: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Charge one batch's times to each of `count` happenings."""
        self.count += count
        self.input_ns += input_ns * count
        self.infer_ns += infer_ns * count
        self.output_ns += output_ns * count

    @property
    def total_ns(self) -> int:
        """All three together."""
        return self.input_ns + self.infer_ns + self.output_ns

    def as_json(self) -> Times:
        """Triton's shape."""
        return {
            "compute_input": _duration(self.count, self.input_ns),
            "compute_infer": _duration(self.count, self.infer_ns),
            "compute_output": _duration(self.count, self.output_ns),
        }


@dataclass(slots=True)
class RequestTimes:
    """The stages of one request, filled in as it passes; the batcher accounts for queue and compute.

    `receive_ns` is None over gRPC, which only shows complete requests.
    """

    start_ns: int
    receive_ns: int | None = 0
    decode_ns: int = 0
    encode_ns: int = 0


class Statistics:
    """One served model. Written by the front ends and by the engine thread, read by anyone."""

    def __init__(self, max_batch_size: int) -> None:
        self._lock = threading.Lock()
        self._last_inference_ms = 0
        self._inference_count = 0
        self._answered_ns = self._decode_ns = self._encode_ns = 0
        self._received = self._receive_ns = 0
        self._failed = self._fail_ns = 0
        self._compute = BatchTimes()
        self._batches: dict[int, BatchTimes] = {}
        self._failures = dict.fromkeys(FAILURE_REASONS, 0)
        self._disconnects = 0
        self._request_duration = Histogram(DURATION_BOUNDS_NS)
        self._queue_duration = Histogram(DURATION_BOUNDS_NS)
        self._compute_duration = Histogram(DURATION_BOUNDS_NS)
        self._max_batch_size = max_batch_size

    def record_execution(
        self,
        rows: int,
        queue_ns: list[int],
        compute_input_ns: int,
        compute_infer_ns: int,
        compute_output_ns: int,
    ) -> None:
        """One executed batch; `queue_ns` holds each of its requests' time in the queue."""
        compute_ns = compute_input_ns + compute_infer_ns + compute_output_ns
        with self._lock:  # plain lists and sums: this runs for every batch, and an idle engine's batches are small
            self._last_inference_ms = time.time_ns() // 1_000_000
            self._inference_count += rows
            batch = self._batches.get(rows)
            if batch is None:
                batch = self._batches[rows] = BatchTimes()
            batch.add(1, compute_input_ns, compute_infer_ns, compute_output_ns)
            self._compute.add(len(queue_ns), compute_input_ns, compute_infer_ns, compute_output_ns)
            for waited_ns in queue_ns:
                self._queue_duration.add(waited_ns)
            self._compute_duration.add(compute_ns)

    def record_success(self, times: RequestTimes) -> None:
        """One answered request; called just before its answer is sent, so that its sender finds it counted."""
        total_ns = time.perf_counter_ns() - times.start_ns
        with self._lock:
            self._answered_ns += total_ns
            if times.receive_ns is not None:
                self._received += 1
                self._receive_ns += times.receive_ns
            self._decode_ns += times.decode_ns
            self._encode_ns += times.encode_ns
            self._request_duration.add(total_ns)

    def record_failure(self, reason: str, start_ns: int) -> None:
        """One request that was turned away or failed; `reason` is one of `FAILURE_REASONS`."""
        with self._lock:
            self._failed += 1
            self._fail_ns += time.perf_counter_ns() - start_ns
            self._failures[reason] += 1

    def record_disconnect(self) -> None:
        """One client that left before its answer; neither a success nor a failure."""
        with self._lock:
            self._disconnects += 1

    def snapshot(self) -> Snapshot:
        """Everything at one moment."""
        with self._lock:
            answered = self._request_duration.count
            stages = {
                "receive": _duration(self._received, self._receive_ns),
                "decode": _duration(answered, self._decode_ns),
                "queue": _duration(self._queue_duration.count, self._queue_duration.total),
                "compute": _duration(self._compute.count, self._compute.total_ns),
                "encode": _duration(answered, self._encode_ns),
            }
            batch_size = Histogram(tuple(range(1, self._max_batch_size + 1)))
            for rows, times in self._batches.items():
                batch_size.add(rows, times.count)
            return Snapshot(
                last_inference_ms=self._last_inference_ms,
                inference_count=self._inference_count,
                execution_count=batch_size.count,
                success=_duration(answered, self._answered_ns),
                fail=_duration(self._failed, self._fail_ns),
                compute=self._compute.as_json(),
                stages=stages,
                batches={size: times.as_json() for size, times in sorted(self._batches.items())},
                failures=dict(self._failures),
                disconnects=self._disconnects,
                request_duration=self._request_duration.copy(),
                queue_duration=self._queue_duration.copy(),
                compute_duration=self._compute_duration.copy(),
                batch_size=batch_size,
            )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters at one moment, for the statistics route and for the metrics."""

    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: dict[str, int]
    fail: dict[str, int]
    compute: Times
    stages: Times
    batches: dict[int, Times]
    failures: dict[str, int]
    disconnects: int
    request_duration: Histogram
    queue_duration: Histogram
    compute_duration: Histogram
    batch_size: Histogram

    def as_model_stats(self, name: str, version: str) -> dict[str, object]:
        """One element of Triton's `model_stats`, with `abserve_stages` added."""
        none = _duration(0, 0)
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": self.success,
                "fail": self.fail,
                "queue": self.stages["queue"],
                **self.compute,
                "cache_hit": none,
                "cache_miss": none,
            },
            "response_stats": {},
            "batch_stats": [{"batch_size": size, **times} for size, times in self.batches.items()],
            "memory_usage": [],
            "abserve_stages": self.stages,
        }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
