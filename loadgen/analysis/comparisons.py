"""Compares the arms: one ratio, interval and verdict for each metric of each scenario.

Verdict of a comparison, in this order:
- invalid: a check that covers it failed;
- undecided: no interval can be computed;
- equivalent: the 95 % interval lies inside [1/(1+δ), 1+δ] (two one-sided tests at 2.5 %);
- a_faster, b_faster: the interval excludes 1 and Holm's adjusted p over all comparisons of the run is below 5 %;
- undecided: everything else, and what lies within the machine's noise floor (`loadgen.analysis.noise_floor`).

Which interval: Student's t over the pairs; over the restarts where there are several; with `--until decided` one that
may be looked at after every pair (`loadgen.statistics.anytime`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from loadgen.analysis.metrics import METRICS, THROUGHPUT, Metric, leading_metric
from loadgen.analysis.pairs import PairedMetric, pair_metrics
from loadgen.analysis.summaries import BlockSummary
from loadgen.records.run import ColdStart, Experiment, Record
from loadgen.records.searches import RampFound, RateFound
from loadgen.statistics.anytime import estimate_anytime
from loadgen.statistics.ratios import (
    SIGNIFICANCE,
    RatioEstimate,
    adjust_holm,
    between_restarts,
    detectable_effect,
    estimate_ratio,
    estimate_restarts,
    geometric_mean,
)

__all__ = ["METRICS", "THROUGHPUT", "Comparison", "Metric", "Outcome", "compare_all", "invalidate", "judge"]

Outcome = Literal["a_faster", "b_faster", "equivalent", "undecided", "invalid"]
Method = Literal["t over pairs", "t over restarts", "anytime-valid over pairs"]
MIN_PAIRS = 2
LEADING_SHARE = 0.8
"""Of the 5 % for false winners, where the leading comparisons decide when to stop: the others have what is left."""


class Comparison(Record, frozen=True, kw_only=True):
    """One metric in one scenario. `a` and `b` are geometric means over the pairs, in `unit`, so that their ratio is
    the ratio; None where the metric could not be had, with the reason."""

    scenario: str
    metric: str
    unit: str
    higher_is_better: bool
    a: float | None
    b: float | None
    ratio_b_over_a: float | None
    ci95: tuple[float, float] | None
    verdict: Outcome
    pairs: int
    minimal_detectable_effect: float | None
    """Smallest true difference that a run of this plan calls with 80 % power, as a share: 0.03 is 3 %. None where
    the number of pairs was not planned."""
    p_value: float | None
    p_adjusted: float | None
    """After Holm, over all comparisons of the run."""
    p_equivalence: float | None
    """Of two one-sided tests against ±δ; not adjusted."""
    ratios: tuple[float, ...]
    """One a pair, in the order in which they ran."""
    reason: str | None
    """Why there is no ratio, no interval, or no verdict."""
    leading: bool = False
    """Whether it stands for its scenario in the verdict, and decides when to stop."""
    method: Method = "t over pairs"
    """What the interval is made of."""
    restarts: int = 1
    """Starts of the servers that the pairs come from."""
    restart_effect: float | None = None
    """Spread of what a restart adds to the ratio, as a share: 0.01 is 1 %. None with one restart."""
    noise_floor: float | None = None
    """Difference that identical arms show on this machine, as a share; None where it is not known."""


def compare_all(
    experiment: Experiment,
    blocks: Sequence[BlockSummary],
    cold_starts: Sequence[ColdStart],
    found: Sequence[RateFound | RampFound] = (),
) -> tuple[Comparison, ...]:
    """Every comparison that the experiment asked for, none of them invalid yet; see `invalidate`. `found` is what
    searches and ramps came to."""
    paired = pair_metrics(experiment.cells, blocks, cold_starts, found)
    estimates = [estimate_pairs(one, experiment) for one in paired]
    adjusted = _adjust(paired, estimates, experiment)
    family = sum(1 for _, estimate in estimates if estimate.p_value is not None)
    return tuple(
        _comparison(one, method, estimate, p_adjusted, family, experiment.equivalence_margin)
        for one, (method, estimate), p_adjusted in zip(paired, estimates, adjusted, strict=True)
    )


def estimate_pairs(paired: PairedMetric, experiment: Experiment) -> tuple[Method, RatioEstimate]:
    """Each cold start is a restart of its own, so there pairs and restarts are the same. What has no blocks has as many
    pairs as planned, also where blocks go on until decided."""
    margin, ratios = experiment.equivalence_margin, [pair.ratio for pair in paired.pairs]
    if paired.cell.scenario == "cold-start":
        return "t over pairs", estimate_ratio(ratios, margin)
    if experiment.until_decided and paired.cell.has_blocks:
        return "anytime-valid over pairs", estimate_anytime(ratios, margin)
    groups = paired.by_restart()
    return ("t over restarts" if len(groups) > 1 else "t over pairs"), estimate_restarts(groups, margin)


def _adjust(
    paired: Sequence[PairedMetric], estimates: Sequence[tuple[Method, RatioEstimate]], experiment: Experiment
) -> list[float | None]:
    """Holm over the run. Where one looks after every pair, the family is what was planned and not what has an interval
    so far, or the thresholds of an early look would be too easy."""
    p_values = [estimate.p_value for _, estimate in estimates]
    if not experiment.until_decided:
        return adjust_holm(p_values)
    leading = [one.metric == leading_metric(one.cell) for one in paired]
    others = len(leading) - sum(leading)
    weights = [LEADING_SHARE / sum(leading) if leads else (1.0 - LEADING_SHARE) / others for leads in leading]
    adjusted = adjust_holm([1.0 if p is None else p for p in p_values], weights)
    return [None if p is None else a for p, a in zip(p_values, adjusted, strict=True)]


def _comparison(
    paired: PairedMetric,
    method: Method,
    estimate: RatioEstimate,
    p_adjusted: float | None,
    family: int,
    margin: float,
) -> Comparison:
    metric, pairs = paired.metric, paired.pairs
    verdict = judge(estimate.ci95, p_adjusted, margin, metric.higher_is_better)
    sensitivity = None
    if estimate.ci95 is not None and estimate.spread_log is not None and method != "anytime-valid over pairs":
        sensitivity = detectable_effect(estimate.spread_log, estimate.units, family)
    reason = paired.reason or estimate.reason
    if verdict == "undecided" and reason is None:
        reason = _too_little(estimate.ci95)
    groups = paired.by_restart()
    added = between_restarts(groups) if method == "t over restarts" else None
    return Comparison(
        scenario=paired.cell.name,
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        a=_middle([pair.a for pair in pairs], groups),
        b=_middle([pair.b for pair in pairs], groups),
        ratio_b_over_a=estimate.ratio,
        ci95=estimate.ci95,
        verdict=verdict,
        pairs=estimate.pairs,
        minimal_detectable_effect=sensitivity,
        p_value=estimate.p_value,
        p_adjusted=p_adjusted,
        p_equivalence=estimate.p_equivalence,
        ratios=tuple(pair.ratio for pair in pairs),
        reason=reason,
        leading=paired.leads,
        method=method,
        restarts=len(groups),
        restart_effect=None if added is None else math.expm1(added),
    )


def _too_little(ci95: tuple[float, float] | None) -> str:
    """Why an interval decides nothing."""
    if ci95 is not None and not ci95[0] <= 1.0 <= ci95[1]:
        return "the interval excludes 1, but among so many comparisons that is not enough to name a winner"
    return "the interval is too wide to name a winner or to call the arms equivalent"


def _middle(values: Sequence[float], groups: Sequence[Sequence[float]]) -> float | None:
    """Geometric mean of the restarts' geometric means, as the ratio is; None without a value."""
    if not values:
        return None
    means, start = [], 0
    for group in groups:
        means.append(geometric_mean(values[start : start + len(group)]))
        start += len(group)
    return geometric_mean(means)


def judge(ci95: tuple[float, float] | None, p_adjusted: float | None, margin: float, higher_is_better: bool) -> Outcome:
    """The rule in this module's text, without the checks."""
    if ci95 is None or p_adjusted is None:
        return "undecided"
    low, high = ci95
    if 1.0 / (1.0 + margin) <= low and high <= 1.0 + margin:
        return "equivalent"
    if p_adjusted >= SIGNIFICANCE or low <= 1.0 <= high:
        return "undecided"
    return "b_faster" if (low > 1.0) == higher_is_better else "a_faster"


def invalidate(comparisons: Sequence[Comparison], why_invalid: Callable[[str], str | None]) -> tuple[Comparison, ...]:
    """Mark as invalid whatever a failed check covers. `why_invalid` gives a scenario's reason, None where all is well.

    Figures stay: they are what was measured, and what it cannot carry is a verdict.
    """
    return tuple(
        msgspec.structs.replace(comparison, verdict="invalid", reason=why)
        if (why := why_invalid(comparison.scenario))
        else comparison
        for comparison in comparisons
    )
