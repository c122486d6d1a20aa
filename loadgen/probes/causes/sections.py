"""Why the arms differ: the reasons, the causes with their ablations, and the latency breakdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.metrics.breakdown import STAGES, TITLES, LatencyBreakdown
from loadgen.metrics.claims import verdict_words
from loadgen.metrics.comparisons import winner_of
from loadgen.probes.causes.analyse import Cause, CausesFound, WorkloadCauses, percent
from loadgen.quantities import join, number, signed_ms
from loadgen.records.run import Pairing, shown
from loadgen.verdict.result import Result
from loadgen.verdict.verdict import ScenarioVerdict

FOLDED = "folded"
FOLDED_NOTE = (
    "folded: only one arm reports this stage, so its time is counted in the stage where the other arm includes it"
)


def why(result: Result) -> doc.Section | None:
    """The reasons for the differences: a terminal shows those of the most loaded scenario, a page those of all."""
    main = result.verdict.main_scenario
    reasons = [one for one in result.verdict.scenarios if one.reasons]
    blocks: list[doc.Items | doc.Text | doc.Table] = [
        doc.Items([_reasons(result, one) for one in reasons if one.scenario == main])
    ]
    for causes in result.of(CausesFound).workloads:
        if causes.workload != main:
            blocks.append(doc.Text(f"{causes.workload}: {causes.sentence}"))
        blocks.append(cause_table(result, causes))
    others: list[doc.Items | doc.Table] = []
    for one in reasons:
        if one.scenario != main:
            own = (one.scenario, one.baseline, one.arm)
            others.append(doc.Items([_reasons(result, one)]))
            others += [
                stage_table(result, breakdown, on=doc.HTML)
                for breakdown in result.stages
                if (breakdown.workload, breakdown.baseline, breakdown.arm) == own
            ]
    return doc.section(
        "Why",
        *blocks,
        doc.Text(causes_note(result), "note"),
        *(stage_table(result, one) for one in result.stages if one.workload == main),
        doc.Fold("The other scenarios", tuple(others)),
        causes_chart(result),
        stages_chart(result),
    )


def _reasons(result: Result, one: ScenarioVerdict) -> doc.Item:
    pairing = Pairing(one.baseline, one.arm)
    better = winner_of(one.outcome, pairing)
    style = None if better is None else charts.arm_style(result, better)
    return doc.Item(verdict_words(one.outcome, pairing), style, one.scenario + _which(result, pairing), one.reasons)


def _which(result: Result, pairing: Pairing) -> str:
    """A sentence part after a scenario, if there are more than two arms: ", C against A"."""
    return f", {shown(pairing.arm)} against {shown(pairing.baseline)}" if charts.several(result) else ""


def cause_table(result: Result, causes: WorkloadCauses) -> doc.Table:
    """One row per ablation, the causes in their order, then the unattributed rest and the whole difference."""
    base, arm = map(shown, causes.pairing)
    rows: list[tuple[str, ...]] = []
    for cause in causes.causes:
        head = (
            _title(cause),
            _ms(cause.difference_ms),
            _interval(cause.ci95_ms if cause.effects else None),
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
            (shown(one.label), f"{'does not apply' if one.moot else 'not tested'}: {one.reason}", "–", "–", "–")
            for one in cause.untested
        ]
        rows += [(*(head if place == 0 else ("",) * len(head)), *tail) for place, tail in enumerate(tails)]
    rest = ("unattributed", _ms(causes.unattributed_ms), _interval(causes.unattributed_ci95_ms))
    rows.append((*rest, percent(causes.unattributed_share), "", "", "", "", ""))
    whole = ("the difference", _ms(causes.difference_ms), _interval(causes.ci95_ms), "100 %")
    times = (f"{base} {number(causes.baseline_ms)} ms", f"{arm} {number(causes.arm_ms)} ms")
    rows.append((*whole, "", "", *times, "blocks"))
    return doc.Table(
        (
            *doc.names("cause"),
            *doc.numbers(f"{arm} − {base}", "95 % interval", "share"),
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


def _title(cause: Cause) -> str:
    return cause.title if cause.found or not cause.effects else f"{cause.title} (within the noise)"


def causes_note(result: Result) -> str:
    """How the causes were found, or why there are none; empty where nothing is shown."""
    causes = result.of(CausesFound)
    if causes.workloads:
        base, arm = charts.base_and_arm(result)
        note = (
            "Each ablation removes one cause from one arm, in blocks interleaved with blocks of the unchanged arm. "
            f"Times are means per request. A cause contributes its cost to {arm} minus its cost to {base}. It counts "
            "if its interval excludes 0."
        )
        if result.state is None or result.state.state != "finished":
            note += " The run ended before all ablations were done."
        if causes.left_out:
            note += f" No time was left for {', '.join(causes.left_out)}: raise --explain-minutes."
        return note
    if causes.explained == ():
        return "No mean request times differ by more than the noise and ±δ, so no ablation was run."
    if not result.stages:
        return ""
    why = "the run ended before its ablations" if result.experiment.explain else "no ablation was run; add `--explain`"
    return f"The latency breakdown shows in which stage the time is spent, but does not prove a cause: {why}."


def causes_chart(result: Result) -> doc.Chart | None:
    """What each cause contributes to the difference, with its interval."""
    found = result.of(CausesFound).workloads
    if not found:
        return None
    base, arm = charts.base_and_arm(result)
    data: list[doc.Figure] = []
    views = [
        charts.add_view(
            data,
            one.workload + _which(result, one.pairing),
            [_cause_bars(result, one)],
            xaxis=charts.axis(f"{shown(one.arm)} − {shown(one.baseline)}, ms per request", zeroline=True),
        )
        for one in sorted(found, key=lambda one: one.workload != result.verdict.main_scenario)
    ]
    return doc.Chart(
        "causes",
        "Causes of the difference",
        f"{arm[0].upper()}{arm[1:]} minus {base}, in ms of the mean request time, with 95 % intervals: right of 0 a "
        f"cause makes {arm} slower, left of 0 {base}. The causes and the unattributed rest add up to the difference; a "
        "cause within the noise does not count.",
        data,
        {
            "height": 150 + 34 * (max(len(one.causes) for one in found) + 2),
            "bargap": 0.4,
            "showlegend": False,
            "yaxis": charts.ROWS,
        },
        views,
    )


def _cause_bars(result: Result, found: WorkloadCauses) -> doc.Figure:
    rows: list[tuple[str, float, tuple[float, float] | None, str]] = [
        ("the difference", found.difference_ms, found.ci95_ms, "--ink")
    ]
    for cause in found.causes:
        if cause.difference_ms is not None and cause.effects:
            slower = found.arm if cause.difference_ms > 0 else found.baseline
            bar = charts.colour(result, slower) if cause.found else "--line"
            rows.append((charts.label_text(_title(cause)), cause.difference_ms, cause.ci95_ms, bar))
    rows.append(("unattributed", found.unattributed_ms, found.unattributed_ci95_ms, "--muted"))
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
    decoding = "decoding in preparing the batch, " if any(name.endswith("(decode)") for name in folded) else ""
    return f"{FOLDED_NOTE}: {decoding}receiving and encoding in network and client." if folded else ""


def _ensemble_note(result: Result, breakdown: LatencyBreakdown) -> str:
    """Which of the arms are ensembles; empty without."""
    labels = {arm.label for arm in breakdown.sides if arm and not arm.contradictions}
    found = [shown(arm.label) for arm in result.arms if arm.steps and arm.label in labels]
    return "" if not found else f"On {join(found)}, an ensemble, a stage is the sum over the steps."


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
        one = differences.get(stage)
        rows.append(
            (
                f"{TITLES[stage]} ({stage})",
                *("–" if value is None else f"{value:.{decimals}f} ms" for value in values),
                _signed(one.difference_ms, decimals) if one else FOLDED if differences else "–",
                percent(one.share if one else None),
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
        found = {arm.label: arm for one in result.stages if one.workload == workload for arm in one.sides if arm}
        arms = [arm for arm in found.values() if not arm.contradictions]
        return [
            charts.bars_across(
                stage,
                [charts.arm_name(result, arm.label) for arm in arms],
                [arm.stages_ms.get(stage) or 0.0 for arm in arms],
                {"color": f"--stage{place}", "line": {"color": "--card", "width": 1}},
                hovertemplate=TITLES[stage] + ": %{x:.3~g} ms<extra></extra>",
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
