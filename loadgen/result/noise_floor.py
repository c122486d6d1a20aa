"""How much identical arms differ on one machine; no comparison claims a smaller difference.

A run of the same arm twice (A/A) with R starts of the servers gives R mean log ratios d whose true mean is 0. The floor
of a metric is t(R; 97.5 %) · √(Σd²/R): 95 % of single starts of identical arms lie within it (a prediction interval
with a known mean). It includes what a single start cannot show: the layout of memory, threads and ports. With fewer
than 3 starts it is the far end of the 95 % interval of the A/A run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadgen.comparison.comparisons import Comparison
from loadgen.comparison.pairs import PairedMetric
from loadgen.quantities import share
from loadgen.records.machine import FloorEntry, NoiseFloor, own_devices, used_gpu
from loadgen.records.run import ArmRequest, Experiment
from loadgen.statistics.ratios import SIGNIFICANCE, critical_t, estimate_ratio

LEAST_RESTARTS = 3
COMMAND = "abserve noise-floor"
_LOCAL = {"localhost", "127.0.0.1", "::1", ""}


def is_self_comparison(experiment: Experiment) -> bool:
    """Whether all arms have the same target and settings."""
    first, *others = (msgspec.structs.replace(arm, label="") for arm in experiment.arms)
    return all(other == first for other in others)


def servers_of(experiment: Experiment) -> str:
    """Hosts of servers on other machines; empty if all are on this one."""
    return ", ".join(sorted({_host(arm) for arm in experiment.arms} - _LOCAL))


def floor_entries(paired: Sequence[PairedMetric]) -> tuple[FloorEntry, ...]:
    """The floor of every metric that an A/A run measured."""
    return tuple(
        FloorEntry(
            scenario=one.workload.name, metric=one.metric.name, difference=math.expm1(floor), pairs=len(one.pairs)
        )
        for one in paired
        if (floor := floor_of(one.by_restart())) is not None
    )


def tail_floors(comparisons: Sequence[Comparison]) -> tuple[FloorEntry, ...]:
    """The floors of percentiles of all rounds together: the far end of their interval."""
    return tuple(
        FloorEntry(scenario=one.scenario, metric=one.metric, difference=math.expm1(_far_end(one.ci95)), pairs=one.pairs)
        for one in comparisons
        if one.ci95 is not None and "order statistics" in one.method
    )


def floor_of(groups: Sequence[Sequence[float]]) -> float | None:
    """The floor of the log ratios by restart; None without an interval."""
    if any(value <= 0.0 for group in groups for value in group):
        return None
    if len(groups) >= LEAST_RESTARTS:
        means = [math.fsum(map(math.log, group)) / len(group) for group in groups]
        root = math.sqrt(math.fsum(mean**2 for mean in means) / len(means))
        return critical_t(len(means), SIGNIFICANCE) * root
    interval = estimate_ratio([value for group in groups for value in group], margin=1.0).ci95
    return None if interval is None else _far_end(interval)


def _far_end(interval: tuple[float, float]) -> float:
    return max(abs(math.log(bound)) for bound in interval)


def find_floor(floors: Sequence[NoiseFloor], scenario: str, metric: str) -> float | None:
    """The floor as a share: the largest of this workload, else of the metric in any; None without either."""
    entries = [entry for floor in floors for entry in floor.entries if entry.metric == metric]
    own = [entry.difference for entry in entries if entry.scenario == scenario]
    return max(own or [entry.difference for entry in entries], default=None)


def apply_floor(
    comparisons: Sequence[Comparison], floors: Sequence[NoiseFloor], margin: float
) -> tuple[Comparison, ...]:
    """Make a comparison inconclusive if it claims a difference within the floor, or "no difference" with a margin below
    the floor."""
    return tuple(_applied(c, find_floor(floors, c.scenario, c.metric), margin) for c in comparisons)


def _applied(comparison: Comparison, floor: float | None, margin: float) -> Comparison:
    ratio = comparison.ratio
    if floor is None or ratio is None:
        return comparison
    comparison = msgspec.structs.replace(comparison, noise_floor=floor)
    reason = None
    if comparison.winner and abs(math.log(ratio)) <= math.log1p(floor):
        reason = f"within this machine's noise floor: identical arms differ by up to {share(floor)}"
    elif comparison.verdict == "no_difference" and floor > margin:
        reason = f"the margin of ±{100.0 * margin:g} % is below this machine's noise floor of {share(floor)}"
    if reason is None:
        return comparison
    return msgspec.structs.replace(comparison, verdict="inconclusive", reason=reason)


def floor_sentence(floors: Sequence[NoiseFloor], comparisons: Sequence[Comparison], experiment: Experiment) -> str:
    """The floor, or how to measure it, for every report."""
    if is_self_comparison(experiment):
        return "The arm is compared with itself: the differences are this machine's noise."
    known = [c.noise_floor for c in comparisons if c.leading and c.noise_floor is not None]
    if not known:
        return f"The noise floor of this machine is unknown; measure it with: {COMMAND}"
    low, high = share(min(known)), share(max(known))
    made = ", ".join(dict.fromkeys(f"{floor.title}, {floor.made_at}" for floor in floors))
    span = low if low == high else f"{low} to {high}"
    return f"Noise floor of this machine (identical arms: {made}): {span}; no smaller difference is claimed."


def _host(arm: ArmRequest) -> str:
    if "://" not in arm.target and ":" not in arm.target:
        return ""
    return urlsplit(arm.target if "://" in arm.target else f"//{arm.target}").hostname or ""


def gpu_of(environment_gpu: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `/gpu-info` document with only the GPU that the server used, so that a floor is not applied to another GPU;
    None without a working GPU."""
    if environment_gpu.get("status") != "ok":
        return None
    used = used_gpu(environment_gpu)
    return {**environment_gpu, "devices": own_devices(environment_gpu, () if used is None else (used,))}
