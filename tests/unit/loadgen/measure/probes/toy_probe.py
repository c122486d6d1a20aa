"""A probe as a contributor would add it, in one file: the temperature of the machine."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.findings.registry import Probe
from loadgen.measure.context import RunContext
from loadgen.metrics.facts import Facts
from loadgen.records.run import Found, Record
from loadgen.verdict.result import Result


class Temperature(Record, frozen=True, kw_only=True):
    """What it stores."""

    FILE = "temperature.json"
    celsius: float


class TemperatureFound(Found, frozen=True, kw_only=True):
    """What it finds."""

    STUDY = "temperature"
    celsius: float | None = None
    warm: bool = False


def measure(context: RunContext) -> None:
    context.enter("reading the thermometer")
    context.store.write(Temperature(celsius=31.0))


def analyse(facts: Facts) -> TemperatureFound:
    read = facts.run.record_of(Temperature)
    return TemperatureFound() if read is None else TemperatureFound(celsius=read.celsius, warm=read.celsius > 25.0)


def temperature(result: Result) -> doc.Section | None:
    finding = result.of(TemperatureFound)
    if finding.celsius is None:
        return None
    return doc.Section("Temperature", (doc.Text(f"The room has {finding.celsius:g} °C{', too warm' * finding.warm}."),))


SECTIONS = {"Detail": (temperature,)}
PROBE = Probe(
    wanted=lambda experiment: experiment.preset == "quick",
    measure=measure,
    finding=TemperatureFound,
    analyse=analyse,
    sections=__name__,
)
