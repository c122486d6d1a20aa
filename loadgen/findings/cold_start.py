"""Cold start: every start of a server, and its seconds as figures that are compared."""

from __future__ import annotations

from loadgen.metrics.facts import Facts
from loadgen.metrics.registry import TIME_TO_FIRST_ANSWER, TIME_TO_READY
from loadgen.records.probes import ContainerStart, ServerStart
from loadgen.records.run import Figure, Found
from loadgen.records.samples import NS_PER_S

SCENARIO = "cold-start"


class ColdStartsFound(Found, frozen=True, kw_only=True):
    """Every start of a server."""

    STUDY = "cold_start"
    starts: tuple[ServerStart, ...] = ()
    containers: tuple[ContainerStart, ...] = ()
    """Every start of a container, step by step; empty except with `--deployment compose`."""

    def figures(self) -> list[Figure]:
        """The seconds of every compared start that succeeded; each repetition is a start of the servers."""
        return [
            Figure(metric.name, SCENARIO, start.label, start.repetition, start.repetition, elapsed_ns / NS_PER_S)
            for start in self.starts
            for metric, elapsed_ns in ((TIME_TO_READY, start.ready_ns), (TIME_TO_FIRST_ANSWER, start.first_answer_ns))
            if start.error is None and elapsed_ns and start.compared
        ]


def analyse(facts: Facts) -> ColdStartsFound:
    """The starts as they were stored; their ratios are comparisons like any other."""
    run = facts.run
    return ColdStartsFound(starts=run.records_of(ServerStart), containers=run.records_of(ContainerStart))
