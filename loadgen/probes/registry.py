"""What a probe is, and the list of all probes in the order in which they measure and are shown.

A probe answers one question about a run. To add one, write a module with a `PROBE` and add its name below: the run then
measures it, the analysis puts its finding into `result.json` below `studies`, and the report shows its sections. Every
report imports all probes, so a probe imports the client and the load generator only inside the functions that measure.

The checks and the verdict stand below the probes. What they read of one is in `loadgen.records.probes` or in a module
`NAME_analysis` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from loadgen.records.run import Experiment, Found

MODULES = tuple(
    f"loadgen.probes.{name}"
    for name in (
        "fairness",
        "handicap",
        "load",
        "rate_search",
        "answers",
        "gpu.probe",
        "causes",
        "ceiling",
        "cold_start",
    )
)


class Probe:
    """One question about a run; a probe overrides the parts that it has.

    `Any` stands for types of the rooms above this module: a `RunContext`, `Facts`, a `Result`, a report's `Section`.
    """

    finding: type[Found] | None = None
    """What `analyse` returns; None without an analysis."""
    after_servers: bool = False
    """Whether it measures when all servers are stopped, once per run."""

    def wanted(self, experiment: Experiment) -> bool:
        """Whether this experiment measures it."""
        raise NotImplementedError

    def measure(self, context: Any) -> None:
        """Measure and store. Called at every start of the servers, when they are up and warm and give the same answers,
        or once after they are stopped."""
        raise NotImplementedError

    def analyse(self, facts: Any) -> Found:
        """The finding, computed from the records alone."""
        raise NotImplementedError

    def conclude(self, finding: Any, facts: Any) -> Any:  # noqa: ARG002 (for probes that need the verdicts)
        """The finding with what follows from the verdicts of the comparisons, which `facts` now hold."""
        return finding

    def sections(self, result: Any) -> Mapping[str, Sequence[Any]]:  # noqa: ARG002 (for probes with sections)
        """Its sections of the report, or None in place of one without content, by chapter: Why, Detail or Proof."""
        return {}


def probes() -> list[Probe]:
    """Every probe, in order."""
    return [import_module(name).PROBE for name in MODULES]


def finding_types() -> dict[str, type[Found]]:
    """The type of every probe's finding, by its name below `studies`."""
    return {probe.finding.STUDY: probe.finding for probe in probes() if probe.finding is not None}
