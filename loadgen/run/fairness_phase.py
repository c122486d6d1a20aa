"""Looks at all arms and at the machine right before the load, with the servers up and warm and nothing sent."""

from __future__ import annotations

from loadgen.analysis.checks.registry import Facts, check_before_load
from loadgen.run.bench import Bench
from loadgen.run.fairness_readings import read_conditions
from loadgen.storage.stored_run import read_run


def check_fairness(bench: Bench) -> None:
    """Stores the readings and tells the progress what the checks say. It stops nothing: what makes a run worthless
    is judged by the analysis. Raises `StorageError`."""
    bench.progress.now("nothing is sent while the machine is looked at")
    bench.store.write(read_conditions(bench.arms, bench.records))
    bench.progress.fairness_checked(check_before_load(Facts(read_run(bench.store.directory))))
