"""Compares the answers kept under load, once this start of the servers has no more load to run."""

from __future__ import annotations

from loadgen.bench.bench import Bench
from loadgen.experiment.schedule import has_load, search_schedule
from loadgen.records.run import Experiment


def wanted(experiment: Experiment) -> bool:
    """Whether there is any load at all."""
    return has_load(experiment) or bool(search_schedule(experiment))


def measure(bench: Bench) -> None:
    """Compare and store the answers kept under load. Raises `StorageError`."""
    bench.enter("comparing answers under load")
    bench.answers.compare(bench.arms, bench.signatures, bench.inputs, bench.restart)
