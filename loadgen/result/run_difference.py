"""Whether the ratios between the arms have changed from one run to another, with an interval and a test.

The change of a comparison is the new ratio over the old one. Each run's log ratio comes with a standard error, taken
from its 95 % interval and the units behind it (pairs of blocks, or restarts); the two runs are independent, so their
difference has Welch's t (Biometrika 34, 1947). p is adjusted by Holm over all comparisons of the two runs. The speed of
the machine on the day cancels in each ratio. What a start of the servers changes by itself does not, unless the runs
have restarts: `caveats` say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from scipy import stats

from loadgen.comparison.comparisons import Comparison, Outcome
from loadgen.comparison.pairs import METRICS
from loadgen.records.machine import own_devices, used_gpu
from loadgen.records.run import Experiment, Label, Pairing, Record, shown
from loadgen.result.result_file import Result
from loadgen.statistics.ratios import SIGNIFICANCE, adjust_holm, critical_t

Kind = Literal["machine", "gpu", "software", "load", "arm"]
HOST = ("cpu_model", "cpu_count", "kernel", "architecture", "glibc", "os", "virtualisation", "python")
BINDING: frozenset[Kind] = frozenset(("machine", "gpu", "software", "load"))
"""Differences that refuse a comparison of two runs. Those of an arm are what one compares runs for."""


class Difference(Record, frozen=True, kw_only=True):
    """One thing that is not the same in both runs; None where a run does not tell."""

    kind: Kind
    name: str
    old: str | None
    new: str | None


def differences(old: Result, new: Result) -> tuple[Difference, ...]:
    """All of them: machine, GPU, software and load first, then the arms."""
    both = (old, new)
    parts: tuple[tuple[Kind, tuple[dict[str, str | None], dict[str, str | None]]], ...] = (
        ("machine", (_machine(old), _machine(new))),
        ("gpu", (_gpu(old), _gpu(new))),
        ("software", (_software(old), _software(new))),
        ("load", (_load(old.experiment, new.experiment), _load(new.experiment, old.experiment))),
        ("load", (_inputs(old), _inputs(new))),
        ("arm", (_arms(old), _arms(new))),
    )
    if any(result.environment is None for result in both):
        unknown = ["recorded" if result.environment is not None else None for result in both]
        missing = Difference(kind="machine", name="environment", old=unknown[0], new=unknown[1])
        parts = parts[3:]
        return (missing, *(found for kind, sides in parts for found in _between(kind, *sides)))
    return tuple(found for kind, sides in parts for found in _between(kind, *sides))


def _between(kind: Kind, old: Mapping[str, str | None], new: Mapping[str, str | None]) -> Iterator[Difference]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before != after:
            yield Difference(kind=kind, name=name, old=before, new=after)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _machine(result: Result) -> dict[str, str | None]:
    host = result.environment.host if result.environment else {}
    return {name: _text(host.get(name)) for name in HOST} | {"memory": _memory(host.get("memory_bytes"))}


def _memory(size: object) -> str | None:
    """In GiB: what the kernel keeps for itself differs by some pages from boot to boot."""
    return f"{size / 2**30:.0f} GiB" if isinstance(size, int | float) else None


def _gpu(result: Result) -> dict[str, str | None]:
    gpu = result.environment.gpu if result.environment else {}
    found: dict[str, str | None] = {}
    nvml = gpu.get("nvml")
    if isinstance(nvml, Mapping):
        found |= {name: _text(nvml.get(name)) for name in ("driver_version", "cuda_driver_version")}
    used = used_gpu(gpu)
    for number, device in enumerate(own_devices(gpu, () if used is None else (used,))):
        found[f"GPU {number}"] = _text(device.get("name"))
    return found


def _software(result: Result) -> dict[str, str | None]:
    return dict(result.environment.packages) if result.environment else {}


def _load(experiment: Experiment, other: Experiment) -> dict[str, str | None]:
    """With the payloads of those arms that both runs have: an arm that one of them lacks loads no other."""
    payloads = {
        f"payload of {arm.label}": experiment.payload_of(arm) for arm in experiment.arms if arm.label in other.labels
    }
    cells = {f"cell {cell.name}": f"{cell.requests} requests, {cell.seconds:g} s a block" for cell in experiment.cells}
    return {
        "model": experiment.model,
        "weights": experiment.weights,
        "transport": experiment.transport,
        **payloads,
        "threads": str(experiment.threads),
        "deployment": experiment.deployment,
        **cells,
    }


def _inputs(result: Result) -> dict[str, str | None]:
    inputs = result.environment.inputs if result.environment else {}
    return {f"inputs, {name}": _text(value) for name, value in inputs.items()}


def _arms(result: Result) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for request in result.experiment.arms:
        found[f"{request.label}: target"] = request.target
        found |= {f"{request.label}: {name}": value for name, value in request.settings.items()}
    for arm in result.arms:
        found[f"{arm.label}: server"] = arm.title
        effect = {f"{arm.label}: {name} in effect": _text(value) for name, value in arm.in_effect.items()}
        found |= dict(sorted(effect.items()))
    if result.environment is not None:
        found["git commit"] = result.environment.git_commit
    return found


Change = Literal["changed", "no change shown", "not comparable"]


class ComparisonChange(Record, frozen=True, kw_only=True):
    """One metric of two arms in one scenario of both runs. Ratios are `arm` over `baseline`; `change` is new over
    old."""

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
    """None where the run has no such comparison."""
    verdict_changed: bool
    change: float | None
    change_ci95: tuple[float, float] | None
    p_adjusted: float | None
    outcome: Change
    better_for: Label | None
    """Which arm has gained on the other, where it changed."""
    reason: str | None


class RunDifference(Record, frozen=True, kw_only=True):
    """Two runs beside each other."""

    schema: Literal["abserve.diff/2"] = "abserve.diff/2"
    old: str
    new: str
    comparable: bool
    """Whether both ran in the same environment and at least one comparison can be made."""
    differences: tuple[Difference, ...]
    refused: tuple[str, ...]
    """Names of the differences that stand against comparing the runs; empty where they were allowed."""
    comparisons: tuple[ComparisonChange, ...]
    """Empty where refused."""
    caveats: tuple[str, ...]


def compare_runs(
    old: Result, new: Result, *, names: tuple[str, str] = ("old", "new"), allow_different: bool = False
) -> RunDifference:
    """`allow_different` compares whatever both runs have, wherever they ran."""
    found = differences(old, new)
    binding = [one for one in found if one.kind in BINDING]
    refused = () if allow_different else tuple(one.name for one in binding)
    changes = () if refused else _changes(old, new)
    return RunDifference(
        old=names[0],
        new=names[1],
        comparable=not refused and any(one.outcome != "not comparable" for one in changes),
        differences=found,
        refused=refused,
        comparisons=changes,
        caveats=() if refused else _caveats(old, new, binding),
    )


class _Key(NamedTuple):
    scenario: str
    metric: str
    pairing: Pairing


def _changes(old: Result, new: Result) -> tuple[ComparisonChange, ...]:
    before, after = (
        {_Key(one.scenario, one.metric, one.pairing): one for one in run.comparisons} for run in (old, new)
    )
    keys = list(dict.fromkeys((*before, *after)))
    why_missing = [
        _why_missing(key, "old" if key not in before else "new", old.experiment, new.experiment) for key in keys
    ]
    tests = [_test(before.get(key), after.get(key), why) for key, why in zip(keys, why_missing, strict=True)]
    adjusted = adjust_holm([test.p for test in tests])
    return tuple(
        _change(key, before.get(key), after.get(key), test, p)
        for key, test, p in zip(keys, tests, adjusted, strict=True)
    )


class _Test(Record, frozen=True, kw_only=True):
    change: float | None = None
    ci95: tuple[float, float] | None = None
    p: float | None = None
    reason: str | None = None


def _why_missing(key: _Key, name: str, old: Experiment, new: Experiment) -> str:
    """Why the run of this name has no such comparison."""
    lacking = [label for label in key.pairing if label not in (old if name == "old" else new).labels]
    if lacking:
        return f"the {name} run has no arm {shown(lacking[0])}"
    if old.baseline.label != new.baseline.label:
        return f"the baseline was {shown(old.baseline.label)} and is {shown(new.baseline.label)}"
    return f"the {name} run has no such comparison"


def _test(old: Comparison | None, new: Comparison | None, why_missing: str) -> _Test:
    for name, one in (("old", old), ("new", new)):
        if one is None:
            return _Test(reason=why_missing)
        if one.verdict == "invalid":
            return _Test(reason=f"invalid in the {name} run: {one.reason}")
        if one.ratio is None:
            return _Test(reason=f"not measured in the {name} run: {one.reason}")
    first, second = _spread(old), _spread(new)
    assert old is not None
    assert new is not None
    assert old.ratio is not None
    assert new.ratio is not None
    centre = math.log(new.ratio) - math.log(old.ratio)
    if first is None or second is None:
        missing = old if first is None else new
        return _Test(change=math.exp(centre), reason=f"no interval in one of the runs: {missing.reason}")
    (error_1, degrees_1), (error_2, degrees_2) = first, second
    error = math.hypot(error_1, error_2)
    degrees = error**4 / (error_1**4 / degrees_1 + error_2**4 / degrees_2)
    half = float(stats.t.ppf(1.0 - SIGNIFICANCE / 2.0, degrees)) * error
    return _Test(
        change=math.exp(centre),
        ci95=(math.exp(centre - half), math.exp(centre + half)),
        p=2.0 * float(stats.t.sf(abs(centre) / error, degrees)),
    )


def _spread(comparison: Comparison | None) -> tuple[float, float] | None:
    """Standard error of the log ratio, and its degrees of freedom, from the interval. One that may be looked at after
    every pair is wider than Student's t, so its error comes out too large, never too small."""
    if comparison is None or comparison.ci95 is None:
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
    shown = test.ci95 is not None and not test.ci95[0] <= 1.0 <= test.ci95[1]
    changed = shown and p_adjusted is not None and p_adjusted < SIGNIFICANCE
    outcome: Change = "not comparable" if test.ci95 is None else "changed" if changed else "no change shown"
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
        outcome=outcome,
        better_for=better,
        reason=test.reason,
    )


def _caveats(old: Result, new: Result, binding: Sequence[Difference]) -> tuple[str, ...]:
    caveats = []
    if binding:
        names = ", ".join(one.name for one in binding)
        caveats.append(f"The runs differ in more than the arms ({names}), so a change need not come from an arm.")
    for name, run in (("old", old), ("new", new)):
        if not run.valid:
            caveats.append(f"The {name} run is not valid; what its failed checks cover is left out.")
    if min(old.experiment.restarts, new.experiment.restarts) < 2:
        caveats.append(
            "What a fresh start of the servers changes by itself is in no interval, because not both runs have "
            "restarts; make both with --restarts 5 or more before small changes are believed."
        )
    return tuple(caveats)
