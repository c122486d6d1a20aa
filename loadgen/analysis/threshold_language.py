"""The language of `--fail-if`: comparisons of measured quantities, parsed by Python's own parser and never executed.

    [SCENARIO:] CONDITION       concurrent(16): b.p99 > 1.05 * a.p99 and b.throughput < 0.95 * a.throughput

Quantities are `a.METRIC`, `b.METRIC` and `ratio.METRIC` (B over A), each also with `.low` and `.high` for the bounds of
its 95 % interval; without them it is the point estimate. There are numbers, + - * /, < <= > >= == !=, and, or, not, and
brackets. Anything else is refused, so a condition cannot call, index or reach anything.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from loadgen.analysis.metrics import METRICS as COMPARED_METRICS

Side = Literal["a", "b", "ratio"]
Bound = Literal["low", "high"]

COMPARED = tuple(name.removeprefix("latency_") for name in COMPARED_METRICS)
"""Those with a ratio: all that the arms are compared by."""
OF_ONE_ARM = ("mean", "p95", "p99_9", "errors")
METRICS = (*COMPARED, *OF_ONE_ARM)
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
_SCENARIO = re.compile(r"\s*([a-z][a-z-]*(?:\([^()]*\))?)\s*:(.*)", re.DOTALL)


class ThresholdError(Exception):
    """A condition cannot be understood; the message says what would do."""


class UndefinedValueError(Exception):
    """The quantities are there, and the condition has no value: something is divided by zero."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One measured number that a condition names."""

    side: Side
    metric: str
    bound: Bound | None = None

    def __str__(self) -> str:
        return ".".join(filter(None, (self.side, self.metric, self.bound)))


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition; it fails a run when it is true."""

    text: str
    scenario: str | None
    """As written before the colon: "concurrent(16)", "batched", "all"; None without one."""
    quantities: tuple[Quantity, ...]
    """Each once, in the order of their appearance."""
    tree: ast.expr

    def holds(self, values: Mapping[Quantity, float]) -> bool:
        """Whether it is true of the values, one for each of `quantities`. Raises `UndefinedValueError`."""
        return _truth(self.tree, values)


def parse_condition(text: str) -> Condition:
    """Raises `ThresholdError`."""
    if len(text) > MAX_LENGTH:
        raise ThresholdError(f"a condition has at most {MAX_LENGTH} characters; use several")
    selected = _SCENARIO.fullmatch(text)
    scenario, body = (selected[1], selected[2]) if selected else (None, text)
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ThresholdError("it is no condition; write one like b.p99 > 1.05 * a.p99") from exc
    if not isinstance(tree, ast.Compare | ast.BoolOp) and not _is_not(tree):
        raise ThresholdError("it compares nothing; write a condition like b.p99 > 1.05 * a.p99")
    found: dict[Quantity, None] = {}
    _check_truth(tree, found)
    if not found:
        raise ThresholdError(f"it names nothing that is measured; there are a, b and ratio with {', '.join(METRICS)}")
    return Condition(" ".join(text.split()), scenario, tuple(found), tree)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _check_truth(node: ast.expr, found: dict[Quantity, None]) -> None:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check_truth(value, found)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check_truth(node.operand, found)
    elif isinstance(node, ast.Compare):
        for operation in node.ops:
            if type(operation) not in _COMPARISONS:
                raise ThresholdError("in, is and the like are not taken; compare with < <= > >= == !=")
        for value in (node.left, *node.comparators):
            _check_number(value, found)
    else:
        raise ThresholdError(f"{ast.unparse(node)} is not a comparison; and, or and not join comparisons")


def _check_number(node: ast.expr, found: dict[Quantity, None]) -> None:
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ThresholdError(f"{value!r} is not a number")
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        _check_number(node.left, found)
        _check_number(node.right, found)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        _check_number(node.operand, found)
    elif isinstance(node, ast.Attribute | ast.Name):
        found[_quantity(node)] = None
    else:
        raise ThresholdError(f"{ast.unparse(node)} is not taken; there are quantities, numbers, + - * / and brackets")


def _quantity(node: ast.Attribute | ast.Name) -> Quantity:
    parts = ast.unparse(node).split(".")
    side, metric, *rest = [*parts, ""] if len(parts) == 1 else parts
    if side not in ("a", "b", "ratio"):
        raise ThresholdError(f"there is no {side}; there are a, b and ratio (B over A), as in b.p99 or ratio.p50.low")
    known = COMPARED if side == "ratio" else METRICS
    if metric not in known:
        raise ThresholdError(f"{side} has no metric {metric or '(none given)'}; there are {', '.join(known)}")
    if rest and (len(rest) > 1 or rest[0] not in ("low", "high")):
        raise ThresholdError(f"{side}.{metric} has no {'.'.join(rest)}; there are low and high, of its 95 % interval")
    if rest and metric == "errors":
        raise ThresholdError("errors are counted, so they have no interval")
    bound: Bound | None = None if not rest else "low" if rest[0] == "low" else "high"
    return Quantity("a" if side == "a" else "b" if side == "b" else "ratio", metric, bound)


def _truth(node: ast.expr, values: Mapping[Quantity, float]) -> bool:
    if isinstance(node, ast.BoolOp):
        parts = [_truth(value, values) for value in node.values]  # all of them: none may hide behind another
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp):
        return not _truth(node.operand, values)
    if not isinstance(node, ast.Compare):
        raise TypeError(ast.dump(node))
    numbers = [_number(value, values) for value in (node.left, *node.comparators)]
    return all(
        _COMPARISONS[type(operation)](left, right)
        for operation, left, right in zip(node.ops, numbers[:-1], numbers[1:], strict=True)
    )


def _number(node: ast.expr, values: Mapping[Quantity, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Attribute | ast.Name):
        return values[_quantity(node)]
    if isinstance(node, ast.UnaryOp):
        value = _number(node.operand, values)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise TypeError(ast.dump(node))
    left, right = _number(node.left, values), _number(node.right, values)
    try:
        result = _ARITHMETIC[type(node.op)](left, right)
    except (ZeroDivisionError, OverflowError) as exc:
        raise UndefinedValueError(f"{ast.unparse(node)} has no value: {exc}") from exc
    if not math.isfinite(result):
        raise UndefinedValueError(f"{ast.unparse(node)} is not finite")
    return result
