"""Drives the load generator: starts its processes, sends them commands, and merges their outcomes into one.

With several processes each gets its share of a block, and all start at one moment of the machine's monotonic clock.
Users are divided as evenly as possible, and send until the block has enough requests of all processes together
(`loadgen.client.traffic`); of an open loop's schedule each process takes every n-th request. So together they send what
one process would, and their samples can be merged. A process that ends or sends no heartbeat is lost: the others are
stopped, everything measured is kept, and the block is not complete.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Any

import msgspec
import numpy as np

from loadgen.base.child_process import OWN_MODULE, ChildProcess
from loadgen.base.headers import secret_of
from loadgen.client.messages import (
    CONNECT_SECONDS,
    Abort,
    BlockOutcome,
    Command,
    CommandReply,
    GeneratorError,
    Go,
    Open,
    Prepare,
    Reply,
)
from loadgen.client.shared_memory import sweep
from loadgen.client.traffic import counts_bytes
from loadgen.records.run import WorkerRecord
from loadgen.records.samples import SAMPLE_DTYPE, Samples, part_path, read_samples, store_samples, with_errors_of
from loadgen.records.tokens import join_tokens, read_tokens, remove_tokens, store_tokens

LOST_MESSAGE = "failed in a load worker that was lost before it could say why"

SILENCE_SECONDS = 10.0
"""A process that opens or runs a block and sends no heartbeat for this long counts as hung."""
_PREPARE_SECONDS = 300.0
_ABORT_SECONDS = 10.0
_LEAD_NS = 150_000_000
"""Time from the command to the common start of several processes, which must have read it by then."""
_SUMMED = ("cpu_ns", "spin_ns", "reconnects", "late", "cool_down", "cool_down_ns", "cool_down_tokens")
_DECODER = msgspec.json.Decoder(Reply | None)


class GeneratorProcess:
    """A long-lived generator of one or more processes. Not thread-safe: one command at a time."""

    def __init__(self, log_path: Path, *, processes: int = 1) -> None:
        """With several processes each writes its own log beside `log_path`. Raises `GeneratorError`, `ProcessError`."""
        names, logs = ["the load generator"], [log_path]
        if processes > 1:
            names = [f"load worker {number} of {processes}" for number in range(1, processes + 1)]
            logs = [log_path.with_name(f"{log_path.stem}-worker{number}.log") for number in range(processes)]
        try:
            self._counts = os.memfd_create("abserve-counts")
            os.ftruncate(self._counts, counts_bytes(processes))
        except OSError as exc:
            raise GeneratorError(f"the load generator cannot start: {exc.strerror or exc}") from exc
        self._workers = [_Worker(name, log, self._counts) for name, log in zip(names, logs, strict=True)]
        self._asked: list[_Worker] = []
        """Workers that got the last command: not all of them when there are fewer users than processes."""
        self._parts: list[Open] = []
        self._running = False
        self._beating = False
        """Whether the last command is one during which the workers send heartbeats."""

    @property
    def alive(self) -> bool:
        """Whether no process of it is lost, so that another block can run."""
        return all(worker.lost is None for worker in self._workers)

    def prepare(self, command: Prepare) -> None:
        """Make the request bodies. Raises `GeneratorError`."""
        self._ask([command] * len(self._workers), _PREPARE_SECONDS)
        self._require_done()

    def open(self, command: Open) -> None:
        """Get one block ready to start. Raises `GeneratorError`, also when the server cannot be reached."""
        os.pwrite(self._counts, bytes(counts_bytes(len(self._workers))), 0)
        shared = msgspec.structs.replace(command, counts=self._counts)
        self._parts = shares(shared, len(self._workers))
        answer_s = command.answer_limit_s
        limit_s = 2 * CONNECT_SECONDS + answer_s + command.settling_s(answer_s)
        self._ask(self._parts, limit_s, beating=True)
        self._require_done()

    def go(self, command: Open) -> BlockOutcome:
        """Run the block that `command` opened; returns after its last answer. Raises `GeneratorError`."""
        start_ns = perf_counter_ns() + _LEAD_NS if len(self._parts) > 1 else None
        self._running = True
        limit_s = 1.25 * command.max_seconds + 2 * command.answer_limit_s + 30.0
        self._ask([Go(start_ns=start_ns)] * len(self._parts), limit_s, beating=True)
        return self._outcome(command)

    def abort(self, command: Open, reason: str) -> BlockOutcome | None:
        """End the block early, after `go` was interrupted; None when it has not begun or gives no outcome in time."""
        if not self._running:
            return None
        self._stop_block(reason)
        self._receive(_ABORT_SECONDS)
        try:
            return self._outcome(command)
        except GeneratorError:
            return None

    def stop(self) -> None:
        """End all processes. Idempotent."""
        for worker in self._workers:
            worker.child.stop(timeout_s=2.0)
            sweep(worker.child.pid)
        if self._counts >= 0:
            os.close(self._counts)
            self._counts = -1

    def _ask(self, commands: Sequence[Command], timeout_s: float, *, beating: bool = False) -> None:
        self._beating = beating
        self._asked = self._workers[: len(commands)]
        for worker, command in zip(self._asked, commands, strict=True):
            worker.reply = None
            worker.heard_s = monotonic()
            worker.send(command)
        self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        stopped = False
        while waiting := [worker for worker in self._asked if worker.reply is None and worker.lost is None]:
            select.select([worker.child for worker in waiting], [], [], 0.5)
            for worker in waiting:
                worker.receive()
                if worker.reply is None and monotonic() > deadline:
                    worker.kill(f"did not answer within {timeout_s:g} s")
                elif worker.reply is None and self._beating and monotonic() - worker.heard_s > SILENCE_SECONDS:
                    worker.kill(f"sent no heartbeat for {SILENCE_SECONDS:g} s")
            fault = next((fault for worker in self._asked if (fault := worker.fault())), None)
            if self._beating and fault is not None and not stopped:
                stopped = True
                self._stop_block(fault)

    def _stop_block(self, reason: str) -> None:
        """Stop the block in all processes: without the lost one the load is not the intended one."""
        for worker in self._asked:
            if worker.reply is None:
                worker.send(Abort(reason=reason))

    def _outcome(self, command: Open) -> BlockOutcome:
        self._running = False
        refused = next((worker for worker in self._asked if isinstance(worker.reply, CommandReply)), None)
        if len(self._parts) == 1 or refused is not None:
            worker = refused or self._asked[0]
            if not isinstance(worker.reply, BlockOutcome):
                raise worker.error()
            return worker.reply
        contributions = [
            Contribution(
                number,
                worker.child.pid,
                part,
                worker.reply if isinstance(worker.reply, BlockOutcome) else None,
                worker.lost,
            )
            for number, (worker, part) in enumerate(zip(self._asked, self._parts, strict=True))
        ]
        return merge(command, contributions)

    def _require_done(self) -> None:
        for worker in self._asked:
            if not isinstance(worker.reply, CommandReply) or worker.reply.refusal is not None:
                raise worker.error()


class _Worker:
    """One process of the generator."""

    def __init__(self, name: str, log_path: Path, counts: int) -> None:
        self.name = name
        command = [*OWN_MODULE, "loadgen.client.worker"]
        self.child = ChildProcess(command, log_path=log_path, pipes=True, descriptors=(counts,))
        self.reply: Reply | None = None
        """The reply to the last command."""
        self.lost: str | None = None
        """How it ended; it gets no more commands."""
        self.heard_s = 0.0

    def send(self, command: Command) -> None:
        if self.lost is None and not self.child.send(msgspec.json.encode(command, enc_hook=secret_of)):
            self.lost = self.child.ended()

    def receive(self) -> None:
        while self.reply is None and self.lost is None and (line := self.child.read_line(0.0)) is not None:
            if not line:
                self.lost = self.child.ended()
                return
            self.heard_s = monotonic()
            self.reply = _DECODER.decode(line)

    def kill(self, reason: str) -> None:
        """End a process that is not reliable, so that it sends no more requests."""
        self.child.popen.kill()
        self.lost = f"{reason} and was killed"

    def fault(self) -> str | None:
        """Why the block ends for the other processes too; None while this one works."""
        if self.lost is not None:
            return f"{self.name} was lost"
        if isinstance(self.reply, CommandReply):
            return self.reply.refusal
        return None if self.reply is None else self.reply.cut_reason

    def error(self) -> GeneratorError:
        refusal = self.reply.refusal if isinstance(self.reply, CommandReply) else None
        return GeneratorError(refusal or f"{self.name} {self.lost or f'answered {type(self.reply).__name__}'}")


@dataclass(frozen=True, slots=True)
class Contribution:
    """One process's part of a block: its outcome, or how it was lost."""

    index: int
    pid: int
    command: Open
    outcome: BlockOutcome | None
    lost: str | None = None

    @property
    def samples_path(self) -> Path:
        return Path(self.command.samples_path or "")


def shares(command: Open, workers: int) -> list[Open]:
    """The command for each process; with fewer users than processes, one per user."""
    parts = min(workers, command.concurrency)
    if parts == 1:
        return [command]
    users = [command.concurrency // parts + (part < command.concurrency % parts) for part in range(parts)]
    return [
        msgspec.structs.replace(
            command,
            concurrency=users[part],
            part=part,
            parts=parts,
            first_user=sum(users[:part]),
            keep_answers=-(-command.keep_answers // parts),
            keep_seed=command.keep_seed + part,
            samples_path=None if command.samples_path is None else str(worker_path(Path(command.samples_path), part)),
        )
        for part in range(parts)
    ]


def worker_path(path: Path, part: int) -> Path:
    """Where one process writes its samples while the block runs."""
    return path.with_name(f"{path.stem}.worker{part}.npy")


def merge(command: Open, parts: Sequence[Contribution]) -> BlockOutcome:
    """One outcome, and with a `samples_path` one sample file in place of the processes' files.

    The samples of a lost process are kept; then the outcome has a `cut_reason`, so that the block is not complete.
    When the samples cannot be stored, the processes' files stay and `storage_error` says why.
    """
    outcomes = [part.outcome for part in parts if part.outcome is not None]
    messages = list(dict.fromkeys(text for outcome in outcomes for text in outcome.error_messages))
    lost = [f"load worker {part.index + 1} of {len(parts)} {part.lost}" for part in parts if part.lost]
    cut_reasons = [*lost, *(outcome.cut_reason for outcome in outcomes if outcome.cut_reason)]
    storage_errors = [outcome.storage_error for outcome in outcomes if outcome.storage_error]
    samples: Samples | None = None
    if command.samples_path is not None:
        try:
            samples = _store(command, parts, messages)
        except (OSError, ValueError) as exc:
            storage_errors.append(exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc))
    workers = tuple(_record(part, samples) for part in parts)
    offsets = command.due_offsets_ns()
    waits = [outcome.generator_waited_ns for outcome in outcomes if outcome.generator_waited_ns is not None]
    first_answers = [outcome.first_answer_ns for outcome in outcomes if outcome.first_answer_ns]
    return BlockOutcome(
        window_start_ns=min((worker.window_start_ns for worker in workers if worker.window_start_ns), default=0),
        window_end_ns=max((worker.window_end_ns for worker in workers), default=0),
        requests=sum(worker.requests for worker in workers) if samples is None else len(samples),
        errors=sum(outcome.errors for outcome in outcomes) if samples is None else int((samples["error"] >= 0).sum()),
        error_messages=tuple(messages),
        cut_reason=next(iter(cut_reasons), None),
        storage_error=next(iter(storage_errors), None),
        transport=next((outcome.transport for outcome in outcomes), "http"),
        body_payload_bytes=next((outcome.body_payload_bytes for outcome in outcomes), ()),
        offered=None if offsets is None else len(offsets),
        due_span_ns=None if offsets is None else int(offsets[-1]),
        workers=workers,
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in _SUMMED},
        first_answer_ns=max(first_answers, default=None),
        answers=tuple(answer for outcome in outcomes for answer in outcome.answers),
        generator_waited_ns=max(waits, default=None),
    )


def _store(command: Open, parts: Sequence[Contribution], messages: list[str]) -> Samples:
    """Store all samples in the order in which they were sent, their errors numbered by `messages`, which grows by one
    for the failures of a lost process. A lost process has no streamed answers."""
    path, pieces = Path(command.samples_path or ""), []
    streamed = bool(command.shapes)
    kept = [part for part in parts if part.outcome is not None or not streamed]
    for part in kept:
        if part.outcome is not None:
            piece = read_samples(part.samples_path)
            pieces.append(with_errors_of(piece, part.outcome.error_messages, messages))
        elif part.samples_path.exists() or part_path(part.samples_path).exists():  # else lost before it opened its file
            piece = read_samples(part.samples_path)
            if (piece["error"] >= 0).any() and LOST_MESSAGE not in messages:
                messages.append(LOST_MESSAGE)
            pieces.append(with_errors_of(piece, [LOST_MESSAGE] if LOST_MESSAGE in messages else [], messages))
    merged = np.concatenate(pieces) if pieces else np.empty(0, dtype=SAMPLE_DTYPE)
    order = np.argsort(merged["send_ns"], kind="stable")
    merged = merged[order]
    if streamed:
        store_tokens(path, join_tokens([read_tokens(part.samples_path) for part in kept], order))
    store_samples(path, [merged])
    for part in parts:
        remove_tokens(part.samples_path)
        part.samples_path.unlink(missing_ok=True)
        part_path(part.samples_path).unlink(missing_ok=True)
    return merged


def _record(part: Contribution, samples: Samples | None) -> WorkerRecord:
    """What a worker did; of a lost one as far as its samples say."""
    common: dict[str, Any] = {"index": part.index, "host": socket.gethostname(), "pid": part.pid, "lost": part.lost}
    if (outcome := part.outcome) is not None:
        fields = ("requests", "cpu_ns", "spin_ns", "window_start_ns", "window_end_ns")
        return WorkerRecord(**common, **{name: getattr(outcome, name) for name in fields})
    first = part.command.first_user
    stored = np.empty(0, dtype=SAMPLE_DTYPE)
    if samples is not None:
        stored = samples[(samples["user"] >= first) & (samples["user"] < first + part.command.concurrency)]
    return WorkerRecord(
        **common,
        requests=len(stored),
        cpu_ns=0,
        window_start_ns=int(stored["intended_ns"].min()) if len(stored) else 0,
        window_end_ns=int(stored["end_ns"].max()) if len(stored) else 0,
    )
