"""Rate searches: their stored trials, the rule that chooses the next trial, and the result of each.

    DIR/trials/NNNN.json   Trial   written when the trial is over, after its samples
    DIR/trials/NNNN.npy    its raw samples; see `loadgen.records.samples`

A trial is a stretch of load at a rate that earlier trials decided. Trials of different arms are not paired; the results
of the searches are compared.

The search looks for the highest rate that holds a bound: doubled while it holds, halved while it does not, then
bisected, as MLPerf's Server scenario finds its score, until the highest rate that held and the lowest that failed are
within the resolution.

A trial may fail because the machine stalls for a moment, and one such trial would cap the whole search far below the
truth. So the lowest rate that failed is tried once more at the end; if it holds then, the search goes on upwards from
there. That happens at most `RETRIES` times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

from loadgen.experiment.schedule import RATE_LIMIT_PER_S
from loadgen.metrics.facts import Facts
from loadgen.metrics.registry import GOODPUT_RATE, SLO_RATE
from loadgen.records.run import Figure, Found, Label, Record, Workload
from loadgen.records.samples import NS_PER_S

Ended = Literal["found", "highest", "none"]
RESOLUTION = 0.05
RETRIES = 6
BUSY = 0.9
"""Share of a core above which the generator may have been the limit."""


class Trial(Record, frozen=True, kw_only=True):
    """One trial of a search."""

    FILE = "trials"
    index: int
    workload: str
    round: int
    restart: int
    label: Label
    position: int
    """0 when this arm came first in its pair, else 1."""
    step: int
    """Index within the search, from 0."""
    concurrency: int
    """The most requests in flight."""
    rate_per_s: float
    started_at: str
    window_start_ns: int
    window_end_ns: int
    samples: str
    """Path of the sample file, relative to DIR."""
    requests: int
    errors: int
    error_messages: tuple[str, ...] = ()
    generator_cpu_ns: int
    """CPU time of all its processes."""
    generator_spin_ns: int = 0
    """The part of it in which users only waited for the moment to send."""
    generator_processes: int = 1
    throughput_per_s: float | None
    """Good answers over the trial's time."""
    p50_ms: float | None
    p99_ms: float | None
    """p99 from the intended start, of good answers; None with too few samples."""
    send_lag_p99_ms: float | None = None
    planned: int
    """Requests that fall due in the trial, by its rate and the early-stopping bound."""
    late: int
    """Answers later than the bound, failed requests, and requests that could not be sent in time."""
    late_allowed: int
    """With more late requests the trial ends at once; see `loadgen.stats.percentiles`."""
    held: bool
    note: str | None = None
    """Any other reason why it was cut short."""

    @property
    def generator_cpu_share(self) -> float | None:
        """Share of one core that sending and receiving took, the mean of its processes."""
        window_ns, work_ns = self.window_end_ns - self.window_start_ns, self.generator_cpu_ns - self.generator_spin_ns
        return max(work_ns, 0) / window_ns / self.generator_processes if window_ns > 0 else None


class RateFound(Record, frozen=True, kw_only=True):
    """Result of one search on one arm."""

    workload: str
    round: int
    restart: int
    label: Label
    bound_ms: float
    rate_per_s: float | None
    """The highest rate that held: an estimate of the rate at which p99 reaches the bound, and no lower bound of it.
    None if no rate held, or the search did not end."""
    failed_rate_per_s: float | None
    """The lowest rate that failed: the true limit lies between the two."""
    ended: Ended | None
    """How the search ended; None if it was cut short."""
    client_limited: bool
    """The generator was busy when the rate failed, so the server may hold more."""
    trials: int
    seconds: float
    """Time under load."""
    speed: float | None = None
    """That rate over the mean rate of the recorded traffic, where that is replayed."""
    metric: str = SLO_RATE.name
    """The metric that it measures."""


class RatesFound(Found, frozen=True, kw_only=True):
    """Results of all searches."""

    STUDY = "rate_search"
    trials: tuple[Trial, ...] = ()
    """All trials, in the order in which they ran."""
    rates: tuple[RateFound, ...] = ()
    """A result per search for the highest rate within a latency bound."""

    def figures(self) -> list[Figure]:
        """The rates that were found."""
        return [
            Figure(rate.metric, rate.workload, rate.label, rate.round, rate.restart, rate.rate_per_s)
            for rate in self.rates
        ]


class RateSearch:
    """One search between `lowest` and `highest` requests per second. `next_rate` is the rate to try, None when the
    search has ended; `held` the highest rate that held, `failed` the lowest that did not."""

    def __init__(self, start: float, *, lowest: float = 0.1, highest: float = 100_000.0) -> None:
        """Raises `ValueError` for rates that are not positive or not in order."""
        if not 0.0 < lowest <= highest or not start > 0.0:
            raise ValueError(f"no search from {start} between {lowest} and {highest}")
        self.held: float | None = None
        self.failed: float | None = None
        self.next_rate: float | None = min(max(start, lowest), highest)
        self._lowest = lowest
        self._highest = highest
        self._retries = 0
        self._confirming = False

    @property
    def ended(self) -> Ended | None:
        """How the search ended: `found`, `highest` if every rate held, `none` if none did; None before the end."""
        if self.next_rate is not None:
            return None
        if self.held is None:
            return "none"
        return "highest" if self.failed is None else "found"

    def record(self, held: bool) -> None:
        """Record whether `next_rate` held."""
        rate = self.next_rate
        if rate is None:
            raise ValueError("the search has ended")
        if held:
            self.held = rate if self.held is None else max(rate, self.held)
            if self._confirming:
                self.failed = None
        else:
            self.failed = rate if self.failed is None else min(rate, self.failed)
        confirmed, self._confirming = self._confirming and not held, False
        self.next_rate = self._choose()
        if self.next_rate is None and self.failed is not None and not confirmed and self._retries < RETRIES:
            self.next_rate, self._confirming = self.failed, True
            self._retries += 1

    def _choose(self) -> float | None:
        if self.failed is None:
            assert self.held is not None
            return None if self.held >= self._highest else min(2.0 * self.held, self._highest)
        if self.held is None:
            return None if self.failed <= self._lowest else max(self.failed / 2.0, self._lowest)
        return None if self.failed / self.held <= 1.0 + RESOLUTION else math.sqrt(self.held * self.failed)


def search_from(workload: Workload, start: float) -> RateSearch:
    """The search of a workload: at the lowest rate a trial takes the workload's `max_seconds`."""
    return RateSearch(start, lowest=workload.requests / workload.max_seconds, highest=RATE_LIMIT_PER_S)


def analyse(facts: Facts) -> RatesFound:
    """The stored trials and their results."""
    trials = facts.run.records_of(Trial)
    return RatesFound(trials=trials, rates=find_rates(facts.run.experiment.workloads, trials))


def find_rates(workloads: Sequence[Workload], trials: Sequence[Trial]) -> tuple[RateFound, ...]:
    """Find one result per search, in the order in which they began, finished or not."""
    return tuple(
        _rate(workload, run) for workload in workloads if workload.is_search for run in _runs(workload, trials)
    )


def _runs(workload: Workload, trials: Sequence[Trial]) -> Iterator[list[Trial]]:
    """The trials of each round and arm, in their order."""
    of_workload = sorted(
        (t for t in trials if t.workload == workload.name), key=lambda t: (t.round, t.position, t.step)
    )
    for _, together in groupby(of_workload, key=lambda t: (t.round, t.label)):
        yield list(together)


def _rate(workload: Workload, trials: list[Trial]) -> RateFound:
    """Replays the search: whether it ended, and how, follows from the trials that held."""
    first = trials[0]
    search = search_from(workload, first.rate_per_s)
    for trial in trials:
        if search.next_rate is None:
            break
        search.record(trial.held)
    held = search.held if search.ended is not None else None
    recorded_per_s = workload.rate_per_s if workload.traffic is not None else None
    return RateFound(
        workload=workload.name,
        round=first.round,
        restart=first.restart,
        label=first.label,
        bound_ms=workload.latency_bound_ms or 0.0,
        metric=GOODPUT_RATE.name if workload.scenario == "goodput" else SLO_RATE.name,
        rate_per_s=held,
        speed=held / recorded_per_s if held and recorded_per_s else None,
        failed_rate_per_s=search.failed,
        ended=search.ended,
        client_limited=any(_busy(t) for t in trials if not t.held and t.rate_per_s == search.failed),
        trials=len(trials),
        seconds=sum(trial.window_end_ns - trial.window_start_ns for trial in trials) / NS_PER_S,
    )


def _busy(trial: Trial) -> bool:
    return (trial.generator_cpu_share or 0.0) > BUSY
