"""The verdict in words: valid or not, which arm is better by how much in each workload, why, and the caveats.

Outcomes come from `comparisons` and validity from `checks`; no arm is called faster if its comparison is inconclusive.
`Stopping` says when and why the load ended, and what the intervals include.

**Beside the lead** the headline names the part of it with a known cause, and settings that differ. The part is a factor
of the lead that was measured: by the ablation of the queue delay; without one, under serial load, by
the time that requests waited in the queue, up to the queue delay; or by the requests that stalled for 0.5 s. It is
named if it is more than half of the lead, in logarithms: 1.6× of 2.4× is 54 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from loadgen.base.quantities import (
    Interval,
    counted,
    join,
    number,
    possessive,
    ratio,
    sentence,
    share,
    signed_ms,
    significant,
)
from loadgen.checks.arms import handicap
from loadgen.checks.generator import RECONNECT_LIMIT
from loadgen.checks.registry import CHECKS, complaints, invalidating
from loadgen.checks.run import same_payload
from loadgen.experiment.schedule import load_workloads
from loadgen.findings.causes import CauseEffect, CausesFound
from loadgen.findings.load import ExecutedBatches, LoadFound
from loadgen.findings.tokens import TokensFound, explain_tokens
from loadgen.metrics.breakdown import STAGE_TITLES, ArmStages, LatencyBreakdown, find_stalls
from loadgen.metrics.claims import (
    WorkloadRanking,
    claim,
    groups,
    neighbours,
    other_decided_metrics,
    place,
    places,
    rank,
    weight,
)
from loadgen.metrics.comparisons import Comparison, Outcome, advantage, leading_comparisons
from loadgen.metrics.facts import Facts, WorkloadFacts
from loadgen.metrics.registry import METRICS, SERVED, THROUGHPUT, TPOT
from loadgen.metrics.summaries import WorkloadSummary, figure_of
from loadgen.metrics.surface import Surface, rows_in_words, surface_of, uncertain
from loadgen.records.checks import Check
from loadgen.records.model_config import queue_policy_of, whole
from loadgen.records.run import ArmRecord, Experiment, Label, Record, RunState, Workload
from loadgen.verdict.headline import consequence, headline, main_comparison

MIN_STAGE_SHARE = 0.05
MOST_DETECTABLE = 100.0
"""A smallest detectable difference beyond this says only that there are too few rounds."""
MAX_STAGES = 3


class ScenarioVerdict(Record, frozen=True, kw_only=True):
    """One arm beside the baseline in one workload: the outcome of the leading metric and the reasons for it."""

    workload: str = msgspec.field(name="scenario")
    baseline: Label
    arm: Label
    metric: str
    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]


NOT_TO_BE_CITED = "Others used the machine, so do not cite the figures."


class Verdict(Record, frozen=True, kw_only=True):
    """The result as sentences. Reports show `caveats` first, then `sentence`."""

    valid: bool
    headline: str
    """The result in at most 32 words."""
    consequence: str = ""
    """What that means: the p99 latency of both arms, and the servers or the money that a load takes."""
    sentence: str
    """Names every metric with a decided difference, also those that do not lead their scenario."""
    main_scenario: str | None
    """The most loaded scenario."""
    scenarios: tuple[ScenarioVerdict, ...]
    rankings: tuple[WorkloadRanking, ...]
    """A ranking per scenario with a valid comparison."""
    surface: Surface | None = None
    """The decision surface, with --surface."""
    failed: tuple[str, ...]
    """Each check that removed a verdict, with the scenarios it covers."""
    caveats: tuple[str, ...]

    @property
    def untold(self) -> tuple[str, ...]:
        """Those of `failed` that the headline does not say."""
        return tuple(text for text in self.failed if text[1:].rstrip(".") not in self.headline)


def reach_verdict(facts: Facts, checks: Sequence[Check]) -> Verdict:
    """The comparisons are those after the checks."""
    experiment, failed = facts.run.experiment, complaints(checks)
    disturbed = complaints(checks, "roughens")
    against = [c for c in facts.comparisons if c.baseline == experiment.baseline_in(c.workload)]
    scenarios = tuple(_scenario(facts, leading) for leading in leading_comparisons(against))
    rankings = rank(facts.comparisons, experiment.baseline_in)
    apart = next((check for check in invalidating(checks) if check.name == same_payload.name), None)
    slowed = complaints([check for check in checks if check.name == handicap.name])
    surface = surface_of(experiment, facts.comparisons)
    decided = main_comparison(facts.comparisons, rankings, experiment.by_name)
    cause = "" if decided is None else explain_lead(facts, decided)
    text = _sentence(facts, rankings, surface, failed, slowed, decided, cause)
    if disturbed and not failed:
        text = f"Rough: {text} {NOT_TO_BE_CITED}"
    usable = {s.workload for s in scenarios if s.outcome != "invalid"} or {s.workload for s in scenarios}
    main = max((workload for workload in experiment.workloads if workload.name in usable), key=weight, default=None)
    return Verdict(
        valid=not failed and not disturbed,
        headline=headline(experiment, facts.run.arms, facts.comparisons, rankings, checks, cause),
        consequence="" if failed or disturbed else consequence(experiment, facts.run.arms, facts.comparisons, rankings),
        sentence=text if apart is None else f"No winner: {apart.detail}, so this does not compare servers.",
        main_scenario=None if main is None else main.name,
        scenarios=scenarios,
        rankings=rankings,
        surface=surface,
        failed=failed,
        caveats=disturbed
        + tuple(
            sentence(check.detail)
            for check in (*(check for check in checks if check.state in CHECKS[check.name].caveat), *_tolerated(checks))
        )
        + _limits_of_smoke(facts),
    )


def no_verdict(checks: Sequence[Check]) -> Verdict:
    """The verdict where none could be reached, which one of the checks says."""
    failed = complaints(checks)
    text = " ".join(["No verdict.", *failed[-1:]])
    return Verdict(
        valid=False, headline=text, sentence=text, main_scenario=None, scenarios=(), rankings=(), failed=failed,
        caveats=(),
    )  # fmt: skip


def _limits_of_smoke(facts: Facts) -> tuple[str, ...]:
    """What the smallest preset cannot decide; empty for the others and without a comparison."""
    leading = leading_comparisons(facts.comparisons)
    if facts.run.experiment.preset != "smoke" or not leading:
        return ()
    fewest, most = min(c.pairs for c in leading), max(c.pairs for c in leading)
    rounds = counted(fewest, "round") if fewest == most else f"{fewest} to {most} rounds"
    effects = [c.minimal_detectable_effect for c in leading if c.minimal_detectable_effect is not None]
    smallest = min(effects, default=math.inf)
    seen = f"differences of {share(smallest)} or more, in some workloads only larger ones"
    if smallest > MOST_DETECTABLE:
        seen = "no difference for certain"
    return (
        f"A smoke run, to see that everything works: {rounds} of each workload show {seen}, so inconclusive does not "
        "mean equal. For a verdict run again with --preset quick.",
    )


def _tolerated(checks: Sequence[Check]) -> list[Check]:
    """Differences between the arms' settings that leave the verdict standing, most of them requested."""
    return [
        check for check in checks if check.ok is False and check.name.startswith("same_") and check.severity == "warns"
    ]


def _sentence(
    facts: Facts,
    rankings: Sequence[WorkloadRanking],
    surface: Surface | None,
    failed: Sequence[str],
    slowed: Sequence[str],
    decided: Comparison | None,
    cause: str,
) -> str:
    """`slowed` are those of the `failed` checks that name an arm which its own settings make slow: they come first.
    `cause` explains the lead of `decided`, the headline's comparison."""
    leading = leading_comparisons(facts.comparisons)
    usable = [c for c in leading if c.verdict != "invalid"]
    if not leading:
        return "Nothing was compared."
    if not usable:
        return " ".join(["No verdict.", *(slowed or failed)[:1]])
    before = ""
    scenarios, lost = ({c.workload for c in group} for group in (leading, set(leading) - set(usable)))
    if lost and slowed:
        before = f"{slowed[0]} Otherwise: "
    elif lost:
        before = f"No verdict on {len(lost)} of {len(scenarios)} workloads (see the failed checks); otherwise: "
    elif failed:
        before = "The run is not valid (see the failed checks); the workloads that are complete show: "
    names, two = facts.names, len(facts.run.experiment.arms) == 2
    if surface is not None:
        text = "; ".join(rows_in_words(surface, names)) + "."
    else:
        text = _two_arms(facts, usable, decided, cause) if two else _many_arms(facts, usable, rankings)
    return before + text if before or text.startswith(tuple(names.values())) else sentence(text)


def _two_arms(facts: Facts, usable: Sequence[Comparison], main: Comparison | None, cause: str) -> str:
    """The headline's comparison, then the other workloads by outcome, then the other metrics."""
    experiment, names = facts.run.experiment, facts.names
    workloads, margin = experiment.by_name, experiment.equivalence_margin
    besides = other_decided_metrics(facts.comparisons, workloads, names)
    if main is None:
        metrics = dict.fromkeys(METRICS[c.metric].title for c in usable) if besides else ()
        what = f" in {join(list(metrics))}" if metrics else ""
        parts = [*groups(usable, workloads, margin, names), *besides]
        return f"no winner{what} between {' and '.join(names.values())}: {'; '.join(parts)}."
    first = claim(main, names, place(workloads[main.workload])) + cause
    rest = groups([c for c in usable if c is not main], workloads, margin, names)
    return "; ".join([first, *rest, *besides]) + "."


def _many_arms(facts: Facts, usable: Sequence[Comparison], rankings: Sequence[WorkloadRanking]) -> str:
    """The order in the most loaded workload with the lead of each arm over the next, then the order in the others."""
    workloads, names = facts.run.experiment.by_name, facts.names
    besides = other_decided_metrics(facts.comparisons, workloads, names)
    if not rankings:  # no leading metric could be measured, as with too few requests for a percentile
        where = places([workloads[name] for name in dict.fromkeys(c.workload for c in usable)])
        return "; ".join([f"no ranking of {join(list(names.values()))}: inconclusive {where}", *besides]) + "."
    loads = [ranking for ranking in rankings if ranking.metric in SERVED] or rankings
    main = max(loads, key=lambda ranking: weight(workloads[ranking.workload]))
    apart = [claim(c, names) + explain_lead(facts, c) for c in neighbours(facts.comparisons, main) if c.winner]
    first = f"by {METRICS[main.metric].title} {place(workloads[main.workload])}: {main.words(names)}."
    same: dict[str, list[Workload]] = {}
    for ranking in rankings:
        if ranking is not main:
            same.setdefault(ranking.words(names), []).append(workloads[ranking.workload])
    rest = [f"{places(where)}: {words}" for words, where in same.items()]
    return " ".join([first, *(sentence("; ".join(part)) for part in (apart, rest, besides) if part)])


def _scenario(facts: Facts, leading: Comparison) -> ScenarioVerdict:
    margin, key = facts.run.experiment.equivalence_margin, (leading.workload, leading.pairing)
    compared = [c for c in facts.comparisons if (c.workload, c.pairing) == key]
    decided = [
        c for c in compared if c is not leading and c.verdict in ("arm_better", "baseline_better", "no_difference")
    ]
    reasons = [
        text
        for causes in CausesFound.among(facts.findings).workloads
        if (causes.workload, causes.pairing) == key
        for text in (causes.sentence, *causes.notes)
    ]  # also without a verdict, since an ablation shows a cause by itself
    if leading.verdict != "invalid" or reasons:
        for breakdown in facts.breakdowns:
            if (breakdown.workload, breakdown.baseline, breakdown.arm) == (leading.workload, *leading.pairing):
                reasons += explain_stages(breakdown, facts.names)
        reasons += _explain_tokens(facts, leading)
        summaries = [s for s in facts.summaries if s.workload == leading.workload and s.label in leading.pairing]
        reasons += [text for summary in summaries for text in _explain_arm(summary, facts.names)]
        workload = facts.run.experiment.by_name[leading.workload]
        batches = LoadFound.among(facts.findings).of_workload(leading.workload)
        reasons += _explain_batching(workload, [b for b in batches if b.label in leading.pairing], facts.names)
    return ScenarioVerdict(
        workload=leading.workload,
        baseline=leading.baseline,
        arm=leading.arm,
        metric=leading.metric,
        outcome=leading.verdict,
        sentence=sentence("; ".join(claim(c, facts.names, margin=margin) for c in (leading, *decided))),
        reasons=tuple(reasons),
    )


def _explain_tokens(facts: Facts, leading: Comparison) -> list[str]:
    """Where the time of a token goes on both arms, as far as their servers report the steps of their engines."""
    totals = {total.label: total for total in TokensFound.among(facts.findings).in_workload(leading.workload)}
    if not all(label in totals for label in leading.pairing):
        return []
    paces = {
        summary.label: pace
        for summary in facts.summaries
        if summary.workload == leading.workload and (pace := figure_of(summary, TPOT)) is not None
    }
    arms = [arm for arm in facts.run.arms if arm.label in leading.pairing]
    reported = {name: {arm.in_effect.get(name) for arm in arms} for name in ("engine", "precision", "device")}
    alike = None not in reported["engine"] and all(len(values - {None}) == 1 for values in reported.values())
    baseline, arm = (totals[label] for label in leading.pairing)
    text = explain_tokens(baseline, arm, paces, facts.names, alike=alike)
    return [text] if text else []


def explain_stages(breakdown: LatencyBreakdown, names: Mapping[Label, str]) -> list[str]:
    """The stages that make up the difference of the mean latencies, the largest first; empty unless both arms report
    them. If a server contradicts the measurement, the contradiction instead."""
    if refused := [
        f"{possessive(names[arm.label])} own statistics do not account for the measured latency "
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
    means = " and ".join(f"{number(side.client_total_ms)} ms on {names[side.label]}" for side in (base, arm))
    if abs(total) < 0.01 * larger:
        return [f"Requests take the same time on both arms ({means})."]
    parts = [
        f"{STAGE_TITLES[d.stage]} {signed_ms(d.difference_ms)}"
        + (f" ({_percent(d.share)})" if d.share is not None else "")
        for d in breakdown.differences[:MAX_STAGES]
        if abs(d.difference_ms) >= MIN_STAGE_SHARE * abs(total)
    ]
    whose = possessive(names[arm.label])
    return [f"Requests take {means} on average. {whose} {signed_ms(total)} come from {', '.join(parts)}."]


def _percent(value: float) -> str:
    return share(value) if value >= 0 else f"−{share(-value)}"


def _explain_arm(summary: WorkloadSummary, names: Mapping[Label, str]) -> list[str]:
    """Explain an arm: an open loop's rate that it did not sustain, and connections that it closed."""
    reasons = []
    if summary.open_loop is not None and summary.open_loop.saturation:
        reasons.append(f"{names[summary.label]} was {summary.open_loop.saturation}.")
    if summary.reconnect_share is not None and summary.reconnect_share > RECONNECT_LIMIT:
        reasons.append(
            f"{names[summary.label]} closed its connection before {share(summary.reconnect_share)} of the requests; "
            "reconnecting is part of its latency."
        )
    return reasons


def _explain_batching(workload: Workload, batches: Sequence[ExecutedBatches], names: Mapping[Label, str]) -> list[str]:
    means = {names[arm.label]: arm.mean for arm in batches if arm.mean is not None}
    if workload.concurrency <= 1 or not means:
        return []
    text = ", ".join(f"{number(mean)} on {label}" for label, mean in sorted(means.items()))
    idle = sorted(names[arm.label] for arm in batches if arm.formed is False)
    return [f"Mean executed batch: {text}" + (f"; {join(idle)} did not merge requests." if idle else ".")]


NAMED_SHARE = 0.5
"""Share of a lead, in logarithms, above which its cause is named."""
COSTLY: tuple[tuple[str, str], ...] = (
    ("precision", "precision"),
    ("threads", "threads"),
    ("pad_to", "padding"),
    ("spinning", "thread spinning"),
)
"""Settings in effect that change what a request costs, and what they are called."""


LeadFactor = tuple[float, str, Interval | None]
"""A measured factor of a lead, its cause, and its interval if it has one."""


def explain_lead(facts: Facts, comparison: Comparison) -> str:
    """A clause that follows the claim of a decided comparison, with its comma; empty if nothing is to be named."""
    lead, winner, loser = advantage(comparison), comparison.winner, comparison.loser
    if lead is None or winner is None or loser is None:
        return ""
    parts: list[LeadFactor] = []
    differences = _settings(facts, comparison)
    load = next((planned for planned in facts.planned if planned.workload.name == comparison.workload), None)
    if comparison.metric == THROUGHPUT.name and load is not None and not load.workload.is_open:
        delay, stalls = _queue_delay(facts, load, winner, loser), _stalls(facts, load, winner, loser)
        parts = [part for part in (delay, stalls) if part is not None and _explains(part[0], lead.factor)]
        differences += [] if delay else _delays(facts, load, winner, loser, lead.factor)
        differences += [] if stalls else _policies(facts, winner, loser)
    clauses = [_factor_words(*max(parts), lead.factor)] if parts else []
    clauses += [f"with {join(differences)}"] if differences else []
    return "".join(f", {clause}" for clause in clauses)


def _factor_words(factor: float, cause: str, ci95: Interval | None, lead: float) -> str:
    """ "of which 5.1× is B's queue delay" """
    shown_factor = f"{number(factor, 2 if factor >= 2.0 else 3)}×" if ci95 is None else ratio(factor, ci95)
    return f"of which {shown_factor} is {cause}" if factor < lead else f"all of which is {cause} ({shown_factor})"


def _explains(factor: float, lead: float) -> bool:
    return factor > 1.0 and lead > 1.0 and math.log(factor) > NAMED_SHARE * math.log(lead)


def _queue_delay(facts: Facts, load: WorkloadFacts, winner: Label, loser: Label) -> LeadFactor | None:
    """The factor of the slower arm's queue delay over the faster one's; None if it was not measured."""
    effects = _ablations(facts, load.workload.name)
    cause = f"{possessive(facts.names[loser])} queue delay"
    if (slower := effects.get(loser)) is not None and slower.ratio is not None:
        seen = slower.ci95_ms is not None and slower.ci95_ms[0] > 0.0
        other = effects[winner].ratio if winner in effects else None
        return slower.ratio / (other or 1.0) if seen else 1.0, cause, slower.ratio_ci95 if other is None else None
    if load.workload.concurrency > 1:
        return None
    own_factor, other_factor = (_serial_factor(facts, load, label) for label in (loser, winner))
    return None if own_factor is None or other_factor is None else (own_factor / other_factor, cause, None)


def _serial_factor(facts: Facts, load: WorkloadFacts, label: Label) -> float | None:
    """Mean latency over that without the wait in the queue, up to the queue delay; None if the wait is unknown."""
    held_ms, stages = _held_us(_arm(facts, label)) / 1000.0, _stages(load, label)
    if not held_ms:
        return 1.0
    if stages is None or (waited_ms := stages.stages_ms["queue"]) is None:
        return None
    total_ms = stages.client_total_ms
    return total_ms / (total_ms - min(waited_ms, held_ms, 0.999 * total_ms))


def _ablations(facts: Facts, workload: str) -> dict[Label, CauseEffect]:
    """The ablation of each arm's queue delay in a workload."""
    return {
        effect.label: effect
        for causes in CausesFound.among(facts.findings).workloads
        if causes.workload == workload
        for cause in causes.causes
        if cause.name == "queue_delay"
        for effect in cause.effects
    }


def _stalls(facts: Facts, load: WorkloadFacts, winner: Label, loser: Label) -> LeadFactor | None:
    """The factor of the slower arm's stalls over the faster one's; None if a stall could not be told apart."""
    slower, other = (
        find_stalls([block for block in load.stored if block.record.label == label]) for label in (loser, winner)
    )
    if slower is None:
        return None
    return slower.factor / (1.0 if other is None else other.factor), f"stalls of 0.5 s on {facts.names[loser]}", None


def _policies(facts: Facts, winner: Label, loser: Label) -> list[str]:
    slower, other = (arm is not None and queue_policy_of(arm) for arm in (_arm(facts, loser), _arm(facts, winner)))
    return [f"a queue policy on {facts.names[loser]}"] if slower and not other else []


def _delays(facts: Facts, load: WorkloadFacts, winner: Label, loser: Label, lead: float) -> list[str]:
    """The queue delays, if the slower arm holds requests for longer and that can be more than half of the lead: a
    request may wait for its own batch and for the one before it."""
    pair = {label: _arm(facts, label) for label in sorted((winner, loser))}
    held_us = {label: _held_us(arm) for label, arm in pair.items()}
    mean_ms = next((summary.latency_ms("mean") for summary in load.summaries if summary.label == loser), None)
    if held_us[loser] <= held_us[winner] or mean_ms is None:
        return []
    stages, most_ms = _stages(load, loser), 2.0 * held_us[loser] / 1000.0
    if stages is not None and (waited_ms := stages.stages_ms["queue"]) is not None:
        most_ms = min(most_ms, waited_ms)
    if most_ms < mean_ms and not _explains(mean_ms / (mean_ms - most_ms), lead):
        return []
    return [
        f"different queue delays ({', '.join(_delay_words(facts.names[label], arm) for label, arm in pair.items())})"
    ]


def _delay_words(name: str, arm: ArmRecord | None) -> str:
    delay = None if arm is None else whole(arm.in_effect.get("max_queue_delay_us"))
    return f"{name} {delay or 0:,} µs" + (", not when idle" if delay and not _held_us(arm) else "")


def _stages(load: WorkloadFacts, label: Label) -> ArmStages | None:
    """An arm's latency breakdown, unless its server contradicts the measurement."""
    return next((arm for arm in load.stages if arm.label == label and not arm.contradictions), None)


def _held_us(arm: ArmRecord | None) -> int:
    """How long an arm holds a request back for others though it could execute it; 0 if that is unknown."""
    if arm is None or arm.in_effect.get("lone_requests_wait") == "false":
        return 0
    return whole(arm.in_effect.get("max_queue_delay_us")) or 0


def _settings(facts: Facts, comparison: Comparison) -> list[str]:
    """The settings of COSTLY that both arms report with other values, the baseline's first."""
    arms = [arm for label in comparison.pairing if (arm := _arm(facts, label)) is not None]
    on_gpu = all(str(arm.in_effect.get("device")).startswith("cuda") for arm in arms)
    differences = []
    for name, title in COSTLY:
        values = [str(arm.in_effect[name]) for arm in arms if arm.in_effect.get(name) is not None]
        if len(values) == 2 and values[0].lower() != values[1].lower() and not (on_gpu and name == "threads"):
            texts = [value.upper() if name == "precision" else value for value in values]
            named = ", ".join(f"{facts.names[arm.label]} {text}" for arm, text in zip(arms, texts, strict=True))
            differences.append(f"different {title} ({named})")
    return differences


def _arm(facts: Facts, label: Label) -> ArmRecord | None:
    return next((arm for arm in facts.run.arms if arm.label == label), None)


WORTH_SAYING = 0.2
"""A correlation that makes an interval a fifth wider."""
ONE_START = "The servers were started once, so the intervals do not include what a restart changes."


class Stopping(Record, frozen=True, kw_only=True):
    """The rule that was set before the run, and how the run ended."""

    rule: Literal["planned", "by time", "until decided"]
    ended_by: Literal["plan", "time", "decided", "time limit"] | None
    """None if the run did not end by itself."""
    time_limit_minutes: float | None
    """Time limit of the load, with the rule "until decided"."""
    restarts: int
    """Fresh starts of the servers."""
    pairs: dict[str, int]
    """Complete pairs of blocks by scenario; the fewest, with several arms."""
    undecided: tuple[str, ...]
    """Scenarios in which a leading comparison with the baseline is inconclusive."""
    sentence: str
    """How it ended."""
    coverage: str
    """What the intervals include and leave out."""


def describe_stopping(experiment: Experiment, state: RunState | None, comparisons: Sequence[Comparison]) -> Stopping:
    """Describe the end of a run by the comparisons before the checks, which do not affect when to stop."""
    names = [workload.name for workload in load_workloads(experiment.workloads)]
    against = [c for c in comparisons if c.baseline == experiment.baseline_in(c.workload)]
    leading = [c for c in against if c.leading and c.workload in names]
    undecided = tuple(dict.fromkeys(c.workload for c in leading if c.verdict == "inconclusive"))
    ended: Literal["plan", "time", "decided", "time limit"] | None = None
    if state is not None and state.state == "finished":
        ended = "plan" if experiment.minutes is None else "time"
        if experiment.until_decided:
            ended = "time limit" if undecided else "decided"
        if (surface := surface_of(experiment, comparisons)) is not None:
            ended = "time" if uncertain(surface) else "decided"
    pairs: dict[str, int] = {}
    for c in leading:
        pairs[c.workload] = min(c.pairs, pairs.get(c.workload, c.pairs))
    return Stopping(
        rule="until decided" if experiment.until_decided else "planned" if experiment.minutes is None else "by time",
        ended_by=ended,
        time_limit_minutes=experiment.time_limit_minutes,
        restarts=experiment.restarts,
        pairs=pairs,
        undecided=undecided,
        sentence=_stopping_sentence(experiment, ended, pairs, undecided),
        coverage=_coverage(experiment, ended, leading) if pairs else "",
    )


def _stopping_sentence(
    experiment: Experiment, ended: str | None, pairs: dict[str, int], undecided: Sequence[str]
) -> str:
    if not pairs:
        return "No round of blocks was planned."
    fewest, most = min(pairs.values()), max(pairs.values())
    count = counted(fewest, "round") if fewest == most else f"{fewest} to {most} rounds"
    if any(workload.scenario == "shadow" for workload in experiment.workloads):
        return f"Ended after {counted(fewest, 'block')} of time."
    if ended == "decided":
        return f"Stopped when every workload was decided, after {count} of each."
    if ended == "time limit":
        limit = counted(significant(experiment.time_limit_minutes or 0.0, 3), "minute")
        names = ", ".join(undecided)
        return f"Stopped by the time limit of {limit} of load, after {count} of each; inconclusive: {names}."
    if ended is None:
        return f"Ended early, after {count} of each workload."
    starts = f" over {experiment.restarts} starts of the servers" if experiment.restarts > 1 else ""
    cold = sum(workload.rounds for workload in experiment.workloads if workload.scenario == "cold-start")
    apart = f", {cold} of cold starts" if cold and cold != fewest else ""
    if ended == "time":
        time = counted(experiment.minutes or 0.0, "minute")
        apart = ", more where the winner was uncertain" if experiment.is_surface else apart
        return f"As many rounds as {time} allowed: {count} of each workload{starts}{apart}."
    return f"As planned: {count} of each workload{starts}{apart}."


def _coverage(experiment: Experiment, ended: str | None, leading: Sequence[Comparison]) -> str:
    # A run that ended early may not have come to its second start.
    restarted = experiment.restarts > 1 if ended is not None else any(c.restarts > 1 for c in leading)
    text = "The intervals include what a restart changes." if restarted else ONE_START
    if experiment.until_decided:
        text = f"The intervals stay valid although they are computed after every round. {text}"
    correlation = max((c.correlation for c in leading), default=0.0)
    if correlation < WORTH_SAYING:
        return text
    return f"{text} They are wide enough for a correlation of successive rounds of up to {correlation:.1f}."
