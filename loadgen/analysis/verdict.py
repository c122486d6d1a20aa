"""The verdict in words: valid or not, which arm by how much in each scenario, why, and with which reservations.

Every sentence is computed from comparisons, checks and the account of time; no arm is called faster where the
comparison is undecided. It decides nothing itself: outcomes come from `comparisons`, validity from `checks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.causes.ranking import CellCauses
from loadgen.analysis.checks.outcome import Check, CheckName, complaint, complaints, invalidating
from loadgen.analysis.checks.run import leading_comparisons
from loadgen.analysis.claims import claim, groups, place, weight
from loadgen.analysis.comparisons import Comparison, Outcome
from loadgen.analysis.reasons import explain_batching, explain_saturation, explain_stages
from loadgen.analysis.stages import StageAccount
from loadgen.analysis.summaries import CellSummary
from loadgen.quantities import sentence
from loadgen.records.run import Experiment, Record

CAVEATS = (
    CheckName.GPU_PRESENT,
    CheckName.TRAINED_WEIGHTS,
    CheckName.NATIVE_BACKEND,
)


class ScenarioVerdict(Record, frozen=True, kw_only=True):
    """One scenario: the outcome of its leading metric, in one sentence, and why in a few more."""

    scenario: str
    metric: str
    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]


class Verdict(Record, frozen=True, kw_only=True):
    """What a reader takes away. `caveats` come first where they are shown, then `headline`."""

    valid: bool
    headline: str
    main_scenario: str | None
    """The most loaded scenario; its reasons stand for the others where there is room for one."""
    scenarios: tuple[ScenarioVerdict, ...]
    failed: tuple[str, ...]
    """Each check that took a verdict away, with what it covers."""
    caveats: tuple[str, ...]


def reach_verdict(
    experiment: Experiment,
    titles: dict[str, str],
    comparisons: Sequence[Comparison],
    checks: Sequence[Check],
    accounts: Sequence[StageAccount],
    cells: Sequence[CellSummary],
    causes: Sequence[CellCauses] = (),
) -> Verdict:
    """`titles` names the arms for people, by label."""
    failed = invalidating(checks)
    scenarios = tuple(
        _scenario(experiment, leading, comparisons, accounts, cells, causes)
        for leading in leading_comparisons(comparisons)
    )
    return Verdict(
        valid=not failed,
        headline=_headline(experiment, titles, comparisons, failed),
        main_scenario=_main_scenario(experiment, scenarios),
        scenarios=scenarios,
        failed=complaints(checks),
        caveats=_caveats(checks),
    )


def _caveats(checks: Sequence[Check]) -> tuple[str, ...]:
    order = {name.value: place for place, name in enumerate(CAVEATS)}
    chosen = [check for check in checks if check.ok is not True and (check.name in order or _deliberate(check))]
    chosen.sort(key=lambda check: order.get(check.name, len(order)))
    return tuple(sentence(check.detail) for check in chosen)


def _deliberate(check: Check) -> bool:
    return check.ok is False and check.name.startswith("same_") and check.severity == "warns"


def _main_scenario(experiment: Experiment, scenarios: Sequence[ScenarioVerdict]) -> str | None:
    usable = {s.scenario for s in scenarios if s.outcome != "invalid"} or {s.scenario for s in scenarios}
    return max((cell for cell in experiment.cells if cell.name in usable), key=weight).name if usable else None


def _headline(
    experiment: Experiment, titles: dict[str, str], comparisons: Sequence[Comparison], failed: Sequence[Check]
) -> str:
    apart = next((check for check in failed if check.name == CheckName.SAME_PAYLOAD), None)
    if apart is not None:
        return f"Not a comparison of servers, so no winner is named: {apart.detail.partition(':')[0]}."
    cells = {cell.name: cell for cell in experiment.cells}
    leading = leading_comparisons(comparisons)
    if not leading:
        return "Nothing was compared."
    usable = [c for c in leading if c.verdict != "invalid"]
    if not usable:
        return f"No verdict: {complaint(failed[0])}." if failed else "No verdict."
    stands = ""
    lost = len(leading) - len(usable)
    if lost:
        stands = f"No verdict on {lost} of {len(leading)} scenarios, see the failed checks; otherwise: "
    elif failed:
        stands = "The run is not valid as a whole, see the failed checks; in what stands: "
    loads = [c for c in usable if c.metric == "throughput"] or usable
    decided = [c for c in loads if c.verdict in ("a_faster", "b_faster")]
    if not decided:
        decided = [c for c in usable if c.verdict in ("a_faster", "b_faster")]
    a, b = f"A ({titles['a']})", f"B ({titles['b']})"
    if not decided:
        parts = groups(usable, cells)
        return f"{stands}{'no' if stands else 'No'} winner between {a} and {b}: {'; '.join(parts)}."
    main = max(decided, key=lambda c: weight(cells[c.scenario]))
    first = claim(main, a, b, f" {place(cells[main.scenario])}")
    rest = groups([c for c in usable if c is not main], cells)
    return stands + "; ".join([first, *rest]) + "."


def _scenario(
    experiment: Experiment,
    leading: Comparison,
    comparisons: Sequence[Comparison],
    accounts: Sequence[StageAccount],
    cells: Sequence[CellSummary],
    causes: Sequence[CellCauses],
) -> ScenarioVerdict:
    main = claim(leading)
    others = [
        claim(c)
        for c in comparisons
        if c.scenario == leading.scenario and c is not leading and c.verdict in ("a_faster", "b_faster", "equivalent")
    ]
    reasons = [
        text for found in causes if found.cell == leading.scenario for text in (found.sentence, *found.notes)
    ]  # also without a verdict: what was taken away was seen to matter, whatever the arms were compared for
    if leading.verdict != "invalid" or reasons:
        for account in accounts:
            if account.cell == leading.scenario:
                reasons += explain_stages(account)
        reasons += explain_saturation([summary for summary in cells if summary.cell == leading.scenario])
        reasons += explain_batching(
            next(cell for cell in experiment.cells if cell.name == leading.scenario),
            [summary for summary in cells if summary.cell == leading.scenario],
        )
    return ScenarioVerdict(
        scenario=leading.scenario,
        metric=leading.metric,
        outcome=leading.verdict,
        sentence=sentence("; ".join([main, *others])),
        reasons=tuple(reasons),
    )
