"""Blocks of streamed answers as they are stored, made from the chunks of each answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.records.run import BlockRecord, Workload
from loadgen.records.samples import SAMPLE_DTYPE, Samples
from loadgen.records.store import StoredBlock
from loadgen.records.tokens import ANSWER_DTYPE, BY_IDS, EVENT_DTYPE, IDS, LENGTH

NS_PER_MS = 1_000_000
Chunks = Sequence[tuple[float, int]]
"""(milliseconds since the answer fell due, tokens) of each chunk of an answer."""


def streamed_arrays(
    answers: Sequence[Chunks],
    asked: int,
    *,
    due_ms: Sequence[float] | None = None,
    users: Sequence[int] | None = None,
    prompt: int = 32,
) -> tuple[Samples, Samples, Samples]:
    """(samples, events, answers). Without `due_ms` one user sends one request after the other; an answer without chunks
    has failed."""
    samples = np.zeros(len(answers), dtype=SAMPLE_DTYPE)
    described = np.zeros(len(answers), dtype=ANSWER_DTYPE)
    events: list[tuple[int, int, int, int]] = []
    now_ms = 0.0
    for row, chunks in enumerate(answers):
        start_ms = now_ms if due_ms is None else due_ms[row]
        end_ms = start_ms + (chunks[-1][0] if chunks else 1.0)
        tokens = sum(count for _, count in chunks)
        samples[row]["intended_ns"] = samples[row]["send_ns"] = round(start_ms * NS_PER_MS)
        samples[row]["first_byte_ns"] = round((start_ms + (chunks[0][0] if chunks else 0.0)) * NS_PER_MS)
        samples[row]["end_ns"] = round(end_ms * NS_PER_MS)
        samples[row]["user"] = 0 if users is None else users[row]
        samples[row]["status"], samples[row]["error"] = (200, -1) if chunks else (200, 0)
        samples[row]["request_bytes"], samples[row]["response_bytes"], samples[row]["batch"] = 400, 200 * tokens, 1
        events += [(row, count, round((start_ms + at) * NS_PER_MS), 1) for at, count in chunks]
        described[row] = (
            asked, prompt, prompt, tokens, tokens, 0, tokens, len(chunks), 4 * tokens, 0, row, LENGTH, BY_IDS, IDS,
        )  # fmt: skip
        now_ms = end_ms
    return samples, np.array(events, dtype=EVENT_DTYPE), described


def streamed_block(
    workload: Workload, arrays: tuple[Samples, Samples, Samples], *, index: int = 0, label: str = "a", round_: int = 0
) -> StoredBlock:
    """A complete block of these arrays."""
    samples, events, answers = arrays
    failed = int((samples["error"] >= 0).sum())
    record = BlockRecord(
        index=index, workload=workload.name, round=round_, label=label, position=0, started_at="",
        window_start_ns=int(samples["intended_ns"].min()), window_end_ns=int(samples["end_ns"].max()),
        samples=f"samples/{index:04d}.npy", requests=len(samples), items=len(samples) - failed, errors=failed,
        error_messages=("the stream held an error",) if failed else (), generator_cpu_ns=1, server_cpu_ns=None,
        stages=None, complete=True, transport="completions",
        offered=len(samples) if workload.is_open else None,
        due_span_ns=int(np.ptp(samples["intended_ns"])) if workload.is_open else None,
    )  # fmt: skip
    return StoredBlock(record, workload, samples, None, events, answers)
