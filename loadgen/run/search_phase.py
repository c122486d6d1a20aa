"""Runs searches and ramps on servers that are up: trials whose load an earlier trial decided, each stored at once.

Arms alternate as in blocks: a pair is one search on each arm, one after the other in an order that is drawn and
balanced; of a ramp both arms take each rung in turn. Rates are a lattice of factors, so every search starts from a
rate of its own, drawn around a first guess: what the lattice adds to a found rate is then noise and no bias.
"""

from __future__ import annotations

from itertools import groupby
from random import Random
from statistics import fmean
from time import monotonic

import msgspec

from loadgen.analysis.searches import search_from
from loadgen.analysis.steady_state import steady_throughput_per_s
from loadgen.experiment.arrivals import arrival_count, schedule_seed
from loadgen.experiment.schedule import ScheduledBlock, load_cells, search_schedule
from loadgen.generator.messages import Open, Outcome
from loadgen.generator.process import GeneratorError
from loadgen.machine.environment import utc_now
from loadgen.quantities import number
from loadgen.records.run import Cell, Experiment, Label
from loadgen.records.sample_files import read_samples
from loadgen.records.samples import NS_PER_MS, NS_PER_S, good, latencies_ms
from loadgen.records.searches import Trial
from loadgen.run.bench import Bench
from loadgen.run.load_phase import LoadError
from loadgen.search.concurrency_ladder import ConcurrencyLadder
from loadgen.statistics.early_stopping import late_allowed
from loadgen.statistics.percentiles import percentile
from loadgen.storage.store import StorageError, storage_sentence

WARM_UP_USERS = 16
_PILOT_SECONDS = 0.5
_PILOT_REQUESTS = 12


def has_searches(experiment: Experiment) -> bool:
    """Whether any are asked for."""
    return bool(search_schedule(experiment.cells, experiment.seed))


def run_searches(bench: Bench) -> None:
    """This restart's share. Raises `LoadError`, `StorageError`."""
    SearchPhase(bench).run()


class SearchPhase:
    """Searches and ramps of one restart of the servers."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._found: dict[tuple[str, Label], float] = {}

    def run(self) -> None:
        """All of them, in order."""
        bench = self._bench
        experiment = bench.experiment
        whole = search_schedule(experiment.cells, experiment.seed, experiment.restarts)
        own = [entry for entry in whole if entry.restart == bench.restart]
        if own and not load_cells(experiment.cells):
            bench.prepare_bodies([1])
        bench.forecast.load_begins()
        to_come = [entry.cell for entry in whole if entry.restart >= bench.restart and entry.position == 0]
        took: dict[str, list[float]] = {}
        for (cell, _), pair in groupby(own, key=lambda entry: (entry.cell, entry.pair)):
            entries, began = list(pair), monotonic()
            if cell.scenario == "slo":
                bench.enter(f"searching for the highest rate with p99 ≤ {cell.latency_bound_ms:g} ms")
                bench.warm_up([_closed(cell, min(cell.concurrency, WARM_UP_USERS))])
                for entry in entries:
                    self._search(entry)
            else:
                bench.enter("adding users until the servers are saturated")
                self._climb(entries)
            to_come.remove(cell)
            took.setdefault(cell.name, []).append(monotonic() - began)
            seen = [seconds for many in took.values() for seconds in many]
            bench.forecast.searches_take(sum(fmean(took.get(left.name, seen)) for left in to_come))
            bench.progress.plan(bench.forecast.remaining_s())

    def _search(self, entry: ScheduledBlock) -> None:
        cell, label = entry.cell, entry.label
        random = Random(f"{self._bench.experiment.seed} {cell.name} {entry.pair} {label}")
        known = self._found.get((cell.name, label))
        # From a rate already found downwards, so that it can fail again; else around one user's.
        guess = self._pilot(entry) if known is None else known / 2.0**0.5
        search = search_from(cell, guess * 2.0 ** (random.random() - 0.5))
        step = 0
        while (rate := search.next_rate) is not None:
            trial = self._rate_trial(entry, step, rate)
            assert trial.held is not None
            search.record(trial.held)
            step += 1
        if search.held is not None:
            self._found[cell.name, label] = search.held

    def _pilot(self, entry: ScheduledBlock) -> float:
        """Requests a second of one user, to begin from; measured, not stored."""
        command = self._bench.arms[entry.label].load(
            batch_size=1,
            concurrency=1,
            requests=_PILOT_REQUESTS,
            seconds=_PILOT_SECONDS,
            max_seconds=30.0,
            samples_path=None,
        )
        outcome = self._load(entry, command)
        seconds = (outcome.window_end_ns - outcome.window_start_ns) / NS_PER_S
        if outcome.cut_reason is not None or outcome.errors or seconds <= 0.0:
            raise LoadError(
                f"{entry.cell.name} on arm {entry.label}: a single user gets no answers "
                f"({outcome.cut_reason or outcome.error_messages[0]}){self._bench.arms[entry.label].obituary()}"
            )
        return outcome.requests / seconds

    def _rate_trial(self, entry: ScheduledBlock, step: int, rate: float) -> Trial:
        """One trial of a search: as many queries as the bound needs, at this rate, ended when it cannot hold."""
        cell = entry.cell
        assert cell.latency_bound_ms is not None
        seconds = max(cell.seconds, cell.requests / rate)
        planned = arrival_count(rate, cell.requests, cell.seconds, 2.0 * seconds)
        allowed = late_allowed(planned)
        if allowed is None:
            raise LoadError(f"{cell.name}: {planned} requests say nothing about p99; a trial needs at least 459")
        self._bench.progress.now(
            f"{entry.label.upper()} at {number(rate)}/s: {planned:,} requests, of which {allowed} may be late"
        )
        index, path = self._bench.store.next_trial()
        command = msgspec.structs.replace(
            self._bench.arms[entry.label].load(
                batch_size=1,
                concurrency=cell.concurrency,
                requests=cell.requests,
                seconds=cell.seconds,
                max_seconds=2.0 * seconds,
                samples_path=str(path),
            ),
            arrivals="poisson",
            rate_per_s=rate,
            arrivals_seed=schedule_seed(self._bench.experiment.seed, cell.name, 1000 * entry.pair + step),
            latency_bound_ns=int(cell.latency_bound_ms * NS_PER_MS),
            late_allowed=allowed,
        )
        started_at = utc_now()
        outcome = self._load(entry, command)
        too_late = outcome.late > allowed
        unsent = (outcome.offered or 0) - outcome.requests if outcome.cut_reason is None else 0
        late = outcome.late + max(unsent, 0)
        trial = msgspec.structs.replace(
            self._record(entry, step, index, started_at, outcome, cell.concurrency),
            rate_per_s=rate,
            planned=planned,
            late=late,
            late_allowed=allowed,
            held=late <= allowed and outcome.cut_reason is None,
            note=None if too_late else outcome.cut_reason,
        )
        return self._stored(entry, trial, outcome)

    def _climb(self, entries: list[ScheduledBlock]) -> None:
        """Both arms of a pair, rung by rung, the order changing with every rung."""
        bench, cell = self._bench, entries[0].cell
        ladders = {entry.label: ConcurrencyLadder(cell.concurrency) for entry in entries}
        step = 0
        while True:
            turns = [entry for entry in entries if ladders[entry.label].next_concurrency is not None]
            if not turns:
                return
            users = ladders[turns[0].label].next_concurrency or 1  # the same for all that still climb
            bench.warm_up([_closed(cell, users)])
            for entry in turns if step % 2 == 0 else turns[::-1]:
                trial = self._rung(entry, step, users)
                ladders[entry.label].record(trial.throughput_per_s or 0.0, trial.p50_ms)
            step += 1

    def _rung(self, entry: ScheduledBlock, step: int, users: int) -> Trial:
        cell = entry.cell
        self._bench.progress.now(f"{entry.label.upper()} with {users} users")
        index, path = self._bench.store.next_trial()
        command = self._bench.arms[entry.label].load(
            batch_size=1,
            concurrency=users,
            requests=max(cell.requests, 4 * users),
            seconds=cell.seconds,
            max_seconds=cell.max_seconds,
            samples_path=str(path),
        )
        started_at = utc_now()
        outcome = self._load(entry, command)
        trial = self._record(entry, step, index, started_at, outcome, users)
        return self._stored(entry, msgspec.structs.replace(trial, note=outcome.cut_reason), outcome)

    def _load(self, entry: ScheduledBlock, command: Open) -> Outcome:
        """Raises `LoadError`. On Ctrl-C the requests in flight finish, and the interrupt goes on."""
        generator = self._bench.generator
        try:
            generator.open(command)
            return generator.go(command)
        except GeneratorError as exc:
            raise LoadError(
                f"{entry.cell.name} on arm {entry.label}: {exc}{self._bench.arms[entry.label].obituary()}"
            ) from exc
        except KeyboardInterrupt:
            generator.abort("interrupted")
            raise

    def _stored(self, entry: ScheduledBlock, trial: Trial, outcome: Outcome) -> Trial:
        """Raises `StorageError`, and `LoadError` for a trial that was cut short by anything but late answers."""
        self._bench.store.trial(trial)
        if outcome.storage_error is not None:
            raise StorageError(storage_sentence(self._bench.store.directory / trial.samples, outcome.storage_error))
        if trial.note is not None:
            obituary = self._bench.arms[entry.label].obituary()
            raise LoadError(f"{entry.cell.name} on arm {entry.label} was cut short: {trial.note}{obituary}")
        return trial

    def _record(
        self, entry: ScheduledBlock, step: int, index: int, started_at: str, outcome: Outcome, users: int
    ) -> Trial:
        name = f"trials/{index:04d}.npy"
        samples = read_samples(self._bench.store.directory / name)
        answered = good(samples)
        waited_ms = latencies_ms(answered)
        if outcome.offered is None:
            speed = steady_throughput_per_s(samples)
        else:
            speed = len(answered) / max((outcome.window_end_ns - outcome.window_start_ns) / NS_PER_S, 1e-9)
        return Trial(
            index=index,
            cell=entry.cell.name,
            pair=entry.pair,
            restart=entry.restart,
            label=entry.label,
            position=entry.position,
            step=step,
            concurrency=users,
            started_at=started_at,
            window_start_ns=outcome.window_start_ns,
            window_end_ns=outcome.window_end_ns,
            samples=name,
            requests=outcome.requests,
            errors=outcome.errors,
            error_messages=outcome.error_messages,
            generator_cpu_ns=outcome.cpu_ns,
            generator_processes=max(1, len(outcome.workers)),
            throughput_per_s=speed,
            p50_ms=percentile(waited_ms, 0.5),
            p99_ms=percentile(waited_ms, 0.99),
            send_lag_p99_ms=percentile((samples["send_ns"] - samples["intended_ns"]) / NS_PER_MS, 0.99),
        )


def _closed(cell: Cell, users: int) -> Cell:
    """The same with so many users in a closed loop."""
    return msgspec.structs.replace(
        cell, scenario="concurrent", concurrency=users, arrivals="closed", latency_bound_ms=None
    )
