"""What a check is, how one is declared, and what follows from its outcome.

A check is a function that looks at the facts of a run and gives an outcome for each thing that it looked at. The
decorator `check` above it says what the check means; the registry, the table in docs/measurement.md (a test compares
them) and every report follow from that, so a new check is one function in one of the modules of this package. Checks
are shown in the order in which they are declared.

Each check has a value, a threshold, a scope and a remedy. A check that lacks its data is unknown (`ok` None), never
ok. What a check that is not ok does is its severity: `invalidates` takes the verdict from what it covers, `warns` and
`informs` are said beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Literal

from loadgen.comparison.comparisons import Comparison, leading_comparisons
from loadgen.comparison.facts import PLAN, RUN, Facts, cell_scope
from loadgen.records.run import ArmRecord, Record

Severity = Literal["invalidates", "warns", "informs"]
State = Literal["passed", "failed", "unknown"]
Value = float | int | str | None


class Check(Record, frozen=True, kw_only=True):
    """One check's outcome, as it is stored and shown."""

    name: str
    title: str
    state: State
    """unknown: its data is missing."""
    severity: Severity
    """What it does where it has not passed."""
    scope: str
    """run, plan, or "cell NAME"."""
    value: Value
    threshold: Value
    detail: str
    """One sentence with the value in words."""
    remedy: str
    """What to do, in one sentence."""

    @property
    def ok(self) -> bool | None:
        """None: unknown."""
        return {"passed": True, "failed": False, "unknown": None}[self.state]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found in its scope."""

    ok: bool | None
    detail: str
    value: Value = None
    threshold: Value = None
    scope: str = RUN
    severity: Severity | None = None
    """Where it is another than the declared one."""


Find = Callable[[Facts], Iterable[Outcome]]


@dataclass(frozen=True, slots=True)
class CheckDefinition:
    """What a check means whatever its outcome, and the function that computes it."""

    name: str
    title: str
    severity: Severity
    unknown: Severity
    """Its severity when its data is missing."""
    remedy: str
    before_load: bool
    """See `fairness`."""
    caveat: bool
    """Whether the verdict quotes it where it is not ok."""
    find: Find

    def checks(self, facts: Facts) -> Iterator[Check]:
        """Each outcome with what the check means."""
        for outcome in self.find(facts):
            yield Check(
                name=self.name,
                title=self.title,
                state="unknown" if outcome.ok is None else "passed" if outcome.ok else "failed",
                severity=outcome.severity or (self.unknown if outcome.ok is None else self.severity),
                scope=outcome.scope,
                value=outcome.value,
                threshold=outcome.threshold,
                detail=outcome.detail,
                remedy=self.remedy,
            )


CHECKS: dict[str, CheckDefinition] = {}
"""Every check by its name, in the order in which they are shown."""


def check(
    *,
    title: str,
    severity: Severity,
    unknown: Severity = "informs",
    remedy: str,
    before_load: bool = False,
    caveat: bool = False,
) -> Callable[[Find], CheckDefinition]:
    """Declare the function below as a check of the same name. `title` says what should be."""

    def declare(find: Find) -> CheckDefinition:
        name = find.__name__
        if name in CHECKS:
            raise ValueError(f"there are two checks {name}")
        CHECKS[name] = CheckDefinition(name, title, severity, unknown, remedy, before_load, caveat, find)
        return CHECKS[name]

    return declare


fairness = partial(check, before_load=True)
"""For a check that needs only the arms as they are in effect and the machine, and is shown before the load begins."""


def leading_by_scenario(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Every scenario with what stands for it: one comparison of two arms, several of more."""
    found: dict[str, list[Comparison]] = {}
    for one in leading_comparisons(comparisons):
        found.setdefault(one.scenario, []).append(one)
    return found


def per_arm(judge: Callable[[ArmRecord, Facts], Outcome]) -> Find:
    """For a check that looks at each arm by itself."""

    @wraps(judge)
    def find(facts: Facts) -> list[Outcome]:
        return [judge(arm, facts) for arm in facts.run.arms]

    return find


def make_checks(facts: Facts) -> tuple[Check, ...]:
    """Every check of a run, in the order in which they are shown."""
    return tuple(one for definition in CHECKS.values() for one in definition.checks(facts))


def check_before_load(facts: Facts) -> list[Check]:
    """What a person is shown before the load begins; `make_checks` makes the same checks again."""
    return [one for definition in CHECKS.values() if definition.before_load for one in definition.checks(facts)]


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
