"""Checks on the machine over the whole run: did it keep its speed, were there cores left."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.analysis.summaries import BlockSummary
from loadgen.quantities import number, share
from loadgen.storage.stored_run import StoredRun

DRIFT_SIGNIFICANCE = 0.01
SERVER_CPU_LIMIT = 0.95


def check_machine(run: StoredRun, blocks: Sequence[BlockSummary]) -> list[Check]:
    """Both checks; none for a run without load."""
    return [_steady(run, blocks), _server_cpu(run, blocks)] if blocks else []


def _steady(run: StoredRun, blocks: Sequence[BlockSummary]) -> Check:
    """Trend of the arms' own speed: least squares of log throughput on time, each arm and cell about its own mean."""
    times: list[float] = []
    speeds: list[float] = []
    groups = 0
    longest_s = 0.0
    for key in sorted({(block.cell, block.label) for block in blocks}):
        own = [b for b in blocks if (b.cell, b.label) == key and b.complete and b.throughput_per_s]
        if len(own) < 2:
            continue
        when = np.array([b.start_s for b in own])
        log_speed = np.array([math.log(b.throughput_per_s or 1.0) for b in own])
        times += list(when - when.mean())
        speeds += list(log_speed - log_speed.mean())
        longest_s = max(longest_s, float(np.ptp(when)))
        groups += 1
    margin = run.experiment.equivalence_margin
    degrees = len(times) - groups - 1
    spread = float(np.dot(times, times)) if times else 0.0
    if degrees < 3 or spread <= 0.0:
        return make_check(
            CheckName.MACHINE_STEADY, None, threshold=margin, detail="too few blocks to see a trend of the speed"
        )
    slope = float(np.dot(times, speeds)) / spread
    residual = np.asarray(speeds) - slope * np.asarray(times)
    error = math.sqrt(float(np.dot(residual, residual)) / degrees / spread)
    change = math.expm1(slope * longest_s)
    p_value = 2.0 * float(stats.t.sf(abs(slope) / error, degrees)) if error > 0.0 else 0.0
    drifted = abs(change) > margin and p_value < DRIFT_SIGNIFICANCE
    return make_check(
        CheckName.MACHINE_STEADY,
        not drifted,
        value=change,
        threshold=margin,
        detail=f"the arms' own speed changed by {'+' if change >= 0 else '−'}{share(abs(change))} over the longest cell"
        + ("" if drifted or abs(change) <= margin else ", which is within the noise"),
    )


def _server_cpu(run: StoredRun, blocks: Sequence[BlockSummary]) -> Check:
    cores = run.environment.host.get("cpu_count") if run.environment else None
    used = [
        block.server_cpu_cores + (block.generator_cpu_share or 0.0)
        for block in blocks
        if block.server_cpu_cores is not None
    ]
    if not used or not isinstance(cores, int | float) or cores <= 0:
        return make_check(
            CheckName.SERVER_CPU, None, threshold=SERVER_CPU_LIMIT, detail="the servers' CPU time is unknown"
        )
    highest = max(used)
    return make_check(
        CheckName.SERVER_CPU,
        highest / cores <= SERVER_CPU_LIMIT,
        value=highest / cores,
        threshold=SERVER_CPU_LIMIT,
        detail=f"server and load generator together kept {number(highest)} of {cores:.0f} cores busy at most",
    )
