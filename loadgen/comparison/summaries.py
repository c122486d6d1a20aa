"""What each block, and each arm in each workload, measured, from raw samples; nothing here compares arms.

In a closed loop throughput and latency are those at full load; in an open loop every request counts, and throughput is
the rate of the responses (see `loadgen.comparison.loops`). Latency counts from the intended start to the last byte of
good responses; failed requests are counted separately and invalidate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.comparison.loops import (
    OpenLoop,
    full_load_share,
    measured_answers,
    pool_open_loops,
    slow_start,
    summarise_open_loop,
    throughput_per_s,
)
from loadgen.comparison.stages import contradictions_in
from loadgen.records.run import BlockRecord, Label, Record
from loadgen.records.samples import NS_PER_MS, NS_PER_S, SAMPLE_DTYPE, Samples, good, latencies_ms
from loadgen.statistics.percentiles import distribution, percentile
from loadgen.statistics.ratios import geometric_mean, interval_of_mean
from loadgen.storage.stored_run import StoredBlock


class LatencySummary(Record, frozen=True, kw_only=True):
    """Milliseconds from the intended start to the last byte; None if a percentile has too few samples."""

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
    round: int
    label: Label
    position: int
    start_s: float
    """Since the run's first request."""
    duration_s: float
    complete: bool
    requests: int
    errors: int
    items: int
    """In good responses."""
    throughput_per_s: float | None
    """Items per second at full load."""
    full_load_share: float | None
    """The share of the block that the figures come from."""
    latency: LatencySummary
    send_lag_p99_ms: float | None
    """Delay of sending a request after it was due; 0 in a closed loop."""
    send_lag_max_ms: float | None
    warm_up_share: float | None
    """Share of the block's counted time that slow first requests cost; see `slow_start`."""
    generator_cpu_share: float | None
    """Of one core; with several generator processes the busiest one's."""
    server_cpu_cores: float | None
    """Mean number of cores that the server kept busy."""
    request_bytes: float | None
    response_bytes: float | None
    """Medians on the wire, per request."""
    note: str | None
    restart: int = 0
    """During which start of the servers, from 0."""
    send_lag_p50_ms: float | None = None
    open_loop: OpenLoop | None = None
    """Of an open loop, whose `throughput_per_s` is the rate of the responses."""
    generator_processes: int = 1
    first_answer_ms: float | None = None
    """From the start of a connection to its first response, before the block; the median over the users."""
    reconnects: int | None = None
    """Requests that had to reconnect because the server had closed the connection, as part of their latency."""


class CellSummary(Record, frozen=True, kw_only=True):
    """One arm in one workload: all complete blocks together."""

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
    """Bytes of tensors in a request: the mean over the prepared bodies. Part of `request_bytes`, unless they go through
    shared memory."""
    open_loop: OpenLoop | None = None
    first_answer_ms: float | None = None
    """From the start of a connection to its first response, before a block: the median over the blocks. Not included in
    the other figures."""
    reconnect_share: float | None = None
    """Share of the requests that had to reconnect because the server had closed the connection."""


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
    """One summary per block, in the order in which they ran; blocks without readable samples keep their counts."""
    origin_ns = min((block.record.window_start_ns for block in blocks), default=0)
    return tuple(_summarise_block(block, origin_ns) for block in blocks)


def _summarise_block(block: StoredBlock, origin_ns: int) -> BlockSummary:
    record = block.record
    samples = block.samples if block.samples is not None and len(block.samples) else None
    window_ns = record.window_end_ns - record.window_start_ns
    share = lag = median_lag = largest_lag = warm = throughput = open_loop = None
    start_s = max(record.window_start_ns - origin_ns, 0) / NS_PER_S
    duration_s = window_ns / NS_PER_S
    if samples is not None:
        begin, last = int(samples["intended_ns"].min()), int(samples["end_ns"].max())
        start_s, duration_s = (begin - origin_ns) / NS_PER_S, (last - begin) / NS_PER_S
        lags_ms = (samples["send_ns"] - samples["intended_ns"]) / NS_PER_MS
        median_lag, lag, largest_lag = percentile(lags_ms, 0.5), percentile(lags_ms, 0.99), float(lags_ms.max())
        if record.offered is not None and record.due_span_ns is not None:
            # Requests of an open loop queue behind each other: a busy start does not mean that warm-up is missing.
            open_loop = summarise_open_loop(samples, record.offered, record.due_span_ns, block.cell.concurrency)
            throughput = None if open_loop.achieved_per_s is None else open_loop.achieved_per_s * block.cell.batch_size
        else:
            share, throughput, warm = full_load_share(samples), throughput_per_s(samples), slow_start(samples)
    answered = good(samples) if samples is not None else None
    measured = measured_samples(block)
    return BlockSummary(
        index=record.index,
        cell=record.cell,
        round=record.round,
        label=record.label,
        position=record.position,
        start_s=start_s,
        duration_s=duration_s,
        complete=record.complete and block.problem is None,
        requests=record.requests,
        errors=record.errors,
        items=int(answered["batch"].sum()) if answered is not None else 0,
        throughput_per_s=throughput,
        full_load_share=share,
        latency=summarise_latency(latencies_ms(measured)),
        send_lag_p99_ms=lag,
        send_lag_max_ms=largest_lag,
        warm_up_share=warm,
        generator_cpu_share=_generator_cpu_share(record),
        server_cpu_cores=record.server_cpu_ns / window_ns
        if record.server_cpu_ns is not None and window_ns > 0
        else None,
        request_bytes=float(np.median(answered["request_bytes"])) if answered is not None and len(answered) else None,
        response_bytes=float(np.median(answered["response_bytes"])) if answered is not None and len(answered) else None,
        note=record.note or block.problem,
        restart=record.restart,
        send_lag_p50_ms=median_lag,
        open_loop=open_loop,
        first_answer_ms=None if record.first_answer_ns is None else record.first_answer_ns / NS_PER_MS,
        generator_processes=max(len(record.workers), 1),
        reconnects=record.reconnects,
    )


def measured_samples(block: StoredBlock) -> Samples:
    """`measured_answers` of a block; empty if its samples are missing."""
    if block.samples is None:
        return np.empty(0, dtype=SAMPLE_DTYPE)
    return measured_answers(block.samples, is_open=block.cell.is_open)


def _generator_cpu_share(record: BlockRecord) -> float | None:
    """Of one core; with several processes, the busiest one's."""
    shares = [
        worker.cpu_ns / (worker.window_end_ns - worker.window_start_ns)
        for worker in record.workers
        if worker.lost is None and worker.window_end_ns > worker.window_start_ns
    ]
    if record.workers:
        return max(shares, default=None)
    window_ns = record.window_end_ns - record.window_start_ns
    return record.generator_cpu_ns / window_ns if window_ns > 0 else None


def summarise_cell(
    cell: str, label: Label, blocks: Sequence[StoredBlock], summaries: Sequence[BlockSummary]
) -> CellSummary:
    """Pool the complete blocks of one arm in one workload; `blocks` and `summaries` are in the same order."""
    chosen = [
        (block, summary)
        for block, summary in zip(blocks, summaries, strict=True)
        if summary.cell == cell and summary.label == label and summary.complete
    ]
    parts = [measured_samples(block) for block, _ in chosen]
    pooled = np.concatenate(parts) if parts else np.empty(0, dtype=SAMPLE_DTYPE)
    latency = latencies_ms(pooled)
    speeds = [summary.throughput_per_s for _, summary in chosen if summary.throughput_per_s]
    medians = [summary.latency.p50_ms for _, summary in chosen if summary.latency.p50_ms]
    told = [block.record.stages for block, _ in chosen if block.record.stages and not contradictions_in(block)]
    batches: dict[int, int] = {}
    for stages in told:
        for size, count in stages.batches.items():
            batches[size] = batches.get(size, 0) + count
    counted = [(one.items, one.executions) for one in told if one.items is not None and one.executions is not None]
    executed, executions = sum(items for items, _ in counted), sum(times for _, times in counted)
    kept = [(summary.reconnects, summary.requests) for _, summary in chosen if summary.reconnects is not None]
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
        first_answer_ms=_median([s.first_answer_ms for _, s in chosen if s.first_answer_ms is not None]),
        open_loop=pool_open_loops([summary.open_loop for _, summary in chosen if summary.open_loop is not None]),
        reconnect_share=sum(times for times, _ in kept) / max(sum(sent for _, sent in kept), 1) if kept else None,
    )


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _payload_bytes(chosen: Sequence[tuple[StoredBlock, BlockSummary]]) -> float | None:
    bodies = [size for block, _ in chosen for size in block.record.body_payload_bytes]
    return float(np.mean(bodies)) if bodies else None


def _request_bytes(chosen: Sequence[tuple[StoredBlock, BlockSummary]]) -> float | None:
    """The median over all requests. If bodies differ in size (JPEG files) it would depend on how often each was sent,
    so then it is the median without the payload plus the mean payload."""
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
