"""The named conditions under which a comparison means something: what a check is, and what follows from it.

Each check has a value, a threshold, a scope and a remedy. A check that lacks its data is unknown (`ok` None), never
ok. What a check that is not ok does is its severity: `invalidates` takes the verdict from what it covers, `warns` and
`informs` are said beside it. The registry is `check_definitions`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.definitions import DEFINITIONS, CheckName, Severity
from loadgen.records.run import Record

__all__ = ["DEFINITIONS", "CheckName"]

RUN = "run"
"""Scope of a check that covers every comparison."""
PLAN = "plan"
"""Scope of a check on the run as planned: it takes the verdict from the run, not from cells that are complete."""


def cell_scope(cell: str) -> str:
    """Scope of a check that covers the comparisons of one cell."""
    return f"cell {cell}"


class Check(Record, frozen=True, kw_only=True):
    """One check's outcome."""

    name: str
    title: str
    ok: bool | None
    """None: unknown."""
    severity: Severity
    """What it does where it is not ok."""
    scope: str
    """run, plan, or "cell NAME"."""
    value: float | int | str | None
    threshold: float | int | str | None
    detail: str
    """One sentence with the value in words."""
    remedy: str


def make_check(
    name: CheckName,
    ok: bool | None,
    *,
    scope: str = RUN,
    value: float | int | str | None = None,
    threshold: float | int | str | None = None,
    detail: str,
) -> Check:
    """A check from its definition and its outcome."""
    definition = DEFINITIONS[name]
    return Check(
        name=name.value,
        title=definition.title,
        ok=ok,
        severity=definition.unknown if ok is None else definition.severity,
        scope=scope,
        value=value,
        threshold=threshold,
        detail=detail,
        remedy=definition.remedy,
    )


def invalidating(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Those that take a verdict away."""
    return tuple(check for check in checks if check.ok is not True and check.severity == "invalidates")


def reason_against(checks: Sequence[Check], scenario: str) -> str | None:
    """Why the comparisons of a scenario are invalid; None where nothing that covers them failed."""
    covering = [check for check in invalidating(checks) if check.scope in (RUN, cell_scope(scenario))]
    return "; ".join(complaint(check) for check in covering) or None


def complaint(check: Check, scopes: Sequence[str] = ()) -> str:
    """A check that is not ok, in words: its title says what should be, so it is quoted and denied.

    `scopes` are those of all checks that the sentence stands for; it quotes the detail of the first.
    """
    outcome = "is unknown" if check.ok is None else "failed"
    cells = [scope.removeprefix("cell ") for scope in scopes or (check.scope,) if scope not in (RUN, PLAN)]
    covers = "" if not cells else f" in {cells[0]}" if len(cells) == 1 else f" in {len(cells)} scenarios"
    example = f"{cells[0]}: " if len(cells) > 1 else ""
    return f"“{check.title}” {outcome}{covers}: {example}{check.detail}"


def complaints(checks: Sequence[Check]) -> tuple[str, ...]:
    """One sentence for each check that takes a verdict away, whatever the number of scenarios in which it does."""
    groups: dict[tuple[str, bool | None], list[Check]] = {}
    for check in invalidating(checks):
        groups.setdefault((check.name, check.ok), []).append(check)
    return tuple(complaint(group[0], [check.scope for check in group]) for group in groups.values())


def in_order(checks: Sequence[Check]) -> tuple[Check, ...]:
    """In the order of `CheckName`, the order of scopes kept."""
    order = {name.value: place for place, name in enumerate(CheckName)}
    return tuple(sorted(checks, key=lambda check: order[check.name]))
