"""What was asked of the servers and of the machine besides the load, in order to trust what they say under it.

DIR/conditions.json: what the machine was like right before the load, with all servers up and nothing sent.
"""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Label, Record


class CacheProbe(Record, frozen=True, kw_only=True):
    """Requests that the arm had never seen, each among as many that it had; empty with an `error`."""

    FILE = "cache_probes.json"
    label: Label
    fresh_ns: tuple[int, ...]
    repeated_ns: tuple[int, ...]
    """As many for each fresh one, sent right before and after it, in the same order."""
    error: str | None = None


class ArmConditions(Record, frozen=True, kw_only=True):
    """Of one arm."""

    label: Label
    loopback: bool
    """Whether its address is this machine's loopback."""
    connect_ms: float | None
    """Median time of a TCP connection to its HTTP port: one round trip; null where none could be made."""
    pids: tuple[int, ...]
    """Of its server, where it is ours."""


class GpuCondition(Record, frozen=True, kw_only=True):
    """One GPU, as its driver told. Null is unknown."""

    uuid: str | None
    name: str | None
    utilisation: float | None
    """Share of the driver's last interval with a kernel running."""
    sm_clock_hertz: float | None
    temperature_celsius: float | None
    clock_event_reasons: tuple[str, ...] | None
    """Why the clocks are not at their highest, in NVML's names."""
    pids: tuple[int, ...] | None
    """Processes with a compute context; in a container these may be the host's numbers."""


class Conditions(Record, frozen=True, kw_only=True):
    """Both arms, the processors and the GPUs."""

    FILE = "conditions.json"
    schema: Literal["abserve.conditions/1"] = "abserve.conditions/1"
    taken_at: str
    arms: tuple[ArmConditions, ...]
    cpu_busy_share: float | None
    """Of all cores that the load generator may use, over 0.3 s in which nothing was sent."""
    cpu_governors: tuple[str, ...] | None
    """Of all cores, each named once; null where the kernel does not tell (virtual machines)."""
    gpus: tuple[GpuCondition, ...]
    """Empty where there is none, or where no server told."""
