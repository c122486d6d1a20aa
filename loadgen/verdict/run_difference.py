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
from typing import Literal, NamedTuple

from scipy import stats
from scipy.optimize import brentq

from loadgen.metrics.comparisons import Comparison, Outcome
from loadgen.metrics.registry import METRICS
from loadgen.records.machine import own_devices, used_gpu
from loadgen.records.run import Experiment, Label, Pairing, Record, shown
from loadgen.stats.ratios import SIGNIFICANCE, adjust_holm, critical_t
from loadgen.verdict.result import Result

LEAST_P, MOST_P = 1e-12, 0.999
Kind = Literal["machine", "gpu", "software", "load", "arm"]
HOST = ("cpu_model", "cpu_count", "kernel", "architecture", "glibc", "os", "virtualisation", "python")
BINDING: frozenset[Kind] = frozenset(("machine", "gpu", "software", "load"))
"""Differences that prevent a comparison of two runs. Differences between arms are the subject of the comparison."""


class PropertyDifference(Record, frozen=True, kw_only=True):
    """One thing that differs between the runs; None if a run does not report it."""

    kind: Kind
    name: str
    old: str | None
    new: str | None


def differences(old: Result, new: Result) -> tuple[PropertyDifference, ...]:
    """List all differences: machine, GPU, software and load first, then the arms."""
    kinds: tuple[Kind, ...] = ("machine", "gpu", "software", "load", "arm")
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


def _described(result: Result, other: Experiment) -> dict[Kind, dict[str, object]]:
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
        used = used_gpu(environment.gpu)
        devices = own_devices(environment.gpu, () if used is None else (used,))
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
            **{f"workload {c.name}": f"{c.requests} requests, {c.seconds:g} s per block" for c in experiment.workloads},
            **inputs,
        },
        "arm": arms,
    }


Change = Literal["changed", "no change shown", "not comparable"]


class ComparisonChange(Record, frozen=True, kw_only=True):
    """The change of one metric of two arms in one workload of both runs. Ratios are `arm` over `baseline`; `change` is
    new over old."""

    scenario: str
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


class _Key(NamedTuple):
    scenario: str
    metric: str
    pairing: Pairing


class _Test(NamedTuple):
    change: float | None = None
    ci95: tuple[float, float] | None = None
    p: float | None = None
    reason: str | None = None


def _changes(old: Result, new: Result) -> tuple[ComparisonChange, ...]:
    before, after = (
        {_Key(comparison.scenario, comparison.metric, comparison.pairing): comparison for comparison in run.comparisons}
        for run in (old, new)
    )
    tests = {}
    for key in dict.fromkeys((*before, *after)):
        first, second = before.get(key), after.get(key)
        if first is None or second is None:
            tests[key] = _Test(reason=_why_missing(key, "old" if first is None else "new", old, new))
        else:
            tests[key] = _test(first, second)
    adjusted = adjust_holm([test.p for test in tests.values()])
    return tuple(
        _change(key, before.get(key), after.get(key), test, p)
        for (key, test), p in zip(tests.items(), adjusted, strict=True)
    )


def _why_missing(key: _Key, name: str, old: Result, new: Result) -> str:
    """Why the run of this name does not have such a comparison."""
    labels = (old if name == "old" else new).experiment.labels
    lacking = [label for label in key.pairing if label not in labels]
    if lacking:
        return f"the {name} run has no arm {shown(lacking[0])}"
    base, other = old.experiment.baseline.label, new.experiment.baseline.label
    if base != other:
        return f"the baseline was {shown(base)} and is {shown(other)}"
    return f"the {name} run has no such comparison"


def _test(old: Comparison, new: Comparison) -> _Test:
    for name, comparison in (("old", old), ("new", new)):
        if comparison.verdict == "invalid":
            return _Test(reason=f"invalid in the {name} run: {comparison.reason}")
        if comparison.ratio is None:
            return _Test(reason=f"not measured in the {name} run: {comparison.reason}")
    centre = math.log(new.ratio or 1.0) - math.log(old.ratio or 1.0)
    if any("order statistics" in comparison.method for comparison in (old, new)) and old.ci95 and new.ci95:
        return _test_tails(centre, _Sides.of(old), _Sides.of(new))
    first, second = _spread(old), _spread(new)
    if first is None or second is None:
        missing = old if first is None else new
        return _Test(change=math.exp(centre), reason=f"no interval in one of the runs: {missing.reason}")
    (error_1, degrees_1), (error_2, degrees_2) = first, second
    error = math.hypot(error_1, error_2)
    degrees = error**4 / (error_1**4 / degrees_1 + error_2**4 / degrees_2)
    half = critical_t(degrees, SIGNIFICANCE) * error
    p = 2.0 * float(stats.t.sf(abs(centre) / error, degrees))
    return _Test(math.exp(centre), (math.exp(centre - half), math.exp(centre + half)), p)


class _Sides(NamedTuple):
    """How far a 95 % interval reaches below and above its log ratio, and the degrees of freedom that scale it."""

    below: float
    above: float
    degrees: float

    @staticmethod
    def of(comparison: Comparison) -> _Sides:
        low, high = map(math.log, comparison.ci95 or (1.0, 1.0))
        centre = math.log(comparison.ratio or 1.0)
        units = comparison.restarts if comparison.restarts > 1 else comparison.pairs
        return _Sides(centre - low, high - centre, max(1.0, comparison.degrees or units - 1.0))

    def at(self, significance: float) -> _Sides:
        longer = critical_t(self.degrees, significance) / critical_t(self.degrees, SIGNIFICANCE)
        return _Sides(self.below * longer, self.above * longer, self.degrees)


def _test_tails(centre: float, old: _Sides, new: _Sides) -> _Test:
    """The test of a change whose intervals are made of order statistics."""

    def interval(significance: float) -> tuple[float, float]:
        first, second = old.at(significance), new.at(significance)
        return centre - math.hypot(second.below, first.above), centre + math.hypot(second.above, first.below)

    def beyond(log_p: float) -> float:
        """Above 0 if the interval at this significance excludes no change."""
        low, high = interval(math.exp(log_p))
        return low if centre > 0.0 else -high

    least, most = math.log(LEAST_P), math.log(MOST_P)
    p = 1.0 if beyond(most) <= 0.0 else LEAST_P if beyond(least) > 0.0 else math.exp(brentq(beyond, least, most))
    low, high = interval(SIGNIFICANCE)
    if low == high:
        return _Test(math.exp(centre), reason="the intervals of both runs have no width")
    return _Test(math.exp(centre), (math.exp(low), math.exp(high)), p)


def _spread(comparison: Comparison) -> tuple[float, float] | None:
    """Standard error of the log ratio, and its degrees of freedom. That of an anytime-valid interval, which is wider
    than Student's t, comes out too large, never too small."""
    if comparison.ci95 is None:
        return None
    if comparison.error_log is not None:
        return comparison.error_log, comparison.degrees
    units = comparison.restarts if comparison.restarts > 1 else comparison.pairs
    half = (math.log(comparison.ci95[1]) - math.log(comparison.ci95[0])) / 2.0
    if units < 2 or half <= 0.0:
        return None
    return half / critical_t(units - 1, SIGNIFICANCE), units - 1


def _change(
    key: _Key, old: Comparison | None, new: Comparison | None, test: _Test, p_adjusted: float | None
) -> ComparisonChange:
    excludes_1 = test.ci95 is not None and not test.ci95[0] <= 1.0 <= test.ci95[1]
    changed = excludes_1 and p_adjusted is not None and p_adjusted < SIGNIFICANCE
    better: Label | None = None
    if changed and test.change is not None:
        arm_gained = (test.change > 1.0) == METRICS[key.metric].higher_is_better
        better = key.pairing.arm if arm_gained else key.pairing.baseline
    return ComparisonChange(
        scenario=key.scenario,
        metric=key.metric,
        baseline=key.pairing.baseline,
        arm=key.pairing.arm,
        old_ratio=None if old is None else old.ratio,
        old_ci95=None if old is None else old.ci95,
        new_ratio=None if new is None else new.ratio,
        new_ci95=None if new is None else new.ci95,
        old_verdict=None if old is None else old.verdict,
        new_verdict=None if new is None else new.verdict,
        verdict_changed=old is not None and new is not None and old.verdict != new.verdict,
        change=test.change,
        change_ci95=test.ci95,
        p_adjusted=p_adjusted,
        outcome="not comparable" if test.ci95 is None else "changed" if changed else "no change shown",
        better_for=better,
        reason=test.reason,
    )


def _caveats(old: Result, new: Result, binding: Sequence[PropertyDifference]) -> tuple[str, ...]:
    caveats = []
    if binding:
        names = ", ".join(difference.name for difference in binding)
        caveats.append(f"The runs differ in more than the arms ({names}), so a change may have another cause.")
    for name, run in (("old", old), ("new", new)):
        if not run.valid:
            caveats.append(f"The {name} run is not valid; the comparisons of its failed checks are left out.")
    if min(old.experiment.restarts, new.experiment.restarts) < 2:
        caveats.append(
            "The intervals do not include what a fresh start of the servers changes, because at least one run had no "
            "restarts; run both with --restarts 5 or more before you trust small changes."
        )
    return tuple(caveats)
