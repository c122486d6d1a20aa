"""What is stored of cold starts: each start of a server process or of a container."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.records.run import Label, Record

Caches = Literal["cached", "uncached"]


class ColdStart(Record, frozen=True, kw_only=True):
    """One start of one server; times are since just before its process was created."""

    FILE = "cold_starts.json"
    label: Label
    repetition: int
    live_ns: int | None
    ready_ns: int | None
    first_answer_ns: int | None
    error: str | None = None
    conditions: str | None = None
    """State of the machine: "page cache warm, fresh ports, the other servers stopped"."""


class ContainerColdStart(Record, frozen=True, kw_only=True):
    """One start of one container; all times but those of the batches are since the engine was asked to start it."""

    FILE = "container_cold_starts.json"
    label: Label
    repetition: int
    service: str
    image: str
    conditions: str
    caches: Caches = "cached"
    """Whether the compile caches of torch and Triton were kept."""
    started_ns: int | None = None
    """The engine had created the process."""
    milestones_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """By the names of `loadgen.studies.cold_start.containers.MILESTONES`, as far as the log shows them."""
    live_ns: int | None = None
    ready_ns: int | None = None
    first_answer_ns: int | None = None
    batch_answers_ns: dict[int, int] = msgspec.field(default_factory=dict)
    """Batch size → latency of its first request, in ascending order, one after the other."""
    error: str | None = None
