"""Compares the arms: one ratio, interval and verdict for each metric of each scenario.

Verdict of a comparison, in this order:
- invalid: a check that covers it failed;
- undecided: no interval can be computed;
- equivalent: the 95 % interval lies inside [1/(1+δ), 1+δ] (two one-sided tests at 2.5 %);
- a_faster, b_faster: the interval excludes 1 and Holm's adjusted p over all comparisons of the run is below 5 %;
- undecided: everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from loadgen.percentiles import samples_needed
from loadgen.records import Cell, ColdStart, Experiment, Label, Record
from loadgen.statistics import (
    SIGNIFICANCE,
    RatioEstimate,
    adjust_holm,
    detectable_effect,
    estimate_ratio,
    geometric_mean,
)
from loadgen.summaries import NS_PER_S, BlockSummary

Outcome = Literal["a_faster", "b_faster", "equivalent", "undecided", "invalid"]
MIN_PAIRS = 2


class Metric(Record, frozen=True, kw_only=True):
    """What is compared, and which direction is better."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    quantile: float | None = None
    """Of the latency, where the metric is one."""


THROUGHPUT = Metric(name="throughput", title="throughput", unit="images/s", higher_is_better=True)
LATENCIES = tuple(
    Metric(
        name=f"latency_p{percent}",
        title=f"p{percent} latency",
        unit="ms",
        higher_is_better=False,
        quantile=percent / 100,
    )
    for percent in (50, 90, 99)
)
TIME_TO_READY = Metric(name="time_to_ready", title="time to ready", unit="s", higher_is_better=False)
TIME_TO_FIRST_ANSWER = Metric(
    name="time_to_first_answer", title="time to first answer", unit="s", higher_is_better=False
)
METRICS = {m.name: m for m in (THROUGHPUT, *LATENCIES, TIME_TO_READY, TIME_TO_FIRST_ANSWER)}


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
    """Smallest true difference that a run of this plan calls with 80 % power, as a share: 0.03 is 3 %."""
    p_value: float | None
    p_adjusted: float | None
    """After Holm, over all comparisons of the run."""
    p_equivalence: float | None
    """Of two one-sided tests against ±δ; not adjusted."""
    ratios: tuple[float, ...]
    """One a pair, in the order in which they ran."""
    reason: str | None
    """Why there is no ratio, no interval, or no verdict."""


Pairs = list[tuple[float, float]]


def compare_all(
    experiment: Experiment,
    blocks: Sequence[BlockSummary],
    cold_starts: Sequence[ColdStart],
) -> tuple[Comparison, ...]:
    """Every comparison that the experiment asked for, none of them invalid yet; see `invalidate`."""
    drafts: list[tuple[Cell, Metric, Pairs, str | None]] = []
    for cell in experiment.cells:
        if cell.scenario == "cold-start":
            drafts += [
                (cell, TIME_TO_READY, _start_pairs(cold_starts, lambda start: start.ready_ns), None),
                (cell, TIME_TO_FIRST_ANSWER, _start_pairs(cold_starts, lambda start: start.first_answer_ns), None),
            ]
        else:
            drafts += [(cell, metric, *_block_pairs(cell, metric, blocks)) for metric in (THROUGHPUT, *LATENCIES)]
    estimates = [estimate_ratio([b / a for a, b in pairs], experiment.equivalence_margin) for _, _, pairs, _ in drafts]
    adjusted = adjust_holm([estimate.p_value for estimate in estimates])
    family = sum(1 for estimate in estimates if estimate.p_value is not None)
    return tuple(
        _comparison(draft, estimate, p_adjusted, family, experiment.equivalence_margin)
        for draft, estimate, p_adjusted in zip(drafts, estimates, adjusted, strict=True)
    )


def _comparison(
    draft: tuple[Cell, Metric, Pairs, str | None],
    estimate: RatioEstimate,
    p_adjusted: float | None,
    family: int,
    margin: float,
) -> Comparison:
    cell, metric, pairs, reason = draft
    verdict = judge(estimate.ci95, p_adjusted, margin, metric.higher_is_better)
    sensitivity = None
    if estimate.ci95 is not None and estimate.spread_log is not None:
        sensitivity = detectable_effect(estimate.spread_log, estimate.pairs, family)
    reason = reason or estimate.reason
    if verdict == "undecided" and reason is None:
        reason = "the interval is too wide to name a winner or to call the arms equivalent"
    return Comparison(
        scenario=cell.name,
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        a=geometric_mean([a for a, _ in pairs]) if pairs else None,
        b=geometric_mean([b for _, b in pairs]) if pairs else None,
        ratio_b_over_a=estimate.ratio,
        ci95=estimate.ci95,
        verdict=verdict,
        pairs=estimate.pairs,
        minimal_detectable_effect=sensitivity,
        p_value=estimate.p_value,
        p_adjusted=p_adjusted,
        p_equivalence=estimate.p_equivalence,
        ratios=tuple(b / a for a, b in pairs),
        reason=reason,
    )


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


def _block_pairs(cell: Cell, metric: Metric, blocks: Sequence[BlockSummary]) -> tuple[Pairs, str | None]:
    """Values of the metric in each complete pair, A first; with the reason where the samples do not suffice."""
    usable = [block for block in blocks if block.cell == cell.name and block.complete]
    by_pair = {(block.pair, block.label): block for block in usable}
    numbers = sorted({block.pair for block in usable})
    complete = [(by_pair.get((n, "a")), by_pair.get((n, "b"))) for n in numbers]
    couples = [(a, b) for a, b in complete if a is not None and b is not None]
    if metric.quantile is not None:
        needed = samples_needed(metric.quantile)
        fewest = min((min(a.latency.samples, b.latency.samples) for a, b in couples), default=0)
        if couples and fewest < needed:
            return [], f"{metric.title} needs {needed} samples a block, the smallest block has {fewest}"
    values = [(_value(a, metric), _value(b, metric)) for a, b in couples]
    pairs = [(a, b) for a, b in values if a is not None and b is not None]
    if len(pairs) < len(values):
        return [], "a block has no good answer to measure"
    return pairs, None


def _value(block: BlockSummary, metric: Metric) -> float | None:
    if metric.quantile is None:
        return block.throughput_per_s
    value: float | None = getattr(block.latency, f"{metric.name.removeprefix('latency_')}_ms")
    return value


def _start_pairs(starts: Sequence[ColdStart], moment: Callable[[ColdStart], int | None]) -> Pairs:
    """Seconds from process start in each repetition in which both arms got there."""
    reached: dict[tuple[int, Label], float] = {}
    for start in starts:
        elapsed_ns = moment(start)
        if start.error is None and elapsed_ns:
            reached[start.repetition, start.label] = elapsed_ns / NS_PER_S
    repetitions = sorted({repetition for repetition, _ in reached})
    return [(reached[r, "a"], reached[r, "b"]) for r in repetitions if (r, "a") in reached and (r, "b") in reached]
