"""Runs searches and ramps on servers that are up: trials whose load earlier trials decide, each stored at once.

Arms alternate as in blocks: a pair is one search on each arm, one after the other in an order that is drawn and
balanced; in a ramp all arms take each step in turn. A search tries rates on a lattice of factors, so every search
starts from a rate drawn around a first guess: the lattice then adds noise to a found rate and no bias.
"""

from __future__ import annotations

from itertools import groupby
from random import Random
from statistics import fmean
from time import monotonic

import msgspec

from loadgen.bench.bench import Bench
from loadgen.bench.load_runner import LoadError, closed_loop, common_fields
from loadgen.client.messages import BlockOutcome, Open
from loadgen.comparison.loops import measured_answers, throughput_per_s
from loadgen.experiment.arrivals import arrival_count, schedule_seed
from loadgen.experiment.schedule import ScheduledBlock, search_schedule
from loadgen.machine.environment import utc_now
from loadgen.probes.rate_search.analyse import rung_of, search_from
from loadgen.probes.rate_search.records import RampRung, Trial
from loadgen.probes.rate_search.search import next_concurrency
from loadgen.quantities import number
from loadgen.records.run import Experiment, Label, Workload, shown
from loadgen.records.samples import NS_PER_MS, NS_PER_S, latencies_ms, read_samples
from loadgen.stats.early_stopping import late_allowed
from loadgen.stats.percentiles import percentile

WARM_UP_USERS = 16
_PILOT_SECONDS = 0.5
_PILOT_REQUESTS = 12


def wanted(experiment: Experiment) -> bool:
    """Whether any search or ramp is requested."""
    return bool(search_schedule(experiment))


def measure(bench: Bench) -> None:
    """Run this restart's searches and ramps, in order. Raises `LoadError`, `StorageError`."""
    experiment = bench.experiment
    whole = search_schedule(experiment)
    own = [entry for entry in whole if entry.restart == bench.restart]
    bench.forecast.load_begins()
    searches = _Searches(bench)
    to_come = [entry.workload for entry in whole if entry.restart >= bench.restart and entry.position == 0]
    took: dict[str, list[float]] = {}
    for (workload, _), pair in groupby(own, key=lambda entry: (entry.workload, entry.round)):
        entries, began = list(pair), monotonic()
        if workload.scenario == "slo":
            bench.enter(f"searching for the highest rate with p99 ≤ {workload.latency_bound_ms:g} ms")
            bench.warm_up([closed_loop(min(workload.concurrency, WARM_UP_USERS), 1, max_seconds=workload.max_seconds)])
            for entry in entries:
                searches.search(entry)
        else:
            bench.enter("adding users until the servers are saturated")
            searches.climb(entries)
        to_come.remove(workload)
        took.setdefault(workload.name, []).append(monotonic() - began)
        seen = [seconds for many in took.values() for seconds in many]
        bench.forecast.searches_take(sum(fmean(took.get(left.name, seen)) for left in to_come))
        bench.progress.plan(bench.forecast.remaining_s())


class _Searches:
    """The rates found and the loads run so far in this restart of the servers."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._runner = bench.load_runner(watched=False)
        self._found: dict[tuple[str, Label], float] = {}
        self._loads = 0

    def search(self, entry: ScheduledBlock) -> None:
        """Run one search on one arm."""
        workload, label = entry.workload, entry.label
        random = Random(f"{self._bench.experiment.seed} {workload.name} {entry.round} {label}")
        known = self._found.get((workload.name, label))
        # Start below a rate already found, so that it can fail again; else around the rate of one user.
        guess = self._pilot(entry) if known is None else known / 2.0**0.5
        search = search_from(workload, guess * 2.0 ** (random.random() - 0.5))
        step = 0
        while (rate := search.next_rate) is not None:
            search.record(self._rate_trial(entry, step, rate))
            step += 1
        if search.held is not None:
            self._found[workload.name, label] = search.held

    def _pilot(self, entry: ScheduledBlock) -> float:
        """Measure the requests per second of one user; not stored."""
        arm = self._bench.arms[entry.label]
        alone = closed_loop(1, _PILOT_REQUESTS, seconds=_PILOT_SECONDS, max_seconds=30.0)
        outcome = self._load(entry, arm.load(alone, None))
        rate = outcome.requests_per_s
        if outcome.cut_reason is not None or outcome.errors or rate is None:
            raise LoadError(
                f"{entry.workload.name} on arm {entry.label}: a single user gets no answers "
                f"({outcome.cut_reason or outcome.error_messages[0]}){arm.failure_message()}"
            )
        return rate

    def _rate_trial(self, entry: ScheduledBlock, step: int, rate: float) -> bool:
        """One trial of a search, stored: enough requests for the bound at this rate, ended when it cannot hold.
        Returns whether it held."""
        workload = entry.workload
        assert workload.latency_bound_ms is not None
        longest_s = 2.0 * max(workload.seconds, workload.requests / rate)
        planned = arrival_count(rate, workload.requests, workload.seconds, longest_s)
        allowed = late_allowed(planned)
        if allowed is None:
            raise LoadError(f"{workload.name}: {planned} requests are too few for p99; a trial needs at least 459")
        self._bench.progress.now(
            f"{shown(entry.label)} at {number(rate)}/s: {planned:,} requests, of which {allowed} may be late"
        )
        asked = msgspec.structs.replace(workload, rate_per_s=rate, max_seconds=longest_s)
        trial, outcome = self._trial(entry, step, asked, late_allowed=allowed)
        unsent = (outcome.offered or 0) - outcome.requests if outcome.cut_reason is None else 0
        late = outcome.late + max(unsent, 0)
        held = late <= allowed and outcome.cut_reason is None
        trial = msgspec.structs.replace(
            trial,
            rate_per_s=rate,
            planned=planned,
            late=late,
            late_allowed=allowed,
            held=held,
            note=None if outcome.late > allowed else outcome.cut_reason,
        )
        self._store(entry, trial, outcome)
        return held

    def climb(self, entries: list[ScheduledBlock]) -> None:
        """Run one ramp on each arm of a pair, step by step; the order of the arms changes with every step."""
        bench, workload = self._bench, entries[0].workload
        rungs: dict[Label, list[RampRung]] = {entry.label: [] for entry in entries}
        step = 0
        while turns := [e for e in entries if next_concurrency(rungs[e.label], workload.concurrency) is not None]:
            users = next_concurrency(rungs[turns[0].label], workload.concurrency) or 1  # the same for all these arms
            rung = closed_loop(
                users, max(workload.requests, 4 * users), seconds=workload.seconds, max_seconds=workload.max_seconds
            )
            bench.warm_up([rung])
            for entry in turns if step % 2 == 0 else turns[::-1]:
                bench.progress.now(f"{shown(entry.label)} with {users} users")
                trial, outcome = self._trial(entry, step, rung)
                self._store(entry, trial, outcome)
                rungs[entry.label].append(rung_of(trial))
            step += 1

    def _load(self, entry: ScheduledBlock, command: Open) -> BlockOutcome:
        self._loads += 1
        return self._runner.load(entry, command, self._loads, "trial")

    def _trial(
        self, entry: ScheduledBlock, step: int, asked: Workload, *, late_allowed: int = 0
    ) -> tuple[Trial, BlockOutcome]:
        """Run one stretch of load and return its record, which is not stored yet. Raises `LoadError`."""
        bench = self._bench
        index, path = bench.store.next_trial()
        seed = schedule_seed(bench.experiment.seed, entry.workload.name, 1000 * entry.round + step)
        command = bench.arms[entry.label].load(asked, path, arrivals_seed=seed, late_allowed=late_allowed)
        started_at = utc_now()
        outcome = self._load(entry, command)
        samples = read_samples(path)
        is_open = outcome.offered is not None
        answered = measured_answers(samples, is_open=is_open)
        waited_ms = latencies_ms(answered)
        speed = len(answered) / max((outcome.window_end_ns - outcome.window_start_ns) / NS_PER_S, 1e-9)
        trial = Trial(
            **common_fields(entry, started_at, outcome),
            index=index,
            step=step,
            concurrency=asked.concurrency,
            samples=f"trials/{path.name}",
            generator_processes=max(1, len(outcome.workers)),
            throughput_per_s=speed if is_open else throughput_per_s(samples),
            p50_ms=percentile(waited_ms, 0.5),
            p99_ms=percentile(waited_ms, 0.99),
            send_lag_p99_ms=percentile((samples["send_ns"] - samples["intended_ns"]) / NS_PER_MS, 0.99),
            note=outcome.cut_reason,
        )
        return trial, outcome

    def _store(self, entry: ScheduledBlock, trial: Trial, outcome: BlockOutcome) -> None:
        """Store a trial. Raises `StorageError`, and `LoadError` if anything but late answers cut it short."""
        bench = self._bench
        bench.store.trial(trial)
        self._runner.require_whole(entry, outcome, bench.store.directory / trial.samples, trial.note)
