"""Runs load on servers that are up: warm-up, blocks, trials of searches. Each is stored before the next begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep, time_ns
from typing import Any, TypeVar

import msgspec

from loadgen.client.generator import GeneratorProcess
from loadgen.client.messages import BlockOutcome, GeneratorError, Open
from loadgen.experiment.schedule import (
    RequestShape,
    ScheduledBlock,
    closed_loop,
    request_shape,
    schedule_seed,
    warm_up_users,
)
from loadgen.measure.answers import AnswersUnderLoad
from loadgen.measure.arms import Arm, Snapshot
from loadgen.measure.errors import RunError
from loadgen.measure.gpu_recording import GpuRecording
from loadgen.measure.machine import utc_now
from loadgen.measure.machine_watch import machine_load, read_processors, server_processes
from loadgen.measure.progress import Forecast, LiveRatio, RunProgress
from loadgen.metrics.barrier import attempt
from loadgen.metrics.registry import METRICS
from loadgen.metrics.summaries import sound, summarise_blocks
from loadgen.records.run import BlockRecord, Experiment, Label, Record, StageTotals, Workload
from loadgen.records.store import RunStore, StorageError, StoredBlock, read_block, storage_sentence, store_empty
from loadgen.records.targets import Kind
from loadgen.stats.ratios import estimate_ratio, lone_correlation

GAP_EVERY_SECONDS = 90.0
"""Interval between measurements of the idle GPU; each takes six seconds."""
CLOCK_STEP_SECONDS = 1.0
"""A larger step means that the wall clock was set: NTP adjusts it by far less within a block."""
WARM_UP_SECONDS = 1.0
"""Least time of the warm-up of each load of a language model, so that a fast server gets several answers per user."""
MOST_CROWDING = 4.0
"""More users make an answer at most so many times slower in the estimate of a load: with one answer so slow that it
outlasts all time left, the three answers of a block on each arm in two rounds would not fit either."""
FIRST_FIGURE_SECONDS, MOST_FIRST_ROUNDS = 3.0, 4
"""No further round of the first figure begins after this time, or beyond so many."""
FIRST_TURN_SECONDS, FIRST_TURN_LIMIT_S = 0.4, 10.0
"""The least and the most time of one arm's turn in it."""
MOST_IN_A_ROW = 3
"""Workloads in a row in which an arm may fail before it is measured no more."""
_SETTLED_SECONDS = 0.5
_NS_PER_S = 1e9
R = TypeVar("R", bound=Record)


class ArmFaults:
    """What a fault of one arm costs: that arm in that workload, and after `MOST_IN_A_ROW` workloads in a row, or when
    its server has ended, the arm. A workload goes on as long as two arms are left in it, after whole rounds only."""

    def __init__(self, labels: Sequence[Label], workloads: Sequence[Workload]) -> None:
        """`workloads` are those that have a load."""
        self._left = {workload.name: list(workload.loaded(labels)) for workload in workloads}
        """The arms that are left in each workload."""
        self._expected: dict[tuple[str, Label], str] = {}
        self._last_rounds: dict[str, int] = {}
        """The last round of a workload that has too few arms left."""
        self._in_a_row: dict[Label, list[str]] = {}

    def expect(self, workload: str, label: Label, why: str) -> None:
        """The arm has failed in the workload's warm-up, so that its first block will not be measured."""
        self._expected[workload, label] = why

    def expected(self, block: ScheduledBlock) -> str | None:
        """Why a block will not be measured."""
        return self._expected.get((block.workload.name, block.label))

    def excludes(self, block: ScheduledBlock) -> bool:
        """Whether a block is not run because of an earlier fault."""
        left = self._left.get(block.workload.name, [block.label])
        is_over = block.round > self._last_rounds.get(block.workload.name, block.round)
        return is_over or block.label not in left

    def ends(self, workload: str) -> bool:
        """Whether a workload gets no further round."""
        return workload in self._last_rounds

    def is_out(self, workload: str, label: Label) -> bool:
        """Whether an arm is not measured in a workload any more."""
        return label not in self._left.get(workload, (label,))

    def measured(self, label: Label) -> None:
        """The arm has completed a block."""
        self._in_a_row.pop(label, None)

    def add(self, block: ScheduledBlock, why: str, *, ended: bool) -> None:
        """A block failed; `ended`: and so did the arm's server. Raises `RunError` where nothing is left to compare."""
        row = self._in_a_row.setdefault(block.label, [])
        row.append(block.workload.name)
        gone = ended or len(row) >= MOST_IN_A_ROW
        for name, labels in self._left.items():
            if block.label in labels and (gone or name == block.workload.name):
                labels.remove(block.label)
                if len(labels) < 2:
                    self._last_rounds.setdefault(name, block.round)
        if all(map(self.ends, self._left)):
            raise RunError(why, block.label)


@dataclass
class LoadRunner:
    """Loads the arms of one run: every block of a round and every trial of a search goes through `load`."""

    arms: Mapping[Label, Arm]
    generator: GeneratorProcess
    store: RunStore
    progress: RunProgress
    gpu: GpuRecording | None = None
    """Records the idle GPU before, between and after the rounds, and readings at both ends of every block."""
    seed: int = 0
    """The experiment's seed, which determines the schedules of open loops."""
    answers: AnswersUnderLoad | None = None
    """Keeps some answers of all load."""
    faults: ArmFaults | None = None
    """What faults of single arms have cost so far; without it the first fault ends the load."""

    @cached_property
    def servers(self) -> tuple[int, ...] | None:
        """The processes of the servers on this machine at the first block; None if they are unknown for one arm."""
        return server_processes(self.arms.values())

    def warm_up(
        self, workloads: Sequence[Workload], until_s: float | None = None, *, each: int = 2
    ) -> dict[str, dict[Label, float]]:
        """Run every load shape on every arm without storing samples, with `each` requests per user after its first.

        Returns by workload and arm how many seconds a request takes. A load of a language model whose first answers
        alone would last beyond `until_s`, by `time.monotonic` and what the arm has shown so far, is not run and has
        that estimate, and so has one in which this arm failed. Raises `RunError` if an arm failed in every load.
        """
        took: dict[tuple[RequestShape, int], dict[Label, float]] = {}
        for label, arm in self.arms.items():
            own = [workload for workload in workloads if label in workload.loaded((label,))]
            shapes = {(request_shape(workload), warm_up_users(workload)): workload for workload in own}
            failed: dict[tuple[RequestShape, int], RunError] = {}
            before: tuple[RequestShape, int, float] | None = None
            for (shape, users), workload in sorted(shapes.items(), key=lambda entry: _size(*entry[0])):
                if until_s is not None and before is not None and workload.kind is Kind.TOKENS:
                    expected_s = _expected_s(*before, shape, users)
                    if monotonic() + expected_s > until_s:
                        took.setdefault((shape, users), {})[label] = expected_s
                        continue
                self.progress.now(f"{arm.name}: {shape.words}, concurrency {users}")
                several = each * users if shape.batch_size > 1 or users > 1 else 5
                # One answer of tokens per user of a slow server may take longer than the others.
                enough = {Kind.TENSORS: (several, 0.0), Kind.TOKENS: (users, WARM_UP_SECONDS)}
                requests, seconds = enough[workload.kind]
                load = closed_loop(users, requests, seconds=seconds, max_seconds=60.0, of=workload)
                try:
                    outcome = self.unstored(f"warm-up of {arm.name}", label, load)
                except RunError as exc:
                    if self.faults is None or not self.generator.alive:
                        raise
                    failed[shape, users] = exc
                    continue
                request_s = users / (outcome.requests_per_s or math.inf)
                before = shape, users, request_s
                took.setdefault((shape, users), {})[label] = request_s
            self._expect(failed, label, own, took)
        every = {workload.name: (request_shape(workload), warm_up_users(workload)) for workload in workloads}
        return {name: took[key] for name, key in every.items() if key in took}

    def _expect(
        self,
        failed: Mapping[tuple[RequestShape, int], RunError],
        label: Label,
        workloads: Sequence[Workload],
        took: dict[tuple[RequestShape, int], dict[Label, float]],
    ) -> None:
        """Leave an arm out of the workloads whose load it failed in; for planning, it is as slow there as the slowest
        load. Raises `RunError` if those are all of its loads."""
        slowest = max((seconds for arms in took.values() for seconds in arms.values()), default=0.0)
        for workload in workloads:
            key = request_shape(workload), warm_up_users(workload)
            if key in failed and self.faults is not None:
                self.faults.expect(workload.name, label, str(failed[key]))
                took.setdefault(key, {})[label] = slowest
        if failed and not any(label in arms for key, arms in took.items() if key not in failed):
            raise next(iter(failed.values()))

    def first_figure(self, experiment: Experiment, workload: Workload) -> list[LiveRatio]:
        """Compare the throughput of the arms at a workload, in a few seconds and without storing anything: two to four
        rounds in balance, after one request that may be slow. Raises `RunError`."""
        metric = METRICS["throughput"]
        until_s = monotonic() + FIRST_FIGURE_SECONDS
        once = closed_loop(workload.concurrency, workload.concurrency, max_seconds=FIRST_TURN_LIMIT_S, of=workload)
        turn = msgspec.structs.replace(once, seconds=FIRST_TURN_SECONDS)
        labels, rounds = workload.loaded(tuple(self.arms)), list[dict[Label, float]]()
        for label in labels:
            self.unstored(f"first request of {self.arms[label].name}", label, once)
        while len(rounds) < 2 or (len(rounds) < MOST_FIRST_ROUNDS and monotonic() < until_s):
            ordered = labels[::-1] if len(rounds) % 2 else labels
            done = {label: self.unstored(f"first turn of {self.arms[label].name}", label, turn) for label in ordered}
            rounds.append({label: outcome.requests_per_s or 0.0 for label, outcome in done.items()})
        found = []
        for two in experiment.pairings_in(workload):
            ratios = [of_round[two.arm] / of_round[two.baseline] for of_round in rounds if of_round[two.baseline]]
            estimate = estimate_ratio(ratios, experiment.equivalence_margin, lone_correlation(ratios))
            found.append(
                LiveRatio(
                    **msgspec.structs.asdict(estimate), workload=workload.name, baseline=two.baseline, arm=two.arm,
                    metric=metric.title,
                )
            )  # fmt: skip
        return found

    def unstored(self, title: str, label: Label, load: Workload) -> BlockOutcome:
        """Run a load on one arm without storing samples; `title` is for messages. Raises `RunError`."""
        arm = self.arms[label]
        outcome = self._generate(title, arm, arm.load(load, None))
        if outcome.errors:
            raise RunError(
                f"{title}: {outcome.errors} of {outcome.requests} requests failed "
                f"({outcome.error_messages[0]}){arm.failure_message()}",
                label,
            )
        if outcome.cut_reason is not None:
            raise _cut_short(title, outcome.cut_reason, arm)
        return outcome

    def run(
        self, blocks: Sequence[ScheduledBlock], forecast: Forecast, *, planned: int | None = None, last: bool = True
    ) -> list[StoredBlock]:
        """Run and store all blocks in order; returns them as stored. `planned` is the number of blocks in the whole
        run, where it is fixed; `last`: no blocks follow. Raises `RunError` after storing a block that was cut short,
        `StorageError`."""
        current_round = None
        of = "" if planned is None else f" of {planned}"
        done = []
        for block in blocks:
            if self.faults is not None and self.faults.excludes(block):
                forecast.leave_out(block)
                continue
            if block.round != current_round and self._gap_due():
                self.idle()
            current_round = block.round
            self.progress.now(f"block {block.index + 1}{of}: {self.arms[block.label].name}, {block.workload.name}")
            started = monotonic()
            record = self.measure(block)
            forecast.block_took(block, monotonic() - started)
            stored = sound(read_block(self.store.directory, record, {block.workload.name: block.workload}))
            done.append(stored)
            self.progress.block_done(stored, summarise_blocks([stored])[0])
            self.progress.plan(attempt(forecast.remaining_s, lambda _: 0.0))
        if last:
            self.idle()
        return done

    def _gap_due(self) -> bool:
        gaps = () if self.gpu is None else self.gpu.gaps
        return not gaps or perf_counter_ns() - gaps[-1].end_ns > GAP_EVERY_SECONDS * _NS_PER_S

    def idle(self) -> None:
        """Measure the idle GPU, where there is one."""
        if self.gpu is not None:
            self.progress.now("measuring the idle GPU")
            self.gpu.gap()

    def load(
        self, arm: Arm, entry: ScheduledBlock, command: Open, number: int, name: str, readings: _Readings | None = None
    ) -> BlockOutcome:
        """Load one arm. `number` decides which answers are kept, of the runner's arms; `name` is for messages.
        `readings` begin when all users are connected; after Ctrl-C, which is raised, their record of the unfinished
        load is stored. Raises `RunError`; a load that was cut short is returned."""
        if self.faults is not None and (why := self.faults.expected(entry)) is not None:
            raise RunError(why, entry.label)
        answers = self.answers if self.arms.get(entry.label) is arm else None
        if answers is not None:
            command = answers.keeping(command, entry.workload, entry.label, number)
        outcome = self._generate(_title(arm, entry), arm, command, readings)
        if answers is not None:
            answers.take(entry.workload, entry.label, f"{name} {number}", command, outcome)
        return outcome

    @staticmethod
    def require_whole(
        arm: Arm, entry: ScheduledBlock, outcome: BlockOutcome, samples: Path, cut_reason: str | None
    ) -> None:
        """Call it after the record is stored. Raises `StorageError` when the samples are not stored, and `RunError`
        when the load was cut short."""
        if outcome.storage_error is not None:
            raise StorageError(storage_sentence(samples, outcome.storage_error))
        if cut_reason is not None:
            raise _cut_short(_title(arm, entry), cut_reason, arm)

    @staticmethod
    def record(kind: type[R], entry: ScheduledBlock, started_at: str, outcome: BlockOutcome, **more: Any) -> R:
        """The record of a block or of a trial: every field that the outcome has under the same name, and `more`."""
        common = set(kind.__struct_fields__) & set(outcome.__struct_fields__)
        measured = {name: getattr(outcome, name) for name in common}
        planned = {
            "workload": entry.workload.name,
            "round": entry.round,
            "restart": entry.restart,
            "label": entry.label,
            "position": entry.position,
            "started_at": started_at,
            "generator_cpu_ns": outcome.cpu_ns,
            "generator_spin_ns": outcome.spin_ns,
        }
        return kind(**measured | planned | more)

    def _generate(self, title: str, arm: Arm, command: Open, readings: _Readings | None = None) -> BlockOutcome:
        try:
            self.generator.open(command)
            if readings is not None:
                readings.begin()
            try:
                return self.generator.go(command)
            except KeyboardInterrupt:
                outcome = self.generator.abort(command, "interrupted")
                if outcome is not None and readings is not None:
                    self.store.block(readings.record(outcome))
                raise
        except GeneratorError as exc:
            raise RunError(f"{title}: {exc}{arm.failure_message()}", arm.request.label) from exc

    def measure(self, block: ScheduledBlock) -> BlockRecord:
        """Run and store one block, with readings of the server, the machine and the GPU. One that its arm's fault kept
        from starting, or cut short, is stored as incomplete, with the reason. Raises as `run` does."""
        arm, workload = self.arms[block.label], block.workload
        path = self.store.samples_path(block.index)
        arrivals_seed = schedule_seed(self.seed, workload.name, block.round)
        command = arm.load(workload, path, turn=block.round, arrivals_seed=arrivals_seed)
        readings = _Readings(block, arm, self.servers, self.gpu)
        try:
            outcome = self.load(arm, block, command, block.index, "block", readings)
        except RunError as exc:
            if self.faults is None or not self.generator.alive:
                raise
            record = readings.record(_not_run(str(exc), arm))
            store_empty(path, record)
            self.store.block(record)
            self._fault(self.faults, block, exc)
            return record
        readings.end(outcome)
        record = readings.record(outcome)
        self.store.block(record)
        try:
            self.require_whole(arm, block, outcome, path, outcome.cut_reason)
        except RunError as exc:
            if self.faults is None or not self.generator.alive:
                raise
            self._fault(self.faults, block, exc)
        else:
            if self.faults is not None:
                self.faults.measured(block.label)
        return record

    def _fault(self, faults: ArmFaults, block: ScheduledBlock, fault: RunError) -> None:
        """Go on without an arm in a workload, or without the arm. Raises `RunError` if nothing is left to compare."""
        faults.add(block, str(fault), ended=self.arms[block.label].deployment.failure() is not None)
        self.progress.arm_left_out(block.label, str(fault))


class _Readings:
    """The readings right before and right after a block: the server's statistics and CPU time, the machine, the GPU."""

    def __init__(
        self, block: ScheduledBlock, arm: Arm, servers: Sequence[int] | None, gpu: GpuRecording | None
    ) -> None:
        """Asks the server what its model calls. `servers`: all processes of the arms' servers, None if unknown."""
        self._entry = block
        self._arm = arm
        self._source = arm.statistics()
        self._servers = servers
        self._gpu = gpu
        self._at_end: dict[str, Any] = {"server_cpu_ns": None, "stages": None, "machine": None}
        """Fields of the record."""
        self._started_at = utc_now()
        self._clock_step_s = 0.0
        """How far the wall clock was set during the block."""

    def begin(self) -> None:
        """Call it when the users are connected."""
        self._read_gpu("before")
        self._statistics = self._source.read()
        self._cpu_ns = self._arm.deployment.cpu_ns()
        self._started_at = utc_now()
        self._clock_ns = _wall_clock_ahead_ns()
        self._processors = read_processors()

    def end(self, outcome: BlockOutcome) -> None:
        """Call it after the last answer."""
        self._at_end["machine"] = machine_load(self._processors, read_processors(), self._servers)
        self._clock_step_s = (_wall_clock_ahead_ns() - self._clock_ns) / _NS_PER_S
        cpu_ns = self._arm.deployment.cpu_ns()
        if self._cpu_ns is not None and cpu_ns is not None:
            self._at_end["server_cpu_ns"] = cpu_ns - self._cpu_ns
        self._read_gpu("after")
        if self._statistics is not None:
            self._at_end["stages"] = self._totals(self._statistics, outcome.requests + outcome.cool_down)

    def _read_gpu(self, moment: str) -> None:
        """With the server's processes at this moment: it may have restarted one that works on the GPU."""
        if self._gpu is not None:
            deployment = self._arm.deployment
            self._gpu.processes(self._entry.label, deployment.pids(), deployment.processes_unknown)
            self._gpu.edge(f"block {self._entry.index} {moment}")

    def _totals(self, before: Snapshot, requests: int) -> StageTotals | None:
        """Servers may count a request a moment after its answer: ask until the last request is counted."""
        deadline = monotonic() + _SETTLED_SECONDS
        while True:
            after = self._source.read()
            if after is None:
                return None
            if self._source.settled(before, after, requests) or monotonic() > deadline:
                return self._source.totals(before, after)
            sleep(0.005)

    def record(self, outcome: BlockOutcome) -> BlockRecord:
        """The block's record; without readings of its end when it was interrupted."""
        block = self._entry
        note = outcome.cut_reason
        if note is None and outcome.reconnects:
            note = (
                f"the server closed {outcome.reconnects} connections, which were opened again before the next request"
            )
        if note is None and abs(self._clock_step_s) > CLOCK_STEP_SECONDS:
            note = f"the wall clock was set by {self._clock_step_s:+,.0f} s; the measurement does not depend on it"
        return LoadRunner.record(
            BlockRecord,
            block,
            self._started_at,
            outcome,
            index=block.index,
            samples=f"samples/{block.index:04d}.npy",
            items=(outcome.requests - outcome.errors) * block.workload.batch_size,
            complete=outcome.cut_reason is None and outcome.storage_error is None,
            note=note,
            **self._at_end,
        )


def _not_run(why: str, arm: Arm) -> BlockOutcome:
    """The outcome of a block that did not begin."""
    now_ns = perf_counter_ns()
    return BlockOutcome(
        window_start_ns=now_ns, window_end_ns=now_ns, requests=0, errors=0, error_messages=(), cpu_ns=0, reconnects=0,
        cut_reason=why, storage_error=None, transport=arm.transport,
    )  # fmt: skip


def _title(arm: Arm, entry: ScheduledBlock) -> str:
    return f"{entry.workload.name} on {arm.name}"


def _cut_short(title: str, reason: str, arm: Arm) -> RunError:
    return RunError(f"{title} was cut short: {reason}{arm.failure_message()}", arm.request.label)


def _wall_clock_ahead_ns() -> int:
    """The wall clock minus the monotonic clock, which changes only when the wall clock is set."""
    return time_ns() - perf_counter_ns()


def _expected_s(shape: RequestShape, users: int, request_s: float, next_shape: RequestShape, next_users: int) -> float:
    """Seconds of an answer at the next load on an arm that batches nothing, by those at a smaller load."""
    more_users = min(next_users / users, MOST_CROWDING)
    return request_s * more_users * (next_shape.output_tokens or 1) / (shape.output_tokens or 1)


def _size(shape: RequestShape, users: int) -> tuple[int, ...]:
    """Sorts loads: small requests and few users first."""
    return (
        shape.batch_size, users, shape.sequence_length or 0, shape.prompt_tokens or 0, shape.output_tokens or 0,
        shape.shared_prefix,
    )  # fmt: skip
