"""Looks at all arms and at the machine right before the load, with the servers up and warm and nothing sent."""

from __future__ import annotations

from loadgen.bench.bench import Bench
from loadgen.comparison.facts import Facts
from loadgen.experiment.schedule import has_load
from loadgen.result.checks.registry import check_before_load
from loadgen.storage.stored_run import read_run
from loadgen.studies.fairness.cache_probe import probe_cache
from loadgen.studies.fairness.conditions import read_conditions
from loadgen.studies.fairness.records import CacheProbe

wanted = has_load


def measure(bench: Bench) -> None:
    """Stores the readings and tells the progress what the checks say; then asks whether an arm answers from memory what
    the load will repeat. It stops nothing: what makes a run worthless is judged by the analysis. Raises
    `StorageError`."""
    if bench.restart:
        return
    bench.enter("checking fairness")
    bench.progress.now("nothing is sent while the machine is looked at")
    bench.store.write(read_conditions(bench.arms, bench.records))
    bench.progress.fairness_checked(check_before_load(Facts(read_run(bench.store.directory))))
    bench.progress.now("new requests to every server, among requests that they know")
    probes = [probe_cache(arm, bench.inputs[arm.payload], bench.signatures[label]) for label, arm in bench.arms.items()]
    bench.store.write_all(CacheProbe, probes)
