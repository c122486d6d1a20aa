"""Compares the arms: one ratio, interval and verdict per metric, workload and pair of arms.

Each arm is compared with the baseline and, for the ranking, the others with each other. The verdict, in this order:
- invalid: a check that covers it failed;
- inconclusive: no interval can be computed;
- no_difference: the 95 % interval lies inside [1/(1+δ), 1+δ] (two one-sided tests at 2.5 %);
- arm_better, baseline_better: the interval excludes 1, and p, after Holm's adjustment over all comparisons of the run,
  is below 5 %;
- inconclusive: everything else, and what lies within the machine's noise floor (`loadgen.verdict.noise_floor`).

The interval is Student's t over the pairs, or over the restarts if there are several; with `--until decided` one that
stays valid after every pair (`loadgen.stats.anytime`). High percentiles come from the samples of all pairs
together (`loadgen.stats.tails`). All of them allow for successive pairs that resemble each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from loadgen.comparison.pairs import Latencies, PairedMetric, leading_metric, pair_metrics, unit_of
from loadgen.comparison.summaries import BlockSummary
from loadgen.quantities import Interval, inverse
from loadgen.quantities import ratio as factor_words
from loadgen.records.run import Experiment, Figure, Label, Pairing, Record, shown
from loadgen.stats.anytime import estimate_anytime
from loadgen.stats.ratios import (
    SIGNIFICANCE,
    Correlation,
    RatioEstimate,
    adjust_holm,
    between_restarts,
    detectable_effect,
    error_of_mean,
    estimate_ratio,
    estimate_restarts,
    geometric_mean,
    plausible_correlation,
    unbiased,
)
from loadgen.stats.tails import Tail, estimate_tail_ratio

Outcome = Literal["arm_better", "baseline_better", "no_difference", "inconclusive", "invalid"]
Method = Literal[
    "t over pairs", "t over restarts", "anytime-valid over pairs", "order statistics", "anytime-valid order statistics"
]
MIN_PAIRS = 2
LEAST_ALONE = 16
"""Pairs from which a comparison's own correlation counts if it exceeds the run's: with fewer it is noise."""
LEADING_SHARE = 0.8
"""Share of the 5 % for false winners that the leading comparisons get if they decide when to stop."""


class Comparison(Record, frozen=True, kw_only=True):
    """One metric of two arms in one workload. The values are geometric means over the pairs, in `unit`, so that their
    quotient is the ratio; None, with a reason, if the metric could not be measured."""

    scenario: str
    metric: str
    unit: str
    higher_is_better: bool
    baseline: Label
    arm: Label
    baseline_value: float | None
    arm_value: float | None
    ratio: float | None
    """The arm's value over the baseline's."""
    ci95: tuple[float, float] | None
    verdict: Outcome
    pairs: int
    minimal_detectable_effect: float | None
    """Smallest true difference that 80 % of runs of this plan detect, as a share: 0.03 is 3 %. None if the number of
    pairs was not planned."""
    p_value: float | None
    p_adjusted: float | None
    """Holm-adjusted p value, over all comparisons of the run."""
    p_equivalence: float | None
    """p value of two one-sided tests against ±δ; not adjusted."""
    ratios: tuple[float, ...]
    """The ratio of each round, in the order in which they ran."""
    reason: str | None
    """Why the ratio, the interval or the verdict is missing."""
    leading: bool = False
    """Whether this metric leads its workload: it gives the verdict and decides when to stop."""
    method: Method = "t over pairs"
    """How the interval is made."""
    restarts: int = 1
    """Starts of the servers that the pairs come from."""
    restart_effect: float | None = None
    """Standard deviation of what a restart adds to the ratio, as a share. None with one restart."""
    error_log: float | None = None
    """Standard error of the log ratio, as wide as the interval."""
    degrees: float = 0.0
    """Degrees of freedom of that error."""
    correlation: float = 0.0
    """Correlation of successive pairs that the interval allows for."""
    baseline_ci95: tuple[float, float] | None = None
    """95 % interval of `baseline_value` by itself, if the metric is a percentile of all rounds together."""
    arm_ci95: tuple[float, float] | None = None
    """95 % interval of `arm_value` by itself, if the metric is a percentile of all rounds together."""
    noise_floor: float | None = None
    """Difference that identical arms show on this machine, as a share; None if it is not known."""

    @property
    def pairing(self) -> Pairing:
        return Pairing(self.baseline, self.arm)

    @property
    def winner(self) -> Label | None:
        return winner_of(self.verdict, self.pairing)

    @property
    def loser(self) -> Label | None:
        return {"arm_better": self.baseline, "baseline_better": self.arm}.get(self.verdict)


def winner_of(outcome: Outcome, pairing: Pairing) -> Label | None:
    """The arm that a verdict names as the better one, if any."""
    return {"arm_better": pairing.arm, "baseline_better": pairing.baseline}.get(outcome)


class Advantage(NamedTuple):
    """One comparison as people read it: from the arm that measured better, so that the factor is never below 1."""

    better: Label | None
    """The arm that measured better, whether or not the verdict names it; None where both measured the same."""
    factor: float
    """How many times better: 1.69 is "serves 1.69× the images/s" or "its latency is 1.69× lower". At least 1."""
    ci95: tuple[float, float] | None
    """Interval of the factor. Its low end is below 1 if the interval of the ratio includes 1."""

    @property
    def words(self) -> str:
        """ "A 2.02×" """
        factor = factor_words(self.factor, self.ci95)
        return factor if self.better is None else f"{shown(self.better)} {factor}"


def advantage(comparison: Comparison) -> Advantage | None:
    """The better arm and its factor, for display; None without a ratio."""
    return better_arm(comparison.pairing, comparison.ratio, comparison.ci95, comparison.higher_is_better)


def better_arm(
    pairing: Pairing, ratio: float | None, ci95: Interval | None, higher_is_better: bool
) -> Advantage | None:
    """The better arm of a stored ratio, which is arm ÷ baseline; None without a ratio."""
    if ratio is None:
        return None
    if ratio == 1.0:
        return Advantage(None, 1.0, ci95)
    better = pairing.arm if (ratio > 1.0) == higher_is_better else pairing.baseline
    return Advantage(better, ratio, ci95) if ratio > 1.0 else Advantage(better, 1.0 / ratio, inverse(ci95))


def compare_all(
    experiment: Experiment,
    blocks: Sequence[BlockSummary],
    figures: Sequence[Figure],
    latencies: Latencies | None = None,
    item: str = "item",
) -> tuple[Comparison, ...]:
    """Every comparison of the experiment, before `invalidate`. `figures` are those of the probes, `latencies` the
    samples for high percentiles; `item` is what an input is called."""
    paired = pair_metrics(experiment, blocks, figures, latencies)
    shared = shared_correlation(paired)
    estimates = [estimate_pairs(one, experiment, shared.plausible) for one in paired]
    adjusted = _adjust(paired, [estimate for _, estimate, _ in estimates], experiment)
    family = sum(1 for _, estimate, _ in estimates if estimate.p_value is not None)
    comparisons = []
    for one, (method, estimate, values), p_adjusted in zip(paired, estimates, adjusted, strict=True):
        metric, restarts = one.metric, one.by_restart()
        verdict = judge(estimate.ci95, p_adjusted, experiment.equivalence_margin, metric.higher_is_better)
        added = between_restarts(restarts) if method == "t over restarts" else None
        scatter = shared.scatter if one.is_one_series else 0.0
        baseline, arm = values or (None, None)
        comparisons.append(
            Comparison(
                scenario=one.workload.name,
                metric=metric.name,
                unit=unit_of(metric, item),
                higher_is_better=metric.higher_is_better,
                baseline=one.pairing.baseline,
                arm=one.pairing.arm,
                baseline_value=None if baseline is None else baseline.value,
                arm_value=None if arm is None else arm.value,
                baseline_ci95=None if baseline is None else baseline.ci95,
                arm_ci95=None if arm is None else arm.ci95,
                ratio=estimate.ratio,
                ci95=estimate.ci95,
                verdict=verdict,
                pairs=estimate.pairs,
                minimal_detectable_effect=None
                if method.startswith("anytime")
                else _sensitivity(one, method, estimate, family, scatter),
                p_value=estimate.p_value,
                p_adjusted=p_adjusted,
                p_equivalence=estimate.p_equivalence,
                ratios=tuple(pair.ratio for pair in one.pairs),
                reason=one.reason
                or estimate.reason
                or (_why_inconclusive(estimate.ci95) if verdict == "inconclusive" else None),
                leading=one.leads,
                method=method,
                restarts=len(restarts) or 1,
                error_log=estimate.error_log,
                degrees=estimate.degrees,
                correlation=estimate.correlation,
                restart_effect=None if added is None else math.expm1(added),
            )
        )
    return tuple(comparisons)


def shared_correlation(paired: Sequence[PairedMetric]) -> Correlation:
    """The correlation of successive pairs that all workloads share, since what makes an arm drift affects every
    workload; a single series of ten pairs is too short. Comparisons of one workload have rounds in common, so their
    mean counts as one series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for one in paired:
        if one.leads and one.correlation is not None:
            series.setdefault(one.workload.name, []).append((len(one.pairs), one.correlation))
    return plausible_correlation(
        [(min(n for n, _ in own), math.fsum(r for _, r in own) / len(own)) for own in series.values()]
    )


def estimate_pairs(
    paired: PairedMetric, experiment: Experiment, shared: float
) -> tuple[Method, RatioEstimate, tuple[Tail, Tail] | None]:
    """How the interval is made, the estimate, and the values of baseline and arm. `shared` is the correlation that the
    run's workloads have in common: the larger of it and the comparison's own counts.

    Each cold start is its own restart, so its pairs and restarts are the same. What has no blocks has as many pairs as
    planned, also with `--until decided`.
    """
    margin, groups = experiment.equivalence_margin, paired.by_restart()
    ratios = [pair.ratio for pair in paired.pairs]
    open_ended = experiment.until_decided and paired.workload.has_blocks
    correlation, own = shared if paired.is_one_series else 0.0, paired.correlation
    if own is not None and len(ratios) >= LEAST_ALONE:
        correlation = max(correlation, unbiased(len(ratios), own))
    if paired.rounds and paired.metric.quantile is not None:
        tail, tails = estimate_tail_ratio(paired.rounds, paired.metric.quantile, margin, correlation, looks=open_ended)
        return ("anytime-valid order statistics" if open_ended else "order statistics"), tail, tails
    values = _values(paired)
    if paired.workload.scenario == "cold-start":
        return "t over pairs", estimate_ratio(ratios, margin), values
    if open_ended:
        return "anytime-valid over pairs", estimate_anytime(ratios, margin, correlation), values
    method: Method = "t over restarts" if len(groups) > 1 else "t over pairs"
    return method, estimate_restarts(groups, margin, correlation), values


def _values(paired: PairedMetric) -> tuple[Tail, Tail] | None:
    """Geometric means of the restarts' geometric means, as the ratio is; None without a pair."""
    if not paired.pairs:
        return None
    starts: dict[int, list[tuple[float, float]]] = {}
    for pair in paired.pairs:
        starts.setdefault(pair.restart, []).append((pair.baseline, pair.arm))
    baseline, arm = (
        geometric_mean([geometric_mean([pair[side] for pair in start]) for start in starts.values()]) for side in (0, 1)
    )
    return Tail(baseline, None), Tail(arm, None)


def _adjust(
    paired: Sequence[PairedMetric], estimates: Sequence[RatioEstimate], experiment: Experiment
) -> list[float | None]:
    """Adjust p by Holm over the run. With a decision after every pair, the family is all that was planned, not all that
    has an interval so far, or the thresholds of an early decision would be too easy."""
    p_values = [estimate.p_value for estimate in estimates]
    if not experiment.until_decided:
        return adjust_holm(p_values)
    leading = [one.metric == leading_metric(one.workload) for one in paired]
    others = len(leading) - sum(leading)
    weights = [LEADING_SHARE / sum(leading) if leads else (1.0 - LEADING_SHARE) / others for leads in leading]
    adjusted = adjust_holm([1.0 if p is None else p for p in p_values], weights)
    return [None if p is None else a for p, a in zip(p_values, adjusted, strict=True)]


def _sensitivity(
    paired: PairedMetric, method: Method, estimate: RatioEstimate, family: int, scatter: float
) -> float | None:
    """The smallest difference that another run of this plan detects. It estimates the correlation anew, and a larger
    estimate costs more power than a smaller one gains, so its scatter is added."""
    error = estimate.error_log
    if error is None:
        return None
    if scatter and method == "t over pairs":
        logs = [math.log(pair.ratio) for pair in paired.pairs]
        error, _ = error_of_mean(logs, estimate.correlation + scatter)
    return detectable_effect(error, estimate.degrees, family)


def _why_inconclusive(ci95: tuple[float, float] | None) -> str:
    if ci95 is not None and not ci95[0] <= 1.0 <= ci95[1]:
        return "the interval excludes 1, but not clearly enough for so many comparisons"
    return "the interval is too wide to name a winner or to exclude a difference"


def judge(ci95: tuple[float, float] | None, p_adjusted: float | None, margin: float, higher_is_better: bool) -> Outcome:
    """Apply the verdict rules in this module's docstring, except for the checks."""
    if ci95 is None or p_adjusted is None:
        return "inconclusive"
    low, high = ci95
    if 1.0 / (1.0 + margin) <= low and high <= 1.0 + margin:
        return "no_difference"
    if p_adjusted >= SIGNIFICANCE or low <= 1.0 <= high:
        return "inconclusive"
    return "arm_better" if (low > 1.0) == higher_is_better else "baseline_better"


def invalidate(comparisons: Sequence[Comparison], why_invalid: Callable[[str], str | None]) -> tuple[Comparison, ...]:
    """Mark as invalid all that a failed check covers; the figures stay. `why_invalid` returns a reason or None."""
    return tuple(
        msgspec.structs.replace(comparison, verdict="invalid", reason=why)
        if (why := why_invalid(comparison.scenario))
        else comparison
        for comparison in comparisons
    )


def leading_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The leading metric of each workload and pairing: throughput, the highest supported percentile of an open loop, or
    the time to the first response of a cold start."""
    return [c for c in comparisons if c.leading]
