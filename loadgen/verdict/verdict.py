"""The verdict in words: valid or not, which arm is better by how much in each workload, why, and the caveats.

Outcomes come from `comparisons` and validity from `checks`; no arm is called faster if its comparison is inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from loadgen.comparison.claims import claim, decided_besides, groups, join, place, places, weight
from loadgen.comparison.comparisons import Comparison, Outcome, leading_comparisons
from loadgen.comparison.facts import Facts
from loadgen.comparison.pairs import METRICS
from loadgen.comparison.ranking import Ranking, neighbours, rank
from loadgen.comparison.stages import TITLES, LatencyBreakdown
from loadgen.comparison.summaries import FORMED_FACTOR, WorkloadSummary
from loadgen.probes.causes_analysis import CausesFound
from loadgen.quantities import number, sentence, share, signed_ms
from loadgen.records.run import Experiment, Label, Record, Workload, shown
from loadgen.verdict.checks.generator import RECONNECT_LIMIT
from loadgen.verdict.checks.handicap import handicap
from loadgen.verdict.checks.registry import CHECKS, Check, complaints, invalidating
from loadgen.verdict.checks.run import same_payload
from loadgen.verdict.lead import beside

Explain = Callable[[Comparison], str]
"""What follows the claim of a comparison; see `beside`."""
MIN_STAGE_SHARE = 0.05
MAX_STAGES = 3


class ScenarioVerdict(Record, frozen=True, kw_only=True):
    """One arm beside the baseline in one workload: the outcome of the leading metric and the reasons for it."""

    scenario: str
    baseline: Label
    arm: Label
    metric: str
    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]


class Verdict(Record, frozen=True, kw_only=True):
    """The result as sentences. Reports show `caveats` first, then `sentence`."""

    valid: bool
    sentence: str
    """Names every metric with a decided difference, also those that do not lead their scenario."""
    main_scenario: str | None
    """The most loaded scenario."""
    scenarios: tuple[ScenarioVerdict, ...]
    rankings: tuple[Ranking, ...]
    """A ranking per scenario with a valid comparison."""
    failed: tuple[str, ...]
    """Each check that removed a verdict, with the scenarios it covers."""
    caveats: tuple[str, ...]


def reach_verdict(facts: Facts, titles: dict[Label, str], checks: Sequence[Check]) -> Verdict:
    """`titles` names the arms for people, by label; the comparisons are those after the checks."""
    experiment, failed = facts.run.experiment, complaints(checks)
    against = [one for one in facts.comparisons if one.baseline == experiment.baseline.label]
    scenarios = tuple(_scenario(facts, leading) for leading in leading_comparisons(against))
    rankings = rank(facts.comparisons, experiment.baseline.label)
    apart = next((check for check in invalidating(checks) if check.name == same_payload.name), None)
    slowed = complaints([check for check in checks if check.name == handicap.name])
    said = _sentence(experiment, titles, facts.comparisons, rankings, failed, slowed, partial(beside, facts))
    usable = {s.scenario for s in scenarios if s.outcome != "invalid"} or {s.scenario for s in scenarios}
    main = max((workload for workload in experiment.workloads if workload.name in usable), key=weight, default=None)
    return Verdict(
        valid=not failed,
        sentence=said if apart is None else f"No winner: {apart.detail}, so this does not compare servers.",
        main_scenario=None if main is None else main.name,
        scenarios=scenarios,
        rankings=rankings,
        failed=failed,
        caveats=tuple(
            sentence(check.detail)
            for check in (*(one for one in checks if one.state in CHECKS[one.name].caveat), *_tolerated(checks))
        ),
    )


def _tolerated(checks: Sequence[Check]) -> list[Check]:
    """Differences between the arms' settings that leave the verdict standing, most of them requested."""
    return [one for one in checks if one.ok is False and one.name.startswith("same_") and one.severity == "warns"]


def _sentence(
    experiment: Experiment,
    titles: dict[Label, str],
    comparisons: Sequence[Comparison],
    rankings: Sequence[Ranking],
    failed: Sequence[str],
    slowed: Sequence[str],
    explain: Explain,
) -> str:
    """`slowed` are those of the `failed` checks that name an arm which its own settings make slow: they come first."""
    workloads = {workload.name: workload for workload in experiment.workloads}
    leading = leading_comparisons(comparisons)
    usable = [c for c in leading if c.verdict != "invalid"]
    if not leading:
        return "Nothing was compared."
    if not usable:
        return " ".join(["No verdict.", *(slowed or failed)[:1]])
    before = ""
    scenarios, lost = ({c.scenario for c in group} for group in (leading, set(leading) - set(usable)))
    if lost and slowed:
        before = f"{slowed[0]} Otherwise: "
    elif lost:
        before = f"No verdict on {len(lost)} of {len(scenarios)} workloads (see the failed checks); otherwise: "
    elif failed:
        before = "The run is not valid (see the failed checks); the workloads that are complete show: "
    names = {label: f"{shown(label)} ({title})" for label, title in titles.items()}
    if len(experiment.arms) == 2:
        found = _two_arms(comparisons, usable, workloads, names, experiment.equivalence_margin, explain)
    else:
        found = _many_arms(comparisons, usable, rankings, workloads, names, explain)
    begins_with_name = found.startswith(tuple(names.values()))
    return before + found if before or begins_with_name else sentence(found)


def _two_arms(
    comparisons: Sequence[Comparison],
    usable: Sequence[Comparison],
    workloads: dict[str, Workload],
    names: dict[Label, str],
    margin: float,
    explain: Explain,
) -> str:
    """The decided comparison with the most load, then the other workloads by outcome, then the other metrics."""
    loads = [c for c in usable if c.metric == "throughput"] or usable
    decided = [c for c in loads if c.winner] or [c for c in usable if c.winner]
    besides = decided_besides(comparisons, workloads)
    if not decided:
        metrics = dict.fromkeys(METRICS[c.metric].title for c in usable) if besides else ()
        what = f" in {join(list(metrics))}" if metrics else ""
        parts = [*groups(usable, workloads, margin), *besides]
        return f"no winner{what} between {' and '.join(names.values())}: {'; '.join(parts)}."
    main = max(decided, key=lambda c: weight(workloads[c.scenario]))
    first = claim(main, names, f" {place(workloads[main.scenario])}") + explain(main)
    rest = groups([c for c in usable if c is not main], workloads, margin)
    return "; ".join([first, *rest, *besides]) + "."


def _many_arms(
    comparisons: Sequence[Comparison],
    usable: Sequence[Comparison],
    rankings: Sequence[Ranking],
    workloads: dict[str, Workload],
    names: dict[Label, str],
    explain: Explain,
) -> str:
    """The order in the most loaded workload with the lead of each arm over the next, then the order in the others."""
    besides = decided_besides(comparisons, workloads)
    if not rankings:  # no leading metric could be measured, as with too few requests for a percentile
        where = places([workloads[name] for name in dict.fromkeys(c.scenario for c in usable)])
        return "; ".join([f"no ranking of {join(list(names.values()))}: inconclusive {where}", *besides]) + "."
    loads = [one for one in rankings if one.metric == "throughput"] or rankings
    main = max(loads, key=lambda one: weight(workloads[one.scenario]))
    apart = [claim(one) + explain(one) for one in neighbours(comparisons, main) if one.winner]
    first = f"by {METRICS[main.metric].title} {place(workloads[main.scenario])}: {main.words(names)}."
    same: dict[str, list[Workload]] = {}
    for one in rankings:
        if one is not main:
            same.setdefault(one.words(), []).append(workloads[one.scenario])
    rest = [f"{places(where)}: {words}" for words, where in same.items()]
    return " ".join([first, *(sentence("; ".join(part)) for part in (apart, rest, besides) if part)])


def _scenario(facts: Facts, leading: Comparison) -> ScenarioVerdict:
    margin, key = facts.run.experiment.equivalence_margin, (leading.scenario, leading.pairing)
    own = [c for c in facts.comparisons if (c.scenario, c.pairing) == key]
    decided = [c for c in own if c is not leading and c.verdict in ("arm_better", "baseline_better", "no_difference")]
    reasons = [
        text
        for found in facts.of(CausesFound).workloads
        if (found.workload, found.pairing) == key
        for text in (found.sentence, *found.notes)
    ]  # also without a verdict, since an ablation shows a cause by itself
    if leading.verdict != "invalid" or reasons:
        for breakdown in facts.breakdowns:
            if (breakdown.workload, breakdown.baseline, breakdown.arm) == (leading.scenario, *leading.pairing):
                reasons += explain_stages(breakdown)
        workload = next(workload for workload in facts.run.experiment.workloads if workload.name == leading.scenario)
        summaries = [s for s in facts.summaries if s.workload == leading.scenario and s.label in leading.pairing]
        reasons += [text for summary in summaries for text in _explain_arm(summary)]
        reasons += _explain_batching(workload, summaries)
    return ScenarioVerdict(
        scenario=leading.scenario,
        baseline=leading.baseline,
        arm=leading.arm,
        metric=leading.metric,
        outcome=leading.verdict,
        sentence=sentence("; ".join(claim(c, margin=margin) for c in (leading, *decided))),
        reasons=tuple(reasons),
    )


def explain_stages(breakdown: LatencyBreakdown) -> list[str]:
    """The stages that make up the difference of the mean latencies, the largest first; empty unless both arms report
    them. If a server contradicts the measurement, the contradiction instead."""
    if refused := [
        f"{shown(arm.label)}'s own statistics do not account for the measured latency "
        f"({number(arm.client_total_ms)} ms on average), so no latency breakdown is shown: "
        f"{'; '.join(arm.contradictions[:MAX_STAGES])}."
        for arm in breakdown.sides
        if arm is not None and arm.contradictions
    ]:
        return refused
    base, arm, total = breakdown.baseline_stages, breakdown.arm_stages, breakdown.difference_ms
    if base is None or arm is None or total is None:
        return []
    larger = max(base.client_total_ms, arm.client_total_ms)
    means = " and ".join(f"{number(side.client_total_ms)} ms on {shown(side.label)}" for side in (base, arm))
    if abs(total) < 0.01 * larger:
        return [f"Requests take the same time on both arms ({means})."]
    parts = [
        f"{TITLES[d.stage]} {signed_ms(d.difference_ms)}" + (f" ({_percent(d.share)})" if d.share is not None else "")
        for d in breakdown.differences[:MAX_STAGES]
        if abs(d.difference_ms) >= MIN_STAGE_SHARE * abs(total)
    ]
    return [f"Requests take {means} on average. {shown(arm.label)}'s {signed_ms(total)} come from {', '.join(parts)}."]


def _percent(value: float) -> str:
    return share(value) if value >= 0 else f"−{share(-value)}"


def _explain_arm(summary: WorkloadSummary) -> list[str]:
    """Explain an arm: an open loop's rate that it did not sustain, and connections that it closed."""
    found = []
    if summary.open_loop is not None and summary.open_loop.saturation:
        found.append(f"{shown(summary.label)} was {summary.open_loop.saturation}.")
    if summary.reconnect_share is not None and summary.reconnect_share > RECONNECT_LIMIT:
        found.append(
            f"{shown(summary.label)} closed its connection before {share(summary.reconnect_share)} of the requests; "
            "reconnecting is part of its latency."
        )
    return found


def _explain_batching(workload: Workload, summaries: Sequence[WorkloadSummary]) -> list[str]:
    means = {shown(s.label): s.executed_batch_mean for s in summaries if s.executed_batch_mean is not None}
    if workload.concurrency <= 1 or not means:
        return []
    text = ", ".join(f"{number(mean)} on {label}" for label, mean in sorted(means.items()))
    idle = [label for label, mean in sorted(means.items()) if mean < FORMED_FACTOR * workload.batch_size]
    return [f"Mean executed batch: {text}" + (f"; {join(idle)} did not merge requests." if idle else ".")]
