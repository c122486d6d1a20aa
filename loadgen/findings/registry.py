"""What a probe is, and the list of all probes in the order in which they measure and are shown.

A probe answers one question about a run. To add one, write a module with a `PROBE` and add its name below: the run then
measures it, the analysis puts its finding into `result.json` below `studies`, and the report shows its sections. Every
report imports all probes, so a probe imports the client and the load generator only inside the functions that measure.

What a probe measures is in `loadgen.measure.probes`. What it finds, which the checks and the verdict read, is in a
module of the same name beside this one, and what it stores there or in `loadgen.records.probes`. What the report shows
of it is in `loadgen.report.sections`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from loadgen.records.run import Experiment, Found
from loadgen.records.targets import Kind

MODULES = tuple(
    f"loadgen.measure.probes.{name}"
    for name in (
        "fairness",
        "handicap",
        "traffic",
        "load",
        "rate_search",
        "answers",
        "tokens",
        "gpu",
        "causes",
        "ceiling",
        "cold_start",
        "best",
        "shadow",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One question about a run, as the functions that answer it. `Any` stands for types of the rooms above this module:
    a `RunContext` and `Facts`."""

    wanted: Callable[[Experiment], bool]
    """Whether an experiment measures it."""
    measure: Callable[[Any], None]
    """Measures and stores records, whose `FILE` names the place in the run's folder, given the run's context: at every
    start of the servers, when they are up and warm and give the same answers, or once after they are stopped."""
    of: Kind | None = None
    """The kind of model whose experiments alone have it."""
    after_servers: bool = False
    """Whether it measures when all servers are stopped, once per run."""
    finding: type[Found] | None = None
    """What `analyse` returns; None without an analysis."""
    analyse: Callable[[Any], Found] | None = None
    """Computes the finding from the facts of a run, which are its records alone."""
    conclude: Callable[[Any, Any], Found] | None = None
    """Adds to the finding what follows from the verdicts of the comparisons, which the facts then hold."""
    sections: str | None = None
    """The module with its `SECTIONS` of the report: by chapter (Why, Detail or Proof) functions that make one section
    of a result each, or None."""


def probes_of(experiment: Experiment) -> list[Probe]:
    """Those that an experiment measures, in order."""
    return [probe for probe in probes() if probe.of in (None, experiment.kind) and probe.wanted(experiment)]


def probes() -> list[Probe]:
    """Every probe, in order."""
    return [import_module(name).PROBE for name in MODULES]


def finding_types() -> dict[str, type[Found]]:
    """The type of every probe's finding, by its name below `studies`."""
    return {probe.finding.STUDY: probe.finding for probe in probes() if probe.finding is not None}
