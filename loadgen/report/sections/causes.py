"""Sections of the causes: why the arms differ, what each cause saves, and in which stages a request spends its time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import join, number, share, signed_ms
from loadgen.experiment.schedule import has_load
from loadgen.findings.causes import Cause, CausesFound, Untested, WorkloadCauses, per_token, percent
from loadgen.metrics.breakdown import STAGE_TITLES, STAGES, ArmStages, LatencyBreakdown
from loadgen.metrics.claims import verdict_words
from loadgen.metrics.comparisons import winner_of
from loadgen.records.run import Pairing, shown
from loadgen.records.targets import Kind
from loadgen.verdict.result import Result
from loadgen.verdict.verdict import ScenarioVerdict

FOLDED = "folded"


FOLDED_NOTE = (
    "folded: only one arm reports this stage, so its time is counted in the stage where the other arm includes it"
)


def why(result: Result) -> doc.Section | None:
    """The reasons for the differences: a terminal shows those of the most loaded scenario, a page those of all."""
    main = result.verdict.main_scenario
    reasons = [verdict for verdict in result.verdict.scenarios if verdict.reasons]
    blocks: list[doc.Items | doc.Text | doc.Table] = [
        doc.Items([_reasons(result, verdict) for verdict in reasons if verdict.workload == main])
    ]
    for causes in result.of(CausesFound).workloads:
        if causes.workload != main:
            blocks.append(doc.Text(f"{causes.workload}: {causes.sentence}"))
        blocks.append(cause_table(result, causes))
    others: list[doc.Items | doc.Table] = []
    for verdict in reasons:
        if verdict.workload != main:
            key = (verdict.workload, verdict.baseline, verdict.arm)
            others.append(doc.Items([_reasons(result, verdict)]))
            others += [
                stage_table(result, breakdown, on=doc.HTML)
                for breakdown in result.stages
                if (breakdown.workload, breakdown.baseline, breakdown.arm) == key
            ]
    return doc.section(
        "Why",
        *blocks,
        doc.Items([] if main is None else time_spent(result, main)),
        doc.Text(causes_note(result), "note"),
        doc.Text(explain_command(result), "code", on=doc.PAGES),
        *(stage_table(result, breakdown) for breakdown in result.stages if breakdown.workload == main),
        doc.Fold("The other scenarios", tuple(others)),
        causes_chart(result),
        stages_chart(result),
    )


def _reasons(result: Result, verdict: ScenarioVerdict) -> doc.Item:
    pairing = Pairing(verdict.baseline, verdict.arm)
    better = winner_of(verdict.outcome, pairing)
    style = None if better is None else charts.arm_style(result, better)
    return doc.Item(
        verdict_words(verdict.outcome, pairing), style, verdict.workload + _which(result, pairing), verdict.reasons
    )


def _which(result: Result, pairing: Pairing) -> str:
    """A sentence part after a scenario, if there are more than two arms: ", C against A"."""
    return f", {shown(pairing.arm)} against {shown(pairing.baseline)}" if charts.several(result) else ""


def cause_table(result: Result, causes: WorkloadCauses) -> doc.Table:
    """One row per ablation, the causes in their order, then the unattributed rest and the whole difference."""
    base, arm = map(shown, causes.pairing)
    workload = next(workload for workload in result.experiment.workloads if workload.name == causes.workload)

    def of_token(answer_ms: float | None) -> str:
        token_ms = None if answer_ms is None else per_token(workload, answer_ms)
        return "" if token_ms is None else _ms(token_ms)

    rows: list[tuple[str, ...]] = []
    for cause in causes.causes:
        head = (
            _title(cause),
            _ms(cause.difference_ms),
            _interval(cause.ci95_ms if cause.effects else None),
            of_token(cause.difference_ms if cause.effects else None),
            percent(cause.share if cause.found else None),
        )
        tails = [
            (
                shown(effect.label),
                effect.changed,
                f"{number(effect.as_is_ms)} ms",
                f"{number(effect.without_ms)} ms",
                effect.folder,
            )
            for effect in cause.effects
        ]
        tails += [
            (shown(untested.label), f"{_state(untested)}: {untested.reason}", "–", "–", "–")
            for untested in cause.untested
        ]
        rows += [(*(head if place == 0 else ("",) * len(head)), *tail) for place, tail in enumerate(tails)]
    rest = ("unattributed", _ms(causes.unattributed_ms), _interval(causes.unattributed_ci95_ms))
    rows.append((*rest, of_token(causes.unattributed_ms), percent(causes.unattributed_share), "", "", "", "", ""))
    whole = ("the difference", _ms(causes.difference_ms), _interval(causes.ci95_ms), of_token(causes.difference_ms))
    times = (f"{base} {number(causes.baseline_ms)} ms", f"{arm} {number(causes.arm_ms)} ms")
    rows.append((*whole, "100 %", "", "", *times, "blocks"))
    return doc.Table(
        (
            *doc.names("cause"),
            *doc.numbers(f"{arm} − {base}", "95 % interval", "per token", "share"),
            *doc.names("arm"),
            *doc.texts("change"),
            *doc.numbers("before", "after"),
            *doc.texts("measured in"),
        ),
        rows,
        title=f"Causes of the difference in {causes.workload}{_which(result, causes.pairing)}",
        total=True,
        on=doc.PAGES,
    )


def _state(untested: Untested) -> str:
    return "does not apply" if untested.moot else "not measurable" if untested.not_measurable else "not tested"


def _title(cause: Cause) -> str:
    noise = cause.effects and not cause.found and cause.difference_ms is not None
    return f"{cause.title} (within the noise)" if noise else cause.title


def _what(result: Result) -> str:
    """What takes the time that is explained."""
    return result.experiment.kind.value


_PER_TOKEN = {Kind.TENSORS: "", Kind.TOKENS: " Per token: that time divided by the answer's tokens."}


def causes_note(result: Result) -> str:
    """How the causes were found, or what the stages cannot tell without them. Never empty."""
    causes = result.of(CausesFound)
    if causes.workloads:
        base, arm = charts.base_and_arm(result)
        note = (
            "Each ablation removes one cause from one arm, in blocks interleaved with blocks of the unchanged arm. "
            f"Times are means per {_what(result)}. A cause contributes its cost to {arm} minus its cost to {base}. It "
            "counts if its interval excludes 0."
        )
        note += _PER_TOKEN[result.experiment.kind]
        if result.state is None or result.state.state != "finished":
            note += " The run ended before all ablations were done."
        if causes.left_out:
            note += f" No time was left for {', '.join(causes.left_out)}: raise --explain-minutes."
        return note
    if causes.explained == ():
        return f"No mean {_what(result)} times differ by more than the noise and ±δ, so no ablation was run."
    if not any(summary.samples for summary in result.summaries):
        if not has_load(result.experiment):
            return "This run has no load of a fixed size, which is what an ablation explains."
        return "No request was measured under load, so there is nothing to explain."
    why = "the run ended before its ablations" if result.experiment.explain else "no ablation was run; add `--explain`"
    if result.experiment.is_at_best:
        why = "no ablation was run; compare a load with the settings chosen for it and `--explain`"
    if result.experiment.preset == "shadow":
        why = "a shadow has no ablations; `abserve compare --explain` has"
    if result.experiment.kind is Kind.TOKENS:
        if not any(scenario.reasons for scenario in result.verdict.scenarios):
            return f"Where the time of a token goes is not known: {why}."
        return (
            "The time per token is the client's figure; steps and their share of the time are the servers' own. They "
            f"show where the time is spent, but do not prove a cause: {why}."
        )
    if any(arm and not arm.contradictions for breakdown in result.stages for arm in breakdown.sides):
        return f"The latency breakdown shows in which stage the time is spent, but does not prove a cause: {why}."
    return f"No server reports stages that add up, so where a request spends its time is not known, and {why}."


def explain_command(result: Result) -> str:
    """The command that would find the causes; empty where it was run or there is nothing to explain."""
    command = result.environment.command if result.environment else ""
    measured = any(summary.samples for summary in result.summaries)
    asked = result.of(CausesFound).workloads or result.experiment.explain
    if asked or not measured or not command or result.experiment.preset == "shadow":
        return ""
    if command.startswith("abserve tune"):  # it has no such option; the file beside the report repeats the comparison
        command = "abserve compare experiment.yaml"
    return f"{command} --explain"


LEAST_SHARE = 0.05
"""A stage with less of a request's time is not named."""


MOST_STAGES = 3
"""Most stages that a line names."""


def time_spent(result: Result, workload: str) -> list[doc.Item]:
    """Where a mean request of each arm spends its time, the largest stages first; a line per measured arm. Empty for a
    workload without a latency breakdown."""
    breakdowns = [breakdown for breakdown in result.stages if breakdown.workload == workload]
    if not breakdowns:
        return []
    sides = {arm.label: arm for breakdown in breakdowns for arm in breakdown.sides if arm is not None}
    means = {s.label: s.latency_ms("mean") for s in result.summaries if s.workload == workload}
    return [
        doc.Item(_spent(sides.get(label), mean_ms), charts.arm_style(result, label), result.names[label])
        for label in result.experiment.labels
        if (mean_ms := means.get(label)) is not None
    ]


def _spent(arm: ArmStages | None, mean_ms: float) -> str:
    if arm is None:
        return f"{number(mean_ms)} ms per request; its server reports no stages"
    if arm.contradictions:
        return f"{number(mean_ms)} ms per request; its server's stages do not add up to that"
    shares = {stage: (ms or 0.0) / arm.client_total_ms for stage, ms in arm.stages_ms.items()}
    largest = sorted((stage for stage in STAGES if shares.get(stage, 0.0) >= LEAST_SHARE), key=lambda s: -shares[s])
    parts = [f"{share(shares[stage])} {STAGE_TITLES[stage]}" for stage in largest[:MOST_STAGES]]
    return f"{number(arm.client_total_ms)} ms per request: {', '.join(parts)}"


def causes_chart(result: Result) -> doc.Chart | None:
    """What each cause contributes to the difference, with its interval."""
    explained = result.of(CausesFound).workloads
    if not explained:
        return None
    base, arm = charts.base_and_arm(result)
    data: list[doc.Figure] = []
    views = [
        charts.add_view(
            data,
            workload_causes.workload + _which(result, workload_causes.pairing),
            [_cause_bars(result, workload_causes)],
            xaxis=charts.axis(
                f"{shown(workload_causes.arm)} − {shown(workload_causes.baseline)}, ms per {_what(result)}",
                zeroline=True,
            ),
        )
        for workload_causes in sorted(
            explained, key=lambda workload_causes: workload_causes.workload != result.verdict.main_scenario
        )
    ]
    return doc.Chart(
        "causes",
        "Causes of the difference",
        f"{arm[0].upper()}{arm[1:]} minus {base}, in ms of the mean {_what(result)} time, with 95 % intervals: right "
        f"of 0 a cause makes {arm} slower, left of 0 {base}. The causes and the unattributed rest add up to the "
        "difference; a cause within the noise does not count.",
        data,
        {
            "height": 150 + 34 * (max(len(workload_causes.causes) for workload_causes in explained) + 2),
            "bargap": 0.4,
            "showlegend": False,
            "yaxis": charts.ROWS,
        },
        views,
    )


def _cause_bars(result: Result, causes: WorkloadCauses) -> doc.Figure:
    rows: list[tuple[str, float, tuple[float, float] | None, str]] = [
        ("the difference", causes.difference_ms, causes.ci95_ms, "--ink")
    ]
    for cause in causes.causes:
        if cause.difference_ms is not None and cause.effects:
            slower = causes.arm if cause.difference_ms > 0 else causes.baseline
            bar = charts.colour(result, slower) if cause.found else "--line"
            rows.append((charts.label_text(_title(cause)), cause.difference_ms, cause.ci95_ms, bar))
    rows.append(("unattributed", causes.unattributed_ms, causes.unattributed_ci95_ms, "--muted"))
    labels, values, bounds, colours = zip(*rows, strict=True)
    return charts.bars_across(
        "",
        labels,
        values,
        {"color": list(colours)},
        error_x=charts.errors(values, bounds, color="--ink"),
        customdata=[signed_ms(value) for value in values],
        hovertemplate="%{y}: %{customdata}<extra></extra>",
    )


def stage_table(result: Result, breakdown: LatencyBreakdown, on: doc.Format = doc.PAGES) -> doc.Table:
    """Each stage of a request with the total last; without rows where no arm reports stages that add up."""
    rows = stage_rows(breakdown)
    pairing = Pairing(breakdown.baseline, breakdown.arm)
    base, arm = map(shown, pairing)
    return doc.Table(
        (*doc.names("stage"), *doc.numbers(base, arm, f"{arm} − {base}", "share")),
        rows,
        title=f"Mean latency breakdown in {breakdown.workload}{_which(result, pairing)}",
        caption=" ".join(filter(None, (_folded_note(rows), _ensemble_note(result, breakdown)))),
        total=True,
        on=on,
    )


def _folded_note(rows: Sequence[tuple[str, ...]]) -> str:
    """Where the time of folded stages is counted; empty if none is folded."""
    folded = [row[0] for row in rows if FOLDED in row]
    decoding = "decoding in preparing the batch, " if STAGE_TITLES["decode"] in folded else ""
    return f"{FOLDED_NOTE}: {decoding}receiving and encoding in network and client." if folded else ""


def _ensemble_note(result: Result, breakdown: LatencyBreakdown) -> str:
    """Which of the arms are ensembles; empty without."""
    labels = {arm.label for arm in breakdown.sides if arm and not arm.contradictions}
    ensembles = [shown(arm.label) for arm in result.arms if arm.steps and arm.label in labels]
    return "" if not ensembles else f"On {join(ensembles)}, an ensemble, a stage is the sum over the steps."


def stage_rows(breakdown: LatencyBreakdown) -> list[tuple[str, ...]]:
    """Rows (stage, baseline, arm, arm − baseline, share of the difference), the total last; empty if no arm reports
    stages that add up."""
    arms = [arm for arm in breakdown.sides if arm and not arm.contradictions]
    if not arms:
        return []
    differences = {d.stage: d for d in breakdown.differences}
    decimals = max(0, 3 - math.floor(math.log10(max(arm.client_total_ms for arm in arms))))
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        values = [arm.stages_ms.get(stage) if arm in arms and arm else None for arm in breakdown.sides]
        if values == [None, None] or (stage == "send_delay" and not any(values)):
            continue
        difference = differences.get(stage)
        rows.append(
            (
                STAGE_TITLES[stage],
                *("–" if value is None else f"{value:.{decimals}f} ms" for value in values),
                _signed(difference.difference_ms, decimals) if difference else FOLDED if differences else "–",
                percent(difference.share if difference else None),
            )
        )
    totals = [f"{arm.client_total_ms:.{decimals}f} ms" if arm else "–" for arm in breakdown.sides]
    total = breakdown.difference_ms
    shares = ("–", "–") if total is None or not differences else (_signed(total, decimals), "100 %")
    rows.append(("client total", *totals, *shares))
    return rows


def stages_chart(result: Result) -> doc.Chart | None:
    """The arms side by side, one colour per stage."""

    def traces(workload: str) -> list[doc.Figure]:
        by_label = {
            arm.label: arm
            for breakdown in result.stages
            if breakdown.workload == workload
            for arm in breakdown.sides
            if arm
        }
        arms = [arm for arm in by_label.values() if not arm.contradictions]
        return [
            charts.bars_across(
                STAGE_TITLES[stage],
                [charts.arm_name(result, arm.label) for arm in arms],
                [arm.stages_ms.get(stage) or 0.0 for arm in arms],
                {"color": f"--stage{place}", "line": {"color": "--card", "width": 1}},
                hovertemplate=STAGE_TITLES[stage] + ": %{x:.3~g} ms<extra></extra>",
            )
            for place, stage in enumerate(STAGES)
            if any(arm.stages_ms.get(stage) for arm in arms)
        ]

    return charts.chart_by_scenario(
        result,
        traces,
        "stages",
        "Latency breakdown",
        "Means per request, in the same stages for all arms. Time outside the servers is network and client; "
        "in a dynamic batch each request is charged the whole execution that it waited for.",
        height=260 + 40 * (len(result.experiment.arms) - 2),
        margin={"b": 96},
        barmode="relative",
        bargap=0.35,
        xaxis=charts.axis("ms per request", rangemode="tozero"),
        yaxis=charts.ROWS,
        legend={**charts.LEGEND_ABOVE, "yref": "container", "y": 0, "traceorder": "normal"},
    )


def _ms(value: float | None) -> str:
    return "–" if value is None else signed_ms(value) if value else "0 ms"


def _interval(bounds: tuple[float, float] | None) -> str:
    return "–" if bounds is None else f"{signed_ms(bounds[0]).removesuffix(' ms')} to {signed_ms(bounds[1])}"


def _signed(value: float, decimals: int) -> str:
    return f"{value:+.{decimals}f} ms".replace("-", "−")


SECTIONS = {"Why": (why,)}
