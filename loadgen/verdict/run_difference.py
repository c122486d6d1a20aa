"""Whether the ratios between the arms have changed from one run to another, with an interval and a test.

The change of a comparison is the new ratio over the old one. Each run's log ratio has a standard error and degrees of
freedom; the runs are independent, so the difference has Welch's t (Biometrika 34, 1947). The interval of a high
percentile is made of order statistics and reaches further to one side, often many times, so it has no standard error:
two of them are combined by the method of variance estimates recovery (Donner and Zou, Stat. Methods Med. Res. 21,
2012), each side with the side of the other run that it faces. At another significance each side is as many times as
long as Student's t, with the run's degrees of freedom, since the number of samples that a percentile's interval spans
grows with t.

p is adjusted by Holm over all comparisons of the two runs. The speed of the machine on the day cancels in each ratio;
what a start of the servers changes does not, unless the runs have restarts: `caveats` say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from loadgen.base.quantities import Interval, counted, excludes_one, number
from loadgen.metrics.comparisons import Comparison, Outcome, as_measured, may_be_moved
from loadgen.metrics.registry import METRICS
from loadgen.records.machine import own_devices, used_gpus
from loadgen.records.run import Experiment, Label, Pairing, Record, Workload, shown
from loadgen.records.targets import Kind
from loadgen.stats.distributions import root, student_tail
from loadgen.stats.estimates import SIGNIFICANCE, critical_t, t_estimate
from loadgen.stats.ratios import adjust_holm
from loadgen.verdict.result import Result

LEAST_P, MOST_P = 1e-12, 0.999
PropertyKind = Literal["machine", "gpu", "software", "load", "arm"]
HOST = ("cpu_model", "cpu_count", "kernel", "architecture", "glibc", "os", "virtualisation", "python")
BINDING: frozenset[PropertyKind] = frozenset(("machine", "gpu", "software", "load"))
"""Differences that prevent a comparison of two runs. Differences between arms are the subject of the comparison."""


class PropertyDifference(Record, frozen=True, kw_only=True):
    """One thing that differs between the runs; None if a run does not report it."""

    kind: PropertyKind
    name: str
    old: str | None
    new: str | None


def differences(old: Result, new: Result) -> tuple[PropertyDifference, ...]:
    """List all differences: machine, GPU, software and load first, then the arms."""
    kinds: tuple[PropertyKind, ...] = ("machine", "gpu", "software", "load", "arm")
    before, after = _described(old, new.experiment), _described(new, old.experiment)
    if old.environment is None or new.environment is None:
        for run, described in ((old, before), (new, after)):
            missing = run.environment is None
            described |= {"machine": {"environment": None if missing else "recorded"}, "gpu": {}, "software": {}}
    return tuple(
        PropertyDifference(
            kind=kind,
            name=name,
            old=None if (first := before[kind].get(name)) is None else str(first),
            new=None if (second := after[kind].get(name)) is None else str(second),
        )
        for kind in kinds
        for name in dict.fromkeys((*before[kind], *after[kind]))
        if before[kind].get(name) != after[kind].get(name)
    )


def _described(result: Result, other: Experiment) -> dict[PropertyKind, dict[str, object]]:
    """The compared properties, by kind and name; `other` is the other run's experiment."""
    environment, experiment = result.environment, result.experiment
    host: Mapping[str, object] = environment.host if environment else {}
    memory = host.get("memory_bytes")  # in GiB: the kernel keeps some pages for itself, which differ from boot to boot
    gpu: dict[str, object] = {}
    software: dict[str, object] = {}
    inputs: dict[str, object] = {}
    if environment is not None:
        nvml = environment.gpu.get("nvml")
        if isinstance(nvml, Mapping):
            gpu = {name: nvml.get(name) for name in ("driver_version", "cuda_driver_version")}
        devices = own_devices(environment.gpu, used_gpus(environment.gpu))
        gpu |= {f"GPU {number}": device.get("name") for number, device in enumerate(devices)}
        software |= environment.packages
        inputs = {f"inputs, {name}": value for name, value in environment.inputs.items()}
    arms: dict[str, object] = {}
    for request in experiment.arms:
        arms[f"{request.label}: target"] = request.target
        arms |= {f"{request.label}: {name}": value for name, value in request.settings.items()}
    for arm in result.arms:
        arms[f"{arm.label}: server"] = arm.title
        arms |= {f"{arm.label}: {name} in effect": arm.in_effect[name] for name in sorted(arm.in_effect)}
    arms["git commit"] = environment.git_commit if environment else None
    return {
        "machine": {name: host.get(name) for name in HOST}
        | {"memory": f"{memory / 2**30:.0f} GiB" if isinstance(memory, int | float) else None},
        "gpu": gpu,
        "software": software,
        "load": {
            **{name: getattr(experiment, name) for name in ("model", "weights", "transport", "threads", "deployment")},
            **{f"payload of {a.label}": experiment.payload_of(a) for a in experiment.arms if a.label in other.labels},
            **{
                f"workload {c.name}": f"{counted(c.requests, 'request')}, {_block_of(c)} per block"
                for c in experiment.workloads
            },
            **inputs,
        },
        "arm": arms,
    }


Change = Literal["changed", "no change shown", "not comparable"]


class ComparisonChange(Record, frozen=True, kw_only=True):
    """The change of one metric of two arms in one workload of both runs. Ratios are `arm` over `baseline`; `change` is
    new over old."""

    workload: str = msgspec.field(name="scenario")
    metric: str
    baseline: Label
    arm: Label
    old_ratio: float | None
    old_ci95: tuple[float, float] | None
    new_ratio: float | None
    new_ci95: tuple[float, float] | None
    old_verdict: Outcome | None
    new_verdict: Outcome | None
    """None if the run does not have such a comparison."""
    verdict_changed: bool
    change: float | None
    change_ci95: tuple[float, float] | None
    p_adjusted: float | None
    outcome: Change
    better_for: Label | None
    """The arm that has gained on the other, if the ratio changed."""
    reason: str | None


class RunDifference(Record, frozen=True, kw_only=True):
    """The comparison of two runs."""

    schema: Literal["abserve.diff/2"] = "abserve.diff/2"
    old: str
    new: str
    comparable: bool
    """Whether the environments agree, or may differ, and at least one comparison can be made."""
    differences: tuple[PropertyDifference, ...]
    refused: tuple[str, ...]
    """Names of the differences that forbid comparing the runs; empty if they were allowed."""
    comparisons: tuple[ComparisonChange, ...]
    """The changes; empty if the comparison was refused."""
    caveats: tuple[str, ...]


def compare_runs(
    old: Result, new: Result, *, names: tuple[str, str] = ("old", "new"), allow_different: bool = False
) -> RunDifference:
    """Compare two runs. `allow_different` compares all that both have, even if their environments differ."""
    differing = differences(old, new)
    binding = [difference for difference in differing if difference.kind in BINDING]
    refused = () if allow_different else tuple(difference.name for difference in binding)
    changes = () if refused else _changes(old, new)
    return RunDifference(
        old=names[0],
        new=names[1],
        comparable=not refused and any(difference.outcome != "not comparable" for difference in changes),
        differences=differing,
        refused=refused,
        comparisons=changes,
        caveats=() if refused else _caveats(old, new, binding),
    )


def _changes(old: Result, new: Result) -> tuple[ComparisonChange, ...]:
    before, after = (
        {(comparison.workload, comparison.metric, comparison.pairing): comparison for comparison in run.comparisons}
        for run in (old, new)
    )
    changes, p_values = [], []
    for scenario, metric, pairing in dict.fromkeys((*before, *after)):
        first, second = before.get((scenario, metric, pairing)), after.get((scenario, metric, pairing))
        change, ci95, p, reason = None, None, None, None
        if first is None or second is None:
            reason = _why_missing(pairing, "old" if first is None else "new", old, new)
        elif (reason := _why_not_compared(first, second)) is None:
            change, ci95, p, reason = _test(first, second)
        p_values.append(p)
        changes.append(
            ComparisonChange(
                workload=scenario,
                metric=metric,
                baseline=pairing.baseline,
                arm=pairing.arm,
                old_ratio=None if first is None else first.ratio,
                old_ci95=None if first is None else first.ci95,
                new_ratio=None if second is None else second.ratio,
                new_ci95=None if second is None else second.ci95,
                old_verdict=None if first is None else first.verdict,
                new_verdict=None if second is None else second.verdict,
                verdict_changed=first is not None and second is not None and first.verdict != second.verdict,
                change=change,
                change_ci95=ci95,
                p_adjusted=None,
                outcome="not comparable" if ci95 is None else "no change shown",
                better_for=None,
                reason=reason,
            )
        )
    return tuple(_decided(change, p) for change, p in zip(changes, adjust_holm(p_values), strict=True))


def _decided(change: ComparisonChange, p_adjusted: float | None) -> ComparisonChange:
    """The change with its outcome, which needs the p values of all of them."""
    change = msgspec.structs.replace(change, p_adjusted=p_adjusted)
    if change.change is None or change.change_ci95 is None or p_adjusted is None:
        return change
    if p_adjusted >= SIGNIFICANCE or not excludes_one(change.change_ci95):
        return change
    arm_gained = (change.change > 1.0) == METRICS[change.metric].higher_is_better
    return msgspec.structs.replace(change, outcome="changed", better_for=change.arm if arm_gained else change.baseline)


def _why_missing(pairing: Pairing, name: str, old: Result, new: Result) -> str:
    """Why the run of this name does not have such a comparison."""
    labels = (old if name == "old" else new).experiment.labels
    lacking = [label for label in pairing if label not in labels]
    if lacking:
        return f"the {name} run has no arm {shown(lacking[0])}"
    base, other = old.experiment.baseline.label, new.experiment.baseline.label
    if base != other:
        return f"the baseline was {shown(base)} and is {shown(other)}"
    return f"the {name} run has no such comparison"


def _why_not_compared(old: Comparison, new: Comparison) -> str | None:
    for name, comparison in (("old", old), ("new", new)):
        if comparison.verdict == "invalid":
            return f"invalid in the {name} run: {comparison.reason}"
        if comparison.ratio is None:
            return f"not measured in the {name} run: {comparison.reason}"
    return None


def _test(old: Comparison, new: Comparison) -> tuple[float, Interval | None, float | None, str | None]:
    """The change, its 95 % interval, p of no change, and why interval and p are missing, if they are. What others took
    from rough runs is not a random error: each end of the interval moves by the sum of what both runs lost."""
    centre = math.log(new.ratio or 1.0) - math.log(old.ratio or 1.0)
    (old_down, old_up), (new_down, new_up) = (may_be_moved(run) or (0.0, 0.0) for run in (old, new))
    down, up = new_down + old_up, new_up + old_down
    beyond = max(centre - down, -up - centre)
    old, new = as_measured(old), as_measured(new)
    change = math.exp(centre)
    if any("order statistics" in comparison.method for comparison in (old, new)) and old.ci95 and new.ci95:
        low, high = _tail_interval(old, new, SIGNIFICANCE)
        if low == high:
            return change, None, None, "the intervals of both runs have no width"
        p = _tail_p(old, new, down, up)
    else:
        first, second = _spread(old), _spread(new)
        if first is None or second is None:
            missing = old if first is None else new
            return change, None, None, f"no interval in one of the runs: {missing.reason}"
        (error_1, degrees_1), (error_2, degrees_2) = first, second
        error = math.hypot(error_1, error_2)
        degrees = error**4 / (error_1**4 / degrees_1 + error_2**4 / degrees_2)
        p = 2.0 * student_tail(max(beyond, 0.0) / error, degrees)
        low, high = t_estimate(centre, error, degrees).interval or (centre, centre)
    return change, (math.exp(low - down), math.exp(high + up)), p, None


def _units(comparison: Comparison) -> int:
    return comparison.restarts if comparison.restarts > 1 else comparison.pairs


def _sides(comparison: Comparison, significance: float) -> tuple[float, float]:
    """How far an interval reaches below and above its log ratio at another significance than that of `ci95`."""
    low, high = map(math.log, comparison.ci95 or (1.0, 1.0))
    centre, degrees = math.log(comparison.ratio or 1.0), max(1.0, comparison.degrees or _units(comparison) - 1.0)
    longer = critical_t(degrees, significance) / critical_t(degrees, SIGNIFICANCE)
    return (centre - low) * longer, (high - centre) * longer


def _tail_interval(old: Comparison, new: Comparison, significance: float) -> tuple[float, float]:
    """The interval of the log change where intervals are made of order statistics."""
    centre = math.log(new.ratio or 1.0) - math.log(old.ratio or 1.0)
    (old_below, old_above), (new_below, new_above) = _sides(old, significance), _sides(new, significance)
    return centre - math.hypot(new_below, old_above), centre + math.hypot(new_above, old_below)


def _tail_p(old: Comparison, new: Comparison, down: float, up: float) -> float:
    """The smallest significance at which that interval, so much wider, excludes no change."""

    def beyond(log_p: float) -> float:
        low, high = _tail_interval(old, new, math.exp(log_p))
        return low - down if (new.ratio or 1.0) > (old.ratio or 1.0) else -high - up

    least, most = math.log(LEAST_P), math.log(MOST_P)
    if beyond(most) <= 0.0:
        return 1.0
    return LEAST_P if beyond(least) > 0.0 else math.exp(root(beyond, least, most))


def _spread(comparison: Comparison) -> tuple[float, float] | None:
    """Standard error of the log ratio, and its degrees of freedom. That of an anytime-valid interval, which is wider
    than Student's t, comes out too large, never too small."""
    if comparison.ci95 is None:
        return None
    if comparison.error_log is not None:
        return comparison.error_log, comparison.degrees
    units = _units(comparison)
    half = (math.log(comparison.ci95[1]) - math.log(comparison.ci95[0])) / 2.0
    if units < 2 or half <= 0.0:
        return None
    return half / critical_t(units - 1, SIGNIFICANCE), units - 1


def _caveats(old: Result, new: Result, binding: Sequence[PropertyDifference]) -> tuple[str, ...]:
    caveats = []
    if binding:
        names = ", ".join(difference.name for difference in binding)
        caveats.append(f"The runs differ in more than the arms ({names}), so a change may have another cause.")
    for name, run in (("old", old), ("new", new)):
        if run.rough:
            caveats.append(f"Others used the machine in the {name} run; a change is claimed only beyond their share.")
        elif not run.valid:
            caveats.append(f"The {name} run is not valid; the comparisons of its failed checks are left out.")
    if min(old.experiment.restarts, new.experiment.restarts) < 2:
        caveats.append(
            "The intervals do not include what a fresh start of the servers changes, because at least one run had no "
            "restarts; run both with --restarts 5 or more before you trust small changes."
        )
    return tuple(caveats)


def _block_of(workload: Workload) -> str:
    """What a block holds by the plan. Its length is that of a few answers of the slower arm, which differs by the run,
    so of streamed answers only their tokens count."""
    tokens = f"{workload.prompt_tokens} → {workload.output_tokens} tokens"
    return {Kind.TENSORS: f"{number(workload.seconds)} s", Kind.TOKENS: tokens}[workload.kind]
