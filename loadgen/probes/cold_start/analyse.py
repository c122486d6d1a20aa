"""The cold starts of a run as they were stored; their ratios are comparisons like any other."""

from __future__ import annotations

from loadgen.metrics.facts import Facts
from loadgen.metrics.registry import TIME_TO_FIRST_ANSWER, TIME_TO_READY
from loadgen.probes.cold_start.records import ColdStart, ContainerColdStart
from loadgen.records.run import Figure, Found
from loadgen.records.samples import NS_PER_S


class ColdStartsFound(Found, frozen=True, kw_only=True):
    """Every start of a server."""

    STUDY = "cold_start"
    starts: tuple[ColdStart, ...] = ()
    containers: tuple[ContainerColdStart, ...] = ()
    """Every start of a container, step by step; empty except with `--deployment compose`."""

    def figures(self) -> list[Figure]:
        """Seconds from the start of the process, of the starts without an error."""
        return [
            Figure(metric.name, "cold-start", start.label, start.repetition, start.repetition, ns / NS_PER_S)
            for start in self.starts
            for metric, ns in ((TIME_TO_READY, start.ready_ns), (TIME_TO_FIRST_ANSWER, start.first_answer_ns))
            if start.error is None and ns
        ]


def analyse(facts: Facts) -> ColdStartsFound:
    """The stored starts."""
    return ColdStartsFound(starts=facts.run.cold_starts, containers=facts.run.container_cold_starts)
