"""The verdict in words: valid or not, which arm by how much in each scenario, why, and with which reservations.

Every sentence is computed from comparisons, checks and the account of time; no arm is called faster where the
comparison is undecided. It decides nothing itself: outcomes come from `comparisons`, validity from `checks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.batching import FORMED_FACTOR
from loadgen.analysis.checks.generator import RECONNECT_LIMIT
from loadgen.analysis.checks.registry import CHECKS, Check, Facts, complaint, complaints, invalidating
from loadgen.analysis.checks.run import same_payload
from loadgen.comparison.claims import claim, decided_besides, groups, join, place, weight
from loadgen.comparison.comparisons import Comparison, Outcome, leading_comparisons
from loadgen.comparison.pairs import METRICS
from loadgen.comparison.stages import TITLES, StageAccount
from loadgen.comparison.summaries import CellSummary
from loadgen.quantities import number, sentence, share, signed_ms
from loadgen.records.run import Cell, Experiment, Record
from loadgen.studies.causes.analyse import CellCauses

MIN_STAGE_SHARE = 0.05
MAX_STAGES = 3


def explain_stages(account: StageAccount) -> list[str]:
    """Which stages make up the difference of the mean latencies, the largest first; empty without both accounts. Where
    a server contradicts what was measured, that, and no breakdown."""
    if refused := [
        f"{arm.label.upper()}'s own statistics contradict the measured latency ({number(arm.client_total_ms)} ms on "
        f"average), so no latency breakdown is shown: {'; '.join(arm.contradictions[:MAX_STAGES])}."
        for arm in (account.a, account.b)
        if arm is not None and arm.contradictions
    ]:
        return refused
    if account.a is None or account.b is None or account.total_b_minus_a_ms is None:
        return []
    total = account.total_b_minus_a_ms
    larger = max(account.a.client_total_ms, account.b.client_total_ms)
    means = f"{number(account.a.client_total_ms)} ms on A and {number(account.b.client_total_ms)} ms on B"
    if abs(total) < 0.01 * larger:
        return [f"Requests take the same time on both arms ({means})."]
    parts = [
        f"{TITLES[d.stage]} {signed_ms(d.b_minus_a_ms)}" + (f" ({_percent(d.share)})" if d.share is not None else "")
        for d in account.differences[:MAX_STAGES]
        if abs(d.b_minus_a_ms) >= MIN_STAGE_SHARE * abs(total)
    ]
    return [f"Requests take {means} on average. B's {signed_ms(total)} are: {'; '.join(parts)}."]


def _percent(value: float) -> str:
    return share(value) if value >= 0 else f"−{share(-value)}"


def explain_saturation(summaries: Sequence[CellSummary]) -> list[str]:
    """Which arm did not sustain the rate of an open loop."""
    return [
        sentence(f"{summary.label.upper()} was {summary.open_loop.saturation}")
        for summary in summaries
        if summary.open_loop is not None and summary.open_loop.saturation
    ]


def explain_reconnects(summaries: Sequence[CellSummary]) -> list[str]:
    """Which server closed its connections, so that clients had to connect again."""
    return [
        f"{summary.label.upper()} closed its connection before {share(summary.reconnect_share)} of the requests; the "
        "time to connect again is part of its latency."
        for summary in summaries
        if summary.reconnect_share is not None and summary.reconnect_share > RECONNECT_LIMIT
    ]


def explain_batching(cell: Cell, summaries: Sequence[CellSummary]) -> list[str]:
    if cell.concurrency <= 1:
        return []
    means = {s.label.upper(): s.executed_batch_mean for s in summaries if s.executed_batch_mean is not None}
    if not means:
        return []
    text = ", ".join(f"{number(mean)} on {label}" for label, mean in sorted(means.items()))
    idle = [label for label, mean in sorted(means.items()) if mean < FORMED_FACTOR * cell.batch_size]
    return [f"Mean executed batch: {text}" + (f"; batching never formed on {' and '.join(idle)}." if idle else ".")]


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
    """Names every metric with a decided difference, also those that do not lead their scenario."""
    main_scenario: str | None
    """The most loaded scenario; its reasons stand for the others where there is room for one."""
    scenarios: tuple[ScenarioVerdict, ...]
    failed: tuple[str, ...]
    """Each check that took a verdict away, with what it covers."""
    caveats: tuple[str, ...]


def reach_verdict(
    facts: Facts, titles: dict[str, str], checks: Sequence[Check], causes: Sequence[CellCauses]
) -> Verdict:
    """`titles` names the arms for people, by label; the comparisons are those after the checks."""
    experiment, failed = facts.run.experiment, invalidating(checks)
    scenarios = tuple(_scenario(facts, leading, causes) for leading in leading_comparisons(facts.comparisons))
    return Verdict(
        valid=not failed,
        headline=_headline(experiment, titles, facts.comparisons, failed),
        main_scenario=_main_scenario(experiment, scenarios),
        scenarios=scenarios,
        failed=complaints(checks),
        caveats=_caveats(checks),
    )


def _caveats(checks: Sequence[Check]) -> tuple[str, ...]:
    declared = [check for check in checks if check.ok is not True and CHECKS[check.name].caveat]
    return tuple(sentence(check.detail) for check in (*declared, *filter(_deliberate, checks)))


def _deliberate(check: Check) -> bool:
    return check.ok is False and check.name.startswith("same_") and check.severity == "warns"


def _main_scenario(experiment: Experiment, scenarios: Sequence[ScenarioVerdict]) -> str | None:
    usable = {s.scenario for s in scenarios if s.outcome != "invalid"} or {s.scenario for s in scenarios}
    return max((cell for cell in experiment.cells if cell.name in usable), key=weight).name if usable else None


def _headline(
    experiment: Experiment, titles: dict[str, str], comparisons: Sequence[Comparison], failed: Sequence[Check]
) -> str:
    apart = next((check for check in failed if check.name == same_payload.name), None)
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
        besides = decided_besides(comparisons, cells)
        metrics = dict.fromkeys(METRICS[c.metric].title for c in usable) if besides else ()
        what = f" in {join(list(metrics))}" if metrics else ""
        parts = [*groups(usable, cells), *besides]
        return f"{stands}{'no' if stands else 'No'} winner{what} between {a} and {b}: {'; '.join(parts)}."
    main = max(decided, key=lambda c: weight(cells[c.scenario]))
    first = claim(main, a, b, f" {place(cells[main.scenario])}")
    rest = groups([c for c in usable if c is not main], cells)
    return stands + "; ".join([first, *rest, *decided_besides(comparisons, cells)]) + "."


def _scenario(facts: Facts, leading: Comparison, causes: Sequence[CellCauses]) -> ScenarioVerdict:
    main = claim(leading)
    others = [
        claim(c)
        for c in facts.comparisons
        if c.scenario == leading.scenario and c is not leading and c.verdict in ("a_faster", "b_faster", "equivalent")
    ]
    reasons = [
        text for found in causes if found.cell == leading.scenario for text in (found.sentence, *found.notes)
    ]  # also without a verdict: what was taken away was seen to matter, whatever the arms were compared for
    if leading.verdict != "invalid" or reasons:
        for account in facts.accounts:
            if account.cell == leading.scenario:
                reasons += explain_stages(account)
        cell = next(cell for cell in facts.run.experiment.cells if cell.name == leading.scenario)
        own = [summary for summary in facts.summaries if summary.cell == leading.scenario]
        reasons += [*explain_saturation(own), *explain_reconnects(own), *explain_batching(cell, own)]
    return ScenarioVerdict(
        scenario=leading.scenario,
        metric=leading.metric,
        outcome=leading.verdict,
        sentence=sentence("; ".join([main, *others])),
        reasons=tuple(reasons),
    )
