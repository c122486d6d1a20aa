"""Checks on the load generator: whether what was measured is the servers' doing or its own."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.outcome import Check, CheckName, cell_scope, make_check
from loadgen.analysis.summaries import BlockSummary, CellSummary
from loadgen.quantities import number, share
from loadgen.records.calibration import CEILING_SHARE_LIMIT, Calibration, ceiling_images_per_s
from loadgen.records.run import Cell, Experiment

GENERATOR_CPU_LIMIT = 0.90
SEND_LAG_LIMIT = 0.02
CONNECTION_WAIT_LIMIT = 0.02


def check_generator(
    experiment: Experiment,
    calibration: Calibration | None,
    cell: Cell,
    blocks: Sequence[BlockSummary],
    summaries: Sequence[CellSummary],
) -> list[Check]:
    """Of one cell, from its blocks and both arms' summaries; `calibration` is of the machine that sent the load."""
    checks = [
        _generator_cpu(cell, blocks),
        _generator_ceiling(experiment, calibration, cell, summaries),
        _send_lag(cell, blocks),
    ]
    if cell.is_open:
        checks += [_connections(cell, blocks), _rate_sustained(cell, summaries)]
    return checks


def _generator_cpu(cell: Cell, blocks: Sequence[BlockSummary]) -> Check:
    shares = [block.generator_cpu_share for block in blocks if block.generator_cpu_share is not None]
    highest = max(shares, default=None)
    who = "the busiest of its processes" if any(block.generator_processes > 1 for block in blocks) else "it"
    return make_check(
        CheckName.GENERATOR_CPU,
        None if highest is None else highest <= GENERATOR_CPU_LIMIT,
        scope=cell_scope(cell.name),
        value=highest,
        threshold=GENERATOR_CPU_LIMIT,
        detail="its CPU time is unknown" if highest is None else f"{who} used {share(highest)} of a core at most",
    )


def _generator_ceiling(
    experiment: Experiment, calibration: Calibration | None, cell: Cell, summaries: Sequence[CellSummary]
) -> Check:
    """Against the most that this generator can ask for on this machine, as `abserve calibrate` measured it."""
    worst: tuple[float, CellSummary, float] | None = None
    for summary in summaries:
        request = experiment.a if summary.label == "a" else experiment.b
        ceiling = None
        if calibration is not None:
            ceiling = ceiling_images_per_s(
                calibration,
                experiment.transport,
                experiment.payload_of(request),
                cell.batch_size,
                experiment.processes,
            )
        if ceiling and summary.throughput_per_s:
            used = summary.throughput_per_s / ceiling
            worst = max(worst or (used, summary, ceiling), (used, summary, ceiling), key=lambda one: one[0])
    if worst is None:
        detail = "no calibration of this machine" if calibration is None else "the calibration has no such cell"
        return make_check(
            CheckName.GENERATOR_CEILING, None, scope=cell_scope(cell.name), threshold=CEILING_SHARE_LIMIT, detail=detail
        )
    used, summary, ceiling = worst
    return make_check(
        CheckName.GENERATOR_CEILING,
        used <= CEILING_SHARE_LIMIT,
        scope=cell_scope(cell.name),
        value=used,
        threshold=CEILING_SHARE_LIMIT,
        detail=f"{summary.label.upper()} was asked for {number(summary.throughput_per_s or 0.0)} images/s, "
        f"{share(used)} of the {number(ceiling)} that the generator was calibrated for",
    )


def _send_lag(cell: Cell, blocks: Sequence[BlockSummary]) -> Check:
    """p99 of the generator's own lag over p99 of the latency; with too few samples for a p99 the largest lag over the
    mean latency, which is more, so that it can clear the generator and not convict it."""
    lags = [(*_own_lag(block), block.latency) for block in blocks]
    exact = [p99 / latency.p99_ms for p99, _, latency in lags if p99 is not None and latency.p99_ms]
    bounds = [
        largest / latency.mean_ms
        for _, largest, latency in lags
        if largest is not None and latency.mean_ms and not latency.p99_ms
    ]
    worst = max(exact + bounds, default=None)
    ok = None if worst is None else worst <= SEND_LAG_LIMIT
    if ok is False and max(exact, default=0.0) <= SEND_LAG_LIMIT:
        ok = None
    by_p99 = bool(exact) and worst == max(exact)
    return make_check(
        CheckName.SEND_LAG,
        ok,
        scope=cell_scope(cell.name),
        value=worst,
        threshold=SEND_LAG_LIMIT,
        detail="no sample"
        if worst is None
        else f"{'p99 of the lag' if by_p99 else 'the largest lag'} is {share(worst)} of "
        f"{'p99 of the latency' if by_p99 else 'the mean latency'}",
    )


def _own_lag(block: BlockSummary) -> tuple[float | None, float | None]:
    """(p99, largest) of what the generator was late by itself, in ms: without the wait for a busy connection, which is
    the server's doing."""
    if block.open_loop is not None:
        return block.open_loop.generator_lag_p99_ms, block.open_loop.generator_lag_max_ms
    return block.send_lag_p99_ms, block.send_lag_max_ms


def _connections(cell: Cell, blocks: Sequence[BlockSummary]) -> Check:
    """A request that waits for a connection adds nothing to the server's queue, as it would from its own client."""
    waits = [
        (block.open_loop.connection_wait_p99_ms, block.latency.p99_ms)
        if block.open_loop.connection_wait_p99_ms is not None and block.latency.p99_ms
        else (block.open_loop.connection_wait_max_ms, block.latency.mean_ms)
        for block in blocks
        if block.open_loop is not None
    ]
    shares = [wait / latency for wait, latency in waits if wait is not None and latency]
    worst = max(shares, default=None)
    detail = "no sample"
    if worst is not None:
        longest = max(block.open_loop.connection_wait_max_ms or 0.0 for block in blocks if block.open_loop is not None)
        detail = f"the longest wait for one of {cell.concurrency} was {number(longest)} ms"
    return make_check(
        CheckName.CONNECTIONS_FREE,
        None if worst is None else worst <= CONNECTION_WAIT_LIMIT,
        scope=cell_scope(cell.name),
        value=worst,
        threshold=CONNECTION_WAIT_LIMIT,
        detail=detail,
    )


def _rate_sustained(cell: Cell, summaries: Sequence[CellSummary]) -> Check:
    loops = {summary.label: summary.open_loop for summary in summaries if summary.open_loop is not None}
    saturated = [f"{label.upper()} was {loop.saturation}" for label, loop in sorted(loops.items()) if loop.saturation]
    worst = min((loop.answered_share for loop in loops.values()), default=None)
    return make_check(
        CheckName.RATE_SUSTAINED,
        None if worst is None else not saturated,
        scope=cell_scope(cell.name),
        value=worst,
        threshold="no growing backlog",
        detail="; ".join(saturated)
        or ("no sample" if worst is None else f"{share(worst, 3)} was answered before the last request was due"),
    )
