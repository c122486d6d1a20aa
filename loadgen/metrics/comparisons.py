"""Compares the arms: one ratio, interval and verdict per metric, workload and pair of arms.

Each arm is compared with the baseline and, for the ranking, the others with each other. The verdict, in this order:
- invalid: a check that covers it failed;
- inconclusive: no interval can be computed;
- no_difference: the 95 % interval lies inside [1/(1+δ), 1+δ] (two one-sided tests at 2.5 %);
- arm_better, baseline_better: the interval excludes 1, and p, after Holm's adjustment over all comparisons of the run,
  is below 5 %;
- inconclusive: everything else, and what lies within the machine's noise floor (`loadgen.checks.noise_floor`).

The interval is Student's t over the pairs, or over the restarts if there are several; with `--until decided` one that
stays valid after every pair (`loadgen.stats.ratios`). High percentiles come from the samples of all pairs
together (`loadgen.stats.tails`). All of them allow for successive pairs that resemble each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from loadgen.base.quantities import Interval, excludes_one, inverse, possessive, share
from loadgen.base.quantities import ratio as factor_words
from loadgen.metrics.registry import (
    ACHIEVED_RATE,
    GOODPUT,
    METRICS,
    TPOT,
    TTFT,
    Metric,
    PerRequest,
    leading_metric,
    measured_answers,
    metrics_of,
    pool_open_loops,
)
from loadgen.metrics.summaries import BlockSummary, figure_of, why_missing
from loadgen.metrics.tokens import samples_of
from loadgen.records.run import Experiment, Figure, Label, Pairing, Record, Workload, shown
from loadgen.records.store import StoredBlock
from loadgen.stats.distributions import student_tail
from loadgen.stats.estimates import SIGNIFICANCE, Estimate
from loadgen.stats.percentiles import Pool, samples_needed
from loadgen.stats.ratios import (
    RatioEstimate,
    Values,
    adjust_holm,
    anytime_p,
    between_restarts,
    detectable_effect,
    error_of_mean,
    estimate_anytime,
    estimate_ratio,
    estimate_restarts,
    has_log,
    lag_one,
    mean_over_starts,
    plausible_correlation,
)
from loadgen.stats.tails import Round, estimate_tail_ratio

T = TypeVar("T")
RequestValues = Mapping[tuple[PerRequest, int], Values]
"""The values of each block's good responses that count, by the function and the block's index."""


class PooledRequests:
    """The samples for percentiles of all blocks: a pool per function, arm and workload, to which blocks are added as
    they are stored."""

    def __init__(self, blocks: Sequence[StoredBlock] = ()) -> None:
        self._pools: dict[tuple[PerRequest, str, Label], Pool] = {}
        self.add(blocks)

    def add(self, blocks: Sequence[StoredBlock]) -> None:
        """Read the samples of further blocks."""
        for block in blocks:
            record, samples = block.record, samples_of(block)
            if samples is None:
                continue
            answers = measured_answers(samples, is_open=block.workload.is_open)
            functions = (metric.of_requests for metric in metrics_of(block.workload) if metric.quantile is not None)
            for function in dict.fromkeys(functions):
                if function is not None:
                    pool = self._pools.setdefault((function, record.workload, record.label), Pool())
                    pool.add(record.index, function(answers))

    @property
    def by_block(self) -> RequestValues:
        return {
            (function, index): values
            for (function, _, _), pool in self._pools.items()
            for index, values in pool.blocks.items()
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """The values of two arms in one round, and during which start of the servers."""

    baseline: float
    arm: float
    restart: int = 0

    @property
    def ratio(self) -> float:
        """The arm's value over the baseline's."""
        return self.arm / self.baseline


@dataclass(frozen=True)
class PairedMetric:
    """One comparison's data; without pairs `reason` may say why."""

    workload: Workload
    metric: Metric
    pairing: Pairing
    pairs: tuple[Pair, ...]
    reason: str | None = None
    rounds: tuple[Round, ...] = ()
    """The samples for a high percentile; `pairs` are then for display only."""
    saturated: bool = False
    """Whether an arm could not sustain the rate of an open loop, so that the achieved rate leads."""

    @property
    def leads(self) -> bool:
        """Whether this metric leads its workload. Goodput counts what an arm that cannot keep up answers too late."""
        leading = leading_metric(self.workload)
        return self.metric == (ACHIEVED_RATE if self.saturated and leading != GOODPUT else leading)

    @cached_property
    def is_one_series(self) -> bool:
        """Whether successive rounds may resemble each other: not those of cold starts and searches, nor restarts, each
        of which begins anew."""
        restarted = len({pair.unit for pair in self.rounds}) < len(self.rounds)
        return self.workload.has_blocks and len(self.by_restart()) < 2 and not restarted

    @cached_property
    def series(self) -> tuple[int, float] | None:
        """The number of pairs and their `lag_one`, if they are one series; of rounds without a figure their medians'
        ratios."""
        ratios = [pair.ratio for pair in self.pairs] or [pair.ratio_of_medians for pair in self.rounds]
        correlation = lag_one(ratios) if self.is_one_series else None
        return None if correlation is None else (len(ratios), correlation)

    def by_restart(self) -> list[list[float]]:
        """Ratios, one list per start of the servers."""
        groups: dict[int, list[float]] = {}
        for pair in self.pairs:
            groups.setdefault(pair.restart, []).append(pair.ratio)
        return list(groups.values())


def side_by_side(values: Mapping[tuple[int, Label], T], pairing: Pairing) -> list[tuple[int, T, T]]:
    """(number, baseline's value, arm's value) of every number that both arms have, in order."""
    base, arm = pairing
    numbers = sorted({number for number, _ in values})
    return [(n, values[n, base], values[n, arm]) for n in numbers if {(n, base), (n, arm)} <= values.keys()]


def pair_metrics(
    experiment: Experiment,
    blocks: Sequence[BlockSummary],
    figures: Sequence[Figure] = (),
    requests: RequestValues | None = None,
    names: Mapping[Label, str] | None = None,
) -> list[PairedMetric]:
    """Every metric of every workload of each arm beside the baseline, in the order of the report; then, for ranking,
    the leading one of the other arms among themselves. `figures` are those that probes measured. Without `requests`
    high percentiles have no data. `names` replaces the labels of arms in reasons."""
    called = names or {label: shown(label) for label in experiment.labels}
    by_workload: dict[str, list[BlockSummary]] = {}
    for block in blocks:
        if block.complete:
            by_workload.setdefault(block.workload, []).append(block)

    def pair(workload: Workload, metric: Metric, pairing: Pairing) -> PairedMetric:
        if metric.has_function:
            of_workload = by_workload.get(workload.name, ())
            return _with_ratios(_block_pairs(workload, metric, pairing, of_workload, requests or {}, called), called)
        return _with_ratios(_figure_pairs(workload, metric, pairing, figures), called)

    paired = []
    for workload in experiment.workloads:
        metrics = metrics_of(workload)
        against = experiment.pairings_in(workload)
        paired += [pair(workload, metric, pairing) for metric in metrics for pairing in against]
        among_others = experiment.pairings_of_others(workload)
        others = (pair(workload, metric, pairing) for metric in metrics for pairing in among_others)
        paired += [other for other in others if other.leads]
    return paired


def _figure_pairs(workload: Workload, metric: Metric, pairing: Pairing, figures: Sequence[Figure]) -> PairedMetric:
    """A pair per round in which a probe measured both arms."""
    values = {
        (figure.round, figure.label): (figure.value, figure.restart)
        for figure in figures
        if figure.value is not None and (figure.metric, figure.workload) == (metric.name, workload.name)
    }
    rounds = side_by_side(values, pairing)
    pairs = tuple(Pair(base, arm, restart) for _, (base, restart), (arm, _) in rounds)
    return PairedMetric(workload, metric, pairing, pairs)


def _with_ratios(paired: PairedMetric, names: Mapping[Label, str]) -> PairedMetric:
    """Without its data, and with the reason, where one of its pairs has no ratio: a figure of 0, as the time per token
    of answers that arrive in one piece, or one that no clock measures."""
    for number, pair in enumerate(paired.pairs, start=1):
        figures = dict(zip(paired.pairing, (pair.baseline, pair.arm), strict=True))
        label = next((label for label, figure in figures.items() if not has_log(figure)), None)
        if label is not None or not has_log(pair.ratio):
            label = label or paired.pairing.arm
            unit = paired.metric.unit_for("item")
            figure = f"{possessive(names[label])} {paired.metric.title} is {figures[label]:.4g} {unit}"
            reason = f"{figure.rstrip()} in pair {number} of {len(paired.pairs)}, so there is no ratio"
            return replace(paired, pairs=(), rounds=(), reason=reason)
    return paired


def _block_pairs(
    workload: Workload,
    metric: Metric,
    pairing: Pairing,
    blocks: Sequence[BlockSummary],
    requests: RequestValues,
    names: Mapping[Label, str],
) -> PairedMetric:
    """`blocks` are the complete ones of the workload."""
    by_round = {(block.round, block.label): block for block in blocks}
    couples = [(base, arm) for _, base, arm in side_by_side(by_round, pairing)]
    arms = zip(pairing, zip(*couples, strict=True), strict=True) if couples else ()
    loops = (
        (label, pool_open_loops([b.open_loop for b in of_arm if b.open_loop is not None])) for label, of_arm in arms
    )
    saturated = [f"{names[label]} was {loop.saturation}" for label, loop in loops if loop and loop.saturation]
    if metric.of_requests is not None and saturated:
        # What a request takes behind a growing backlog depends on the length of the block.
        return PairedMetric(workload, metric, pairing, (), saturated[0], saturated=True)
    if (reason := why_missing((block for couple in couples for block in couple), metric, names)) is not None:
        return PairedMetric(workload, metric, pairing, (), reason, saturated=bool(saturated))
    if metric.quantile is not None:
        needed = samples_needed(metric.quantile)
        if metric.is_tail or any(block.samples < needed for couple in couples for block in couple):
            return _tail(workload, metric, pairing, couples, requests)
    pairs = _pairs(couples, metric)
    if len(pairs) < len(couples):
        return PairedMetric(workload, metric, pairing, (), metric.if_missing, saturated=bool(saturated))
    return PairedMetric(workload, metric, pairing, pairs, saturated=bool(saturated))


def _pairs(couples: Sequence[tuple[BlockSummary, BlockSummary]], metric: Metric) -> tuple[Pair, ...]:
    values = [(figure_of(base, metric), figure_of(arm, metric), base.restart) for base, arm in couples]
    return tuple(Pair(base, arm, restart) for base, arm, restart in values if base is not None and arm is not None)


def _tail(
    workload: Workload,
    metric: Metric,
    pairing: Pairing,
    couples: Sequence[tuple[BlockSummary, BlockSummary]],
    requests: RequestValues,
) -> PairedMetric:
    """Pool the rounds. The independent unit is the start of the servers if there are several, else the round."""
    several = len({a.restart for a, _ in couples}) > 1
    none = np.empty(0)

    def values(block: BlockSummary) -> Values:
        return none if metric.of_requests is None else requests.get((metric.of_requests, block.index), none)

    rounds = tuple(Round(values(a), values(b), a.restart if several else a.round) for a, b in couples)
    needed = samples_needed(metric.quantile or 0.5)
    fewest = min(sum(len(pair.a) for pair in rounds), sum(len(pair.b) for pair in rounds))
    if rounds and fewest < needed:
        reason = f"{metric.title} needs {needed} samples per arm; one arm has {fewest}"
        return PairedMetric(workload, metric, pairing, (), reason)
    pairs = _pairs(couples, metric)
    return PairedMetric(workload, metric, pairing, pairs if len(pairs) == len(couples) else (), rounds=rounds)


Outcome = Literal["arm_better", "baseline_better", "no_difference", "inconclusive", "invalid"]
Method = Literal[
    "t over pairs", "t over restarts", "anytime-valid over pairs", "order statistics", "anytime-valid order statistics"
]
MIN_PAIRS = 2
LEADING_SHARE = 0.8
"""Share of the 5 % for false winners that the leading comparisons get if they decide when to stop."""


class Comparison(RatioEstimate, Record, frozen=True, kw_only=True):
    """The ratio of one metric of two arms in one workload, and its verdict. The values are geometric means over the
    pairs, in `unit`, so that their quotient is the ratio; None, with a reason, if the metric could not be measured."""

    workload: str = msgspec.field(name="scenario")
    metric: str
    unit: str
    higher_is_better: bool
    baseline: Label
    arm: Label
    baseline_value: float | None
    arm_value: float | None
    verdict: Outcome
    minimal_detectable_effect: float | None
    """Smallest true difference that 80 % of runs of this plan detect, as a share: 0.03 is 3 %. None if the number of
    pairs was not planned."""
    p_adjusted: float | None
    """Holm-adjusted p value, over all comparisons of the run."""
    ratios: tuple[float, ...]
    """The ratio of each round, in the order in which they ran."""
    leading: bool = False
    """Whether this metric leads its workload: it gives the verdict and decides when to stop."""
    method: Method = "t over pairs"
    """How the interval is made."""
    restarts: int = 1
    """Starts of the servers that the pairs come from."""
    restart_effect: float | None = None
    """Standard deviation of what a restart adds to the ratio, as a share. None with one restart."""
    baseline_ci95: tuple[float, float] | None = None
    """95 % interval of `baseline_value` by itself, if the metric is a percentile of all rounds together."""
    arm_ci95: tuple[float, float] | None = None
    """95 % interval of `arm_value` by itself, if the metric is a percentile of all rounds together."""
    noise_floor: float | None = None
    """Difference that identical arms show on this machine, as a share; None if it is not known."""
    lost: tuple[float, float] | None = None
    """The share of its time that others may have taken from the baseline and from the arm, which the interval includes;
    None where the run is not rough."""

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

    def words(self, names: Mapping[Label, str] | None = None) -> str:
        """ "A 2.02×", or with the arm's name."""
        factor = factor_words(self.factor, self.ci95)
        return factor if self.better is None else f"{(names or {}).get(self.better, shown(self.better))} {factor}"


def advantage(comparison: Comparison) -> Advantage | None:
    """The better arm and its factor, for display; None without a ratio, and where a check that covers it failed."""
    ratio = None if comparison.verdict == "invalid" else comparison.ratio
    return better_arm(comparison.pairing, ratio, comparison.ci95, comparison.higher_is_better)


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


def log_lead(comparison: Comparison | None, arm: Label) -> Estimate | None:
    """log of how many times better an arm is than the other one of a comparison, with infinite bounds where there is no
    interval; None if that was not measured."""
    if comparison is None or comparison.ratio is None:
        return None
    low, high = (-math.inf, math.inf) if comparison.ci95 is None else map(math.log, comparison.ci95)
    if (comparison.arm == arm) == comparison.higher_is_better:
        return Estimate(math.log(comparison.ratio), low, high)
    return Estimate(-math.log(comparison.ratio), -high, -low)


def compare_all(
    experiment: Experiment,
    blocks: Sequence[BlockSummary],
    figures: Sequence[Figure] = (),
    requests: RequestValues | None = None,
    item: str = "item",
    names: Mapping[Label, str] | None = None,
) -> tuple[Comparison, ...]:
    """Every comparison of the experiment, before `invalidate`. `figures` are those that probes measured, `requests`
    the samples for high percentiles; `item` is what an input is called; `names` replaces labels in reasons."""
    paired_metrics = pair_metrics(experiment, blocks, figures, requests, names)
    seen = seen_correlations(paired_metrics)
    estimates = [estimate_pairs(paired, experiment, seen) for paired in paired_metrics]
    p_values = [estimate.p_value for _, estimate, _ in estimates]
    leads = [paired.metric == leading_metric(paired.workload) for paired in paired_metrics]
    adjusted = adjust(leads, p_values, until_decided=experiment.until_decided)
    family = sum(p is not None for p in p_values)
    comparisons: list[Comparison] = []
    shown_values = _one_value_each(paired_metrics, [values for _, _, values in estimates])
    for paired, (method, estimate, _), values, p_adjusted in zip(
        paired_metrics, estimates, shown_values, adjusted, strict=True
    ):
        metric, restarts = paired.metric, paired.by_restart()
        verdict = judge(estimate.ci95, p_adjusted, experiment.equivalence_margin, metric.higher_is_better)
        added = between_restarts(restarts) if method == "t over restarts" else None
        baseline, arm = values or (None, None)
        reason = paired.reason or estimate.reason
        if verdict == "inconclusive":
            reason = reason or _why_inconclusive(estimate.ci95, family)
        comparisons.append(
            Comparison(
                **msgspec.structs.asdict(msgspec.structs.replace(estimate, reason=reason)),
                workload=paired.workload.name,
                metric=metric.name,
                unit=metric.unit_for(item),
                higher_is_better=metric.higher_is_better,
                baseline=paired.pairing.baseline,
                arm=paired.pairing.arm,
                baseline_value=None if baseline is None else baseline.value,
                arm_value=None if arm is None else arm.value,
                baseline_ci95=None if baseline is None else baseline.interval,
                arm_ci95=None if arm is None else arm.interval,
                verdict=verdict,
                minimal_detectable_effect=None
                if method.startswith("anytime")
                else _sensitivity(paired, method, estimate, family, seen),
                p_adjusted=p_adjusted,
                ratios=tuple(pair.ratio for pair in paired.pairs),
                leading=paired.leads,
                method=method,
                restarts=len(restarts) or 1,
                restart_effect=None if added is None else math.expm1(added),
            )
        )
    failed = _failed_shares(blocks)
    comparisons = [_of_answers(comparison, failed, names or {}) for comparison in comparisons]
    return tuple(_without_held_back(comparison, comparisons, names or {}) for comparison in comparisons)


MOST_FAILED = 0.1
"""Of the requests that a percentile leaves above it (for a mean, of a tenth of all): so many more may have failed on
the arm that wins."""


def _failed_shares(blocks: Sequence[BlockSummary]) -> dict[tuple[str, Label], float]:
    """The share of an arm's requests in a workload that failed, over its complete blocks."""
    errors, requests = Counter[tuple[str, Label]](), Counter[tuple[str, Label]]()
    for block in (block for block in blocks if block.complete):
        errors[block.workload, block.label] += block.errors
        requests[block.workload, block.label] += block.requests
    return {key: errors[key] / sent for key, sent in requests.items() if sent}


def _of_answers(
    comparison: Comparison, failed: Mapping[tuple[str, Label], float], names: Mapping[Label, str]
) -> Comparison:
    """The comparison without its winner if that is one by the times of its answers and has refused more requests:
    where goodput counts failed requests, an arm that refuses them has the shorter times."""
    metric, winner, loser = METRICS[comparison.metric], comparison.winner, comparison.loser
    if winner is None or loser is None or metric.of_requests is None:
        return comparison
    share_failed = failed.get((comparison.workload, winner), 0.0)
    allowed = MOST_FAILED * (1.0 - (0.9 if metric.quantile is None else metric.quantile))
    if share_failed <= failed.get((comparison.workload, loser), 0.0) + allowed:
        return comparison
    reason = (
        f"{names.get(winner, shown(winner))} failed {share(share_failed)} of its requests, and its times are those of "
        "the others"
    )
    return msgspec.structs.replace(comparison, verdict="inconclusive", reason=reason)


def _without_held_back(
    comparison: Comparison, comparisons: Sequence[Comparison], names: Mapping[Label, str]
) -> Comparison:
    """The comparison without its winner if that is one by TPOT alone: later the first token, faster the rest, and all
    together not faster. So looks an arm whose first tokens are held back."""
    if comparison.metric != TPOT.name or comparison.winner is None:
        return comparison
    beside = [c for c in comparisons if (c.workload, c.pairing) == (comparison.workload, comparison.pairing)]
    others = {c.metric: c for c in beside}
    first, whole = others.get(TTFT.name), next((c for c in beside if c.leading), None)
    if first is None or whole is None or first.winner != comparison.loser or whole.winner == comparison.winner:
        return comparison
    reason = (
        f"{names.get(comparison.winner, shown(comparison.winner))} sends its first token later and the others sooner, "
        "and is not shown to be faster in all: its first tokens are held back"
    )
    return msgspec.structs.replace(comparison, verdict="inconclusive", reason=reason)


Series = Sequence[tuple[int, float]]
"""The length and `lag_one` of series of pairs."""


def seen_correlations(paired_metrics: Sequence[PairedMetric]) -> Series:
    """One series per workload for `plausible_correlation`, since what makes an arm drift may affect every workload, and
    a single series of ten pairs is too short. Comparisons of one workload have rounds in common, so their mean counts
    as one series."""
    series: dict[str, list[tuple[int, float]]] = {}
    for paired in paired_metrics:
        if paired.leads and paired.series is not None:
            series.setdefault(paired.workload.name, []).append(paired.series)
    return [
        (min(n for n, _ in of_workload), math.fsum(r for _, r in of_workload) / len(of_workload))
        for of_workload in series.values()
    ]


def estimate_pairs(
    paired: PairedMetric, experiment: Experiment, seen: Series
) -> tuple[Method, RatioEstimate, tuple[Estimate, Estimate] | None]:
    """How the interval is made, the estimate, and the values of baseline and arm. `seen` are the `seen_correlations` of
    the run: the larger of what they and the comparison itself make plausible counts.

    Each cold start is its own restart, so its pairs and restarts are the same. What has no blocks has as many pairs as
    planned, also with `--until decided`.
    """
    margin, groups = experiment.equivalence_margin, paired.by_restart()
    ratios = [pair.ratio for pair in paired.pairs]
    open_ended = experiment.until_decided and paired.workload.has_blocks
    correlation = plausible_correlation(seen, paired.series)[0] if paired.is_one_series else 0.0
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


def _values(paired: PairedMetric) -> tuple[Estimate, Estimate] | None:
    """Geometric means of the restarts' geometric means, as the ratio is; None without a pair."""
    if not paired.pairs:
        return None
    starts: dict[int, list[tuple[float, float]]] = {}
    for pair in paired.pairs:
        starts.setdefault(pair.restart, []).append((pair.baseline, pair.arm))
    baseline, arm = (mean_over_starts([[pair[side] for pair in start] for start in starts.values()]) for side in (0, 1))
    return Estimate(baseline), Estimate(arm)


def _one_value_each(
    paired_metrics: Sequence[PairedMetric], values: Sequence[tuple[Estimate, Estimate] | None]
) -> list[tuple[Estimate, Estimate] | None]:
    """The values of baseline and arm of every comparison, so that an arm has one per metric and workload. The pools of
    a percentile are adjusted to the arm beside them: the baseline's value of the first comparison stays, and the others
    follow from it by their ratios."""
    known: dict[tuple[str, str, Label], Estimate] = {}
    chosen: list[tuple[Estimate, Estimate] | None] = []
    for paired, both in zip(paired_metrics, values, strict=True):
        if both is not None:
            base, arm = ((paired.workload.name, paired.metric.name, label) for label in paired.pairing)
            factor = known.setdefault(base, both[0]).value / both[0].value if both[0].value else 1.0
            both = known[base], known.setdefault(arm, both[1].scaled(factor))
        chosen.append(both)
    return chosen


def adjust(leads: Sequence[bool], p_values: Sequence[float | None], *, until_decided: bool) -> list[float | None]:
    """Adjust p by Holm over the run. With a decision after every pair, the family is all that was planned, not all that
    has an interval so far, or the thresholds of an early decision would be too easy; `leads`: whether each comparison
    is by the metric that leads its workload, by the plan."""
    if not until_decided:
        return adjust_holm(p_values)
    others = len(leads) - sum(leads)
    weights = [LEADING_SHARE / sum(leads) if one_leads else (1.0 - LEADING_SHARE) / others for one_leads in leads]
    adjusted = adjust_holm([1.0 if p is None else p for p in p_values], weights)
    return [None if p is None else a for p, a in zip(p_values, adjusted, strict=True)]


def _sensitivity(
    paired: PairedMetric, method: Method, estimate: RatioEstimate, family: int, seen: Series
) -> float | None:
    """The smallest difference that another run of this plan detects. It estimates the correlation anew, and a larger
    estimate costs more power than a smaller one gains, so its scatter is added."""
    error = estimate.error_log
    if error is None:
        return None
    if paired.is_one_series and method == "t over pairs":
        logs = [math.log(pair.ratio) for pair in paired.pairs]
        error, _ = error_of_mean(logs, estimate.correlation + plausible_correlation(seen, paired.series)[1])
    return detectable_effect(error, estimate.degrees, family)


def _why_inconclusive(ci95: Interval | None, family: int) -> str:
    if excludes_one(ci95):
        return f"the interval excludes 1, but not after Holm's adjustment for {family} comparisons"
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
        if (why := why_invalid(comparison.workload))
        else comparison
        for comparison in comparisons
    )


def roughen(
    comparisons: Sequence[Comparison], lost: Mapping[str, Mapping[Label, float]], margin: float
) -> tuple[Comparison, ...]:
    """Widen the intervals of the rough workloads by what others may have taken from one arm and not from the other;
    `lost` is the share of its time of each arm by workload. There is no winner where this difference could explain the
    lead, or where the rest of the lead is not significant among all comparisons of the run."""
    rough = [
        msgspec.structs.replace(c, lost=(of_arms.get(c.baseline, 0.0), of_arms.get(c.arm, 0.0)))
        if (of_arms := lost.get(c.workload)) is not None
        else c
        for c in comparisons
    ]
    until_decided = any(comparison.method.startswith("anytime") for comparison in rough)
    adjusted = adjust([c.leading for c in rough], list(map(_p_beyond, rough)), until_decided=until_decided)
    return tuple(
        comparison if comparison.lost is None else _widened(comparison, p_adjusted, margin)
        for comparison, p_adjusted in zip(rough, adjusted, strict=True)
    )


def may_be_moved(comparison: Comparison) -> tuple[float, float] | None:
    """How far below and above the measured one the log ratio without the others may lie; None: without a bound. An arm
    would have done as well or better alone, so it lies beyond the far end by the arm's own loss, and beyond the near
    end by that of the baseline."""
    baseline, arm = (METRICS[comparison.metric].most_lost(share) for share in comparison.lost or (0.0, 0.0))
    if baseline is None or arm is None:
        return None
    return (baseline, arm) if comparison.higher_is_better else (arm, baseline)


def _p_beyond(comparison: Comparison) -> float | None:
    """p of a log ratio that others alone could make of equal arms; where nothing was taken, that of no difference."""
    if comparison.lost is None or comparison.ratio is None or comparison.p_value is None:
        return comparison.p_value
    if (moved := may_be_moved(comparison)) is None:
        return 1.0
    (down, up), centre, pairs = moved, math.log(comparison.ratio), comparison.pairs
    made = min(max(centre, -up), down)
    if made == centre:
        return 1.0
    if comparison.error_log is None:
        return anytime_p([math.log(ratio) for ratio in comparison.ratios], made, comparison.correlation)
    errors = abs(centre - made) / comparison.error_log if comparison.error_log else math.inf
    looks = pairs * (pairs + 1.0) if comparison.method == "anytime-valid order statistics" else 1.0
    return min(1.0, looks * 2.0 * student_tail(errors, comparison.degrees))


def lost_in(comparisons: Sequence[Comparison]) -> dict[str, dict[Label, float]]:
    """What `roughen` was given, from its comparisons."""
    lost: dict[str, dict[Label, float]] = {}
    for comparison in comparisons:
        if comparison.lost is not None:
            lost.setdefault(comparison.workload, {}).update(zip(comparison.pairing, comparison.lost, strict=True))
    return lost


def _widened(comparison: Comparison, p_adjusted: float | None, margin: float) -> Comparison:
    """`p_adjusted` is that of `_p_beyond`."""
    rough = msgspec.structs.replace(comparison, error_log=None)
    if comparison.ci95 is None or comparison.verdict == "invalid":
        return rough
    if (moved := may_be_moved(comparison)) is None:
        return msgspec.structs.replace(rough, ci95=None, verdict="inconclusive", reason=UNBOUNDED)
    (down, up), (low, high) = moved, comparison.ci95
    ci95 = low * math.exp(-down), high * math.exp(up)
    rough = msgspec.structs.replace(rough, ci95=ci95)
    verdict = judge(ci95, p_adjusted, margin, comparison.higher_is_better)
    if comparison.verdict == "inconclusive" or verdict == comparison.verdict:
        return rough
    return msgspec.structs.replace(rough, verdict="inconclusive", reason=WITHIN_DISTURBANCE)


def as_measured(comparison: Comparison) -> Comparison:
    """A comparison with its interval before `roughen`."""
    moved = may_be_moved(comparison)
    if comparison.lost is None or comparison.ci95 is None or moved is None:
        return comparison
    (down, up), (low, high) = moved, comparison.ci95
    return msgspec.structs.replace(comparison, ci95=(low * math.exp(down), high * math.exp(-up)))


UNBOUNDED = "others used the machine, and how far that moves a tail or a first token has no bound"
WITHIN_DISTURBANCE = "others used the machine, and what they took could make the difference"


def leading_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The leading metric of each workload and pairing: throughput, the highest supported percentile of an open loop, or
    the time to the first response of a cold start."""
    return [c for c in comparisons if c.leading]
