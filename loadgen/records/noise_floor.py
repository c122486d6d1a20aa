"""What runs of an arm against itself have shown on one machine; `loadgen.analysis.noise_floor` makes and uses it."""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Record


class FloorEntry(Record, frozen=True, kw_only=True):
    """Of one metric in one scenario."""

    scenario: str
    metric: str
    difference: float
    """The floor, as a share: 0.02 is 2 %."""
    pairs: int


class NoiseFloor(Record, frozen=True, kw_only=True):
    """One A/A run."""

    schema: Literal["abserve.noise-floor/1"] = "abserve.noise-floor/1"
    fingerprint: str
    """Of the machine, see `loadgen.machine.fingerprint`."""
    servers: str
    """Host of servers that run elsewhere; empty for this machine."""
    title: str
    """What was measured against itself."""
    made_at: str
    restarts: int
    entries: tuple[FloorEntry, ...]
