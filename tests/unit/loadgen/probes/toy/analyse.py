from __future__ import annotations

from loadgen.metrics.facts import Facts
from tests.unit.loadgen.probes.toy.records import Temperature, TemperatureFound


def analyse(facts: Facts) -> TemperatureFound:
    read = facts.run.one(Temperature)
    return TemperatureFound() if read is None else TemperatureFound(celsius=read.celsius, warm=read.celsius > 25.0)
