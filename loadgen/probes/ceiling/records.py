"""The stored records of engines measured alone: DIR/ceilings.json, with the documents that `abserve engine` wrote."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.records.run import Label, Record


class EngineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch size of a document of `abserve engine`, see docs/engines.md. Unknown fields are ignored."""

    batch: int
    repeats: int
    execution_ns: int | None
    call_ns: int
    """Median of the whole call with its copies, which a server cannot avoid."""
    call_p99_ns: int | None
    """p99 of the whole call; None with too few calls."""
    items_per_second: float | None = None
    """Throughput of the execution alone if the engine reports it, so copies may be left out."""
    tflops: float | None = None
    share_of_matrix_product: float | None = None
    cosine_to_fp32: float | None = None
    relative_error_to_fp32: float | None = None
    fault: str | None = None
    """Why the answers are not the model's; None if they are."""
    sizes: dict[str, int] = {}
    """By axis; others have their default."""
    tokens_per_second: float | None = None


class EngineDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document of `abserve engine --json`. Unknown fields are ignored."""

    schema: Literal["abserve.engine/1", "abserve.engine/2"] = "abserve.engine/2"
    model: str
    flops_per_item: float | None
    engine: dict[str, object]
    """Settings in effect: kind, version, precision, mode, device, threads, max_batch_size, weights, details."""
    matrix_product_tflops: float | None
    load_seconds: float
    batches: tuple[EngineBatch, ...]


class Ceiling(Record, frozen=True, kw_only=True):
    """One engine alone, or why it was not measured."""

    labels: tuple[Label, ...]
    """The arms with this ceiling: several if their engines have the same settings."""
    command: str | None = None
    """The command that measured it; None if nothing was started."""
    document: EngineDocument | None = None
    reason: str | None = None
    """Why the document is missing."""


class Ceilings(Record, frozen=True, kw_only=True):
    """DIR/ceilings.json, rewritten after each measurement."""

    FILE = "ceilings.json"
    schema: Literal["abserve.ceilings/1"] = "abserve.ceilings/1"
    measured: tuple[Ceiling, ...]
