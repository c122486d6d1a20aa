"""Thresholds of a run (`--fail-if`): whether each condition is true of what was measured.

    [SCENARIO:] CONDITION       concurrent(16): b.p99 > 1.05 * a.p99 and b.throughput < 0.95 * a.throughput

A condition is QUANTITY OP NUMBER or QUANTITY OP [NUMBER *] QUANTITY, or several of these joined by `and`. Quantities
are `b.METRIC` of an arm by its label, and `ratio(b).METRIC`, that arm over the baseline (with two arms `ratio.METRIC`).
`.low` and `.high` are the bounds of the 95 % interval. OP is one of < <= > >= == !=.

It is judged in one workload at a time: without a scenario in the most loaded one that measures all its quantities;
`batched:` is every workload of that scenario and `all:` every workload. A condition whose quantities were not measured,
or whose workload is invalid, is not kept. In a rough workload it fails the run only if it is true at both ends of every
interval, widened by what others may have taken from that arm; without an interval it is kept there, since nothing is
shown.

Point estimates are those of the comparisons with the baseline: geometric means over the pairs of blocks. A percentile
for which single blocks have too few samples is that of all blocks of the arm together, and has no interval. An arm's
interval is Student's t over its blocks (or starts); a ratio's is that of the comparison.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import msgspec

from loadgen.base.quantities import join, number
from loadgen.experiment.plan import PlanError
from loadgen.metrics.barrier import attempt
from loadgen.metrics.claims import weight
from loadgen.metrics.comparisons import UNBOUNDED, WITHIN_DISTURBANCE, lost_in
from loadgen.metrics.facts import Facts
from loadgen.metrics.registry import METRICS, Metric, metrics_of
from loadgen.metrics.summaries import by_start, figure_of
from loadgen.records.run import Label, Record, Workload
from loadgen.stats.ratios import interval_of_mean, mean_over_starts

MAX_LENGTH = 500
ALL = "all"

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_QUANTITY = r"[^\s()<>=!*]+(?:\([^()<>=!*]*\))?(?:\.[^\s()<>=!*]*)?"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_COMPARISON = re.compile(
    rf"\s*({_QUANTITY})\s*([<>]=?|[=!]=)\s*(?:({_NUMBER})|(?:({_NUMBER})\s*\*\s*)?({_QUANTITY}))\s*"
)
_SCENARIO = re.compile(r"\s*([a-z][a-z-]*(?:\([^()]*\))?)\s*:(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Quantity:
    """One measured number that a condition names."""

    side: str
    """The text of the side: a label, "ratio" or "ratio(LABEL)"."""
    arm: Label
    """The arm of the value, or of the ratio to the baseline."""
    metric: Metric
    bound: str | None = None
    """"low" or "high"."""

    @property
    def is_ratio(self) -> bool:
        return self.side != self.arm

    def __str__(self) -> str:
        return ".".join(filter(None, (self.side, self.metric.short_name, self.bound)))


@dataclass(frozen=True, slots=True)
class Bound:
    """One comparison of a condition: `left` with `factor` times `right`, or with `factor` alone."""

    left: Quantity
    compare: Callable[[float, float], bool]
    factor: float
    right: Quantity | None

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The one or two that it names."""
        return tuple(dict.fromkeys(quantity for quantity in (self.left, self.right) if quantity is not None))

    def limit(self, values: Mapping[Quantity, float]) -> float:
        """What `left` is compared with."""
        return self.factor * (1.0 if self.right is None else values[self.right])

    def holds(self, values: Mapping[Quantity, float]) -> bool:
        """Whether it is true of the values."""
        return self.compare(values[self.left], self.limit(values))


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition; it fails a run when all its bounds are true."""

    text: str
    scenario: str | None
    """The text before the colon: "concurrent(16)", "batched", "all"; None without one."""
    bounds: tuple[Bound, ...]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities without repeats, in the order of their appearance."""
        return tuple(dict.fromkeys(quantity for bound in self.bounds for quantity in bound.quantities))

    def holds(self, values: Mapping[Quantity, float]) -> bool:
        """Whether it is true of the values, one per quantity."""
        return all(bound.holds(values) for bound in self.bounds)


def parse_condition(text: str, labels: Sequence[Label]) -> Condition:
    """Parse one condition. `labels` are those of the arms, the baseline's first. Raises `PlanError`."""
    if len(text) > MAX_LENGTH:
        raise PlanError(f"a condition has at most {MAX_LENGTH} characters; use several")
    selected = _SCENARIO.fullmatch(text)
    scenario, body = (selected[1], selected[2]) if selected else (None, text)
    bounds = tuple(_bound(part.strip(), labels) for part in re.split(r"\band\b(?![-.])", body))
    return Condition(" ".join(text.split()), scenario, bounds)


def _bound(text: str, labels: Sequence[Label]) -> Bound:
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise PlanError(
            f"{text or 'nothing'} is not a comparison; write one like {labels[1]}.p99 > 1.05 * {labels[0]}.p99, and "
            "join several by and"
        )
    left, compare, number_alone, factor, right = found.groups()
    value = float(number_alone or factor or 1.0)
    if not math.isfinite(value):
        raise PlanError(f"{value} is not a number: it is too large")
    return Bound(
        _quantity(left, labels), _OPERATORS[compare], value, None if right is None else _quantity(right, labels)
    )


def _metrics(*, compared: bool = False) -> dict[str, Metric]:
    """The metrics by their names in a condition; `compared`: only those that have a ratio, which come first."""
    ordered = sorted(METRICS.values(), key=lambda metric: metric.compared_in is None)
    return {metric.short_name: metric for metric in ordered if metric.compared_in is not None or not compared}


def _quantity(text: str, labels: Sequence[Label]) -> Quantity:
    side, _, rest = re.sub(r"\s", "", text).partition(".")
    metric, _, bound = rest.partition(".")
    arms = {label: label for label in labels} | {f"ratio({label})": label for label in labels[1:]}
    if len(labels) == 2:
        arms["ratio"] = labels[1]
    if side not in arms:
        raise PlanError(f"{side} is unknown; {_sides(labels)}, as in {labels[1]}.p99")
    metrics = _metrics(compared=side not in labels)
    if metric not in metrics:
        raise PlanError(f"{side} has no metric {metric or '(none given)'}; use one of {', '.join(metrics)}")
    if bound not in ("", "low", "high"):
        raise PlanError(f"{side}.{metric} has no {bound}; use low and high, the bounds of its 95 % interval")
    if bound and metrics[metric].is_count:
        raise PlanError(f"{metric} are counted and have no interval")
    return Quantity(side, arms[side], metrics[metric], bound or None)


def _sides(labels: Sequence[Label]) -> str:
    base, *others = labels
    ratios = [f"ratio({label})" for label in others] if len(others) > 1 else ["ratio"]
    arm = others[0] if len(others) == 1 else "that arm"
    return f"use {join([*labels, *ratios])} ({arm} over {base})"


class ThresholdOutcome(Record, frozen=True, kw_only=True):
    """The outcome of one condition in one workload. Only `kept` is a pass."""

    condition: str
    workload: str = msgspec.field(name="scenario")
    state: Literal["kept", "broken", "not_measurable"]
    detail: str
    """The quantities with their values, or why they are missing."""
    values: dict[str, float | None]
    """Values by name: "b.p99", "ratio.p50.low"; None if it was not measured."""


def plan_conditions(
    texts: Sequence[str], workloads: Sequence[Workload], labels: Sequence[Label]
) -> list[tuple[Condition, tuple[Workload, ...]]]:
    """Each condition with its planned workloads; `labels` are those of the arms, the baseline's first. Raises
    `PlanError` for what can never be measured."""
    planned = []
    for text in texts:
        try:
            condition = parse_condition(text, labels)
            planned.append((condition, _workloads_of(condition, workloads)))
        except PlanError as exc:
            raise PlanError(f"--fail-if '{text}': {exc}") from exc
    return planned


def judge_thresholds(facts: Facts) -> tuple[ThresholdOutcome, ...]:
    """Judge every condition of the experiment in each of its workloads, by the comparisons after the checks."""
    experiment = facts.run.experiment
    servers = tuple(dict.fromkeys(experiment.servers.values()))
    texts = (experiment.settings or {}).get("fail_if", ())
    if not isinstance(texts, list | tuple):
        return ()

    def failed(text: str, workload: str, why: str) -> ThresholdOutcome:
        return ThresholdOutcome(condition=text, workload=workload, state="not_measurable", detail=why, values={})

    def judge() -> tuple[ThresholdOutcome, ...]:
        return tuple(
            attempt(partial(_judge, condition, workload, facts), partial(failed, condition.text, workload.name))
            for condition, chosen in plan_conditions(list(map(str, texts)), experiment.workloads, servers)
            for workload in chosen
        )

    return attempt(judge, lambda why: (failed("; ".join(map(str, texts)), "", why),))


def measured_in(workload: Workload) -> tuple[str, ...]:
    """Names of the metrics that a workload measures, first those by which it compares the arms."""
    measured = (metric for metric in METRICS.values() if metric.measures(workload))
    return tuple(metric.short_name for metric in dict.fromkeys((*metrics_of(workload), *measured)))


def _workloads_of(condition: Condition, workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    lacking = {
        workload: [str(q) for q in condition.quantities if not q.metric.measures(workload)] for workload in workloads
    }
    selected = (condition.scenario or "").replace(" ", "")
    if selected in ("", ALL):
        able = [workload for workload in workloads if not lacking[workload]]
        if not able:
            names = "; ".join(f"{workload.name} has {', '.join(measured_in(workload))}" for workload in workloads)
            raise PlanError(f"no workload of the experiment measures all its quantities: {names}")
        return tuple(able) if selected == ALL else (max(able, key=weight),)
    chosen = [workload for workload in workloads if selected in (workload.name.replace(" ", ""), workload.scenario)]
    if not chosen:
        names = ", ".join(workload.name for workload in workloads)
        raise PlanError(f"the experiment has no workload {condition.scenario}; use one of {names}, or all")
    for workload in chosen:
        if lacking[workload]:
            raise PlanError(
                f"{workload.name} has no {', '.join(lacking[workload])}; it has {', '.join(measured_in(workload))}"
            )
    return tuple(chosen)


def _judge(condition: Condition, workload: Workload, facts: Facts) -> ThresholdOutcome:
    measured = {quantity: _measure(quantity, workload.name, facts) for quantity in condition.quantities}
    values = {quantity: value for quantity, value in measured.items() if not isinstance(value, str)}
    reasons = {str(quantity): value for quantity, value in measured.items() if isinstance(value, str)}
    invalid = [c.reason for c in facts.comparisons if c.workload == workload.name and c.verdict == "invalid"]
    lost = lost_in(facts.comparisons).get(workload.name)
    state: Literal["kept", "broken", "not_measurable"] = "not_measurable"
    if reasons and all(reason == UNBOUNDED for reason in reasons.values()) and not invalid:
        state, detail = "kept", f"{', '.join(reasons)}: {UNBOUNDED}, so nothing is shown"
    elif reasons:
        detail = f"{', '.join(reasons)} could not be measured: {'; '.join(dict.fromkeys(reasons.values()))}"
    elif invalid:
        detail = f"{workload.name} is invalid: {invalid[0]}"
    else:
        detail = ", ".join(f"{quantity} = {_shown(quantity, value, facts.item)}" for quantity, value in values.items())
        state = "broken" if condition.holds(values) else "kept"
        if state == "broken" and lost and not _holds_at_all_ends(condition, workload.name, facts, lost):
            state, detail = "kept", f"{detail}; {WITHIN_DISTURBANCE}"
    return ThresholdOutcome(
        condition=condition.text,
        workload=workload.name,
        state=state,
        detail=detail,
        values={str(quantity): values.get(quantity) for quantity in condition.quantities},
    )


def _holds_at_all_ends(condition: Condition, workload: str, facts: Facts, lost: Mapping[Label, float]) -> bool:
    """Whether a condition is true whatever the others took; a difference (`!=`) on one side only."""
    for bound in condition.bounds:
        ends = [_ends(quantity, workload, facts, lost) for quantity in bound.quantities]
        corners = [dict(zip(bound.quantities, corner, strict=True)) for corner in product(*ends)]
        sides = {values[bound.left] > bound.limit(values) for values in corners}
        if len(sides) > 1 or not all(map(bound.holds, corners)):
            return False
    return True


def _ends(quantity: Quantity, workload: str, facts: Facts, lost: Mapping[Label, float]) -> tuple[float, float]:
    """The range of a quantity in a rough workload: its interval, for an arm's own figure with what the arm may have
    lost; of a ratio without an interval everything."""
    value = _measure(quantity, workload, facts)
    assert not isinstance(value, str), "the caller has its value"
    if quantity.bound is not None or quantity.metric.is_count:
        return value, value
    low, high = (_measure(replace(quantity, bound=bound), workload, facts) for bound in ("low", "high"))
    if quantity.is_ratio:
        return (0.0, math.inf) if isinstance(low, str) or isinstance(high, str) else (low, high)
    log = quantity.metric.most_lost(lost.get(facts.run.experiment.arm_of(quantity.arm, workload), 0.0))
    factor = math.inf if log is None else math.exp(log)
    low, high = value if isinstance(low, str) else low, value if isinstance(high, str) else high
    return (low, high * factor) if quantity.metric.higher_is_better else (low / factor, high)


def _shown(quantity: Quantity, value: float, item: str) -> str:
    if quantity.is_ratio:
        return f"{value:.4g}"
    return f"{number(value, 4)} {quantity.metric.unit_for(item)}".rstrip()


def _measure(quantity: Quantity, workload: str, facts: Facts) -> float | str:
    """The value, or why it is missing."""
    metric, arm = quantity.metric, facts.run.experiment.arm_of(quantity.arm, workload)
    baseline = facts.run.experiment.baseline_in(workload)
    candidates = [
        comparison
        for comparison in facts.comparisons
        if (comparison.workload, comparison.metric, comparison.baseline) == (workload, metric.name, baseline)
        and arm in comparison.pairing
    ]
    compared = next((c for c in candidates if c.ratio is not None), candidates[0] if candidates else None)
    summary = next((s for s in facts.summaries if s.workload == workload and s.label == arm), None)
    singles = _singles(metric, arm, workload, facts)
    interval = interval_of_mean(singles) if singles else None
    value = mean_over_starts(singles) if singles else None
    if not singles and summary is not None and metric.of_requests is not None:
        value = figure_of(summary, metric)
    if compared is not None:
        side_value, side_interval = (
            (compared.arm_value, compared.arm_ci95)
            if arm == compared.arm
            else (compared.baseline_value, compared.baseline_ci95)
        )
        value = value if side_value is None else side_value
        interval = side_interval if "order statistics" in compared.method else interval
    if quantity.is_ratio:
        value, interval = (None, None) if compared is None else (compared.ratio, compared.ci95)
    elif metric.is_count:
        value = figure_of(summary, metric) if summary is not None and summary.blocks else None
    if quantity.bound is not None:
        value = None if interval is None else interval[quantity.bound == "high"]
    if value is not None:
        return float(value)
    if compared is not None and compared.reason:
        return compared.reason
    if quantity.bound is not None:
        return "an interval needs two or more blocks that differ, each with enough samples"
    return "too few samples, or the run did not get that far"


def _singles(metric: Metric, label: Label, workload: str, facts: Facts) -> list[list[float]]:
    """The metric in each block or search of an arm by start of the servers, or in each cold start; empty if one of them
    lacks it."""
    if metric.has_function:
        blocks = [b for b in facts.blocks if (b.workload, b.label) == (workload, label) and b.complete]
        starts = by_start(blocks, metric)
        return starts if sum(map(len, starts)) == len(blocks) else []
    key = (metric.name, workload, label)
    figures = [figure for figure in facts.figures if (figure.metric, figure.workload, figure.label) == key]
    values: dict[int, list[float]] = {}
    for figure in figures:
        if figure.value:
            values.setdefault(figure.restart, []).append(figure.value)
    return list(values.values()) if all(figure.value for figure in figures) else []
