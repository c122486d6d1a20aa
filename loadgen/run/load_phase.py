"""Runs blocks on servers that are up: warm-up, then one block after the other, each on disk before the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic, perf_counter_ns, sleep, time_ns

import msgspec

from loadgen.analysis.summaries import BlockSummary, summarise_blocks
from loadgen.experiment.arrivals import schedule_seed
from loadgen.experiment.forecast import Forecast
from loadgen.experiment.schedule import ScheduledBlock
from loadgen.generator.messages import Open, Outcome
from loadgen.generator.process import GeneratorError, GeneratorProcess
from loadgen.machine.environment import utc_now
from loadgen.records.run import BlockRecord, Cell, Label, StageTotals
from loadgen.run.account import requests_seen, stage_totals
from loadgen.run.arms import Arm
from loadgen.run.gpu_recording import GpuRecording
from loadgen.run.progress import Progress
from loadgen.storage.store import RunStore, StorageError, storage_sentence
from loadgen.storage.stored_run import read_block

OPEN_WARM_UP_USERS = 8
CLOCK_STEP_SECONDS = 1.0
"""NTP slews by far less within a block."""
_SETTLED_SECONDS = 0.5


class LoadError(Exception):
    """A block could not be run or was cut short; everything before it is stored."""


class LoadPhase:
    """The blocks of one run."""

    def __init__(
        self,
        arms: Mapping[Label, Arm],
        generator: GeneratorProcess,
        store: RunStore,
        progress: Progress,
        gpu: GpuRecording | None = None,
        seed: int = 0,
    ) -> None:
        """With `gpu` there is an idle gap before, between and after the rounds, and an edge beside every block. `seed`
        is the experiment's; the schedules of open loops come from it."""
        self._arms = arms
        self._generator = generator
        self._store = store
        self._progress = progress
        self._gpu = gpu
        self._seed = seed

    def warm_up(self, cells: Sequence[Cell]) -> None:
        """Every load shape on every arm, outside any window and in no sample file. Raises `LoadError`."""
        for label, arm in self._arms.items():
            for batch_size, concurrency in sorted({_warm_up_shape(cell) for cell in cells}):
                self._progress.now(f"{label.upper()}: batch {batch_size}, concurrency {concurrency}")
                requests = 2 * concurrency if batch_size > 1 or concurrency > 1 else 5
                command = arm.load(
                    batch_size=batch_size,
                    concurrency=concurrency,
                    requests=requests,
                    seconds=0.0,
                    max_seconds=60.0,
                    samples_path=None,
                )
                try:
                    self._generator.open(command)
                    outcome = self._generator.go(command)
                except GeneratorError as exc:
                    raise LoadError(f"warm-up of arm {label} failed: {exc}{arm.obituary()}") from exc
                if outcome.errors:
                    raise LoadError(
                        f"warm-up of arm {label}: {outcome.errors} of {outcome.requests} requests failed "
                        f"({outcome.error_messages[0]}){arm.obituary()}"
                    )
                if outcome.cut_reason is not None:
                    raise LoadError(f"warm-up of arm {label} was cut short: {outcome.cut_reason}{arm.obituary()}")

    def run(
        self, blocks: Sequence[ScheduledBlock], forecast: Forecast, *, planned: int | None = None, last: bool = True
    ) -> list[BlockSummary]:
        """All blocks in order, each summarised once it is stored. Without `planned`, the number of blocks in all, it is
        not known; with `last`, nothing follows them. Raises `LoadError` after storing a block that was cut short,
        `StorageError`."""
        pair = None
        summaries = []
        for block in blocks:
            if block.pair != pair:
                self.idle()
                pair = block.pair
            of = "" if planned is None else f" of {planned}"
            self._progress.now(f"block {block.index + 1}{of}: {block.label.upper()} {block.cell.name}")
            started = monotonic()
            record, outcome = self._stored_block(block)
            forecast.block_took(block, monotonic() - started)
            summary = self._summary(record, block.cell)
            summaries.append(summary)
            self._progress.block_done(record, summary, outcome.latency_p50_ns)
            self._progress.plan(forecast.remaining_s())
        if last:
            self.idle()
        return summaries

    def measure(self, block: ScheduledBlock) -> BlockRecord:
        """One block outside the schedule, stored. Raises as `run` does."""
        return self._stored_block(block)[0]

    def idle(self) -> None:
        """Send nothing for a while, where the evidence needs to know the GPU at rest."""
        if self._gpu is not None:
            self._progress.now("nothing is sent, so that the GPU's idling is known")
            self._gpu.gap()

    def _stored_block(self, block: ScheduledBlock) -> tuple[BlockRecord, Outcome]:
        record, outcome = self._run_block(block)
        self._store.block(record)
        if outcome.storage_error is not None:
            path = self._store.samples_path(block.index)
            raise StorageError(storage_sentence(path, outcome.storage_error))
        if not record.complete:
            raise LoadError(
                f"{block.cell.name} on arm {block.label} was cut short: "
                f"{outcome.cut_reason}{self._arms[block.label].obituary()}"
            )
        return record, outcome

    def _summary(self, record: BlockRecord, cell: Cell) -> BlockSummary:
        return summarise_blocks([read_block(self._store.directory, record, {cell.name: cell})])[0]

    def _run_block(self, block: ScheduledBlock) -> tuple[BlockRecord, Outcome]:
        arm, cell = self._arms[block.label], block.cell
        path = self._store.samples_path(block.index)
        command = msgspec.structs.replace(
            arm.load(
                batch_size=cell.batch_size,
                concurrency=cell.concurrency,
                requests=cell.requests,
                seconds=cell.seconds,
                max_seconds=cell.max_seconds,
                samples_path=str(path),
            ),
            arrivals=cell.arrivals,
            rate_per_s=cell.rate_per_s,
            arrivals_seed=schedule_seed(self._seed, cell.name, block.pair),
        )
        try:
            self._generator.open(command)
            if self._gpu is not None:
                self._gpu.edge(f"block {block.index} before")
            before = arm.endpoint.statistics(arm.model)
            cpu_before = arm.deployment.cpu_ns()
            started_at = utc_now()
            clock_apart_ns = _wall_clock_ahead_ns()
            outcome = self._go(command, lambda outcome: self._interrupted(block, started_at, outcome))
        except GeneratorError as exc:
            raise LoadError(f"{cell.name} on arm {block.label}: {exc}{arm.obituary()}") from exc
        step_s = (_wall_clock_ahead_ns() - clock_apart_ns) / 1e9
        cpu_after = arm.deployment.cpu_ns()
        if self._gpu is not None:
            self._gpu.edge(f"block {block.index} after")
        stages = None if before is None else self._stages_after(arm, before, outcome)
        cpu_ns = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
        record = self._record(block, started_at, outcome, cpu_ns, stages)
        if record.note is None and abs(step_s) > CLOCK_STEP_SECONDS:
            note = f"the wall clock was set by {step_s:+,.0f} s meanwhile; what is measured does not depend on it"
            record = msgspec.structs.replace(record, note=note)
        return record, outcome

    def _go(self, command: Open, interrupted: Callable[[Outcome], None]) -> Outcome:
        """On Ctrl-C the requests in flight finish, what was measured is stored, and the interrupt goes on."""
        try:
            return self._generator.go(command)
        except KeyboardInterrupt:
            outcome = self._generator.abort("interrupted")
            if outcome is not None:
                interrupted(outcome)
            raise

    def _interrupted(self, block: ScheduledBlock, started_at: str, outcome: Outcome) -> None:
        self._store.block(self._record(block, started_at, outcome, None, None))

    def _record(
        self,
        block: ScheduledBlock,
        started_at: str,
        outcome: Outcome,
        server_cpu_ns: int | None,
        stages: StageTotals | None,
    ) -> BlockRecord:
        note = outcome.cut_reason
        if note is None and outcome.reconnects:
            note = f"{outcome.reconnects} connections that the server had closed were made again before a request"
        return BlockRecord(
            index=block.index,
            cell=block.cell.name,
            pair=block.pair,
            label=block.label,
            position=block.position,
            started_at=started_at,
            window_start_ns=outcome.window_start_ns,
            window_end_ns=outcome.window_end_ns,
            samples=f"samples/{self._store.samples_path(block.index).name}",
            requests=outcome.requests,
            items=(outcome.requests - outcome.errors) * block.cell.batch_size,
            errors=outcome.errors,
            error_messages=outcome.error_messages,
            generator_cpu_ns=outcome.cpu_ns,
            server_cpu_ns=server_cpu_ns,
            stages=stages,
            complete=outcome.cut_reason is None and outcome.storage_error is None,
            note=note,
            transport=outcome.transport,
            body_payload_bytes=outcome.body_payload_bytes,
            restart=block.restart,
            offered=outcome.offered,
            due_span_ns=outcome.due_span_ns,
            workers=outcome.workers,
        )

    def _stages_after(self, arm: Arm, before: Mapping[str, object], outcome: Outcome) -> StageTotals | None:
        """Statistics may be counted a moment after the answer: ask again until they include the last request."""
        deadline = monotonic() + _SETTLED_SECONDS
        while True:
            after = arm.endpoint.statistics(arm.model)
            if after is None:
                return None
            if requests_seen(after) - requests_seen(before) >= outcome.requests or monotonic() > deadline:
                return stage_totals(before, after)
            sleep(0.005)


def _wall_clock_ahead_ns() -> int:
    """Of the monotonic clock; it changes only where somebody sets the wall clock."""
    return time_ns() - perf_counter_ns()


def _warm_up_shape(cell: Cell) -> tuple[int, int]:
    """Batch size and concurrency; the connections of an open loop are a limit and no load."""
    return cell.batch_size, min(cell.concurrency, OPEN_WARM_UP_USERS) if cell.is_open else cell.concurrency
