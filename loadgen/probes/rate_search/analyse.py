"""From the stored trials of a run to one result per search and per ramp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from loadgen.experiment.arrivals import RATE_LIMIT_PER_S
from loadgen.metrics.facts import Facts
from loadgen.probes.rate_search.records import RampFound, RampRung, RateFound, RatesFound, Trial
from loadgen.probes.rate_search.search import RateSearch, is_saturated, knee
from loadgen.records.run import Workload
from loadgen.records.samples import NS_PER_S

BUSY = 0.9
"""Share of a core above which the generator may have been the limit."""


def search_from(workload: Workload, start: float) -> RateSearch:
    """The search of a workload: at the lowest rate a trial takes the workload's `max_seconds`."""
    return RateSearch(start, lowest=workload.requests / workload.max_seconds, highest=RATE_LIMIT_PER_S)


def analyse(facts: Facts) -> RatesFound:
    """The stored trials and their results."""
    workloads, trials = facts.run.experiment.workloads, facts.run.trials
    return RatesFound(trials=trials, rates=find_rates(workloads, trials), ramps=find_ramps(workloads, trials))


def find_rates(workloads: Sequence[Workload], trials: Sequence[Trial]) -> tuple[RateFound, ...]:
    """Find one result per search, in the order in which they began, finished or not."""
    return tuple(
        _rate(workload, own) for workload in workloads if workload.scenario == "slo" for own in _runs(workload, trials)
    )


def find_ramps(workloads: Sequence[Workload], trials: Sequence[Trial]) -> tuple[RampFound, ...]:
    """Find one result per ramp, in the order in which they began, finished or not."""
    return tuple(
        _ramp(workload, own) for workload in workloads if workload.scenario == "ramp" for own in _runs(workload, trials)
    )


def _runs(workload: Workload, trials: Sequence[Trial]) -> Iterator[list[Trial]]:
    """The trials of each round and arm, in their order."""
    own = sorted((t for t in trials if t.workload == workload.name), key=lambda t: (t.round, t.position, t.step))
    for _, together in groupby(own, key=lambda t: (t.round, t.label)):
        yield list(together)


def _rate(workload: Workload, trials: list[Trial]) -> RateFound:
    """Replays the search: whether it ended, and how, follows from the trials that held."""
    first = trials[0]
    search = search_from(workload, first.rate_per_s or 1.0)
    for trial in trials:
        if trial.held is None or search.next_rate is None:
            break
        search.record(trial.held)
    return RateFound(
        workload=workload.name,
        round=first.round,
        restart=first.restart,
        label=first.label,
        bound_ms=workload.latency_bound_ms or 0.0,
        rate_per_s=search.held if search.ended is not None else None,
        failed_rate_per_s=search.failed,
        ended=search.ended,
        client_limited=any(_busy(t) for t in trials if t.held is False and t.rate_per_s == search.failed),
        trials=len(trials),
        seconds=sum(trial.window_end_ns - trial.window_start_ns for trial in trials) / NS_PER_S,
    )


def _ramp(workload: Workload, trials: list[Trial]) -> RampFound:
    first = trials[0]
    usable = [trial for trial in trials if trial.throughput_per_s is not None and trial.note is None]
    rungs = tuple(map(rung_of, usable))
    bend = knee(rungs)
    best = max(usable, key=lambda trial: trial.throughput_per_s or 0.0, default=None)
    ended = is_saturated(rungs) or (bool(rungs) and rungs[-1].concurrency >= workload.concurrency)
    return RampFound(
        workload=workload.name,
        round=first.round,
        restart=first.restart,
        label=first.label,
        rungs=rungs,
        saturation_per_s=best.throughput_per_s if best is not None and ended else None,
        knee_concurrency=bend.concurrency if bend is not None and ended else None,
        saturated=is_saturated(rungs),
        client_limited=best is not None and _busy(best),
    )


def rung_of(trial: Trial) -> RampRung:
    """The figures of a ramp's step."""
    return RampRung(
        concurrency=trial.concurrency,
        throughput_per_s=trial.throughput_per_s or 0.0,
        p50_ms=trial.p50_ms,
        p99_ms=trial.p99_ms,
    )


def _busy(trial: Trial) -> bool:
    return (trial.generator_cpu_share or 0.0) > BUSY
