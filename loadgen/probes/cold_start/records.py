"""The stored records of cold starts: each start of a server process or of a container."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.records.run import Label, Record

Caches = Literal["cached", "uncached"]


class ColdStart(Record, frozen=True, kw_only=True):
    """One start of one server; times count from just before its process was created."""

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
    """One start of one container; times count from the request to the engine to start it, except batch latencies."""

    FILE = "container_cold_starts.json"
    label: Label
    repetition: int
    service: str
    image: str
    conditions: str
    caches: Caches = "cached"
    """Whether the compile caches of torch and Triton were kept."""
    started_ns: int | None = None
    """Time at which the engine had created the process."""
    milestones_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """Time of each milestone that the log shows, by the names of `loadgen.probes.cold_start.containers.MILESTONES`."""
    live_ns: int | None = None
    ready_ns: int | None = None
    first_answer_ns: int | None = None
    batch_answers_ns: dict[int, int] = msgspec.field(default_factory=dict)
    """Latency of the first request of each batch size, in ascending order, one after the other."""
    error: str | None = None
