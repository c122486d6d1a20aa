"""What is stored of one block of load, beside its samples."""

from __future__ import annotations

import msgspec

from loadgen.records.experiment import Label, Record, Transport


class StageTotals(Record, frozen=True, kw_only=True):
    """A server's own account of a block: differences of its statistics, summed over the block's requests.

    The names are Triton's. `receive` and `encode` are the native server's HTTP stages, None where a server does not
    report them; `decode` is part of compute_input on Triton.
    """

    requests: int
    items: int
    executions: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    receive_ns: int | None = None
    decode_ns: int | None = None
    encode_ns: int | None = None
    batches: dict[int, int] = msgspec.field(default_factory=dict)
    """Executed batch size → number of executions."""


class WorkerRecord(Record, frozen=True, kw_only=True):
    """What one process of a distributed generator did in a block. Its times are of its own machine's clock."""

    index: int
    host: str
    pid: int
    requests: int
    cpu_ns: int
    window_start_ns: int
    window_end_ns: int
    lost: str | None = None
    """How it was lost, where it was; `requests` are then those found in its file."""


class BlockRecord(Record, frozen=True, kw_only=True):
    """One stretch of load on one arm."""

    index: int
    cell: str
    pair: int
    label: Label
    position: int
    """0 when this arm came first in its pair, else 1."""
    started_at: str
    window_start_ns: int
    window_end_ns: int
    samples: str
    """Path of the sample file, relative to DIR."""
    requests: int
    items: int
    errors: int
    error_messages: tuple[str, ...]
    generator_cpu_ns: int
    server_cpu_ns: int | None
    stages: StageTotals | None
    complete: bool
    """False when the block was cut short: by a dead server, by Ctrl-C. Such a block takes part in no comparison."""
    note: str | None = None
    transport: Transport = "http"
    body_payload_bytes: tuple[int, ...] = ()
    """Bytes of tensors in each prepared body, by the number in the samples. They are part of the samples' request
    bytes, except with the transport shm, where they go through memory."""
    restart: int = 0
    """During which start of the servers, from 0."""
    offered: int | None = None
    """Requests that fell due in an open loop; those beyond `requests` could not be sent in time."""
    due_span_ns: int | None = None
    """From the first to the last moment at which one was due."""
    workers: tuple[WorkerRecord, ...] = ()
    """Processes of a distributed generator; empty where one process sent everything."""
