from __future__ import annotations

import loadgen.report.document as doc
from loadgen.verdict.result import Result
from tests.unit.loadgen.probes.toy.records import TemperatureFound


def temperature(result: Result) -> doc.Section | None:
    found = result.of(TemperatureFound)
    if found.celsius is None:
        return None
    return doc.Section("Temperature", (doc.Text(f"The room has {found.celsius:g} °C{', too warm' * found.warm}."),))


SECTIONS = {"Detail": (temperature,)}
