"""How one block is shared among several load processes, and how their outcomes become one.

Users are divided as evenly as possible, and send until the block has enough requests of all processes together
(`loadgen.generator.window`); of an open loop's schedule each process takes every n-th request. So together they send
what one process would. All share one machine's monotonic clock, so their samples
can be merged.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.generator.messages import Open, Outcome
from loadgen.records.run import WorkerRecord
from loadgen.records.samples import (
    SAMPLE_DTYPE,
    Samples,
    part_path,
    read_samples,
    store_samples,
    with_errors_of,
)

LOST_MESSAGE = "failed in a load worker that was lost before it could say why"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One process's part of a block: its outcome, or how it was lost."""

    index: int
    pid: int
    command: Open
    outcome: Outcome | None
    lost: str | None = None

    @property
    def samples_path(self) -> Path:
        return Path(self.command.samples_path or "")


def shares(command: Open, workers: int) -> list[Open]:
    """The command for each process; with fewer users than processes, one per user."""
    parts = min(workers, command.concurrency)
    if parts == 1:
        return [command]
    users = _even(command.concurrency, parts)
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


def merge(command: Open, parts: Sequence[Contribution]) -> Outcome:
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
            samples = _store(Path(command.samples_path), parts, messages)
        except (OSError, ValueError) as exc:
            storage_errors.append(exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc))
    workers = tuple(_record(part, samples) for part in parts)
    offsets = command.due_offsets_ns()
    first_answers = [outcome.first_answer_ns for outcome in outcomes if outcome.first_answer_ns]
    return Outcome(
        window_start_ns=min((worker.window_start_ns for worker in workers if worker.window_start_ns), default=0),
        window_end_ns=max((worker.window_end_ns for worker in workers), default=0),
        requests=sum(worker.requests for worker in workers) if samples is None else len(samples),
        errors=sum(one.errors for one in outcomes) if samples is None else int((samples["error"] >= 0).sum()),
        error_messages=tuple(messages),
        cpu_ns=sum(worker.cpu_ns for worker in workers),
        spin_ns=sum(worker.spin_ns for worker in workers),
        reconnects=sum(outcome.reconnects for outcome in outcomes),
        cut_reason=next(iter(cut_reasons), None),
        storage_error=next(iter(storage_errors), None),
        transport=next((outcome.transport for outcome in outcomes), "http"),
        body_payload_bytes=next((outcome.body_payload_bytes for outcome in outcomes), ()),
        offered=None if offsets is None else len(offsets),
        due_span_ns=None if offsets is None else int(offsets[-1]),
        workers=workers,
        late=sum(outcome.late for outcome in outcomes),
        cool_down=sum(outcome.cool_down for outcome in outcomes),
        cool_down_ns=sum(outcome.cool_down_ns for outcome in outcomes),
        first_answer_ns=max(first_answers, default=None),
        answers=tuple(answer for outcome in outcomes for answer in outcome.answers),
    )


def _store(path: Path, parts: Sequence[Contribution], messages: list[str]) -> Samples:
    """Store all samples in the order in which they were sent, their errors numbered by `messages`, which grows by one
    for the failures of a lost process."""
    pieces = []
    for part in parts:
        own = part.samples_path
        if part.outcome is not None:
            pieces.append(with_errors_of(read_samples(own), part.outcome.error_messages, messages))
        elif own.exists() or part_path(own).exists():  # else it was lost before it could open its file
            piece = read_samples(own)
            if (piece["error"] >= 0).any() and LOST_MESSAGE not in messages:
                messages.append(LOST_MESSAGE)
            pieces.append(with_errors_of(piece, [LOST_MESSAGE] if LOST_MESSAGE in messages else [], messages))
    merged = np.concatenate(pieces) if pieces else np.empty(0, dtype=SAMPLE_DTYPE)
    merged = merged[np.argsort(merged["send_ns"], kind="stable")]
    store_samples(path, [merged])
    for part in parts:
        part.samples_path.unlink(missing_ok=True)
        part_path(part.samples_path).unlink(missing_ok=True)
    return merged


def _record(part: Contribution, samples: Samples | None) -> WorkerRecord:
    common: dict[str, Any] = {"index": part.index, "host": socket.gethostname(), "pid": part.pid, "lost": part.lost}
    if part.outcome is not None:
        return WorkerRecord(
            **common,
            requests=part.outcome.requests,
            cpu_ns=part.outcome.cpu_ns,
            spin_ns=part.outcome.spin_ns,
            window_start_ns=part.outcome.window_start_ns,
            window_end_ns=part.outcome.window_end_ns,
        )
    first = part.command.first_user
    own = np.empty(0, dtype=SAMPLE_DTYPE)
    if samples is not None:
        own = samples[(samples["user"] >= first) & (samples["user"] < first + part.command.concurrency)]
    return WorkerRecord(
        **common,
        requests=len(own),
        cpu_ns=0,
        window_start_ns=int(own["intended_ns"].min()) if len(own) else 0,
        window_end_ns=int(own["end_ns"].max()) if len(own) else 0,
    )


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if part < total % parts else 0) for part in range(parts)]
