"""How much identical arms differ on one machine; no comparison of these arms claims a smaller difference.

A floor is of an arm, a model, a payload, a transport and a workload, and counts for no other: the noise of a request of
1 ms says nothing about one of 100 ms.

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

from loadgen.base.quantities import share
from loadgen.metrics.comparisons import Comparison, PairedMetric
from loadgen.records.machine import FloorEntry, NoiseFloor, own_devices, used_gpus
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, Label
from loadgen.stats.estimates import SIGNIFICANCE, critical_t
from loadgen.stats.ratios import estimate_ratio

LEAST_RESTARTS = 3
MOST_NAMED = 3
COMMAND = "abserve noise-floor"
_LOCAL = {"localhost", "127.0.0.1", "::1"}


def is_self_comparison(experiment: Experiment) -> bool:
    """Whether all arms have the same target and settings."""
    first, *others = (msgspec.structs.replace(arm, label="") for arm in experiment.arms)
    return all(other == first for other in others)


def server_of(arm: ArmRequest) -> str:
    """Host of a server on another machine; empty on this one."""
    is_url = "://" in arm.target
    host = urlsplit(arm.target if is_url else f"//{arm.target}").hostname if is_url or ":" in arm.target else None
    return "" if host is None or host in _LOCAL else host


def floor_entries(paired_metrics: Sequence[PairedMetric], comparisons: Sequence[Comparison]) -> tuple[FloorEntry, ...]:
    """The floor of every metric that an A/A run measured; of percentiles of all rounds together the far end of their
    interval."""
    floors = [(p.workload.name, p.metric.name, floor_of(p.by_restart()), len(p.pairs)) for p in paired_metrics]
    floors += [
        (c.workload, c.metric, _far_end(c.ci95), c.pairs)
        for c in comparisons
        if c.ci95 is not None and "order statistics" in c.method
    ]
    return tuple(
        FloorEntry(workload=workload, metric=metric, difference=math.expm1(floor), pairs=pairs)
        for workload, metric, floor, pairs in floors
        if floor is not None
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


def floor_of_arm(experiment: Experiment, request: ArmRequest, arms: Sequence[ArmRecord]) -> NoiseFloor:
    """A floor without entries that says which arm it is of."""
    threads = {"threads": str(experiment.threads)} if request.embedded else {}
    return NoiseFloor(
        fingerprint="",
        servers=server_of(request),
        title=next((arm.title for arm in arms if arm.label == request.label), request.target),
        made_at="",
        restarts=0,
        entries=(),
        model=request.model or experiment.model,
        payload=experiment.payload_of(request),
        transport=experiment.transport,
        settings=threads | request.settings,
    )


def floors_by_arm(
    experiment: Experiment, arms: Sequence[ArmRecord], floors: Sequence[NoiseFloor]
) -> dict[Label, list[NoiseFloor]]:
    """The floors of each arm of an experiment, with its model, payload and transport."""
    keys = {request.label: floor_of_arm(experiment, request, arms).arm for request in experiment.arms}
    return {label: [floor for floor in floors if floor.arm == key] for label, key in keys.items()}


def find_floor(floors: Sequence[NoiseFloor], workload: str, metric: str) -> float | None:
    """The largest of these floors in a workload, as a share; None without any."""
    return max(
        (
            entry.difference
            for floor in floors
            for entry in floor.entries
            if (entry.workload, entry.metric) == (workload, metric)
        ),
        default=None,
    )


def apply_floor(
    comparisons: Sequence[Comparison], floors: Mapping[Label, Sequence[NoiseFloor]], margin: float
) -> tuple[Comparison, ...]:
    """Make a comparison inconclusive if it claims a difference within the floor of one of its arms, or "no difference"
    with a margin below that floor."""

    def floor(comparison: Comparison) -> float | None:
        return find_floor(
            [f for label in comparison.pairing for f in floors.get(label, ())], comparison.workload, comparison.metric
        )

    return tuple(_applied(comparison, floor(comparison), margin) for comparison in comparisons)


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


def unknown_floor(floors: Sequence[NoiseFloor]) -> str:
    """Why no floor is known for a run, of which these are the machine's."""
    if (problem := next((floor.problem for floor in floors if floor.problem is not None), None)) is not None:
        return problem
    if not floors:
        return "never measured on this machine"
    made = list(dict.fromkeys(_words(floor) for floor in floors))
    more = f" and {len(made) - MOST_NAMED} more" if len(made) > MOST_NAMED else ""
    named = "; ".join(made[:MOST_NAMED])
    return f"never measured for these arms, model, payload, transport and workloads (measured: {named}{more})"


def _words(floor: NoiseFloor) -> str:
    key = ", ".join(filter(None, (floor.model, floor.payload, floor.transport)))
    return f"{floor.title} with {key}" if key else f"{floor.title} by an older version"


def floor_sentence(
    floors: Sequence[NoiseFloor],
    comparisons: Sequence[Comparison],
    experiment: Experiment,
    arms: Sequence[ArmRecord] = (),
) -> str:
    """The floor, or how to measure it, for every report."""
    if is_self_comparison(experiment):
        return "The arm is compared with itself: the differences are this machine's noise."
    leading = [c for c in comparisons if c.leading]
    measured = [c.noise_floor for c in leading if c.noise_floor is not None]
    if not measured:
        if not floors:
            return f"The noise floor of this machine is unknown; measure it with: {COMMAND}"
        why = unknown_floor(floors)
        return f"The noise floor is unknown: {why}" + ("" if COMMAND in why else f"; measure it with: {COMMAND}")
    low, high = share(min(measured)), share(max(measured))
    used = [floor for of_arm in floors_by_arm(experiment, arms, floors).values() for floor in of_arm]
    made = ", ".join(dict.fromkeys(f"{floor.title}, {floor.made_at}" for floor in used))
    span = low if low == high else f"{low} to {high}"
    lacking = dict.fromkeys(c.workload for c in leading if c.noise_floor is None)
    rest = f" Not measured in {', '.join(lacking)}." if lacking else ""
    return f"Noise floor of this machine (identical arms: {made}): {span}; no smaller difference is claimed.{rest}"


def gpu_of(environment_gpu: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `/gpu-info` document with only the GPUs that the server used, so that a floor is not applied to others; None
    without a working GPU."""
    if environment_gpu.get("status") != "ok":
        return None
    return {**environment_gpu, "devices": own_devices(environment_gpu, used_gpus(environment_gpu))}
