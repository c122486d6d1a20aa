"""The verdict in words: valid or not, which arm by how much in each scenario, why, and with which reservations.

Every sentence is computed from comparisons, checks and the account of time; no arm is called faster where the
comparison is undecided. It decides nothing itself: outcomes come from `comparisons`, validity from `checks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.comparison.claims import claim, decided_besides, groups, join, place, places, weight
from loadgen.comparison.comparisons import Comparison, Outcome, leading_comparisons
from loadgen.comparison.facts import Facts
from loadgen.comparison.pairs import METRICS
from loadgen.comparison.ranking import Ranking, neighbours, rank
from loadgen.comparison.stages import TITLES, StageAccount
from loadgen.comparison.summaries import CellSummary
from loadgen.quantities import number, sentence, share, signed_ms
from loadgen.records.run import Cell, Experiment, Label, Record, shown
from loadgen.result.checks.generator import RECONNECT_LIMIT
from loadgen.result.checks.registry import CHECKS, Check, complaint, complaints, invalidating
from loadgen.result.checks.run import same_payload
from loadgen.studies.causes.analyse import CausesFound
from loadgen.studies.load.analyse import FORMED_FACTOR

MIN_STAGE_SHARE = 0.05
MAX_STAGES = 3


def explain_stages(account: StageAccount) -> list[str]:
    """Which stages make up the difference of the mean latencies, the largest first; empty without both accounts. Where
    a server contradicts what was measured, that, and no breakdown."""
    if refused := [
        f"{shown(arm.label)}'s own statistics contradict the measured latency ({number(arm.client_total_ms)} ms on "
        f"average), so no latency breakdown is shown: {'; '.join(arm.contradictions[:MAX_STAGES])}."
        for arm in account.sides
        if arm is not None and arm.contradictions
    ]:
        return refused
    base, arm, total = account.baseline_stages, account.arm_stages, account.difference_ms
    if base is None or arm is None or total is None:
        return []
    larger = max(base.client_total_ms, arm.client_total_ms)
    means = " and ".join(f"{number(side.client_total_ms)} ms on {shown(side.label)}" for side in (base, arm))
    if abs(total) < 0.01 * larger:
        return [f"Requests take the same time on both arms ({means})."]
    parts = [
        f"{TITLES[d.stage]} {signed_ms(d.difference_ms)}" + (f" ({_percent(d.share)})" if d.share is not None else "")
        for d in account.differences[:MAX_STAGES]
        if abs(d.difference_ms) >= MIN_STAGE_SHARE * abs(total)
    ]
    return [f"Requests take {means} on average. {shown(arm.label)}'s {signed_ms(total)} are: {'; '.join(parts)}."]


def _percent(value: float) -> str:
    return share(value) if value >= 0 else f"−{share(-value)}"


def explain_saturation(summaries: Sequence[CellSummary]) -> list[str]:
    """Which arm did not sustain the rate of an open loop."""
    return [
        sentence(f"{shown(summary.label)} was {summary.open_loop.saturation}")
        for summary in summaries
        if summary.open_loop is not None and summary.open_loop.saturation
    ]


def explain_reconnects(summaries: Sequence[CellSummary]) -> list[str]:
    """Which server closed its connections, so that clients had to connect again."""
    return [
        f"{shown(summary.label)} closed its connection before {share(summary.reconnect_share)} of the requests; the "
        "time to connect again is part of its latency."
        for summary in summaries
        if summary.reconnect_share is not None and summary.reconnect_share > RECONNECT_LIMIT
    ]


def explain_batching(cell: Cell, summaries: Sequence[CellSummary]) -> list[str]:
    if cell.concurrency <= 1:
        return []
    means = {shown(s.label): s.executed_batch_mean for s in summaries if s.executed_batch_mean is not None}
    if not means:
        return []
    text = ", ".join(f"{number(mean)} on {label}" for label, mean in sorted(means.items()))
    idle = [label for label, mean in sorted(means.items()) if mean < FORMED_FACTOR * cell.batch_size]
    return [f"Mean executed batch: {text}" + (f"; batching never formed on {' and '.join(idle)}." if idle else ".")]


class ScenarioVerdict(Record, frozen=True, kw_only=True):
    """One arm beside the baseline in one scenario: the outcome of the leading metric, in one sentence, and why in a few
    more."""

    scenario: str
    baseline: Label
    arm: Label
    metric: str
    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]


class Verdict(Record, frozen=True, kw_only=True):
    """What a reader takes away. `caveats` come first where they are shown, then `sentence`."""

    valid: bool
    sentence: str
    """Names every metric with a decided difference, also those that do not lead their scenario."""
    main_scenario: str | None
    """The most loaded scenario; its reasons stand for the others where there is room for one."""
    scenarios: tuple[ScenarioVerdict, ...]
    rankings: tuple[Ranking, ...]
    """One a scenario with a valid comparison."""
    failed: tuple[str, ...]
    """Each check that took a verdict away, with what it covers."""
    caveats: tuple[str, ...]


def reach_verdict(facts: Facts, titles: dict[Label, str], checks: Sequence[Check]) -> Verdict:
    """`titles` names the arms for people, by label; the comparisons are those after the checks."""
    experiment, failed = facts.run.experiment, invalidating(checks)
    against = [one for one in facts.comparisons if one.baseline == experiment.baseline.label]
    scenarios = tuple(_scenario(facts, leading) for leading in leading_comparisons(against))
    rankings = rank(facts.comparisons, experiment.baseline.label)
    return Verdict(
        valid=not failed,
        sentence=_sentence(experiment, titles, facts.comparisons, rankings, failed),
        main_scenario=_main_scenario(experiment, scenarios),
        scenarios=scenarios,
        rankings=rankings,
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


def _sentence(
    experiment: Experiment,
    titles: dict[Label, str],
    comparisons: Sequence[Comparison],
    rankings: Sequence[Ranking],
    failed: Sequence[Check],
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
    scenarios, lost = ({c.scenario for c in group} for group in (leading, set(leading) - set(usable)))
    if lost:
        stands = f"No verdict on {len(lost)} of {len(scenarios)} scenarios, see the failed checks; otherwise: "
    elif failed:
        stands = "The run is not valid as a whole, see the failed checks; in what stands: "
    names = {label: f"{shown(label)} ({title})" for label, title in titles.items()}
    if len(experiment.arms) == 2:
        return stands + _two_arms(comparisons, usable, cells, names, stands)
    return stands + _many_arms(comparisons, rankings, cells, names)


def _two_arms(
    comparisons: Sequence[Comparison],
    usable: Sequence[Comparison],
    cells: dict[str, Cell],
    names: dict[Label, str],
    before: str,
) -> str:
    loads = [c for c in usable if c.metric == "throughput"] or usable
    decided = [c for c in loads if c.winner] or [c for c in usable if c.winner]
    if not decided:
        besides = decided_besides(comparisons, cells)
        metrics = dict.fromkeys(METRICS[c.metric].title for c in usable) if besides else ()
        what = f" in {join(list(metrics))}" if metrics else ""
        parts = [*groups(usable, cells), *besides]
        return f"{'no' if before else 'No'} winner{what} between {' and '.join(names.values())}: {'; '.join(parts)}."
    main = max(decided, key=lambda c: weight(cells[c.scenario]))
    first = claim(main, names, f" {place(cells[main.scenario])}")
    rest = groups([c for c in usable if c is not main], cells)
    return "; ".join([first, *rest, *decided_besides(comparisons, cells)]) + "."


def _many_arms(
    comparisons: Sequence[Comparison],
    rankings: Sequence[Ranking],
    cells: dict[str, Cell],
    names: dict[Label, str],
) -> str:
    """The order in the most loaded scenario with the largest lead there, then the order in the others."""
    loads = [one for one in rankings if one.metric == "throughput"] or rankings
    main = max(loads, key=lambda one: weight(cells[one.scenario]))
    apart = [claim(one) for one in neighbours(comparisons, main) if one.winner]
    first = f"By {METRICS[main.metric].title} {place(cells[main.scenario])}: {main.words(names)}."
    first += f" {sentence('; '.join(apart))}" if apart else ""
    same: dict[str, list[Cell]] = {}
    for one in rankings:
        if one is not main:
            same.setdefault(one.words(), []).append(cells[one.scenario])
    rest = [f"{places(where)}: {words}" for words, where in same.items()]
    besides = decided_besides(comparisons, cells)
    return " ".join([first, *(sentence("; ".join(part)) for part in (rest, besides) if part)])


def _scenario(facts: Facts, leading: Comparison) -> ScenarioVerdict:
    main = claim(leading)
    others = [
        claim(c)
        for c in facts.comparisons
        if (c.scenario, c.pairing) == (leading.scenario, leading.pairing)
        and c is not leading
        and c.verdict in ("arm_better", "baseline_better", "no_difference")
    ]
    reasons = [
        text
        for found in facts.of(CausesFound).cells
        if (found.cell, found.pairing) == (leading.scenario, leading.pairing)
        for text in (found.sentence, *found.notes)
    ]  # also without a verdict: what was taken away was seen to matter, whatever the arms were compared for
    if leading.verdict != "invalid" or reasons:
        for account in facts.accounts:
            if (account.cell, account.baseline, account.arm) == (leading.scenario, *leading.pairing):
                reasons += explain_stages(account)
        cell = next(cell for cell in facts.run.experiment.cells if cell.name == leading.scenario)
        own = [s for s in facts.summaries if s.cell == leading.scenario and s.label in leading.pairing]
        reasons += [*explain_saturation(own), *explain_reconnects(own), *explain_batching(cell, own)]
    return ScenarioVerdict(
        scenario=leading.scenario,
        baseline=leading.baseline,
        arm=leading.arm,
        metric=leading.metric,
        outcome=leading.verdict,
        sentence=sentence("; ".join([main, *others])),
        reasons=tuple(reasons),
    )
