"""Looks at both arms and at the machine right before the load, with the servers up and warm and nothing sent."""

from __future__ import annotations

import os

from loadgen.analysis.checks.fairness.arms import check_before_load
from loadgen.run.bench import Bench
from loadgen.run.fairness_readings import read_conditions


def look(bench: Bench) -> None:
    """Stores the readings and tells the progress what the checks say. It stops nothing: what makes a run worthless
    is judged by the analysis. Raises `StorageError`."""
    bench.progress.now("nothing is sent while the machine is looked at")
    conditions = read_conditions(bench.arms, bench.records)
    bench.store.conditions(conditions)
    cores = len(os.sched_getaffinity(0))
    bench.progress.fairness_checked(check_before_load(bench.experiment, bench.records, conditions, cores))
