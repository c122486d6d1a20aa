"""Summaries of each block, and of each arm in each workload, from raw samples; nothing here compares arms.

In a closed loop throughput and latency are those at full load; in an open loop every request counts, and throughput is
the rate of the responses (see `loadgen.metrics.registry`). Latency counts from the intended start to the last byte of
good responses; failed requests are counted separately and invalidate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
from msgspec import UNSET, UnsetType

from loadgen.base.quantities import Interval
from loadgen.metrics.barrier import attempt
from loadgen.metrics.breakdown import contradictions_in
from loadgen.metrics.registry import (
    ERRORS,
    METRICS,
    OUTPUT_TOKENS,
    THROUGHPUT,
    Metric,
    OpenLoopSummary,
    PerRequest,
    full_load_share,
    measured_answers,
    pool_open_loops,
    slow_start,
    summarise_open_loop,
)
from loadgen.metrics.tokens import samples_of
from loadgen.records.run import BlockRecord, Label, Record, Workload
from loadgen.records.samples import NS_PER_MS, NS_PER_S, SAMPLE_DTYPE, Samples, good, latencies_ms
from loadgen.records.store import StoredBlock, StoredRunError
from loadgen.records.targets import ROUTES, Kind
from loadgen.stats.percentiles import Pool, distribution, percentile
from loadgen.stats.ratios import interval_of_mean, mean_over_starts

_MOST_NS = 10 * 365 * 86_400 * int(NS_PER_S)
"""Ten years: a longer load is a damaged file."""


class MeasuredFigures(Record, frozen=True, kw_only=True):
    """The figures of a block, or of an arm in a workload, by the names of their metrics."""

    figures: dict[str, float | None]
    samples: int
    """Good responses whose latencies count."""

    @property
    def throughput_per_s(self) -> float | None:
        """Items per second: at full load, in an open loop at the rate of the responses."""
        return self.figures.get(THROUGHPUT.name)

    def latency_ms(self, name: str) -> float | None:
        """From the intended start to the last byte; `name` is mean, p50, p99 …."""
        return self.figures.get(f"latency_{name}")


class BlockSummary(MeasuredFigures, frozen=True, kw_only=True):
    """The figures of one block, the unit of replication."""

    index: int
    workload: str
    round: int
    label: Label
    position: int
    start_s: float
    """Start of the block, since the run's first request."""
    duration_s: float
    complete: bool
    requests: int
    errors: int
    items: int
    """Items in good responses."""
    full_load_share: float | None
    """The share of the block that the figures come from."""
    send_lag_p99_ms: float | None
    """Delay of sending a request after it was due; 0 in a closed loop."""
    send_lag_max_ms: float | None
    warm_up_share: float | None
    """Share of the block's counted time that slow first requests cost; see `slow_start`."""
    generator_cpu_share: float | None
    """Share of one core that sending and receiving took; with several generator processes, that of the busiest one."""
    server_cpu_cores: float | None
    """Mean number of cores that the server kept busy."""
    request_bytes: float | None
    response_bytes: float | None
    """Medians on the wire, per request."""
    note: str | None
    restart: int = 0
    """Index of the server start in which the block ran, from 0."""
    send_lag_p50_ms: float | None = None
    open_loop: OpenLoopSummary | None = None
    """What only an open loop has."""
    generator_processes: int = 1
    first_answer_ms: float | None = None
    """Time from the start of a connection to its first response, before the block; the median over the users."""
    reconnects: int | None = None
    """Requests that had to reconnect because the server had closed the connection; latency includes this."""
    missing: dict[str, str] | UnsetType = UNSET
    """Why a figure is missing, where that is known: "its answers arrive in one piece …"."""


class WorkloadSummary(MeasuredFigures, frozen=True, kw_only=True):
    """The figures of one arm in one workload: of the requests of all complete blocks, or the geometric mean of the
    starts' geometric means of their blocks."""

    workload: str
    label: Label
    blocks: int
    requests: int
    errors: int
    intervals: dict[str, tuple[float, float] | None]
    """The 95 % intervals of the figures that are means over the blocks."""
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
    open_loop: OpenLoopSummary | None = None
    first_answer_ms: float | None = None
    """Time from the start of a connection to its first response, before a block: the median over the blocks. Other
    figures do not include it."""
    reconnect_share: float | None = None
    """Share of the requests that had to reconnect because the server had closed the connection."""
    server_cpu_ms: float | None = None
    """CPU time of the server per request, in ms: over all blocks whose CPU time is known."""


def sound(block: StoredBlock) -> StoredBlock:
    """The block; without its samples, and with the reason, where they cannot be read or cannot have been measured."""
    try:
        fault = _impossible(samples_of(block))
    except StoredRunError as exc:
        fault = str(exc)
    except (ValueError, IndexError) as exc:
        fault = f"samples of block {block.record.index}: {exc}"
    if fault is None:
        return block
    return replace(block, stored=None, stored_events=None, stored_answers=None, problem=block.problem or fault)


def _impossible(samples: Samples | None) -> str | None:
    """What no clock has measured, as of a damaged file."""
    if samples is None or not len(samples):
        return None
    due_ns, send_ns, end_ns = (samples[name] for name in ("intended_ns", "send_ns", "end_ns"))
    if ((due_ns > send_ns) | (send_ns > end_ns)).any() or int(end_ns.max()) - int(due_ns.min()) > _MOST_NS:
        return "the samples of the block hold requests that end before they begin, or years later"
    times_ms = [samples[name] for name in samples.dtype.names or () if name in ("ttft_ms", "tpot_ms", "worst_gap_ms")]
    return (
        "the samples of the block hold tokens that came before their requests"
        if any((ms < 0.0).any() for ms in times_ms)
        else None
    )


def summarise_blocks(blocks: Sequence[StoredBlock]) -> tuple[BlockSummary, ...]:
    """Summarise each block, in the order in which they ran; blocks without readable samples keep their counts."""
    origin_ns = min((block.record.window_start_ns for block in blocks), default=0)

    def without_samples(block: StoredBlock, why: str) -> BlockSummary:
        problem = f"samples of block {block.record.index}: {why}"
        return _summarise_block(replace(block, stored=None, problem=problem), origin_ns)

    return tuple(
        attempt(partial(_summarise_block, block, origin_ns), partial(without_samples, block)) for block in blocks
    )


def _summarise_block(block: StoredBlock, origin_ns: int) -> BlockSummary:
    record, samples = block.record, samples_of(block)
    begin_ns, end_ns = record.window_start_ns, record.window_end_ns
    window_ns = end_ns - begin_ns
    lags_ms, answered = np.empty(0), np.empty(0, dtype=SAMPLE_DTYPE)
    figures: dict[str, tuple[float | None, str | None]] = {}
    counted, share, warm, open_loop = 0, None, None, None
    if samples is not None and len(samples):
        begin_ns, end_ns = int(samples["intended_ns"].min()), int(samples["end_ns"].max())
        lags_ms, answered = (samples["send_ns"] - samples["intended_ns"]) / NS_PER_MS, good(samples)
        measured = measured_answers(samples, is_open=block.workload.is_open)
        counted = len(measured)
        if record.offered is not None and record.due_span_ns is not None:
            # Requests of an open loop queue behind each other: a busy start does not mean that warm-up is missing.
            open_loop = summarise_open_loop(samples, record.offered, record.due_span_ns, block.workload.concurrency)
        elif not block.workload.is_open:
            share, warm = full_load_share(samples), slow_start(samples)
        for metric in _metrics_of(block.workload):
            measure = partial(metric.measure, samples, measured, block.workload)
            figures[metric.name] = attempt(measure, lambda why: (None, f"it could not be computed: {why}"))
    figures[ERRORS.name] = float(record.errors), None
    missing = {name: reason for name, (_, reason) in figures.items() if reason is not None}
    return BlockSummary(
        index=record.index,
        workload=record.workload,
        round=record.round,
        label=record.label,
        position=record.position,
        start_s=max(begin_ns - origin_ns, 0) / NS_PER_S,
        duration_s=(end_ns - begin_ns) / NS_PER_S,
        complete=record.complete and block.problem is None,
        requests=record.requests,
        errors=record.errors,
        items=int(answered["batch"].sum()),
        figures={name: value for name, (value, _) in figures.items()},
        samples=counted,
        full_load_share=share,
        send_lag_p99_ms=percentile(lags_ms, 0.99),
        send_lag_max_ms=float(lags_ms.max()) if len(lags_ms) else None,
        warm_up_share=warm,
        generator_cpu_share=_generator_cpu_share(record),
        server_cpu_cores=None if record.server_cpu_ns is None or window_ns <= 0 else record.server_cpu_ns / window_ns,
        request_bytes=_median(answered["request_bytes"]),
        response_bytes=_median(answered["response_bytes"]),
        note=record.note or block.problem,
        restart=record.restart,
        send_lag_p50_ms=percentile(lags_ms, 0.5),
        open_loop=open_loop,
        first_answer_ms=None if record.first_answer_ns is None else record.first_answer_ns / NS_PER_MS,
        generator_processes=max(len(record.workers), 1),
        reconnects=record.reconnects,
        missing=missing or UNSET,
    )


def _metrics_of(workload: Workload) -> list[Metric]:
    """The metrics that a workload measures from samples."""
    return [metric for metric in METRICS.values() if metric.has_function and metric.measures(workload)]


def figure_of(summary: BlockSummary | WorkloadSummary, metric: Metric) -> float | None:
    """A metric's figure of a block, or of an arm in a workload."""
    return summary.figures.get(metric.name)


def why_missing(blocks: Iterable[BlockSummary], metric: Metric, names: Mapping[Label, str]) -> str | None:
    """Why one of the blocks has no figure, with the arm: "vLLM: its answers arrive in one piece …"; None if no block
    says so."""
    for block in blocks:
        if block.missing and (reason := block.missing.get(metric.name)) is not None:
            return f"{names[block.label]}: {reason}"
    return None


def tokens_per_answer(summary: WorkloadSummary) -> float | None:
    """Output tokens of an answer of a language model, on average; None where none were counted."""
    tokens_per_s = figure_of(summary, OUTPUT_TOKENS)
    return tokens_per_s / summary.throughput_per_s if tokens_per_s and summary.throughput_per_s else None


def items_per_request(
    workload: Workload,
    label: Label,
    workloads: Iterable[Workload],
    summaries: Iterable[WorkloadSummary],
    blocks: Iterable[BlockSummary],
) -> float | None:
    """Items of a request of a workload, of a language model the tokens of its answer. Recorded requests differ: of them
    it is the mean over those that this arm answered in the replays; None without such a replay."""
    if workload.traffic is None:
        return float(workload.output_tokens or workload.batch_size)
    replays = {load.name for load in workloads if load.traffic == workload.traffic and load.has_blocks}
    if workload.kind is Kind.TOKENS:
        means = [tokens_per_answer(s) for s in summaries if s.label == label and s.workload in replays]
        known = [tokens for tokens in means if tokens is not None]
        return fmean(known) if known else None
    own = [block for block in blocks if block.label == label and block.workload in replays]
    answered = sum(block.requests - block.errors for block in own)
    return sum(block.items for block in own) / answered if answered else None


def further_metrics(summaries: Sequence[BlockSummary | WorkloadSummary]) -> list[Metric]:
    """The metrics of these summaries that have no column of their own in a table."""
    names = {name for summary in summaries for name in summary.figures}
    return [metric for metric in METRICS.values() if metric.name in names and not (metric.column or metric.is_count)]


def interval_of(summary: WorkloadSummary, metric: Metric) -> Interval | None:
    """The 95 % interval of that figure, if the summary holds one."""
    return summary.intervals.get(metric.name)


def _median(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.generic]]) -> float | None:
    return float(np.median(np.asarray(values, dtype=np.float64))) if len(values) else None


def _generator_cpu_share(record: BlockRecord) -> float | None:
    """Share of one core that sending and receiving took; with several processes, that of the busiest one. Waiting for
    the moment to send is no limit: there is the less of it, the more there is to do."""
    shares = [
        max(worker.cpu_ns - worker.spin_ns, 0) / (worker.window_end_ns - worker.window_start_ns)
        for worker in record.workers
        if worker.lost is None and worker.window_end_ns > worker.window_start_ns
    ]
    if record.workers:
        return max(shares, default=None)
    window_ns = record.window_end_ns - record.window_start_ns
    return max(record.generator_cpu_ns - record.generator_spin_ns, 0) / window_ns if window_ns > 0 else None


def summarise_workload(
    workload: str, label: Label, blocks: Sequence[StoredBlock], summaries: Sequence[BlockSummary]
) -> WorkloadSummary:
    """Pool the complete blocks of one arm in one workload; `blocks` and `summaries` are in the same order."""
    pairs = zip(blocks, summaries, strict=True)
    chosen = [(b, s) for b, s in pairs if s.workload == workload and s.label == label and s.complete]
    stored, complete = [block for block, _ in chosen], [summary for _, summary in chosen]
    metrics = _metrics_of(stored[0].workload) if stored else []
    functions = (metric.of_requests for metric in metrics if metric.of_requests is not None)
    pools, responses, request_bytes = _pool(stored, (latencies_ms, *functions))
    figures = {metric.name: _figure_of_all(metric, pools, complete) for metric in metrics}
    errors = sum(summary.errors for summary in complete)
    reported = [block.record.stages for block in stored if block.record.stages and not contradictions_in(block)]
    batches: Counter[int] = Counter()
    for stages in reported:
        batches.update(stages.batches)
    counted = [
        (stages.executed_items, stages.executions)
        for stages in reported
        if stages.executed_items is not None and stages.executions is not None
    ]
    executed, executions = sum(items for items, _ in counted), sum(times for _, times in counted)
    reconnects = [(summary.reconnects, summary.requests) for summary in complete if summary.reconnects is not None]
    cores = [summary.server_cpu_cores for summary in complete if summary.server_cpu_cores is not None]
    payloads = [size for block in stored for size in block.record.body_payload_bytes]
    worked = [(b.record.server_cpu_ns, b.record.requests + b.record.cool_down) for b in stored]
    cpu_ns = [(ns, sent) for ns, sent in worked if ns is not None and sent]
    return WorkloadSummary(
        workload=workload,
        label=label,
        blocks=len(chosen),
        requests=sum(summary.requests for summary in complete),
        errors=errors,
        figures={**figures, ERRORS.name: float(errors)},
        intervals=_intervals(metrics, complete),
        samples=pools[latencies_ms].count,
        generator_cpu_share_max=max(
            (s.generator_cpu_share for s in complete if s.generator_cpu_share is not None), default=None
        ),
        server_cpu_cores=float(np.mean(cores)) if cores else None,
        request_bytes=request_bytes,
        response_bytes=_median(responses.values),
        executed_batches=dict(sorted(batches.items())),
        # An execution of a language model's engine is a step of many requests, or a server counts whole answers.
        executed_batch_mean=executed / executions if executions and stored[0].workload.kind is Kind.TENSORS else None,
        distribution_ms=distribution(pools[latencies_ms].values),
        payload_bytes=float(np.mean(payloads)) if payloads else None,
        first_answer_ms=_median([s.first_answer_ms for s in complete if s.first_answer_ms is not None]),
        open_loop=pool_open_loops([summary.open_loop for summary in complete if summary.open_loop is not None]),
        server_cpu_ms=sum(ns for ns, _ in cpu_ns) / sum(sent for _, sent in cpu_ns) / NS_PER_MS if cpu_ns else None,
        reconnect_share=sum(times for times, _ in reconnects) / max(sum(sent for _, sent in reconnects), 1)
        if reconnects
        else None,
    )


def _intervals(metrics: Sequence[Metric], blocks: Sequence[BlockSummary]) -> dict[str, Interval | None]:
    """The intervals of figures that are means over the blocks; None where a block has no figure."""
    intervals: dict[str, Interval | None] = {}
    for metric in metrics:
        if metric.is_averaged or (not metric.column and metric.quantile is None):
            starts = by_start(blocks, metric)
            is_whole = metric.is_averaged or sum(map(len, starts)) == len(blocks)
            intervals[metric.name] = interval_of_mean(starts) if is_whole else None
    return intervals


def by_start(blocks: Sequence[BlockSummary], metric: Metric) -> list[list[float]]:
    """The figures of blocks that have one other than 0, one list per start of the servers."""
    starts: dict[int, list[float]] = {}
    for block in blocks:
        if value := figure_of(block, metric):
            starts.setdefault(block.restart, []).append(value)
    return list(starts.values())


def _figure_of_all(metric: Metric, pools: dict[PerRequest, Pool], blocks: Sequence[BlockSummary]) -> float | None:
    """A figure of all blocks of an arm and workload."""
    if metric.of_requests is not None:
        pool = pools[metric.of_requests]
        return pool.mean if metric.quantile is None else metric.statistic(pool.values)
    values = [value for block in blocks if (value := figure_of(block, metric)) is not None]
    if not all(values):  # such as a block without a good answer
        return float(np.mean(values))
    return mean_over_starts(by_start(blocks, metric)) if values else None


def _pool(
    blocks: Sequence[StoredBlock], functions: Iterable[PerRequest]
) -> tuple[dict[PerRequest, Pool], Pool, float | None]:
    """The values of each function, the bytes of the responses, and the median bytes of a request. If bodies differ in
    size (JPEG files), the median over all requests would depend on how often each was sent, so then it is the median
    without the payload plus the mean payload. Each block is read once."""
    pools = {function: Pool() for function in functions}
    responses, requests, varies = Pool(), Pool(), False
    payloads = [size for block in blocks for size in block.record.body_payload_bytes]
    for block in blocks:
        samples, record = samples_of(block), block.record
        if samples is None:
            continue
        answered, body_bytes = good(samples), np.array(record.body_payload_bytes, dtype=np.float64)
        on_wire = not ROUTES[record.transport].shares_memory and len(set(record.body_payload_bytes)) > 1
        varies |= on_wire
        wire = answered["request_bytes"].astype(np.float64)
        requests.add(record.index, wire - body_bytes[answered["body"]] if on_wire else wire)
        measured = measured_answers(samples, is_open=block.workload.is_open)
        responses.add(record.index, measured["response_bytes"])
        for function, pool in pools.items():
            pool.add(record.index, function(measured))
    middle = _median(requests.values)
    return pools, responses, middle + float(np.mean(payloads)) if middle is not None and varies else middle
