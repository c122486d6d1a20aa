"""Runs load on servers that are up: warm-up, blocks, trials of searches. Each is on disk before the next begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep, time_ns
from typing import Any

from loadgen.bench.answers import AnswersUnderLoad
from loadgen.bench.arms import Arm
from loadgen.bench.gpu_recording import GpuRecording
from loadgen.bench.machine_watch import MachineWatch
from loadgen.bench.progress import Progress
from loadgen.bench.server_stats import requests_seen, stage_totals
from loadgen.comparison.summaries import summarise_blocks
from loadgen.experiment.arrivals import schedule_seed
from loadgen.experiment.forecast import Forecast
from loadgen.experiment.schedule import ScheduledBlock
from loadgen.generator.messages import Open, Outcome
from loadgen.generator.process import GeneratorError, GeneratorProcess
from loadgen.machine.environment import utc_now
from loadgen.records.run import BlockRecord, Cell, Label, MachineLoad, StageTotals, shown
from loadgen.storage.store import RunStore, StorageError, storage_sentence
from loadgen.storage.stored_run import StoredBlock, read_block

OPEN_WARM_UP_USERS = 8
GAP_EVERY_SECONDS = 90.0
"""Between two measurements of the idle GPU, which take six seconds each."""
CLOCK_STEP_SECONDS = 1.0
"""NTP slews by far less within a block."""
_SETTLED_SECONDS = 0.5
_NS_PER_S = 1e9


class LoadError(Exception):
    """Load could not be run or was cut short; everything before it is stored."""


@dataclass(slots=True)
class LoadRunner:
    """Everything that loads the arms of one run goes through `load`: each block of a round, each trial of a search."""

    arms: Mapping[Label, Arm]
    generator: GeneratorProcess
    store: RunStore
    progress: Progress
    gpu: GpuRecording | None = None
    """With it there is an idle gap before, between and after the rounds, and an edge beside every block."""
    seed: int = 0
    """The experiment's, from which the schedules of open loops follow."""
    answers: AnswersUnderLoad | None = None
    """Keeps some answers of all load."""
    _watch: MachineWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = MachineWatch(tuple(self.arms.values()))

    def warm_up(self, cells: Sequence[Cell]) -> dict[str, float]:
        """Every load shape on every arm, outside any window and in no sample file; by the cells' names, how many
        seconds a request takes on the slower arm. Raises `LoadError`."""
        slowest: dict[tuple[int, int], float] = {}
        for label, arm in self.arms.items():
            for batch_size, concurrency in sorted({_warm_up_shape(cell) for cell in cells}):
                self.progress.now(f"{shown(label)}: batch {batch_size}, concurrency {concurrency}")
                requests = 2 * concurrency if batch_size > 1 or concurrency > 1 else 5
                shape = closed_loop(concurrency, requests, batch_size=batch_size, max_seconds=60.0)
                outcome = self._generate(f"warm-up of arm {label}", arm, arm.load(shape, None))
                if outcome.errors:
                    raise LoadError(
                        f"warm-up of arm {label}: {outcome.errors} of {outcome.requests} requests failed "
                        f"({outcome.error_messages[0]}){arm.failure_message()}"
                    )
                if outcome.cut_reason is not None:
                    raise _cut_short(f"warm-up of arm {label}", outcome.cut_reason, arm)
                seconds = (outcome.window_end_ns - outcome.window_start_ns) / _NS_PER_S
                took = concurrency * seconds / max(outcome.requests + outcome.cool_down, 1)
                slowest[batch_size, concurrency] = max(took, slowest.get((batch_size, concurrency), 0.0))
        return {cell.name: slowest[_warm_up_shape(cell)] for cell in cells}

    def run(
        self, blocks: Sequence[ScheduledBlock], forecast: Forecast, *, planned: int | None = None, last: bool = True
    ) -> list[StoredBlock]:
        """All blocks in order, each read back once it is stored. Without `planned`, the number of blocks in all, it is
        not known; with `last`, nothing follows them. Raises `LoadError` after storing a block that was cut short,
        `StorageError`."""
        pair = None
        done = []
        for block in blocks:
            if block.round != pair:
                if self._gap_due():
                    self.idle()
                pair = block.round
            of = "" if planned is None else f" of {planned}"
            self.progress.now(f"block {block.index + 1}{of}: {shown(block.label)} {block.cell.name}")
            started = monotonic()
            record, outcome = self._block(block)
            forecast.block_took(block, monotonic() - started)
            stored = read_block(self.store.directory, record, {block.cell.name: block.cell})
            done.append(stored)
            self.progress.block_done(record, summarise_blocks([stored])[0], outcome.latency_p50_ns)
            self.progress.plan(forecast.remaining_s())
        if last:
            self.idle()
        return done

    def measure(self, block: ScheduledBlock) -> BlockRecord:
        """One block outside the schedule, stored. Raises as `run` does."""
        return self._block(block)[0]

    def _gap_due(self) -> bool:
        """Whether the idle GPU was last measured so long ago that it may have changed."""
        gaps = () if self.gpu is None else self.gpu.gaps
        return not gaps or perf_counter_ns() - gaps[-1].end_ns > GAP_EVERY_SECONDS * _NS_PER_S

    def idle(self) -> None:
        """Send nothing for a while, where the evidence needs to know the GPU at rest."""
        if self.gpu is not None:
            self.progress.now("nothing is sent, so that the GPU's idling is known")
            self.gpu.gap()

    def load(
        self,
        entry: ScheduledBlock,
        command: Open,
        number: int,
        name: str,
        *,
        before: Callable[[], None] | None = None,
        interrupted: Callable[[Outcome], None] | None = None,
    ) -> Outcome:
        """Load one arm as the command says. `number` decides which of its answers are kept, `name` is for people.
        `before` is called when all users are connected, right before they start; `interrupted` gets what was done up
        to Ctrl-C, which then goes on. Raises `LoadError`; a load that was cut short is returned."""
        arm = self.arms[entry.label]
        if self.answers is not None:
            command = self.answers.keeping(command, entry.cell, number)
        outcome = self._generate(_title(entry), arm, command, before, interrupted)
        if self.answers is not None:
            self.answers.take(entry.cell, entry.label, f"{name} {number}", outcome)
        return outcome

    def require_whole(self, entry: ScheduledBlock, outcome: Outcome, samples: Path, cut_reason: str | None) -> None:
        """For a load whose record is stored. Raises `StorageError` where its samples are not, and `LoadError` where it
        was cut short."""
        if outcome.storage_error is not None:
            raise StorageError(storage_sentence(samples, outcome.storage_error))
        if cut_reason is not None:
            raise _cut_short(_title(entry), cut_reason, self.arms[entry.label])

    def _generate(
        self,
        title: str,
        arm: Arm,
        command: Open,
        before: Callable[[], None] | None = None,
        interrupted: Callable[[Outcome], None] | None = None,
    ) -> Outcome:
        try:
            self.generator.open(command)
            if before is not None:
                before()
            try:
                return self.generator.go(command)
            except KeyboardInterrupt:
                outcome = self.generator.abort(command, "interrupted")
                if outcome is not None and interrupted is not None:
                    interrupted(outcome)
                raise
        except GeneratorError as exc:
            raise LoadError(f"{title}: {exc}{arm.failure_message()}") from exc

    def _block(self, block: ScheduledBlock) -> tuple[BlockRecord, Outcome]:
        """Run it, with what the server, the machine and the GPU did meanwhile, and store it."""
        arm, cell = self.arms[block.label], block.cell
        path = self.store.samples_path(block.index)
        seed = schedule_seed(self.seed, cell.name, block.round)
        readings = _Readings(arm, self._watch, self.gpu, f"block {block.index}")
        outcome = self.load(
            block,
            arm.load(cell, path, arrivals_seed=seed),
            block.index,
            "block",
            before=readings.begin,
            interrupted=lambda outcome: self.store.block(_record(block, readings, outcome)),
        )
        readings.end(outcome)
        record = _record(block, readings, outcome)
        self.store.block(record)
        self.require_whole(block, outcome, path, outcome.cut_reason)
        return record, outcome


@dataclass(slots=True)
class _Readings:
    """What is read right before and right after a block: the server's statistics and CPU time, the machine, the GPU."""

    arm: Arm
    watch: MachineWatch
    gpu: GpuRecording | None
    title: str
    started_at: str = ""
    server_cpu_ns: int | None = None
    stages: StageTotals | None = None
    machine: MachineLoad | None = None
    clock_step_s: float = 0.0
    """By how much the wall clock was set meanwhile."""
    _statistics: Mapping[str, Any] | None = None
    _cpu_ns: int | None = None
    _clock_ns: int = 0

    def begin(self) -> None:
        """The users are connected."""
        if self.gpu is not None:
            self.gpu.edge(f"{self.title} before")
        self._statistics = self.arm.endpoint.statistics(self.arm.model)
        self._cpu_ns = self.arm.deployment.cpu_ns()
        self.started_at = utc_now()
        self._clock_ns = _wall_clock_ahead_ns()
        self.watch.start()

    def end(self, outcome: Outcome) -> None:
        """The last answer is in."""
        self.machine = self.watch.end()
        self.clock_step_s = (_wall_clock_ahead_ns() - self._clock_ns) / _NS_PER_S
        cpu_ns = self.arm.deployment.cpu_ns()
        if self._cpu_ns is not None and cpu_ns is not None:
            self.server_cpu_ns = cpu_ns - self._cpu_ns
        if self.gpu is not None:
            self.gpu.edge(f"{self.title} after")
        if self._statistics is not None:
            self.stages = self._stages(self._statistics, outcome.requests + outcome.cool_down)

    def _stages(self, before: Mapping[str, Any], requests: int) -> StageTotals | None:
        """Statistics may be counted a moment after the answer: ask again until they include the last request."""
        deadline = monotonic() + _SETTLED_SECONDS
        while True:
            after = self.arm.endpoint.statistics(self.arm.model)
            if after is None:
                return None
            if requests_seen(after) - requests_seen(before) >= requests or monotonic() > deadline:
                return stage_totals(before, after)
            sleep(0.005)


def closed_loop(
    concurrency: int, requests: int, *, batch_size: int = 1, seconds: float = 0.0, max_seconds: float
) -> Cell:
    """A load beside the experiment's own."""
    return Cell(
        scenario="concurrent", batch_size=batch_size, concurrency=concurrency, requests=requests, seconds=seconds,
        max_seconds=max_seconds, rounds=1,
    )  # fmt: skip


def common_fields(entry: ScheduledBlock, started_at: str, outcome: Outcome) -> dict[str, Any]:
    """What the records of a block and of a trial both hold."""
    return {
        "cell": entry.cell.name,
        "round": entry.round,
        "restart": entry.restart,
        "label": entry.label,
        "position": entry.position,
        "started_at": started_at,
        "window_start_ns": outcome.window_start_ns,
        "window_end_ns": outcome.window_end_ns,
        "requests": outcome.requests,
        "errors": outcome.errors,
        "error_messages": outcome.error_messages,
        "generator_cpu_ns": outcome.cpu_ns,
    }


def _record(block: ScheduledBlock, readings: _Readings, outcome: Outcome) -> BlockRecord:
    note = outcome.cut_reason
    if note is None and outcome.reconnects:
        note = f"{outcome.reconnects} connections that the server had closed were made again before a request"
    if note is None and abs(readings.clock_step_s) > CLOCK_STEP_SECONDS:
        note = (
            f"the wall clock was set by {readings.clock_step_s:+,.0f} s meanwhile; "
            "what is measured does not depend on it"
        )
    return BlockRecord(
        **common_fields(block, readings.started_at, outcome),
        index=block.index,
        samples=f"samples/{block.index:04d}.npy",
        items=(outcome.requests - outcome.errors) * block.cell.batch_size,
        server_cpu_ns=readings.server_cpu_ns,
        stages=readings.stages,
        complete=outcome.cut_reason is None and outcome.storage_error is None,
        note=note,
        transport=outcome.transport,
        body_payload_bytes=outcome.body_payload_bytes,
        offered=outcome.offered,
        due_span_ns=outcome.due_span_ns,
        cool_down=outcome.cool_down,
        first_answer_ns=outcome.first_answer_ns,
        reconnects=outcome.reconnects,
        machine=readings.machine,
        workers=outcome.workers,
    )


def _title(entry: ScheduledBlock) -> str:
    return f"{entry.cell.name} on arm {entry.label}"


def _cut_short(title: str, reason: str, arm: Arm) -> LoadError:
    return LoadError(f"{title} was cut short: {reason}{arm.failure_message()}")


def _wall_clock_ahead_ns() -> int:
    """Of the monotonic clock; it changes only where somebody sets the wall clock."""
    return time_ns() - perf_counter_ns()


def _warm_up_shape(cell: Cell) -> tuple[int, int]:
    """Batch size and concurrency; the connections of an open loop are a limit and no load."""
    return cell.batch_size, min(cell.concurrency, OPEN_WARM_UP_USERS) if cell.is_open else cell.concurrency
