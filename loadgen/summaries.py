"""What each block and each cell of an arm measured, from raw samples; nothing here compares arms.

Throughput. A closed loop of N users that ends after a number of requests has a tail: the users stop one by one, and
the last requests run at less than the asked-for load. Items divided by the time up to the last answer then charges
the tail to the server, and more so to the arm with the more variable latency. The window used here is the time of
full load: from the first intended start until the first user retires, that is the earliest of the users' last
answers. A request that straddles its end counts by the share of its life inside the window. For constant latencies,
for batches that finish together and for one user this is exact; for N independent users its relative bias is about
CV²/2 · N/n (renewal theory; CV of the latencies, n requests), where items up to the last answer are off by the
longest remaining latency: see `tests/truth` for both, side by side.

Latency counts from the intended start to the last byte, of good answers only; failed requests are counted apart and
invalidate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.percentiles import distribution, percentile
from loadgen.records import Label, Record
from loadgen.samples import SAMPLE_DTYPE, Samples
from loadgen.statistics import geometric_mean, interval_of_mean
from loadgen.stored_run import StoredBlock

NS_PER_MS = 1e6
NS_PER_S = 1e9


class LatencySummary(Record, frozen=True, kw_only=True):
    """Milliseconds from the intended start to the last byte; None where a percentile has too few samples."""

    samples: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    p99_9_ms: float | None


class BlockSummary(Record, frozen=True, kw_only=True):
    """One block, reduced to numbers; the unit of replication."""

    index: int
    cell: str
    pair: int
    label: Label
    position: int
    start_s: float
    """Since the run's first request."""
    duration_s: float
    complete: bool
    requests: int
    errors: int
    items: int
    """In good answers."""
    throughput_per_s: float | None
    """Items a second of full load."""
    full_load_share: float | None
    """The share of the block, up to its last answer, that was at full load."""
    latency: LatencySummary
    send_lag_p99_ms: float | None
    """How much later than the schedule wanted requests left; 0 in a closed loop."""
    send_lag_max_ms: float | None
    warm_up_share: float | None
    """Time lost to slow first requests as a share of the block's user time; see `warm_up_cost`."""
    warm_up_error_share: float | None
    """Standard error of `warm_up_share` by the noise of the other requests."""
    generator_cpu_share: float | None
    """Of one core."""
    server_cpu_cores: float | None
    """Mean number of cores that the server kept busy."""
    request_bytes: float | None
    response_bytes: float | None
    """Medians on the wire, a request."""
    note: str | None
    restart: int = 0
    """During which start of the servers, from 0."""


class CellSummary(Record, frozen=True, kw_only=True):
    """One arm in one cell: all complete blocks together."""

    cell: str
    label: Label
    blocks: int
    requests: int
    errors: int
    throughput_per_s: float | None
    """Geometric mean of the blocks."""
    throughput_ci95: tuple[float, float] | None
    latency: LatencySummary
    p50_ci95_ms: tuple[float, float] | None
    generator_cpu_share_max: float | None
    server_cpu_cores: float | None
    request_bytes: float | None
    response_bytes: float | None
    executed_batches: dict[int, int]
    """Executed batch size → executions."""
    executed_batch_mean: float | None
    distribution_ms: tuple[tuple[float, float], ...]
    """Latency and the share of requests that took at most that long, for drawing."""
    payload_bytes: float | None = None
    """Bytes of tensors in a request: the mean over the prepared bodies, which take turns. Part of `request_bytes`,
    except where they go through shared memory."""


def good(samples: Samples) -> Samples:
    """Those that were answered without an error."""
    return samples[samples["error"] < 0]


def latencies_ms(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """From the intended start to the last byte, of the given samples."""
    return np.asarray((samples["end_ns"] - samples["intended_ns"]) / NS_PER_MS, dtype=np.float64)


def full_load_window(samples: Samples) -> tuple[int, int]:
    """(start, end) in ns of the time during which every user had a request under way; see the module's text.

    `samples` is not empty and includes failed requests: a user that failed and went on was still under load.
    """
    users, places = np.unique(samples["user"], return_inverse=True)
    retired = np.zeros(len(users), dtype=np.int64)
    np.maximum.at(retired, places, samples["end_ns"])
    return int(samples["intended_ns"].min()), int(retired.min())


def throughput_per_s(samples: Samples) -> float | None:
    """Items a second in the full-load window, from good answers; a straddling request counts by its share inside."""
    if len(samples) == 0:
        return None
    start, end = full_load_window(samples)
    answered = good(samples)
    if end <= start or len(answered) == 0:
        return None
    life = np.maximum(answered["end_ns"] - answered["intended_ns"], 1)
    inside = np.minimum(answered["end_ns"], end) - np.maximum(answered["intended_ns"], start)
    items = float(np.sum(answered["batch"] * np.clip(inside / life, 0.0, 1.0)))
    return items / ((end - start) / NS_PER_S) if items > 0.0 else None


def warm_up_cost(samples: Samples) -> tuple[float, float] | None:
    """How much of a block's user time its first requests lost against the mean of the others, with its standard error.

    Sum over the first max(users, 5) requests of (latency − mean of the rest), over users × duration. This is the
    relative error that missing warm-up can have put into the throughput. The error is of that sum if the first
    requests were like the rest and all independent. None with fewer than 20 good answers.
    """
    answered = np.sort(good(samples), order="intended_ns")
    users = len(np.unique(answered["user"]))
    first = max(users, 5)
    if len(answered) < max(20, 2 * first):
        return None
    latency = latencies_ms(answered)
    rest = latency[first:]
    duration_ms = (int(answered["end_ns"].max()) - int(answered["intended_ns"].min())) / NS_PER_MS
    if duration_ms <= 0.0:
        return None
    error_ms = float(np.std(rest, ddof=1)) * float(np.sqrt(first * (1.0 + first / len(rest))))
    return float(np.sum(latency[:first] - np.mean(rest))) / (users * duration_ms), error_ms / (users * duration_ms)


def summarise_latency(values_ms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> LatencySummary:
    """Percentiles of latencies in ms."""
    return LatencySummary(
        samples=len(values_ms),
        mean_ms=float(np.mean(values_ms)) if len(values_ms) else None,
        p50_ms=percentile(values_ms, 0.50),
        p90_ms=percentile(values_ms, 0.90),
        p95_ms=percentile(values_ms, 0.95),
        p99_ms=percentile(values_ms, 0.99),
        p99_9_ms=percentile(values_ms, 0.999),
    )


def summarise_blocks(blocks: Sequence[StoredBlock]) -> tuple[BlockSummary, ...]:
    """One summary a block, in the order in which they ran; blocks without readable samples keep their counts."""
    origin_ns = min((block.record.window_start_ns for block in blocks), default=0)
    return tuple(_summarise_block(block, origin_ns) for block in blocks)


def _summarise_block(block: StoredBlock, origin_ns: int) -> BlockSummary:
    record = block.record
    samples = block.samples if block.samples is not None and len(block.samples) else None
    window_ns = record.window_end_ns - record.window_start_ns
    full_load = lag = largest_lag = warm = None
    start_s = max(record.window_start_ns - origin_ns, 0) / NS_PER_S
    duration_s = window_ns / NS_PER_S
    if samples is not None:
        begin, end = full_load_window(samples)
        last = int(samples["end_ns"].max())
        start_s, duration_s = (begin - origin_ns) / NS_PER_S, (last - begin) / NS_PER_S
        full_load = (end - begin) / (last - begin) if last > begin else None
        lags_ms = (samples["send_ns"] - samples["intended_ns"]) / NS_PER_MS
        lag, largest_lag = percentile(lags_ms, 0.99), float(lags_ms.max())
        warm = warm_up_cost(samples)
    answered = good(samples) if samples is not None else None
    return BlockSummary(
        index=record.index,
        cell=record.cell,
        pair=record.pair,
        label=record.label,
        position=record.position,
        start_s=start_s,
        duration_s=duration_s,
        complete=record.complete and block.problem is None,
        requests=record.requests,
        errors=record.errors,
        items=int(answered["batch"].sum()) if answered is not None else 0,
        throughput_per_s=throughput_per_s(samples) if samples is not None else None,
        full_load_share=full_load,
        latency=summarise_latency(latencies_ms(answered) if answered is not None else np.empty(0)),
        send_lag_p99_ms=lag,
        send_lag_max_ms=largest_lag,
        warm_up_share=warm[0] if warm else None,
        warm_up_error_share=warm[1] if warm else None,
        generator_cpu_share=record.generator_cpu_ns / window_ns if window_ns > 0 else None,
        server_cpu_cores=record.server_cpu_ns / window_ns
        if record.server_cpu_ns is not None and window_ns > 0
        else None,
        request_bytes=float(np.median(answered["request_bytes"])) if answered is not None and len(answered) else None,
        response_bytes=float(np.median(answered["response_bytes"])) if answered is not None and len(answered) else None,
        note=record.note or block.problem,
        restart=record.restart,
    )


def summarise_cell(
    cell: str, label: Label, blocks: Sequence[StoredBlock], summaries: Sequence[BlockSummary]
) -> CellSummary:
    """Pool the complete blocks of one arm in one cell; `blocks` and `summaries` belong together, in order."""
    chosen = [
        (block, summary)
        for block, summary in zip(blocks, summaries, strict=True)
        if summary.cell == cell and summary.label == label and summary.complete
    ]
    parts = [good(block.samples) for block, _ in chosen if block.samples is not None]
    pooled = np.concatenate(parts) if parts else np.empty(0, dtype=SAMPLE_DTYPE)
    latency = latencies_ms(pooled)
    speeds = [summary.throughput_per_s for _, summary in chosen if summary.throughput_per_s]
    medians = [summary.latency.p50_ms for _, summary in chosen if summary.latency.p50_ms]
    batches: dict[int, int] = {}
    for block, _ in chosen:
        for size, count in (block.record.stages.batches if block.record.stages else {}).items():
            batches[size] = batches.get(size, 0) + count
    executions = sum(block.record.stages.executions for block, _ in chosen if block.record.stages)
    executed = sum(block.record.stages.items for block, _ in chosen if block.record.stages)
    cpu = [summary.generator_cpu_share for _, summary in chosen if summary.generator_cpu_share is not None]
    cores = [summary.server_cpu_cores for _, summary in chosen if summary.server_cpu_cores is not None]
    return CellSummary(
        cell=cell,
        label=label,
        blocks=len(chosen),
        requests=sum(summary.requests for _, summary in chosen),
        errors=sum(summary.errors for _, summary in chosen),
        throughput_per_s=geometric_mean(speeds) if speeds else None,
        throughput_ci95=interval_of_mean(speeds),
        latency=summarise_latency(latency),
        p50_ci95_ms=interval_of_mean(medians),
        generator_cpu_share_max=max(cpu, default=None),
        server_cpu_cores=float(np.mean(cores)) if cores else None,
        request_bytes=_request_bytes(chosen),
        response_bytes=float(np.median(pooled["response_bytes"])) if len(pooled) else None,
        executed_batches=dict(sorted(batches.items())),
        executed_batch_mean=executed / executions if executions else None,
        distribution_ms=distribution(latency),
        payload_bytes=_payload_bytes(chosen),
    )


def _payload_bytes(chosen: Sequence[tuple[StoredBlock, BlockSummary]]) -> float | None:
    bodies = [size for block, _ in chosen for size in block.record.body_payload_bytes]
    return float(np.mean(bodies)) if bodies else None


def _request_bytes(chosen: Sequence[tuple[StoredBlock, BlockSummary]]) -> float | None:
    """The median over all requests. Where bodies differ in size (JPEG files), it depends on how often each was sent;
    so there it is the median of what is no payload, and the payload's mean."""
    sizes, varies = [], False
    for block, _ in chosen:
        answered = good(block.samples) if block.samples is not None else np.empty(0, dtype=SAMPLE_DTYPE)
        payload = np.array(block.record.body_payload_bytes, dtype=np.float64)
        on_wire = block.record.transport != "shm" and len(set(block.record.body_payload_bytes)) > 1
        varies |= on_wire
        wire = answered["request_bytes"].astype(np.float64)
        sizes.append(wire - payload[answered["body"]] if on_wire else wire)
    pooled = np.concatenate(sizes) if sizes else np.empty(0)
    if not len(pooled):
        return None
    return float(np.median(pooled)) + ((_payload_bytes(chosen) or 0.0) if varies else 0.0)
