"""Rate search: finds the highest rate within a latency bound on servers that are up.

A search consists of trials whose rate earlier trials decide, each stored at once. Arms alternate as in blocks: a pair
is one search on each arm, one after the other in an order that is drawn and balanced. A search tries rates on a lattice
of factors, so every search starts from a rate drawn around a first guess: the lattice then adds noise to a found rate
and no bias.
"""

from __future__ import annotations

from itertools import count, groupby
from pathlib import Path
from random import Random
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from loadgen.base.quantities import number
from loadgen.experiment.language import GOOD_SHARE
from loadgen.experiment.schedule import ScheduledBlock, arrival_count, closed_loop, schedule_seed, search_schedule
from loadgen.findings.rate_search import RatesFound, Trial, analyse, search_from
from loadgen.findings.registry import Probe
from loadgen.measure.arms import replay_of
from loadgen.measure.errors import RunError
from loadgen.measure.machine import utc_now
from loadgen.metrics.registry import measured_answers
from loadgen.metrics.tokens import meets_limits, with_tokens
from loadgen.records.run import Experiment, Label, Workload
from loadgen.records.samples import NS_PER_MS, NS_PER_S, Samples, latencies_ms, read_samples
from loadgen.records.tokens import read_tokens
from loadgen.records.traffic import TrafficError
from loadgen.stats.percentiles import late_allowed, percentile, queries_needed

if TYPE_CHECKING:
    from loadgen.measure.arms import Arm
    from loadgen.measure.context import RunContext

WARM_UP_USERS = 16
_PILOT_SECONDS = 0.5
_PILOT_REQUESTS = 12


def wanted(experiment: Experiment) -> bool:
    """Whether any search is requested."""
    return bool(search_schedule(experiment))


def measure(context: RunContext) -> None:
    """Run the searches of this start of the servers, in order. Raises `RunError`, `StorageError`."""
    schedule = search_schedule(context.experiment)
    to_come = [entry.workload for entry in schedule if entry.restart >= context.restart and entry.position == 0]
    planned = [entry for entry in schedule if entry.restart == context.restart]
    took: dict[str, list[float]] = {}
    rates: dict[tuple[str, Label], float] = {}
    """The rates found at this start of the servers."""
    context.forecast.before_load_s = 0.0
    for (workload, _), pair in groupby(planned, key=lambda entry: (entry.workload, entry.round)):
        entries, began = list(pair), monotonic()
        held = f"within {workload.limits}" if workload.limits else f"with p99 ≤ {workload.latency_bound_ms:g} ms"
        context.enter(f"searching for the highest rate {held}")
        users = min(workload.concurrency, WARM_UP_USERS)
        context.load_runner().warm_up([closed_loop(users, 1, max_seconds=workload.max_seconds, of=workload)])
        for entry in entries:
            key = workload.name, entry.label
            rate = search_rate(context, entry, rates.get(key))
            if rate is not None:
                rates[key] = rate
        to_come.remove(workload)
        took.setdefault(workload.name, []).append(monotonic() - began)
        durations = [seconds for many in took.values() for seconds in many]
        context.forecast.searches_s = sum(fmean(took.get(left.name, durations)) for left in to_come)
        context.progress.plan(context.forecast.remaining_s())


def search_rate(context: RunContext, entry: ScheduledBlock, earlier_rate: float | None) -> float | None:
    """Search for the highest rate that holds the workload's bound on an arm that is up and warm; every trial is stored.
    Returns the rate in requests per second, None if none held. `earlier_rate`: the rate that an earlier search found on
    this arm. Raises `RunError`, `StorageError`."""
    random = Random(f"{context.experiment.seed} {entry.workload.name} {entry.round} {entry.label}")
    # Start below a rate already found, so that it can fail again; else around the rate of one user.
    guess = _pilot(context, entry) if earlier_rate is None else earlier_rate / 2.0**0.5
    search = search_from(entry.workload, guess * 2.0 ** (random.random() - 0.5))
    for step in count():
        if search.next_rate is None:
            break
        search.record(_rate_trial(context, entry, step, search.next_rate))
    return search.held


def _pilot(context: RunContext, entry: ScheduledBlock) -> float:
    """Measure the requests per second of one user; not stored. Raises `RunError`."""
    title = f"a single user of {entry.workload.name} on {context.arms[entry.label].name}"
    load = closed_loop(1, _PILOT_REQUESTS, seconds=_PILOT_SECONDS, max_seconds=30.0, of=entry.workload)
    rate = context.load_runner(watched=False).unstored(title, entry.label, load).requests_per_s
    if rate is None:
        raise RunError(f"{title} gets no answers", entry.label)
    return rate


def _rate_trial(context: RunContext, entry: ScheduledBlock, step: int, rate: float) -> bool:
    """One trial of a search, stored: enough requests for the bound at this rate, ended when it cannot hold. Returns
    whether it held."""
    workload, arm = entry.workload, context.arms[entry.label]
    quantile = 0.99 if workload.limits is None else GOOD_SHARE
    needed_s = max(workload.seconds, workload.requests / rate)
    longest_s = 2.0 * needed_s
    load = msgspec.structs.replace(workload, rate_per_s=rate, max_seconds=longest_s)
    seed = schedule_seed(context.experiment.seed, workload.name, 1000 * entry.round + step)
    planned = arrival_count(rate, workload.requests, workload.seconds, longest_s)
    if workload.traffic is not None and workload.rate_per_s:
        seed = schedule_seed(context.experiment.seed, workload.name, entry.round)  # trials of one part of the traffic
        speed = rate / workload.rate_per_s
        load, planned = _replayed(arm, msgspec.structs.replace(load, speed=speed, seconds=needed_s), seed)
    allowed = late_allowed(planned, quantile)
    if allowed is None:
        needed = queries_needed(0, quantile)
        raise RunError(
            f"{workload.name}: {planned} requests are too few for a share of {quantile:.0%}; a trial needs at least "
            f"{needed}"
        )
    context.progress.now(f"{arm.name} at {number(rate)}/s: {planned:,} requests, of which {allowed} may be late")
    return _run_trial(context, entry, step, load, seed, planned, allowed).held


def _replayed(arm: Arm, load: Workload, seed: int) -> tuple[Workload, int]:
    """A trial that replays so much of the recorded traffic that its requests are enough, and how many they are. Raises
    `RunError`."""
    while True:
        replay = replay_of(load, arm.transport)
        assert replay is not None
        try:
            planned = len(replay.window(seed)[1])
            if planned >= min(load.requests, len(replay.requests())):
                return load, planned
        except TrafficError as exc:
            raise RunError(str(exc)) from exc
        load = msgspec.structs.replace(load, seconds=1.5 * load.seconds, max_seconds=1.5 * load.max_seconds)


def _run_trial(
    context: RunContext, entry: ScheduledBlock, step: int, load: Workload, seed: int, planned: int, allowed: int
) -> Trial:
    """Run and store one trial of `planned` requests, of which `allowed` may be late. Raises `StorageError`, and
    `RunError` if anything but late answers cut it short."""
    arm, (index, path) = context.arms[entry.label], context.store.next_numbered(Trial)
    command = arm.load(load, path, arrivals_seed=seed, late_allowed=allowed)
    runner = context.load_runner(watched=False)
    started_at = utc_now()
    outcome = runner.load(arm, entry, command, index, "trial")
    samples = read_samples(path)
    answered = measured_answers(samples, is_open=True)
    waited_ms = latencies_ms(answered)
    unsent = max((outcome.offered or 0) - outcome.requests, 0) if outcome.cut_reason is None else 0
    late = unsent + (outcome.late if load.limits is None else _bad(samples, path, load))
    trial = runner.record(
        Trial,
        entry,
        started_at,
        outcome,
        index=index,
        step=step,
        concurrency=load.concurrency,
        samples=f"{Trial.FILE}/{path.name}",
        generator_processes=max(1, len(outcome.workers)),
        throughput_per_s=len(answered) / max((outcome.window_end_ns - outcome.window_start_ns) / NS_PER_S, 1e-9),
        p50_ms=percentile(waited_ms, 0.5),
        p99_ms=percentile(waited_ms, 0.99),
        send_lag_p99_ms=percentile((samples["send_ns"] - samples["intended_ns"]) / NS_PER_MS, 0.99),
        rate_per_s=load.rate_per_s,
        planned=planned,
        late=late,
        late_allowed=allowed,
        held=late <= allowed and outcome.cut_reason is None,
        note=None if late > allowed else outcome.cut_reason,
    )
    context.store.write_numbered(trial, index)
    runner.require_whole(arm, entry, outcome, context.store.directory / trial.samples, trial.note)
    return trial


def _bad(samples: Samples, path: Path, load: Workload) -> int:
    """How many answers are not good: failed, short, or outside the limits."""
    tokens = read_tokens(path)
    return int((~meets_limits(with_tokens(samples, tokens.events, tokens.answers), load.limits)).sum())


PROBE = Probe(
    wanted=wanted,
    measure=measure,
    finding=RatesFound,
    analyse=analyse,
    sections="loadgen.report.sections.rate_search",
)
