"""Readings of the servers and of the machine besides the load, from which the fairness checks are made."""

from __future__ import annotations

from typing import Literal

from loadgen.records.run import Label, Record


class CacheProbe(Record, frozen=True, kw_only=True):
    """Times of new requests and of repeated ones sent among them, group by group; empty with an `error`."""

    FILE = "cache_probes.json"
    label: Label
    fresh_ns: tuple[int, ...]
    """Time of the new request of each group."""
    repeated_ns: tuple[int, ...]
    """Times of the repeated requests, as many for each new one, in the order of the groups."""
    error: str | None = None


class ArmConditions(Record, frozen=True, kw_only=True):
    """Readings of one arm."""

    label: Label
    loopback: bool
    """Whether its address is this machine's loopback."""
    connect_ms: float | None
    """Median time of a TCP connection to its HTTP port: one round trip; null if one failed."""
    pids: tuple[int, ...]
    """Processes of its server, where it runs on this machine and they can be seen."""


class GpuCondition(Record, frozen=True, kw_only=True):
    """One GPU, as its driver reports it. Null is unknown."""

    uuid: str | None
    name: str | None
    utilisation: float | None
    """Share of the driver's last interval with a kernel running."""
    sm_clock_hertz: float | None
    temperature_celsius: float | None
    clock_event_reasons: tuple[str, ...] | None
    """NVML's reasons why the clocks are not at their highest."""
    pids: tuple[int, ...] | None
    """Processes with a compute context; in a container these may be the host's PIDs."""


class Conditions(Record, frozen=True, kw_only=True):
    """The arms, the processors and the GPUs right before the load, with all servers up and nothing sent."""

    FILE = "conditions.json"
    schema: Literal["abserve.conditions/1"] = "abserve.conditions/1"
    taken_at: str
    arms: tuple[ArmConditions, ...]
    cpu_busy_share: float | None
    """Busy share of all cores that the load generator may use, over 0.3 s in which nothing was sent."""
    cpu_governors: tuple[str, ...] | None
    """The different governors of all cores; null where the kernel does not report them (virtual machines)."""
    gpus: tuple[GpuCondition, ...]
    """The GPUs; empty without a GPU, or if no server reports one."""
