"""Checks on the load: whether what was measured is the servers' doing or the load generator's, and was alike to
every arm.

Searches and ramps are asked the same as loads, of the trials that decided what they came to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from loadgen.comparison.claims import join
from loadgen.comparison.facts import CellFacts, Facts, cell_scope
from loadgen.comparison.summaries import BlockSummary
from loadgen.quantities import number, share
from loadgen.records.machine import CEILING_SHARE_LIMIT, ceiling_images_per_s
from loadgen.records.run import Cell, Label, shown
from loadgen.result.checks.registry import Outcome, check
from loadgen.statistics.ratios import critical_t
from loadgen.studies.rate_search.analyse import BUSY
from loadgen.studies.rate_search.records import RatesFound

SEND_LAG_LIMIT = 0.02
CONNECTION_WAIT_LIMIT = 0.02
RECONNECT_LIMIT = 0.01
"""Of an arm's requests: from one in a hundred on, connecting again decides the p99."""
SEARCH_WAIT_LIMIT = 0.1
"""Of the latency bound, for p99 of the wait to be sent at the rate found."""
WARM_UP_LIMIT = 0.03
WARM_UP_BLOCKS = 3
WARM_UP_SIGNIFICANCE = 0.001
"""A run asks this of every scenario and of every arm."""
UNKNOWN_CPU = "its CPU time is unknown"


@check(
    title="the load generator was not the limit",
    severity="invalidates",
    unknown="invalidates",
    remedy="Client-limited: lower the concurrency, choose a smaller payload, or run the generator on another machine.",
)
def generator_cpu(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        shares = [block.generator_cpu_share for block in load.blocks if block.generator_cpu_share is not None]
        who = "the busiest of its processes" if any(block.generator_processes > 1 for block in load.blocks) else "it"
        if not shares:
            yield Outcome(None, UNKNOWN_CPU, None, BUSY, load.scope)
            continue
        highest = max(shares)
        detail = f"{who} used {share(highest)} of a core at most"
        yield Outcome(highest <= BUSY, detail, highest, BUSY, load.scope)
    for cell in facts.run.experiment.cells:
        if cell.scenario == "slo":
            yield _busy_in_search(facts, cell)
        elif cell.scenario == "ramp":
            yield _busy_in_ramp(facts, cell)


def _busy_in_search(facts: Facts, cell: Cell) -> Outcome:
    """A rate that failed while the generator was busy may be one that the server holds."""
    found = [rate for rate in facts.of(RatesFound).rates if rate.cell == cell.name]
    deciding = [
        trial.generator_cpu_share or 0.0
        for trial in facts.run.trials
        for one in found
        if (trial.cell, one.round, one.label) == (cell.name, trial.round, trial.label)
        and trial.rate_per_s == one.failed_rate_per_s
    ]
    return _busy(cell, any(one.client_limited for one in found), deciding, "the lowest rate that failed")


def _busy_in_ramp(facts: Facts, cell: Cell) -> Outcome:
    ramps = [ramp for ramp in facts.of(RatesFound).ramps if ramp.cell == cell.name]
    best = {
        (ramp.round, ramp.label): max(ramp.rungs, key=lambda rung: rung.throughput_per_s).concurrency
        for ramp in ramps
        if ramp.rungs
    }
    deciding = [
        trial.generator_cpu_share or 0.0
        for trial in facts.run.trials
        if trial.cell == cell.name and best.get((trial.round, trial.label)) == trial.concurrency
    ]
    return _busy(cell, any(ramp.client_limited for ramp in ramps), deciding, "the best rung")


def _busy(cell: Cell, limited: bool, deciding: Sequence[float], where: str) -> Outcome:
    if not deciding:
        return Outcome(None, UNKNOWN_CPU, None, BUSY, cell_scope(cell.name))
    highest = max(deciding)
    return Outcome(not limited, f"it used {share(highest)} of a core at {where}", highest, BUSY, cell_scope(cell.name))


@check(
    title="the load generator was far from its ceiling",
    severity="warns",
    remedy="Above half of its ceiling the generator adds to what it measures: spread it with --processes, or measure "
    "the ceiling with `abserve calibrate`.",
)
def generator_ceiling(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        speeds = [(one.label, one.throughput_per_s) for one in load.summaries if one.throughput_per_s]
        yield _ceiling(facts, load.cell, speeds, "was asked for")
    for cell in facts.run.experiment.cells:
        if cell.scenario == "slo":
            rates = [
                (one.label, one.rate_per_s)
                for one in facts.of(RatesFound).rates
                if one.cell == cell.name and one.rate_per_s
            ]
            yield _ceiling(facts, cell, rates, "reached")
        elif cell.scenario == "ramp":
            best = [(one.label, one.saturation_per_s) for one in facts.of(RatesFound).ramps if one.cell == cell.name]
            yield _ceiling(facts, cell, [(label, speed) for label, speed in best if speed], "reached")


def _ceiling(facts: Facts, cell: Cell, speeds: Sequence[tuple[Label, float]], verb: str) -> Outcome:
    """Against the most that this generator can ask for on this machine, as `abserve calibrate` measured it."""
    experiment, calibration, scope = facts.run.experiment, facts.run.calibration, cell_scope(cell.name)
    if calibration is None:
        return Outcome(None, "no calibration of this machine", None, CEILING_SHARE_LIMIT, scope)
    measured = []
    for label, speed in speeds:
        payload = experiment.payload_of(experiment.arm(label))
        ceiling = ceiling_images_per_s(
            calibration, experiment.transport, payload, cell.batch_size, experiment.processes
        )
        if ceiling:
            measured.append((speed / ceiling, label, speed, ceiling))
    if not measured:
        return Outcome(None, "the calibration has no such cell", None, CEILING_SHARE_LIMIT, scope)
    used, label, speed, ceiling = max(measured, key=lambda one: one[0])
    detail = (
        f"{shown(label)} {verb} {number(speed)} images/s, {share(used)} of the {number(ceiling)} that the generator "
        "was calibrated for"
    )
    return Outcome(used <= CEILING_SHARE_LIMIT, detail, used, CEILING_SHARE_LIMIT, scope)


@check(
    title="requests left when they were due",
    severity="invalidates",
    unknown="warns",
    remedy="Client-limited: lower the rate or give the load generator a core of its own.",
)
def send_lag(facts: Facts) -> Iterator[Outcome]:
    """p99 of the generator's own lag over p99 of the latency; with too few samples for a p99 the largest lag over the
    mean latency, which is more, so that it can clear the generator and not convict it."""
    for load in facts.loads:
        lags = [(*_own_lag(block), block.latency) for block in load.blocks]
        exact = [p99 / latency.p99_ms for p99, _, latency in lags if p99 is not None and latency.p99_ms]
        bounds = [
            largest / latency.mean_ms
            for _, largest, latency in lags
            if largest is not None and latency.mean_ms and not latency.p99_ms
        ]
        worst = max(exact + bounds, default=None)
        if worst is None:
            yield Outcome(None, "no sample", None, SEND_LAG_LIMIT, load.scope)
            continue
        ok: bool | None = worst <= SEND_LAG_LIMIT
        if not ok and max(exact, default=0.0) <= SEND_LAG_LIMIT:
            ok = None
        if exact and worst == max(exact):
            detail = f"p99 of the lag is {share(worst)} of p99 of the latency"
        else:
            detail = f"the largest lag is {share(worst)} of the mean latency"
        yield Outcome(ok, detail, worst, SEND_LAG_LIMIT, load.scope)


def _own_lag(block: BlockSummary) -> tuple[float | None, float | None]:
    """(p99, largest) of what the generator was late by itself, in ms: without the wait for a busy connection, which is
    the server's doing."""
    if block.open_loop is not None:
        return block.open_loop.generator_lag_p99_ms, block.open_loop.generator_lag_max_ms
    return block.send_lag_p99_ms, block.send_lag_max_ms


@check(
    title="a connection was free for every request",
    severity="warns",
    remedy="Allow more --connections; where the arm does not sustain the rate, every number of them is too small.",
)
def connections_free(facts: Facts) -> Iterator[Outcome]:
    """A request that waits for a connection adds nothing to the server's queue, as it would from its own client."""
    for load in facts.loads:
        if load.cell.is_open:
            yield _waits_in_load(load)
    for cell in facts.run.experiment.cells:
        if cell.scenario == "slo":
            yield _waits_in_search(facts, cell)


def _waits_in_load(load: CellFacts) -> Outcome:
    loops = [(block.open_loop, block.latency) for block in load.blocks if block.open_loop is not None]
    waits = [
        (loop.connection_wait_p99_ms, latency.p99_ms)
        if loop.connection_wait_p99_ms is not None and latency.p99_ms
        else (loop.connection_wait_max_ms, latency.mean_ms)
        for loop, latency in loops
    ]
    shares = [wait / latency for wait, latency in waits if wait is not None and latency]
    if not shares:
        return Outcome(None, "no sample", None, CONNECTION_WAIT_LIMIT, load.scope)
    longest = max(loop.connection_wait_max_ms or 0.0 for loop, _ in loops)
    detail = f"the longest wait for one of {load.cell.concurrency} was {number(longest)} ms"
    return Outcome(max(shares) <= CONNECTION_WAIT_LIMIT, detail, max(shares), CONNECTION_WAIT_LIMIT, load.scope)


def _waits_in_search(facts: Facts, cell: Cell) -> Outcome:
    """At the rates found; the wait counts as latency all the same."""
    lags = [
        trial.send_lag_p99_ms
        for trial in facts.run.trials
        for one in facts.of(RatesFound).rates
        if trial.cell == one.cell == cell.name
        and (one.round, one.label, one.rate_per_s) == (trial.round, trial.label, trial.rate_per_s)
        and trial.held
        and trial.send_lag_p99_ms is not None
    ]
    scope = cell_scope(cell.name)
    if not lags:
        return Outcome(None, "no trial has requests enough for a p99", None, SEARCH_WAIT_LIMIT, scope)
    longest, of_bound = max(lags), max(lags) / (cell.latency_bound_ms or 1.0)
    detail = (
        f"at the rates found, p99 of the wait to be sent was {number(longest)} ms at most, {share(of_bound)} of the "
        f"bound, with {cell.concurrency} connections"
    )
    return Outcome(of_bound <= SEARCH_WAIT_LIMIT, detail, of_bound, SEARCH_WAIT_LIMIT, scope)


@check(
    title="the servers kept their connections open",
    severity="warns",
    remedy="Turn keep-alive on, or raise its limit of requests: that server's latency includes connecting again.",
)
def connections_kept(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        shares = {shown(s.label): s.reconnect_share for s in load.summaries if s.reconnect_share is not None}
        if not shares:
            yield Outcome(None, "it was not recorded", None, RECONNECT_LIMIT, load.scope)
            continue
        told = ", ".join(f"{share(value)} of those to {label}" for label, value in shares.items())
        detail = f"requests that had to connect again, inside their latency: {told}"
        worst = max(shares.values())
        yield Outcome(worst <= RECONNECT_LIMIT, detail, worst, RECONNECT_LIMIT, load.scope)


@check(
    title="the arms sustained the rate",
    severity="informs",
    remedy="This is a result and no fault: compare latencies at a lower rate, and capacity by the achieved rate.",
)
def rate_sustained(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        if not load.cell.is_open:
            continue
        loops = [(s.label, s.open_loop) for s in load.summaries if s.open_loop is not None]
        saturated = [f"{shown(label)} was {loop.saturation}" for label, loop in loops if loop.saturation]
        worst = min((loop.answered_share for _, loop in loops), default=None)
        detail = "no sample" if worst is None else f"{share(worst, 3)} was answered before the last request was due"
        ok = None if worst is None else not saturated
        yield Outcome(ok, "; ".join(saturated) or detail, worst, "no growing backlog", load.scope)


@check(
    title="the servers were warm",
    severity="invalidates",
    remedy="Warm the batch size up for longer: the first requests of a block are slower than the rest.",
)
def warm_up(facts: Facts) -> Iterator[Outcome]:
    """One observation per block: requests that are under way together are slow together. Both the limit and the noise
    (a one-sided t test over an arm's blocks) must be exceeded."""
    for load in facts.loads:
        costs: dict[str, tuple[float, float]] = {}
        for label in facts.run.experiment.labels:
            lost = [
                block.warm_up_share
                for block in load.blocks
                if block.label == label and block.complete and block.warm_up_share is not None
            ]
            if len(lost) >= WARM_UP_BLOCKS:
                error = float(np.std(lost, ddof=1)) / float(np.sqrt(len(lost)))
                costs[label] = float(np.mean(lost)), critical_t(len(lost) - 1, 2.0 * WARM_UP_SIGNIFICANCE) * error
        if not costs:
            detail = f"this takes {WARM_UP_BLOCKS} blocks of 20 requests on an arm"
            if load.cell.is_open:
                detail = "requests of an open loop queue behind each other, which looks the same"
            yield Outcome(None, detail, None, WARM_UP_LIMIT, load.scope)
            continue
        worst = max(costs, key=lambda label: costs[label][0] - costs[label][1])
        cost, noise = costs[worst]
        noisy = f", within the noise of {share(noise)} between blocks" if WARM_UP_LIMIT < cost <= noise else ""
        detail = f"slow first requests cost {shown(worst)} {share(max(cost, 0.0))} of its time{noisy}"
        yield Outcome(cost <= max(WARM_UP_LIMIT, noise), detail, cost, WARM_UP_LIMIT, load.scope)


@check(
    title="the arms got requests of the same size",
    severity="invalidates",
    unknown="warns",
    remedy="Send the same payload to every arm; with different ones this is not a comparison of servers.",
)
def same_payload_bytes(facts: Facts) -> Iterator[Outcome]:
    limit, labels = "1 % or 512 bytes", facts.run.experiment.labels
    for load in facts.loads:
        sizes = {s.label: s.request_bytes for s in load.summaries if s.request_bytes is not None}
        if len(sizes) < len(labels):
            yield Outcome(None, "not every arm answered", None, limit, load.scope)
            continue
        apart = max(sizes.values()) - min(sizes.values())
        told = join([f"{size:,.0f} bytes to {shown(label)}" for label, size in sizes.items()])
        ok = apart <= max(512.0, 0.01 * sizes[labels[0]])
        yield Outcome(ok, f"a request is {told}", apart, limit, load.scope)
