"""Thresholds of a run (`--fail-if`): whether each condition holds, from what was measured and nothing else.

A condition holds for one cell at a time. Without a scenario it is for the most loaded cell, or for the cold starts
where only they have what it names; `batched:` stands for each cell of that scenario, `all:` for every cell that has it.
A condition whose quantities were not measured, or whose cell is invalid, is not kept: silence is no pass.

Point estimates are those of the comparisons with the baseline: geometric means over the pairs of blocks. A percentile
for which single blocks have too few samples is that of all blocks of the arm together, and then it has no interval. The
interval of an arm is Student's t over its blocks (or starts); that of a ratio is the comparison's.

The language: comparisons of measured quantities, parsed by Python's own parser and never executed.

    [SCENARIO:] CONDITION       concurrent(16): b.p99 > 1.05 * a.p99 and b.throughput < 0.95 * a.throughput

Quantities are `b.METRIC`, of an arm by its label, and `ratio(b).METRIC`, that arm over the baseline; with two arms
`ratio.METRIC` will do. Each also has `.low` and `.high` for the bounds of its 95 % interval; without them it is the
point estimate. There are numbers, + - * /, < <= > >= == !=, and, or, not, and brackets. Anything else is refused, so a
condition cannot call, index or reach anything.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from loadgen.comparison.claims import join, weight
from loadgen.comparison.comparisons import Comparison
from loadgen.comparison.facts import Facts
from loadgen.comparison.pairs import METRICS, TIME_TO_FIRST_ANSWER, TIME_TO_READY, metrics_of
from loadgen.comparison.summaries import CellSummary, LatencySummary
from loadgen.experiment.plan import PlanError
from loadgen.quantities import number
from loadgen.records.run import Cell, Label, Record, shown
from loadgen.records.samples import NS_PER_S
from loadgen.statistics.ratios import geometric_mean, interval_of_mean

Bound = Literal["low", "high"]

COMPARED = tuple(name.removeprefix("latency_") for name in METRICS)
"""Those with a ratio: all that the arms are compared by."""
OF_ONE_ARM = ("mean", "p95", "p99_9", "errors")
QUANTITIES = (*COMPARED, *OF_ONE_ARM)
MAX_LENGTH = 500

_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_HYPHEN = "·"
"""Stands for the hyphen of a label, which Python's grammar would take for a minus sign."""
_SCENARIO = re.compile(r"\s*([a-z][a-z-]*(?:\([^()]*\))?)\s*:(.*)", re.DOTALL)


class ThresholdError(Exception):
    """A condition cannot be understood; the message says what would do."""


class UndefinedValueError(Exception):
    """The quantities are there, and the condition has no value: something is divided by zero."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One measured number that a condition names."""

    side: str
    """As written: a label, "ratio" or "ratio(LABEL)"."""
    arm: Label
    """Whose value, or ratio to the baseline, it is."""
    metric: str
    bound: Bound | None = None

    @property
    def is_ratio(self) -> bool:
        """And not one arm's value."""
        return self.side != self.arm

    def __str__(self) -> str:
        return ".".join(filter(None, (self.side, self.metric, self.bound)))


Values = Mapping[Quantity, float]
Take = Callable[[ast.expr], Quantity]
"""Finds what a name stands for, and remembers it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition; it fails a run when it is true."""

    text: str
    scenario: str | None
    """As written before the colon: "concurrent(16)", "batched", "all"; None without one."""
    quantities: tuple[Quantity, ...]
    """Each once, in the order of their appearance."""
    holds: Callable[[Values], bool]
    """Whether it is true of the values, one for each of `quantities`. Raises `UndefinedValueError`."""


def parse_condition(text: str, labels: Sequence[Label]) -> Condition:
    """`labels` are those of the arms, the baseline's first. Raises `ThresholdError`."""
    if len(text) > MAX_LENGTH:
        raise ThresholdError(f"a condition has at most {MAX_LENGTH} characters; use several")
    selected = _SCENARIO.fullmatch(text)
    scenario, body = (selected[1], selected[2]) if selected else (None, text)
    for label in sorted(filter(lambda label: "-" in label, labels), key=len, reverse=True):
        body = re.sub(rf"(?<!\w){label}(?=\s*[.)])", label.replace("-", _HYPHEN), body)
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ThresholdError(f"it is no condition; write one like {_example(labels)}") from exc
    if not isinstance(tree, ast.Compare | ast.BoolOp) and not _is_not(tree):
        raise ThresholdError(f"it compares nothing; write a condition like {_example(labels)}")
    found: dict[Quantity, None] = {}

    def take(node: ast.expr) -> Quantity:
        quantity = _quantity(_written(node), labels)
        found[quantity] = None
        return quantity

    holds = _truth(tree, take)
    if not found:
        raise ThresholdError(f"it names nothing that is measured; {_sides(labels)} with {', '.join(QUANTITIES)}")
    return Condition(" ".join(text.split()), scenario, tuple(found), holds)


def _example(labels: Sequence[Label]) -> str:
    return f"{labels[1]}.p99 > 1.05 * {labels[0]}.p99"


def _written(node: ast.expr) -> str:
    return ast.unparse(node).replace(_HYPHEN, "-")


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _truth(node: ast.expr, take: Take) -> Callable[[Values], bool]:
    """What a condition computes."""
    if isinstance(node, ast.BoolOp):
        parts = [_truth(value, take) for value in node.values]
        join = all if isinstance(node.op, ast.And) else any
        return lambda values: join([part(values) for part in parts])  # all of them: none may hide behind another
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        operand = _truth(node.operand, take)
        return lambda values: not operand(values)
    if not isinstance(node, ast.Compare):
        raise ThresholdError(f"{_written(node)} is not a comparison; and, or and not join comparisons")
    if any(type(operation) not in _COMPARISONS for operation in node.ops):
        raise ThresholdError("in, is and the like are not taken; compare with < <= > >= == !=")
    tests = [_COMPARISONS[type(operation)] for operation in node.ops]
    sides = [_number(value, take) for value in (node.left, *node.comparators)]

    def compare(values: Values) -> bool:
        numbers = [side(values) for side in sides]
        return all(test(*pair) for test, pair in zip(tests, pairwise(numbers), strict=True))

    return compare


def _number(node: ast.expr, take: Take) -> Callable[[Values], float]:
    """What an expression computes."""
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ThresholdError(f"{value!r} is not a number")
        return lambda _: value
    if isinstance(node, ast.Attribute | ast.Name):
        quantity = take(node)
        return lambda values: values[quantity]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        sign, operand = operator.neg if isinstance(node.op, ast.USub) else operator.pos, _number(node.operand, take)
        return lambda values: float(sign(operand(values)))
    if not isinstance(node, ast.BinOp) or type(node.op) not in _ARITHMETIC:
        raise ThresholdError(f"{_written(node)} is not taken; there are quantities, numbers, + - * / and brackets")
    operation, left, right = _ARITHMETIC[type(node.op)], _number(node.left, take), _number(node.right, take)

    def compute(values: Values) -> float:
        try:
            result = operation(left(values), right(values))
        except (ZeroDivisionError, OverflowError) as exc:
            raise UndefinedValueError(f"{_written(node)} has no value: {exc}") from exc
        if not math.isfinite(result):
            raise UndefinedValueError(f"{_written(node)} is not finite")
        return result

    return compute


def _quantity(text: str, labels: Sequence[Label]) -> Quantity:
    parts = text.split(".")
    side, metric, *rest = [*parts, ""] if len(parts) == 1 else parts
    arms = {label: label for label in labels} | {f"ratio({label})": label for label in labels[1:]}
    if len(labels) == 2:
        arms["ratio"] = labels[1]
    if side not in arms:
        raise ThresholdError(f"there is no {side}; {_sides(labels)}, as in {labels[1]}.p99")
    known = QUANTITIES if side in labels else COMPARED
    if metric not in known:
        raise ThresholdError(f"{side} has no metric {metric or '(none given)'}; there are {', '.join(known)}")
    if rest and (len(rest) > 1 or rest[0] not in ("low", "high")):
        raise ThresholdError(f"{side}.{metric} has no {'.'.join(rest)}; there are low and high, of its 95 % interval")
    if rest and metric == "errors":
        raise ThresholdError("errors are counted, so they have no interval")
    bound: Bound | None = None if not rest else "low" if rest[0] == "low" else "high"
    return Quantity(side, arms[side], metric, bound)


def _sides(labels: Sequence[Label]) -> str:
    """What a condition can name, in words."""
    base, *others = labels
    ratios = [f"ratio({label})" for label in others] if len(others) > 1 else ["ratio"]
    arm = shown(others[0]) if len(others) == 1 else "that arm"
    return f"there are {join([*labels, *ratios])} ({arm} over {shown(base)})"


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


def plan_conditions(
    texts: Sequence[str], cells: Sequence[Cell], labels: Sequence[Label]
) -> list[tuple[Condition, tuple[Cell, ...]]]:
    """Each condition with the planned cells that it is about; `labels` are those of the arms, the baseline's first.
    Raises `PlanError` for what can never be measured."""
    planned = []
    for text in texts:
        try:
            condition = parse_condition(text, labels)
            planned.append((condition, _cells_of(condition, cells)))
        except ThresholdError as exc:
            raise PlanError(f"--fail-if '{text}': {exc}") from exc
    return planned


def judge_thresholds(facts: Facts) -> tuple[ThresholdOutcome, ...]:
    """Every condition of the experiment in every cell that it is about. The comparisons are those after the checks."""
    experiment = facts.run.experiment
    texts = (experiment.settings or {}).get("fail_if", ())
    if not isinstance(texts, list | tuple):
        return ()
    return tuple(
        _judge(condition, cell, facts)
        for condition, chosen in plan_conditions([str(text) for text in texts], experiment.cells, experiment.labels)
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


def _judge(condition: Condition, cell: Cell, facts: Facts) -> ThresholdOutcome:
    values = {quantity: _value(quantity, cell.name, facts) for quantity in condition.quantities}
    numbers = {quantity: value for quantity, value in values.items() if value is not None}
    state: State
    invalid = next(
        (c.reason for c in facts.comparisons if c.scenario == cell.name and c.verdict == "invalid"),
        None,
    )
    missing = [str(quantity) for quantity, value in values.items() if value is None]
    if missing:
        reasons = dict.fromkeys(_why_missing(q, cell.name, facts) for q, value in values.items() if value is None)
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
    if quantity.is_ratio:
        return f"{value:.4g}"
    unit = "" if quantity.metric == "errors" else METRICS[name].unit if (name := quantity.metric) in METRICS else "ms"
    return f"{number(value, 4)} {unit}".rstrip()


def _comparison(quantity: Quantity, cell: str, facts: Facts) -> Comparison | None:
    """Of the arm with the baseline; for the baseline itself the first that was measured."""
    names, baseline = {quantity.metric, f"latency_{quantity.metric}"}, facts.run.experiment.baseline.label
    found = [
        c
        for c in facts.comparisons
        if c.scenario == cell and c.metric in names and c.baseline == baseline and quantity.arm in c.pairing
    ]
    return next((c for c in found if c.ratio is not None), found[0] if found else None)


def _why_missing(quantity: Quantity, cell: str, facts: Facts) -> str:
    compared = _comparison(quantity, cell, facts)
    if compared is not None and compared.reason:
        return compared.reason
    if quantity.bound is not None:
        return "an interval takes two blocks or more that differ, each with enough samples"
    return "too few samples, or the run did not get that far"


def _value(quantity: Quantity, cell: str, facts: Facts) -> float | None:
    compared = _comparison(quantity, cell, facts)
    if quantity.is_ratio:
        if compared is None:
            return None
        return compared.ratio if quantity.bound is None else _bound(compared.ci95, quantity)
    if quantity.metric == "errors":
        summary = _summary(quantity.arm, cell, facts)
        return None if summary is None or not summary.blocks else float(summary.errors)
    singles = _singles(quantity.metric, quantity.arm, cell, facts)
    if quantity.bound is not None:
        if compared is not None and "order statistics" in compared.method:
            return _bound(compared.arm_ci95 if quantity.arm == compared.arm else compared.baseline_ci95, quantity)
        return _bound(interval_of_mean(singles) if singles else None, quantity)
    if compared is not None:
        own = compared.arm_value if quantity.arm == compared.arm else compared.baseline_value
        if own is not None:
            return own
    if singles:
        return geometric_mean(singles)
    summary = _summary(quantity.arm, cell, facts)
    return None if summary is None else _latency(summary.latency, quantity.metric)


def _bound(interval: tuple[float, float] | None, quantity: Quantity) -> float | None:
    return None if interval is None else interval[0 if quantity.bound == "low" else 1]


def _summary(label: Label, cell: str, facts: Facts) -> CellSummary | None:
    return next((s for s in facts.summaries if s.cell == cell and s.label == label), None)


def _singles(metric: str, label: Label, cell: str, facts: Facts) -> list[float]:
    """The metric in each block or start of an arm; empty where one of them lacks it."""
    values: list[float | None]
    if metric in (TIME_TO_READY.name, TIME_TO_FIRST_ANSWER.name):
        starts = [start for start in facts.run.cold_starts if start.label == label]
        moments = [start.ready_ns if metric == TIME_TO_READY.name else start.first_answer_ns for start in starts]
        values = [None if moment is None else moment / NS_PER_S for moment in moments]
    else:
        blocks = [b for b in facts.blocks if b.cell == cell and b.label == label and b.complete]
        rates = ("throughput", "achieved_rate")
        values = [b.throughput_per_s if metric in rates else _latency(b.latency, metric) for b in blocks]
    usable = [value for value in values if value]
    return usable if len(usable) == len(values) else []


def _latency(latency: LatencySummary, metric: str) -> float | None:
    value: float | None = getattr(latency, f"{metric}_ms", None)
    return value
