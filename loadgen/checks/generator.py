"""Checks of the load: the figures are the servers' and not the load generator's, and every arm got the same load.

Searches are checked like blocks, by the trials that decided their value.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from loadgen.base.quantities import join, number, per_second, share
from loadgen.checks.registry import Judgement, check, late_severity, per_load, per_load_or_search
from loadgen.findings.rate_search import BUSY, RatesFound, Trial
from loadgen.metrics.facts import Facts, WorkloadFacts
from loadgen.metrics.registry import CHUNK_SIZE, OUTPUT_TOKENS, split_lag_ms
from loadgen.metrics.summaries import figure_of
from loadgen.records.checks import Severity
from loadgen.records.machine import CEILING_SHARE_LIMIT, Calibration, ceiling_images_per_s, ceiling_tokens_per_s
from loadgen.records.run import Label, Workload
from loadgen.records.samples import NS_PER_MS
from loadgen.records.targets import Kind
from loadgen.stats.estimates import critical_t
from loadgen.stats.percentiles import Pool, percentile

SEND_LAG_LIMIT = 0.02
REPLAY_LAG_MS = 1.0
"""The p99 of an arm; of few requests the largest lag."""
CONNECTION_WAIT_LIMIT = 0.02
RECONNECT_LIMIT = 0.01
"""Share of an arm's requests that may reconnect: above 1 %, reconnecting decides the p99."""
SEARCH_WAIT_LIMIT = 0.1
"""Share of the latency bound that the p99 of the wait for a connection may take at the rate found."""
WARM_UP_LIMIT = 0.03
WARM_UP_BLOCKS = 3
WARM_UP_SIGNIFICANCE = 0.001
"""p below which slow first requests count; low because a run tests every workload and every arm."""


@check(
    "the load generator had CPU to spare",
    "The load generator had no CPU to spare",
    "invalidates",
    "Lower the concurrency, choose a smaller payload, add --processes, or use another machine for the load generator.",
    unknown="invalidates",
    threshold=BUSY,
    not_known="The load generator's CPU use is not known",
    fault="overloaded load generator",
)
@per_load_or_search
def generator_cpu(load: WorkloadFacts, facts: Facts) -> Judgement:
    """Of a search judge the lowest rate that failed, which the server might have held."""
    if load.workload.is_search:
        shares, limited, where = _busy_in_search(facts, load.workload.name)
    else:
        shares = [block.generator_cpu_share for block in load.blocks if block.generator_cpu_share is not None]
        limited, where = max(shares, default=0.0) > BUSY, "at most"
        if any(block.generator_processes > 1 for block in load.blocks):
            where += ", in one process"
    if not shares:
        return Judgement(None, "the CPU time of the load generator is unknown")
    detail = f"the load generator used {share(max(shares))} of a core {where}"
    if limited:
        detail += ", so it may have limited the arms"
    return Judgement(not limited, detail, max(shares))


def _busy_in_search(facts: Facts, workload: str) -> tuple[list[float], bool, str]:
    """The generator's CPU shares in the trials at that rate, whether it limited the search, and where that was."""
    rates = [rate for rate in facts.of(RatesFound).rates if rate.workload == workload]
    trials = [trial for trial in facts.run.records_of(Trial) if trial.workload == workload]
    deciding = {(rate.round, rate.label): rate.failed_rate_per_s for rate in rates}
    shares = [
        trial.generator_cpu_share
        for trial in trials
        if trial.generator_cpu_share is not None and trial.rate_per_s == deciding.get((trial.round, trial.label))
    ]
    where = "at the lowest rate that failed"
    if any(trial.generator_processes > 1 for trial in trials):
        where += ", on average over its processes"
    return shares, any(rate.client_limited for rate in rates), where


@check(
    "the load generator ran well below its own maximum",
    "The load generator ran near its own maximum",
    "warns",
    "Spread the load generator over more --processes, or use a machine with more cores; `abserve calibrate` measures "
    "its maximum.",
    threshold=CEILING_SHARE_LIMIT,
    fault="overloaded load generator",
)
@per_load_or_search
def generator_ceiling(load: WorkloadFacts, facts: Facts) -> Judgement:
    """Compare with this machine's calibration; above half of the maximum the generator adds to the latencies. Of
    streamed answers compare the chunks: one of several tokens costs about as much as one of a single token. Beyond the
    maximum for them it merges chunks and stamps them late, so the run is invalid."""
    if facts.run.calibration is None:
        return Judgement(None, "this machine is not calibrated")
    if load.workload.kind is Kind.TOKENS and not load.workload.is_search:
        speeds = _chunks_per_s(load, facts, facts.run.calibration)
        return _below_maximum(speeds, facts, "sent", "chunks/s", "receive one by one", beyond="invalidates")
    speeds = _items_per_s(load, facts, facts.run.calibration)
    return _below_maximum(speeds, facts, "reached", per_second(facts.item), "send")


Speeds = Iterable[tuple[Label, float | None, float | None]]
"""By arm what it reached in a second, and what the load generator can."""


def _below_maximum(
    speeds: Speeds, facts: Facts, verb: str, unit: str, can: str, *, beyond: Severity | None = None
) -> Judgement:
    """`beyond`: the severity of more than the maximum."""
    measured = [(speed / most, label, speed, most) for label, speed, most in speeds if speed and most]
    if not measured:
        return Judgement(None, "the calibration does not cover this workload")
    used, label, speed, most = max(measured)
    detail = (
        f"{facts.names[label]} {verb} {number(speed)} {unit}, {share(used)} of the {number(most)}/s that the load "
        f"generator can {can}"
    )
    return Judgement(used <= CEILING_SHARE_LIMIT, detail, used, severity=beyond if used > 1.0 else None)


def _items_per_s(load: WorkloadFacts, facts: Facts, calibration: Calibration) -> Speeds:
    experiment, workload = facts.run.experiment, load.workload
    reached = [(summary.label, summary.throughput_per_s) for summary in load.summaries]
    if workload.is_search:
        rates = facts.of(RatesFound).rates
        reached = [(rate.label, rate.rate_per_s) for rate in rates if rate.workload == workload.name]
    for label, speed in reached:
        payload = experiment.payload_of(experiment.arm(label))
        yield label, speed, ceiling_images_per_s(
            calibration, experiment.transport, payload, workload.batch_size, _processes(load, facts)
        )  # fmt: skip


def _chunks_per_s(load: WorkloadFacts, facts: Facts, calibration: Calibration) -> Speeds:
    experiment = facts.run.experiment
    for summary in load.summaries:
        speed, size = figure_of(summary, OUTPUT_TOKENS), figure_of(summary, CHUNK_SIZE)
        transport = experiment.transport_of(experiment.arm(summary.label))
        most = ceiling_tokens_per_s(calibration, transport, _processes(load, facts))
        yield summary.label, speed / size if speed and size else None, most


def _processes(load: WorkloadFacts, facts: Facts) -> int:
    """The load generator's processes that have users: a user is not shared among several."""
    return max(1, min(facts.run.experiment.processes, load.workload.concurrency))


@check(
    "requests were sent on time",
    "Requests were sent late",
    "invalidates",
    "Lower the rate, or give the load generator a CPU core of its own.",
    unknown="warns",
    threshold=SEND_LAG_LIMIT,
    not_known="The send lag is not known",
    fault="overloaded load generator",
)
@per_load
def send_lag(load: WorkloadFacts, _: Facts) -> Judgement:
    """Judge, of all requests of an arm, p99 of the generator's own lag over p99 of the latency: of many blocks one
    nearly always meets a stall of the machine. With too few samples for a p99, the largest lag over the mean latency,
    which is larger: it can clear the generator, but not fail it. Where others took the cores, a lag is part of what
    they may have taken, since a latency counts from when its request was due."""
    exact, bounds = [], []
    for summary in load.summaries:
        lag_ms, largest_ms = _own_lag(load, summary.label)
        p99_ms, mean_ms = summary.latency_ms("p99"), summary.latency_ms("mean")
        if lag_ms is not None and p99_ms:
            exact.append(lag_ms / p99_ms)
        elif largest_ms is not None and mean_ms:
            bounds.append(largest_ms / mean_ms)
    worst = max(exact + bounds, default=None)
    if worst is None:
        return Judgement(None, "no samples")
    ok: bool | None = worst <= SEND_LAG_LIMIT
    if not ok and max(exact, default=0.0) <= SEND_LAG_LIMIT:
        ok = None
    if exact and worst == max(exact):
        detail = f"the p99 of the load generator's own delay is {share(worst)} of the p99 latency"
    else:
        detail = f"the largest delay of the load generator is {share(worst)} of the mean latency"
    return Judgement(ok, detail, worst, severity=late_severity(ok, load))


@check(
    "the replay kept the recorded times",
    "Recorded requests were sent at other times",
    "invalidates",
    "Give the load generator a CPU core of its own, or replay at a lower --speed.",
    unknown="warns",
    threshold=f"p99 ≤ {REPLAY_LAG_MS:g} ms",
    not_known="When the recorded requests were sent is not known",
    fault="overloaded load generator",
)
@per_load
def replay_on_time(load: WorkloadFacts, _: Facts) -> Judgement | None:
    """Judge the generator's own delay, without the wait for a connection, which the server's answers decide."""
    if load.workload.traffic is None:
        return None
    lags = [_own_lag(load, summary.label) for summary in load.summaries]
    known = [largest if p99 is None else p99 for p99, largest in lags if largest is not None]
    if not known:
        return Judgement(None, "no samples")
    ok = max(known) <= REPLAY_LAG_MS
    detail = f"requests were sent up to {number(max(known))} ms (p99 of an arm) after their recorded time"
    return Judgement(ok, detail, max(known), severity=late_severity(ok, load))


def _own_lag(load: WorkloadFacts, label: Label) -> tuple[float | None, float | None]:
    """(p99, largest) delay of the generator itself in ms over all requests of an arm, without the wait for a busy
    connection."""
    pool = Pool()
    for block in load.stored:
        record, samples = block.record, block.samples
        if record.label == label and record.complete and samples is not None:
            lags_ms = (samples["send_ns"] - samples["intended_ns"]) / NS_PER_MS
            if record.offered is not None and record.due_span_ns is not None:
                lags_ms, _ = split_lag_ms(samples, load.workload.concurrency)
            pool.add(record.index, lags_ms)
    lags_ms = pool.values
    return percentile(lags_ms, 0.99), float(lags_ms.max()) if len(lags_ms) else None


@check(
    "a connection was free for every request",
    "Requests waited for a connection",
    "warns",
    "Allow more --connections; if the arm cannot sustain the rate, no number of them suffices.",
    threshold=CONNECTION_WAIT_LIMIT,
)
@per_load_or_search
def connections_free(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Judge the wait for a connection: a request that waits for one is missing from the server's queue."""
    if load.workload.is_search:
        return _waits_in_search(load.workload, facts)
    loops = [(block, block.open_loop) for block in load.blocks if block.open_loop is not None]
    if not load.workload.is_open:
        return None
    waits = [
        (loop.connection_wait_p99_ms, p99_ms)
        if loop.connection_wait_p99_ms is not None and (p99_ms := block.latency_ms("p99"))
        else (loop.connection_wait_max_ms, block.latency_ms("mean"))
        for block, loop in loops
    ]
    shares = [wait / latency for wait, latency in waits if wait is not None and latency]
    if not shares:
        return Judgement(None, "no samples")
    longest = max(loop.connection_wait_max_ms or 0.0 for _, loop in loops)
    detail = f"requests waited up to {number(longest)} ms for one of {load.workload.concurrency} connections"
    return Judgement(max(shares) <= CONNECTION_WAIT_LIMIT, detail, max(shares))


def _waits_in_search(workload: Workload, facts: Facts) -> Judgement:
    """Judge the wait at the rates found; the latency includes it in any case."""
    rates = {(r.round, r.label, r.rate_per_s) for r in facts.of(RatesFound).rates if r.workload == workload.name}
    lags = [
        trial.send_lag_p99_ms
        for trial in facts.run.records_of(Trial)
        if trial.workload == workload.name
        and (trial.round, trial.label, trial.rate_per_s) in rates
        and trial.held
        and trial.send_lag_p99_ms is not None
    ]
    if not lags:
        return Judgement(None, "no trial has enough requests for a p99", None, SEARCH_WAIT_LIMIT)
    bound_ms = workload.latency_bound_ms if workload.limits is None else workload.limits.ttft_ms
    if not bound_ms:
        return Judgement(None, "the first token has no limit, which alone would include the wait")
    longest, of_bound = max(lags), max(lags) / bound_ms
    detail = (
        f"at the rates found, the p99 of the wait for one of {workload.concurrency} connections was up to "
        f"{number(longest)} ms, {share(of_bound)} of the {bound_ms:g} ms that are allowed"
    )
    return Judgement(of_bound <= SEARCH_WAIT_LIMIT, detail, of_bound, SEARCH_WAIT_LIMIT)


@check(
    "the servers kept their connections open",
    "A server closed its connections",
    "warns",
    "Turn keep-alive on, or raise its limit of requests per connection.",
    threshold=RECONNECT_LIMIT,
)
@per_load
def connections_kept(load: WorkloadFacts, facts: Facts) -> Judgement:
    shares = {facts.names[s.label]: s.reconnect_share for s in load.summaries if s.reconnect_share is not None}
    if not shares:
        return Judgement(None, "reconnects were not recorded")
    worst = max(shares.values())
    detail = join([f"{share(value)} of the requests to {label}" for label, value in shares.items()])
    if worst > RECONNECT_LIMIT:
        return Judgement(False, f"{detail} had to reconnect, which is part of their latency", worst)
    return Judgement(True, f"{detail} had to reconnect", worst)


@check(
    "the arms kept up with the request rate",
    "An arm did not keep up with the request rate",
    "informs",
    "Compare latencies at a lower rate, and capacity by the achieved rate.",
    threshold="no growing backlog",
)
@per_load
def rate_sustained(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    if not load.workload.is_open:
        return None
    loops = [(s.label, s.open_loop) for s in load.summaries if s.open_loop is not None]
    if not loops:
        return Judgement(None, "no samples")
    saturated = [f"{facts.names[label]} was {loop.saturation}" for label, loop in loops if loop.saturation]
    worst = min(loop.answered_share for _, loop in loops)
    detail = f"{share(worst, 3)} of the requests were answered before the last one was due"
    grew = sum(block.open_loop is not None and block.open_loop.saturation is not None for block in load.blocks)
    if grew:
        detail += f"; the backlog grew in {grew} of {len(load.blocks)} blocks, not in most blocks of an arm"
    return Judgement(not saturated, "; ".join(saturated) or detail, worst)


@check(
    "the warm-up was long enough",
    "The warm-up was too short",
    "invalidates",
    "Warm up for longer at this batch size.",
    threshold=WARM_UP_LIMIT,
    fault="incomplete run",
)
@per_load
def warm_up(load: WorkloadFacts, facts: Facts) -> Judgement:
    """Test one value per block, since concurrent requests are slow together. It fails only beyond both the limit and
    the noise (a one-sided t test over an arm's blocks)."""
    names = facts.names
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
    if not costs and load.workload.is_open:
        return Judgement(None, "a queue that builds up in an open loop looks the same")
    if not costs:
        return Judgement(None, f"this needs {WARM_UP_BLOCKS} blocks per arm, each with 20 requests")
    worst = max(costs, key=lambda label: costs[label][0] - costs[label][1])
    cost, noise = costs[worst]
    ok, lost_share = cost <= max(WARM_UP_LIMIT, noise), f"{names[worst]} {share(max(cost, 0.0))} of its throughput"
    if not ok:
        return Judgement(False, f"the warm-up was too short: the first requests were slow and cost {lost_share}", cost)
    noisy = f", within the noise of {share(noise)} between blocks" if cost > WARM_UP_LIMIT else ""
    return Judgement(True, f"the first requests cost {lost_share}{noisy}", cost)


@check(
    "requests have the same size on every arm",
    "Requests differ in size between the arms",
    "invalidates",
    "Send the same payload to every arm.",
    unknown="warns",
    threshold="1 % or 512 bytes",
    fault="unfair configuration",
)
@per_load
def same_payload_bytes(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Skipped where the arms speak different protocols, which another check says."""
    names = facts.names
    experiment, labels = facts.run.experiment, facts.run.experiment.loaded(load.workload)
    if len({experiment.transport_of(arm) for arm in experiment.arms}) > 1:
        return None
    sizes = {s.label: s.request_bytes for s in load.summaries if s.request_bytes is not None}
    if len(sizes) < len(labels):
        return Judgement(None, "not every arm answered")
    apart = max(sizes.values()) - min(sizes.values())
    detail = "a request has " + join([f"{size:,.0f} bytes to {names[label]}" for label, size in sizes.items()])
    if apart > max(512.0, 0.01 * sizes[labels[0]]):
        return Judgement(False, f"{detail}, so the arms do different work", apart)
    return Judgement(True, detail, apart)
