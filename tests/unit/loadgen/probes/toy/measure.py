from __future__ import annotations

from loadgen.bench.bench import Bench
from loadgen.records.run import Experiment
from tests.unit.loadgen.probes.toy.records import Temperature


def wanted(experiment: Experiment) -> bool:
    return experiment.preset == "quick"


def measure(bench: Bench) -> None:
    bench.enter("reading the thermometer")
    bench.store.write(Temperature(celsius=31.0))
