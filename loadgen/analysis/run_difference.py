"""Whether the ratio between the arms has changed from one run to another, with an interval and a test.

The change of a comparison is the new ratio over the old one. Each run's log ratio comes with a standard error, taken
from its 95 % interval and the units behind it (pairs of blocks, or restarts); the two runs are independent, so their
difference has Welch's t (Biometrika 34, 1947). p is adjusted by Holm over all comparisons of the two runs. The speed of
the machine on the day cancels in each ratio. What a start of the servers changes by itself does not, unless the runs
have restarts: `caveats` say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from scipy import stats

from loadgen.analysis.comparisons import METRICS, Comparison, Outcome
from loadgen.analysis.result import Result
from loadgen.analysis.run_environment import BINDING, Difference, differences
from loadgen.records.run import Record
from loadgen.statistics.ratios import SIGNIFICANCE, adjust_holm, critical_t

Change = Literal["changed", "no change shown", "not comparable"]


class ComparisonChange(Record, frozen=True, kw_only=True):
    """One metric of one scenario in both runs. Ratios are B over A; `change` is new over old."""

    scenario: str
    metric: str
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
    better_for: Literal["a", "b"] | None
    """Which arm has gained on the other, where it changed."""
    reason: str | None


class RunDifference(Record, frozen=True, kw_only=True):
    """Two runs beside each other."""

    schema: Literal["abserve.diff/1"] = "abserve.diff/1"
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
    changes = () if refused else _changes(old.comparisons, new.comparisons)
    return RunDifference(
        old=names[0],
        new=names[1],
        comparable=not refused and any(one.outcome != "not comparable" for one in changes),
        differences=found,
        refused=refused,
        comparisons=changes,
        caveats=() if refused else _caveats(old, new, binding),
    )


def _changes(old: Sequence[Comparison], new: Sequence[Comparison]) -> tuple[ComparisonChange, ...]:
    before = {(one.scenario, one.metric): one for one in old}
    after = {(one.scenario, one.metric): one for one in new}
    keys = list(dict.fromkeys((*before, *after)))
    tests = [_test(before.get(key), after.get(key)) for key in keys]
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


def _test(old: Comparison | None, new: Comparison | None) -> _Test:
    for name, one in (("old", old), ("new", new)):
        if one is None:
            return _Test(reason=f"the {name} run has no such comparison")
        if one.verdict == "invalid":
            return _Test(reason=f"invalid in the {name} run: {one.reason}")
        if one.ratio_b_over_a is None:
            return _Test(reason=f"not measured in the {name} run: {one.reason}")
    first, second = _spread(old), _spread(new)
    assert old is not None
    assert new is not None
    assert old.ratio_b_over_a is not None
    assert new.ratio_b_over_a is not None
    centre = math.log(new.ratio_b_over_a) - math.log(old.ratio_b_over_a)
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


def _spread(comparison: Comparison | None) -> tuple[float, int] | None:
    """Standard error of the log ratio, and its degrees of freedom, from the interval. One that may be looked at after
    every pair is wider than Student's t, so its error comes out too large, never too small."""
    if comparison is None or comparison.ci95 is None:
        return None
    units = comparison.restarts if comparison.method == "t over restarts" else comparison.pairs
    half = (math.log(comparison.ci95[1]) - math.log(comparison.ci95[0])) / 2.0
    if units < 2 or half <= 0.0:
        return None
    return half / critical_t(units - 1, SIGNIFICANCE), units - 1


def _change(
    key: tuple[str, str], old: Comparison | None, new: Comparison | None, test: _Test, p_adjusted: float | None
) -> ComparisonChange:
    shown = test.ci95 is not None and not test.ci95[0] <= 1.0 <= test.ci95[1]
    changed = shown and p_adjusted is not None and p_adjusted < SIGNIFICANCE
    outcome: Change = "not comparable" if test.ci95 is None else "changed" if changed else "no change shown"
    better: Literal["a", "b"] | None = None
    if changed and test.change is not None:
        better = "b" if (test.change > 1.0) == METRICS[key[1]].higher_is_better else "a"
    return ComparisonChange(
        scenario=key[0],
        metric=key[1],
        old_ratio=None if old is None else old.ratio_b_over_a,
        old_ci95=None if old is None else old.ci95,
        new_ratio=None if new is None else new.ratio_b_over_a,
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
