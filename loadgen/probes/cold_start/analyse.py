"""The cold starts of a run as they were stored; their ratios are comparisons like any other."""

from __future__ import annotations

from loadgen.metrics.facts import Facts
from loadgen.probes.cold_start.records import ColdStart, ContainerColdStart
from loadgen.records.run import Found


class ColdStartsFound(Found, frozen=True, kw_only=True):
    """Every start of a server."""

    STUDY = "cold_start"
    starts: tuple[ColdStart, ...] = ()
    containers: tuple[ContainerColdStart, ...] = ()
    """Every start of a container, step by step; empty except with `--deployment compose`."""


def analyse(facts: Facts) -> ColdStartsFound:
    """The stored starts."""
    return ColdStartsFound(starts=facts.run.cold_starts, containers=facts.run.container_cold_starts)
