"""Checks as rows of text, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.analysis.checks.outcome import Check
from loadgen.analysis.result import Result

CheckState = Literal["failed", "warning", "unknown", "note", "ok"]
ARMS = 2
STATE_ORDER: tuple[CheckState, ...] = ("failed", "warning", "unknown", "note", "ok")


@dataclass(frozen=True, slots=True)
class CheckRow:
    """All checks of one name that came out alike, or one of them."""

    title: str
    state: CheckState
    detail: str
    scope: str
    threshold: str
    remedy: str
    severity: str


def state_of(check: Check) -> CheckState:
    """How a check is shown: failed where it takes a verdict away, also by being unknown."""
    if check.ok:
        return "ok"
    if check.severity == "invalidates":
        return "failed"
    if check.ok is None:
        return "unknown"
    return "warning" if check.severity == "warns" else "note"


def check_rows(result: Result) -> list[CheckRow]:
    """Checks of one name and state become one row, so that eight cells do not fill a page; the worst come first."""
    groups: dict[tuple[str, CheckState], list[Check]] = {}
    for check in result.checks:
        groups.setdefault((check.name, state_of(check)), []).append(check)
    rows = [_check_row(state, checks) for (_, state), checks in groups.items()]
    return sorted(rows, key=lambda row: STATE_ORDER.index(row.state))


def counts(rows: Sequence[CheckRow]) -> str:
    """ "45 ok, 3 unknown, 6 only noted" """
    words: dict[CheckState, str] = {
        "ok": "ok", "failed": "failed", "warning": "warn", "unknown": "unknown", "note": "only noted",
    }  # fmt: skip
    found = {state: sum(1 for row in rows if row.state == state) for state in words}
    return ", ".join(f"{number} {words[state]}" for state, number in found.items() if number)


def _check_row(state: CheckState, checks: Sequence[Check]) -> CheckRow:
    first = max(checks, key=_badness) if state == "ok" else checks[0]
    scopes = [check.scope.removeprefix("cell ") for check in checks]
    alike = len(set(scopes)) == 1 or (state == "ok" and len({check.detail for check in checks}) == 1)
    several = "" if alike else f"{first.scope.removeprefix('cell ')}: "
    by_arm = len(set(scopes)) == 1 and len(checks) == ARMS
    detail = "; ".join(dict.fromkeys(check.detail for check in checks)) if by_arm else first.detail
    cells = {"run": "whole run", "plan": "whole run"}.get(scopes[0], scopes[0]) if len(set(scopes)) == 1 else None
    threshold = first.threshold
    return CheckRow(
        title=first.title,
        state=state,
        detail=several + detail,
        scope=cells or (", ".join(scopes) if len(scopes) <= 3 else f"{len(scopes)} scenarios"),
        threshold="" if threshold is None else f"{threshold:.4g}" if isinstance(threshold, float) else str(threshold),
        remedy=first.remedy,
        severity=first.severity,
    )


def _badness(check: Check) -> float:
    """For checks that are ok: the one closest to its threshold says most."""
    if not isinstance(check.value, int | float):
        return 0.0
    at_least = isinstance(check.threshold, int | float) and check.value > check.threshold
    return -float(check.value) if at_least else float(check.value)
