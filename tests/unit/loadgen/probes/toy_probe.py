"""A probe as a contributor would add it, in one file: the temperature of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import loadgen.report.document as doc
from loadgen.metrics.facts import Facts
from loadgen.probes.registry import Probe
from loadgen.records.run import Experiment, Found, Record
from loadgen.run.context import RunContext
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


class TemperatureProbe(Probe):
    """How warm is the room?"""

    finding = TemperatureFound

    def wanted(self, experiment: Experiment) -> bool:
        return experiment.preset == "quick"

    def measure(self, context: RunContext) -> None:
        context.enter("reading the thermometer")
        context.store.write(Temperature(celsius=31.0))

    def analyse(self, facts: Facts) -> TemperatureFound:
        read = facts.run.record_of(Temperature)
        return TemperatureFound() if read is None else TemperatureFound(celsius=read.celsius, warm=read.celsius > 25.0)

    def sections(self, result: Result) -> Mapping[str, Sequence[doc.Section | None]]:
        finding = result.of(TemperatureFound)
        if finding.celsius is None:
            return {}
        text = f"The room has {finding.celsius:g} °C{', too warm' * finding.warm}."
        return {"Detail": (doc.Section("Temperature", (doc.Text(text),)),)}


PROBE = TemperatureProbe()
