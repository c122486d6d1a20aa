"""How a check is declared, and how its outcome affects the verdict.

A check is one function of the run's `Facts`, below the decorator that gives its titles, severity and remedy. It yields
one outcome per scope. The result, every report and the table in docs/measurement.md (a test compares it) follow from
the registry, in the order of declaration. A check without its data is unknown (`ok` None), never ok.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial, wraps
from typing import Literal, TypeVar, get_args

from loadgen.base.quantities import counted, sentence
from loadgen.metrics.barrier import attempt
from loadgen.metrics.comparisons import Comparison, leading_comparisons
from loadgen.metrics.facts import PLAN, RUN, Facts, WorkloadFacts, workload_scope
from loadgen.records.checks import Check, Severity, State, Value
from loadgen.records.run import ArmRecord, Label
from loadgen.records.targets import Kind

Fault = Literal[
    "wrong answers", "failed requests", "unfair configuration", "GPU not verified", "incomplete run", "busy machine",
    "overloaded load generator",
]  # fmt: skip
"""What an INVALID run is called, by the check that takes its verdict away; the gravest first."""
RUN_FINISHED = "run_finished"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of a check in one scope."""

    ok: bool | None
    detail: str
    value: Value = None
    threshold: Value = None
    """If it differs from the declared one."""
    scope: str = RUN
    severity: Severity | None = None
    """If it differs from the declared one."""
    remedy: str | None = None
    """If it differs from the declared one."""
    failed: str | None = None
    """If it differs from the declared one."""
    arms: tuple[Label, ...] = ()
    """The arms to blame."""


Find = Callable[[Facts], Iterable[Judgement]]
S = TypeVar("S")
Judge = Callable[[S, Facts], Judgement | None]
"""Judges one subject of a run, such as an arm; None if the check does not apply to it."""


@dataclass(frozen=True, slots=True)
class CheckDefinition:
    """A declared check: a decorator of its function, whose name it has."""

    title: str
    """The condition that should hold."""
    failed: str
    """The title where it does not."""
    severity: Severity
    remedy: str
    _: KW_ONLY
    unknown: Severity = "informs"
    """The severity without data."""
    threshold: Value = None
    before_load: bool = False
    """Whether it needs only the arms and the machine, and is shown before the load."""
    caveat: tuple[State, ...] = ()
    """The states in which the verdict quotes it."""
    not_known: str = ""
    """The title without data, if it differs from `title`."""
    fault: Fault | None = None
    """Of every check that can take a verdict away."""
    of: Kind | None = None
    """The kind of model that alone is checked."""
    name: str = ""
    find: Find = lambda _: ()

    def __call__(self, find: Find) -> CheckDefinition:
        """Declare the function as the check of the same name."""
        if find.__name__ in CHECKS:
            raise ValueError(f"there are two checks {find.__name__}")
        CHECKS[find.__name__] = declared = replace(self, name=find.__name__, find=find)
        return declared

    def checks(self, facts: Facts) -> Iterator[Check]:
        if self.of not in (None, facts.run.experiment.kind):
            return
        for outcome in attempt(lambda: list(self.find(facts)), self._not_made):
            yield self.stated(outcome, strict=facts.run.experiment.strict)

    def stated(self, outcome: Judgement, *, strict: bool = False) -> Check:
        """The check with this outcome, also of what is no comparison. `strict`: what makes a run rough takes its
        verdict away."""
        severity = outcome.severity or (self.unknown if outcome.ok is None else self.severity)
        titles = {True: self.title, False: outcome.failed or self.failed, None: self.not_known or self.title}
        return Check(
            name=self.name,
            title=titles[outcome.ok],
            state="unknown" if outcome.ok is None else "passed" if outcome.ok else "failed",
            severity="invalidates" if strict and severity == "roughens" else severity,
            scope=outcome.scope,
            value=outcome.value,
            threshold=self.threshold if outcome.threshold is None else outcome.threshold,
            detail=outcome.detail,
            remedy=outcome.remedy or self.remedy,
            arms=() if outcome.ok else outcome.arms,
        )

    def _not_made(self, why: str) -> list[Judgement]:
        """The outcome of a check that failed itself. One that could have taken a verdict away takes it."""
        takes_it = not {"invalidates", "roughens"}.isdisjoint((self.severity, self.unknown))
        severity: Severity = "invalidates" if takes_it else "warns"
        return [Judgement(None, f"this check could not be made: {why}", severity=severity, remedy=AGAIN)]


AGAIN = "Restore the file that is named, or report a bug, then make the report again with abserve report."
"""What to do where a step of the analysis failed. Nothing that was measured is lost."""
CHECKS: dict[str, CheckDefinition] = {}
"""Every check by its name, in the order in which they are shown."""


check = CheckDefinition
fairness = partial(check, before_load=True)
of_tensors, of_tokens = partial(check, of=Kind.TENSORS), partial(check, of=Kind.TOKENS)
tensor_fairness = partial(fairness, of=Kind.TENSORS)


def _each(
    subjects: Callable[[Facts], Iterable[S]], placed: Callable[[Judgement, S, Facts], Judgement]
) -> Callable[[Judge[S]], Find]:
    """The decorator of a check that judges each of these subjects by itself, whose outcome is then `placed`."""

    def declare(judge: Judge[S]) -> Find:
        @wraps(judge)
        def find(facts: Facts) -> list[Judgement]:
            judged = ((subject, judge(subject, facts)) for subject in subjects(facts))
            return [placed(outcome, subject, facts) for subject, outcome in judged if outcome is not None]

        return find

    return declare


def _of_arm(outcome: Judgement, arm: ArmRecord, facts: Facts) -> Judgement:
    return replace(outcome, detail=f"{facts.names[arm.label]} {outcome.detail}", arms=(arm.label,))


def _of_load(outcome: Judgement, load: WorkloadFacts, _: Facts) -> Judgement:
    return replace(outcome, scope=load.scope)


def _of_comparisons(outcome: Judgement, leading: Sequence[Comparison], _: Facts) -> Judgement:
    return replace(outcome, scope=workload_scope(leading[0].workload))


def _leading(facts: Facts) -> Iterable[Sequence[Comparison]]:
    leading: dict[str, list[Comparison]] = {}
    for comparison in leading_comparisons(facts.comparisons):
        leading.setdefault(comparison.workload, []).append(comparison)
    return leading.values()


per_arm = _each(lambda facts: facts.run.arms, _of_arm)
"""Of each arm, with details that continue "A …"."""
per_load = _each(lambda facts: facts.loads, _of_load)
"""Of each workload that has blocks."""
per_load_or_search = _each(lambda facts: [*facts.loads, *facts.searches], _of_load)
"""Of each workload that has blocks, and of each search."""
per_workload = _each(lambda facts: facts.workloads, _of_load)
"""Of each workload of the experiment."""
per_comparison = _each(_leading, _of_comparisons)
"""Of each workload's leading comparisons: one with two arms, several with more."""


def late_severity(ok: bool | None, load: WorkloadFacts) -> Severity | None:
    """A load generator that was late because others had the cores makes the run rough; None: the check's own
    severity."""
    return "roughens" if ok is False and load.is_disturbed else None


def make_checks(facts: Facts, *, before_load: bool = False) -> tuple[Check, ...]:
    """The outcomes of all checks; with `before_load` of those to show then, which are made again after it."""
    made = (definition for definition in CHECKS.values() if definition.before_load or not before_load)
    return tuple(outcome for definition in made for outcome in definition.checks(facts))


def reached(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks to show: where the run did not finish, without those whose data is missing."""
    finished = all(check.ok for check in checks if check.name == RUN_FINISHED)
    return tuple(check for check in checks if finished or check.ok is not None or check.name == RUN_FINISHED)


def invalidating(checks: Sequence[Check], severity: Severity = "invalidates") -> tuple[Check, ...]:
    """The checks that remove a verdict, or that have another effect, the gravest faults first."""
    failed = [check for check in checks if check.ok is not True and check.severity == severity]
    order = get_args(Fault)
    return tuple(sorted(failed, key=lambda check: order.index(fault) if (fault := fault_of(check)) else len(order)))


def roughening(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks that make the figures rough; none where others take the verdict away."""
    return () if invalidating(reached(checks)) else invalidating(checks, "roughens")


def gravest(checks: Sequence[Check]) -> Check | None:
    """The check that is to blame first for an INVALID or a ROUGH run, whose remedy stands under the headline."""
    return next(iter([*invalidating(reached(checks)), *roughening(checks)]), None)


def fault_of(check: Check) -> Fault | None:
    """What a run is called whose verdict the check takes away; None also for a check that no longer exists, in a stored
    result."""
    return CHECKS[check.name].fault if check.name in CHECKS else None


def validity(checks: Sequence[Check]) -> str:
    """ "VALID", "ROUGH: busy machine", or "INVALID: wrong answers" with the gravest fault. Where others used the
    machine, a generator that could not keep up is the machine's fault."""
    first = gravest(checks)
    if first is None:
        return "VALID"
    fault = fault_of(first)
    disturbed = any(check.ok is False and fault_of(check) == "busy machine" for check in checks)
    if fault == "overloaded load generator" and disturbed:
        fault = "busy machine"
    word = "ROUGH" if first.severity == "roughens" else "INVALID"
    return f"{word}: {fault}" if fault else word


def reason_against(checks: Sequence[Check], workload: str) -> str | None:
    """Why the comparisons of a workload are invalid; None if they are valid."""
    covering = [check for check in invalidating(checks) if check.scope in (RUN, workload_scope(workload))]
    return "; ".join(_message(check) for check in covering) or None


def lost_where_rough(checks: Sequence[Check], facts: Facts) -> dict[str, dict[Label, float]]:
    """The share of its time that each arm may have lost to others, by rough workload. What has no blocks, and so no
    readings, is taken to have lost as much as the worst of these."""
    scopes = {check.scope for check in invalidating(checks, "roughens")}
    lost = {load.workload.name: load.lost_to_others for load in facts.loads if load.scope in scopes}
    worst = {label: max(of.get(label, 0.0) for of in lost.values()) for label in facts.run.experiment.labels if lost}
    without = [workload.name for workload in facts.run.experiment.workloads if not workload.has_blocks]
    return lost | dict.fromkeys(without, worst) if lost else {}


def complaints(checks: Sequence[Check], severity: Severity = "invalidates") -> tuple[str, ...]:
    """One message per check that removes a verdict, or that has another effect, with the scenarios that it covers and
    the first one's detail."""
    groups: dict[tuple[str, bool | None], list[Check]] = {}
    for check in invalidating(reached(checks), severity):
        groups.setdefault((check.name, check.ok), []).append(check)
    messages = []
    for first, *more in groups.values():
        others = f" and {counted(len(more), 'more workload')}" if more else ""
        covers = "" if first.scope in (RUN, PLAN) else f"In {first.scope.removeprefix('workload ')}{others}, "
        messages.append(sentence(covers + _message(first)))
    return tuple(messages)


def _message(check: Check) -> str:
    if check.ok is not None:
        return check.detail
    title = CHECKS[check.name].not_known if check.name in CHECKS else ""
    words = in_sentence(title) if title else f"not available: “{check.title}”"
    return f"{words} ({check.detail})"


def in_sentence(title: str) -> str:
    """A title inside a sentence: without its capital, unless that begins an abbreviation such as GPU."""
    return title[:1].lower() + title[1:] if title[1:2].islower() or title.startswith("A ") else title
