"""Chooses how many processes the load generator has, when `--processes` is 0: by a pilot, before anything is measured.

The pilot loads every arm for half a second per load shape. One process sends at most its ceiling: that of this
machine's calibration, or what its own CPU time per request allows. There are enough processes when the fastest arm
takes at most `USED_SHARE` of their ceilings together. A pilot with too few processes hides how fast an arm is, so it is
run again with more. At most half the cores get one, since the servers need the others, and at most one per user.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from loadgen.bench.bench import Bench
from loadgen.bench.load_runner import closed_loop
from loadgen.client.messages import BlockOutcome
from loadgen.records.machine import CEILING_SHARE_LIMIT, Calibration, ceiling_images_per_s
from loadgen.records.run import Experiment, Workload

USED_SHARE = 0.8 * CEILING_SHARE_LIMIT
"""So that the check of the ceiling passes also for an arm that is a little faster than in the pilot."""
PILOT_SECONDS = 0.5
_MOST_USERS = 64
_MOST_PROCESSES = 64


def size_generator(bench: Bench, calibration: Calibration | None, batch_sizes: Sequence[int]) -> int:
    """Restart the generator with as many processes as the load needs, and return their number. Raises `LoadError`,
    `GeneratorError`."""
    loads = pilot_loads(bench.experiment.workloads)
    limit = most_processes(loads)
    processes = 1
    while processes < limit:
        needed = min(limit, math.ceil(processes * _used(bench, loads, calibration, processes) / USED_SHARE))
        if needed <= processes:
            break
        processes = needed
        bench.generator.stop()
        bench.start_generator(processes)
        bench.prepare_bodies(batch_sizes)
    return processes


def most_processes(loads: Sequence[Workload], cores: int | None = None) -> int:
    """The limit on this machine, which has one process up to three cores."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(1, min(cores // 2, _MOST_PROCESSES, max((load.concurrency for load in loads), default=1)))


def pilot_loads(workloads: Sequence[Workload]) -> list[Workload]:
    """A closed loop in the shape of each load, with the rate of an open loop as `rate_per_s`."""
    found = {
        (load.batch_size, min(load.concurrency, _MOST_USERS), load.sequence_length, load.rate_per_s): load
        for load in workloads
        if load.scenario != "cold-start"
    }
    return [
        closed_loop(
            users, 1, batch_size=load.batch_size, seconds=PILOT_SECONDS, max_seconds=30.0, length=load.sequence_length,
            rate_per_s=load.rate_per_s,
        )
        for (_, users, _, _), load in found.items()
    ]  # fmt: skip


def _used(bench: Bench, loads: Sequence[Workload], calibration: Calibration | None, processes: int) -> float:
    """The largest share of the processes' ceilings that an arm took."""
    runner = bench.load_runner(watched=False)
    shares = [
        used_share(runner.pilot(label, load), load, bench.experiment, calibration, payload=arm.payload, of=processes)
        for label, arm in bench.arms.items()
        for load in loads
    ]
    return max(shares, default=0.0)


def used_share(
    outcome: BlockOutcome,
    load: Workload,
    experiment: Experiment,
    calibration: Calibration | None,
    *,
    payload: str,
    of: int,
) -> float:
    """The share of the ceilings of `of` processes that this load takes; 0 for a load that more processes could not
    share, because it has no more users than there are processes."""
    rate = outcome.requests_per_s
    if rate is None or outcome.cpu_ns == 0 or load.concurrency <= of:
        return 0.0
    if load.rate_per_s is not None:
        rate = min(rate, load.rate_per_s)
    ceiling = (outcome.requests + outcome.cool_down) / (outcome.cpu_ns / 1e9)
    if calibration is not None:
        known = ceiling_images_per_s(calibration, experiment.transport, payload, load.batch_size)
        ceiling = ceiling if known is None else known / load.batch_size
    return rate / (of * ceiling)
