"""How one block is shared among the workers of a generator, and how what they did is put together again.

Nothing here knows processes or clocks. Users and requests are divided as evenly as can be; of an open loop's schedule
each worker takes every n-th request, so that together they send exactly what one process would. All workers are on one
machine and share its monotonic clock, so their samples merge as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from loadgen.generator.messages import Open, Outcome
from loadgen.records.run import WorkerRecord
from loadgen.records.samples import (
    SAMPLE_DTYPE,
    Samples,
    median_latency_ns,
    part_path,
    read_samples,
    store_samples,
    with_errors_of,
)

LOST_MESSAGE = "failed in a load worker that was lost, which could not tell why"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's part of a block: its outcome, or how it was lost."""

    index: int
    host: str
    pid: int
    command: Open
    outcome: Outcome | None
    lost: str | None = None


def shares(command: Open, workers: int) -> list[Open]:
    """What each worker is told; fewer commands than workers where there are fewer users than workers."""
    parts = min(workers, command.concurrency)
    users = _even(command.concurrency, parts)
    requests = _even(command.requests, parts)
    return [
        msgspec.structs.replace(
            command,
            concurrency=users[part],
            requests=command.requests if command.arrivals != "closed" else max(requests[part], 1),
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
    """Where a worker writes its samples while the block runs."""
    return path.with_name(f"{path.stem}.worker{part}.npy")


def merge(command: Open, parts: Sequence[Contribution]) -> Outcome:
    """One outcome, and with a `samples_path` one sample file in place of the workers' own.

    A lost worker leaves what it had written; then the outcome has a `cut_reason`, so that the block is not complete.
    Where the samples cannot be stored, the workers' files stay and `storage_error` says why.
    """
    outcomes = {part.index: part.outcome for part in parts if part.outcome is not None}
    messages = list(dict.fromkeys(text for outcome in outcomes.values() for text in outcome.error_messages))
    storage_error = next((outcome.storage_error for outcome in outcomes.values() if outcome.storage_error), None)
    lost = [f"load worker {part.index + 1} of {len(parts)} {part.lost}" for part in parts if part.lost]
    cut_reason = next(iter(lost), None) or next((o.cut_reason for o in outcomes.values() if o.cut_reason), None)
    samples: Samples | None = None
    if command.samples_path is not None:
        try:
            samples = _stored(Path(command.samples_path), parts, messages)
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            storage_error = storage_error or reason
    workers = tuple(_record(part, samples) for part in parts)
    started = [worker.window_start_ns for worker in workers if worker.window_start_ns]
    offsets = command.due_offsets_ns()
    failed = None if samples is None else int((samples["error"] >= 0).sum())
    return Outcome(
        window_start_ns=min(started, default=0),
        window_end_ns=max((worker.window_end_ns for worker in workers), default=0),
        requests=sum(worker.requests for worker in workers) if samples is None else len(samples),
        errors=sum(outcome.errors for outcome in outcomes.values()) if failed is None else failed,
        error_messages=tuple(messages),
        cpu_ns=sum(worker.cpu_ns for worker in workers),
        reconnects=sum(outcome.reconnects for outcome in outcomes.values()),
        latency_p50_ns=None if samples is None else median_latency_ns(samples),
        cut_reason=cut_reason,
        storage_error=storage_error,
        transport=next((outcome.transport for outcome in outcomes.values()), "http"),
        body_payload_bytes=next((outcome.body_payload_bytes for outcome in outcomes.values()), ()),
        offered=None if offsets is None else len(offsets),
        due_span_ns=None if offsets is None else int(offsets[-1]),
        workers=workers,
        late=sum(outcome.late for outcome in outcomes.values()),
        cool_down=sum(outcome.cool_down for outcome in outcomes.values()),
        first_answer_ns=max((o.first_answer_ns for o in outcomes.values() if o.first_answer_ns), default=None),
        answers=tuple(answer for outcome in outcomes.values() for answer in outcome.answers),
    )


def _stored(path: Path, parts: Sequence[Contribution], messages: list[str]) -> Samples:
    """All samples in the order in which they were sent, their error numbers those of `messages`, which grows by one
    for the failures of a lost worker."""
    pieces = []
    for part in parts:
        own = Path(part.command.samples_path or "")
        if part.outcome is None and not own.exists() and not part_path(own).exists():
            continue  # lost before it could open its file
        piece = read_samples(own)
        texts: Sequence[str] = () if part.outcome is None else part.outcome.error_messages
        if part.outcome is None and (piece["error"] >= 0).any():
            texts = [LOST_MESSAGE]
            messages += [text for text in texts if text not in messages]
        pieces.append(with_errors_of(piece, texts, messages))
    merged = np.concatenate(pieces) if pieces else np.empty(0, dtype=SAMPLE_DTYPE)
    merged = merged[np.argsort(merged["send_ns"], kind="stable")]
    store_samples(path, merged)
    for part in parts:
        own = Path(part.command.samples_path or "")
        own.unlink(missing_ok=True)
        part_path(own).unlink(missing_ok=True)
    return merged


def _record(part: Contribution, samples: Samples | None) -> WorkerRecord:
    outcome = part.outcome
    if outcome is not None:
        requests, cpu_ns = outcome.requests, outcome.cpu_ns
        start_ns, end_ns = outcome.window_start_ns, outcome.window_end_ns
    else:
        first, last = part.command.first_user, part.command.first_user + part.command.concurrency
        own = np.empty(0, dtype=SAMPLE_DTYPE)
        if samples is not None:
            own = samples[(samples["user"] >= first) & (samples["user"] < last)]
        requests, cpu_ns = len(own), 0
        start_ns = int(own["intended_ns"].min()) if len(own) else 0
        end_ns = int(own["end_ns"].max()) if len(own) else 0
    return WorkerRecord(
        index=part.index,
        host=part.host,
        pid=part.pid,
        requests=requests,
        cpu_ns=cpu_ns,
        window_start_ns=start_ns,
        window_end_ns=end_ns,
        lost=part.lost,
    )


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if part < total % parts else 0) for part in range(parts)]
