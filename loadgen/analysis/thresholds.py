"""Thresholds of a run (`--fail-if`): whether each condition holds, from what was measured and nothing else.

A condition holds for one cell at a time. Without a scenario it is for the most loaded cell, or for the cold starts
where only they have what it names; `batched:` stands for each cell of that scenario, `all:` for every cell that has it.
A condition whose quantities were not measured, or whose cell is invalid, is not kept: silence is no pass.

Point estimates are those of the comparisons: geometric means over the pairs of blocks. A percentile for which single
blocks have too few samples is that of all blocks of the arm together, and then it has no interval. The interval of an
arm is Student's t over its blocks (or starts); that of a ratio is the comparison's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.analysis.claims import weight
from loadgen.analysis.comparisons import Comparison
from loadgen.analysis.metrics import METRICS, TIME_TO_FIRST_ANSWER, TIME_TO_READY, metrics_of
from loadgen.analysis.summaries import NS_PER_S, BlockSummary, CellSummary, LatencySummary
from loadgen.analysis.threshold_language import (
    OF_ONE_ARM,
    Condition,
    Quantity,
    ThresholdError,
    UndefinedValueError,
    parse_condition,
)
from loadgen.experiment.plan import PlanError
from loadgen.quantities import number
from loadgen.records.run import Cell, ColdStart, Experiment, Label, Record
from loadgen.statistics.ratios import geometric_mean, interval_of_mean

State = Literal["kept", "broken", "not_measurable"]
ALL = "all"


class ThresholdOutcome(Record, frozen=True, kw_only=True):
    """One condition in one cell. Only `kept` is a pass."""

    condition: str
    scenario: str
    state: State
    detail: str
    """The quantities with their values, or why there are none."""
    values: dict[str, float | None]
    """By name: "b.p99", "ratio.p50.low"; None where it was not measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What conditions are held against."""

    comparisons: Sequence[Comparison]
    summaries: Sequence[CellSummary]
    blocks: Sequence[BlockSummary]
    cold_starts: Sequence[ColdStart]


def plan_conditions(texts: Sequence[str], cells: Sequence[Cell]) -> list[tuple[Condition, tuple[Cell, ...]]]:
    """Each condition with the planned cells that it is about. Raises `PlanError` for what can never be measured."""
    planned = []
    for text in texts:
        try:
            condition = parse_condition(text)
            planned.append((condition, _cells_of(condition, cells)))
        except ThresholdError as exc:
            raise PlanError(f"--fail-if '{text}': {exc}") from exc
    return planned


def judge_thresholds(experiment: Experiment, measured: Measured) -> tuple[ThresholdOutcome, ...]:
    """Every condition of the experiment in every cell that it is about."""
    texts = (experiment.settings or {}).get("fail_if", ())
    if not isinstance(texts, list | tuple):
        return ()
    return tuple(
        _judge(condition, cell, measured)
        for condition, chosen in plan_conditions([str(text) for text in texts], experiment.cells)
        for cell in chosen
    )


def measured_in(cell: Cell) -> tuple[str, ...]:
    """Names of the metrics that a cell can have."""
    compared = tuple(metric.name.removeprefix("latency_") for metric in metrics_of(cell))
    return compared if not cell.has_blocks else tuple(dict.fromkeys((*compared, "throughput", *OF_ONE_ARM)))


def _cells_of(condition: Condition, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    wanted = None if condition.scenario is None else condition.scenario.replace(" ", "")
    if wanted in (None, ALL):
        able = [cell for cell in cells if not _lacking(condition, cell)]
        if not able:
            names = "; ".join(f"{cell.name} has {', '.join(measured_in(cell))}" for cell in cells)
            raise ThresholdError(f"no cell of the experiment measures all that it names: {names}")
        return tuple(able) if wanted == ALL else (max(able, key=weight),)
    chosen = [cell for cell in cells if wanted in (cell.name.replace(" ", ""), cell.scenario)]
    if not chosen:
        names = ", ".join(cell.name for cell in cells)
        raise ThresholdError(f"the experiment has no cell {condition.scenario}; there are {names}, and all")
    for cell in chosen:
        if lacking := _lacking(condition, cell):
            raise ThresholdError(f"{cell.name} has no {', '.join(lacking)}; it has {', '.join(measured_in(cell))}")
    return tuple(chosen)


def _lacking(condition: Condition, cell: Cell) -> list[str]:
    known = measured_in(cell)
    return [str(quantity) for quantity in condition.quantities if quantity.metric not in known]


def _judge(condition: Condition, cell: Cell, measured: Measured) -> ThresholdOutcome:
    values = {quantity: _value(quantity, cell.name, measured) for quantity in condition.quantities}
    numbers = {quantity: value for quantity, value in values.items() if value is not None}
    state: State
    invalid = next(
        (c.reason for c in measured.comparisons if c.scenario == cell.name and c.verdict == "invalid"),
        None,
    )
    missing = [str(quantity) for quantity, value in values.items() if value is None]
    if missing:
        reasons = dict.fromkeys(_why_missing(q, cell.name, measured) for q, value in values.items() if value is None)
        state, detail = "not_measurable", f"{', '.join(missing)} could not be measured: {'; '.join(reasons)}"
    elif invalid is not None:
        state, detail = "not_measurable", f"{cell.name} is invalid: {invalid}"
    else:
        detail = ", ".join(f"{quantity} = {_shown(quantity, value)}" for quantity, value in numbers.items())
        try:
            state = "broken" if condition.holds(numbers) else "kept"
        except UndefinedValueError as exc:
            state, detail = "not_measurable", f"{detail}: {exc}"
    return ThresholdOutcome(
        condition=condition.text,
        scenario=cell.name,
        state=state,
        detail=detail,
        values={str(quantity): value for quantity, value in values.items()},
    )


def _shown(quantity: Quantity, value: float) -> str:
    if quantity.side == "ratio":
        return f"{value:.4g}"
    unit = "" if quantity.metric == "errors" else METRICS[name].unit if (name := quantity.metric) in METRICS else "ms"
    return f"{number(value, 4)} {unit}".rstrip()


def _comparison(metric: str, cell: str, measured: Measured) -> Comparison | None:
    names = {metric, f"latency_{metric}"}
    return next((c for c in measured.comparisons if c.scenario == cell and c.metric in names), None)


def _why_missing(quantity: Quantity, cell: str, measured: Measured) -> str:
    compared = _comparison(quantity.metric, cell, measured)
    if compared is not None and compared.reason:
        return compared.reason
    if quantity.bound is not None:
        return "an interval takes two blocks or more that differ, each with enough samples"
    return "too few samples, or the run did not get that far"


def _value(quantity: Quantity, cell: str, measured: Measured) -> float | None:
    compared = _comparison(quantity.metric, cell, measured)
    if quantity.side == "ratio":
        if compared is None:
            return None
        return compared.ratio_b_over_a if quantity.bound is None else _bound(compared.ci95, quantity)
    if quantity.metric == "errors":
        summary = _summary(quantity.side, cell, measured)
        return None if summary is None or not summary.blocks else float(summary.errors)
    singles = _singles(quantity.metric, quantity.side, cell, measured)
    if quantity.bound is not None:
        return _bound(interval_of_mean(singles) if singles else None, quantity)
    if compared is not None and (own := compared.a if quantity.side == "a" else compared.b) is not None:
        return own
    if singles:
        return geometric_mean(singles)
    summary = _summary(quantity.side, cell, measured)
    return None if summary is None else _latency(summary.latency, quantity.metric)


def _bound(interval: tuple[float, float] | None, quantity: Quantity) -> float | None:
    return None if interval is None else interval[0 if quantity.bound == "low" else 1]


def _summary(label: Label, cell: str, measured: Measured) -> CellSummary | None:
    return next((s for s in measured.summaries if s.cell == cell and s.label == label), None)


def _singles(metric: str, label: Label, cell: str, measured: Measured) -> list[float]:
    """The metric in each block or start of an arm; empty where one of them lacks it."""
    values: list[float | None]
    if metric in (TIME_TO_READY.name, TIME_TO_FIRST_ANSWER.name):
        starts = [start for start in measured.cold_starts if start.label == label]
        moments = [start.ready_ns if metric == TIME_TO_READY.name else start.first_answer_ns for start in starts]
        values = [None if moment is None else moment / NS_PER_S for moment in moments]
    else:
        blocks = [b for b in measured.blocks if b.cell == cell and b.label == label and b.complete]
        rates = ("throughput", "achieved_rate")
        values = [b.throughput_per_s if metric in rates else _latency(b.latency, metric) for b in blocks]
    usable = [value for value in values if value]
    return usable if len(usable) == len(values) else []


def _latency(latency: LatencySummary, metric: str) -> float | None:
    value: float | None = getattr(latency, f"{metric}_ms", None)
    return value
