"""Why the arms differ: the reasons, the causes with what shows them, and where the time of a request goes."""

from __future__ import annotations

import math

import loadgen.report.document as doc
from loadgen.analysis.result import Result
from loadgen.analysis.verdict import ScenarioVerdict
from loadgen.comparison.stages import STAGES, TITLES
from loadgen.quantities import number, share, signed_ms
from loadgen.report.sections.charts import (
    LEGEND_ABOVE,
    ROWS,
    arm_name,
    axis,
    bars_across,
    chart_by_scenario,
    errors,
    label_text,
)
from loadgen.report.sections.comparisons import VERDICTS
from loadgen.studies.causes.analyse import CellCauses, percent

FOLDED = "folded"
FOLDED_NOTE = (
    "folded: only one arm reports this stage, so its time is counted where the other arm keeps it: decoding under "
    "preparing the batch, receiving and encoding under what is outside "
    "the server's account (network, protocol, client)."
)
CAUSES_NOTE = (
    "Each cause was taken away from one arm at a time, in blocks interleaved with those of the arm as it is; means a "
    "request. What a cause makes of the difference is what it costs B minus what it costs A. It counts where its "
    "interval excludes 0."
)


def why(result: Result) -> doc.Section | None:
    """A terminal shows the reasons of the most loaded scenario, a page those of all."""
    reasons = [one for one in result.verdict.scenarios if one.reasons]
    main = [one for one in reasons if one.scenario == result.verdict.main_scenario]
    others = [one for one in reasons if one not in main]
    blocks: list[doc.Items | doc.Text | doc.Table] = [doc.Items([_reasons(one) for one in main])]
    for causes in result.causes:
        if causes.cell != result.verdict.main_scenario:
            blocks.append(doc.Text(f"{causes.cell}: {causes.sentence}"))
        blocks.append(cause_table(causes))
    other_blocks: list[doc.Items | doc.Table] = []
    for one in others:
        other_blocks += [doc.Items([_reasons(one)]), stage_table(result, one.scenario, on=doc.HTML)]
    return doc.section(
        "Why",
        *blocks,
        doc.Text(causes_note(result) or "", "note"),
        stage_table(result, result.verdict.main_scenario or ""),
        doc.Fold("The other scenarios", tuple(other_blocks)),
        causes_chart(result),
        stages_chart(result),
    )


def _reasons(one: ScenarioVerdict) -> doc.Item:
    words, style = VERDICTS[one.outcome]
    return doc.Item(words, style if style in ("a", "b") else None, one.scenario, one.reasons)


def cause_table(causes: CellCauses) -> doc.Table:
    """One row for each effect, the causes in their order, then what is left over and the whole difference."""
    rows: list[tuple[str, ...]] = []
    for cause in causes.causes:
        head = (
            cause.title + ("" if cause.found or not cause.effects else " (within the noise)"),
            _ms(cause.b_minus_a_ms),
            _interval(cause.ci95_ms if cause.effects else None),
            percent(cause.share if cause.found else None),
        )
        for effect in cause.effects:
            times = (f"{number(effect.as_is_ms)} ms", f"{number(effect.without_ms)} ms")
            rows.append((*head, effect.label.upper(), effect.changed, *times, effect.folder))
            head = ("", "", "", "")
        for untested in cause.untested:
            words = "nothing to take away" if untested.moot else "not tested"
            rows.append((*head, untested.label.upper(), f"{words}: {untested.reason}", "–", "–", "–"))
            head = ("", "", "", "")
    rest = ("unattributed", _ms(causes.unattributed_ms), _interval(causes.unattributed_ci95_ms))
    rows.append((*rest, percent(causes.unattributed_share), "", "", "", "", ""))
    whole = ("the difference", _ms(causes.b_minus_a_ms), _interval(causes.ci95_ms), "100 %")
    rows.append((*whole, "", "", f"A {number(causes.a_ms)} ms", f"B {number(causes.b_ms)} ms", "blocks"))
    return doc.Table(
        (
            *doc.names("cause"),
            *doc.numbers("B − A", "95 % interval", "share"),
            *doc.names("arm"),
            *doc.texts("what was changed"),
            *doc.numbers("as it is", "without"),
            *doc.texts("shown by"),
        ),
        rows,
        title=f"What each cause makes of the difference in {causes.cell}",
        total=True,
        on=doc.PAGES,
    )


def causes_note(result: Result) -> str | None:
    """What a reader must know of how the causes were found, or that none were looked for."""
    if result.causes:
        note = CAUSES_NOTE
        if result.state is None or result.state.state != "finished":
            note += " The run ended before all causes were taken away."
        if result.causes_left_out:
            note += f" No time was left for {', '.join(result.causes_left_out)}: raise --explain-minutes."
        return note
    if result.explained_cells == ():
        return "No mean request times differ by more than the noise and ±δ, so no cause was looked for."
    if not result.stages:
        return None
    ended = "The run ended before causes were taken away. " if result.experiment.explain else ""
    return ended + (
        "These are the servers' own accounts of where time went, an inference: no cause was taken away to see what it "
        "makes of the difference. --explain does that (in the preset full it is on)."
    )


def causes_chart(result: Result) -> doc.Chart | None:
    """What each cause makes of the difference, with its interval."""
    found = {causes.cell: causes for causes in result.causes}
    most = max((len(causes.causes) for causes in result.causes), default=0) + 2
    return chart_by_scenario(
        result,
        lambda cell: [_cause_bars(found[cell])] if cell in found else [],
        "causes",
        "What each cause makes of the difference",
        "B minus A, in ms of the mean request time, with 95 % intervals: right of 0 a cause makes B slower, left of it "
        "A. The causes and what is unattributed add up to the difference; a cause within the noise counts for nothing.",
        height=150 + 34 * most,
        bargap=0.4,
        showlegend=False,
        xaxis=axis("B − A, ms a request", zeroline=True),
        yaxis=ROWS,
    )


def _cause_bars(found: CellCauses) -> doc.Figure:
    rows: list[tuple[str, float, tuple[float, float] | None, str]] = [
        ("the difference", found.b_minus_a_ms, found.ci95_ms, "--ink")
    ]
    for cause in found.causes:
        if cause.b_minus_a_ms is not None and cause.effects:
            name = cause.title if cause.found else f"{cause.title} (within the noise)"
            colour = ("--b" if cause.b_minus_a_ms > 0 else "--a") if cause.found else "--line"
            rows.append((label_text(name), cause.b_minus_a_ms, cause.ci95_ms, colour))
    rows.append(("unattributed", found.unattributed_ms, found.unattributed_ci95_ms, "--muted"))
    labels, values, bounds, colours = zip(*rows, strict=True)
    return bars_across(
        "",
        labels,
        values,
        {"color": list(colours)},
        error_x=errors(values, bounds, color="--ink"),
        customdata=[signed_ms(value) for value in values],
        hovertemplate="%{y}: %{customdata}<extra></extra>",
    )


def stage_table(result: Result, cell: str, on: doc.Format = doc.PAGES) -> doc.Table:
    """Each stage of a request with the total last; without rows where no arm reports stages that add up."""
    rows = stage_rows(result, cell)
    return doc.Table(
        (*doc.names("stage"), *doc.numbers("A", "B", "B − A", "share")),
        rows,
        title=f"Where the time of a request goes in {cell}",
        caption=FOLDED_NOTE if any(FOLDED in row for row in rows) else "",
        total=True,
        on=on,
    )


def stage_rows(result: Result, cell: str) -> list[tuple[str, ...]]:
    """(stage, A, B, B − A, share of the difference) with the total last; empty where no arm reports stages that add
    up."""
    account = next((account for account in result.stages if account.cell == cell), None)
    arms = [arm for arm in (account.a, account.b) if arm and not arm.contradictions] if account else []
    if account is None or not arms:
        return []
    differences = {d.stage: d for d in account.differences}
    decimals = max(0, 3 - math.floor(math.log10(max(arm.client_total_ms for arm in arms))))
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        values = [arm.stages_ms.get(stage) if arm in arms and arm else None for arm in (account.a, account.b)]
        if values == [None, None] or (stage == "send_delay" and not any(values)):
            continue
        difference = differences.get(stage)
        rows.append(
            (
                f"{TITLES[stage]} ({stage})",
                *("–" if value is None else f"{value:.{decimals}f} ms" for value in values),
                _signed(difference.b_minus_a_ms, decimals) if difference else FOLDED if differences else "–",
                _signed_share(difference.share) if difference else "–",
            )
        )
    totals = [f"{arm.client_total_ms:.{decimals}f} ms" if arm else "–" for arm in (account.a, account.b)]
    total = account.total_b_minus_a_ms
    shares = ("–", "–") if total is None or not differences else (_signed(total, decimals), "100 %")
    rows.append(("client total", *totals, *shares))
    return rows


def stages_chart(result: Result) -> doc.Chart | None:
    """Both arms side by side, a colour for each stage."""
    accounts = {account.cell: account for account in result.stages}

    def traces(cell: str) -> list[doc.Figure]:
        account = accounts.get(cell)
        arms = [arm for arm in (account.a, account.b) if arm and not arm.contradictions] if account else []
        return [
            bars_across(
                stage,
                [arm_name(result, arm.label) for arm in arms],
                [arm.stages_ms.get(stage) or 0.0 for arm in arms],
                {"color": f"--stage{place}", "line": {"color": "--card", "width": 1}},
                hovertemplate=TITLES[stage] + ": %{x:.3~g} ms<extra></extra>",
            )
            for place, stage in enumerate(STAGES)
            if any(arm.stages_ms.get(stage) for arm in arms)
        ]

    return chart_by_scenario(
        result,
        traces,
        "stages",
        "Where the time of a request goes",
        "Means a request, in the same stages for both arms; what nobody times is outside the server's account. In a "
        "dynamic batch each request is charged the whole execution that it waited for.",
        height=260,
        margin={"b": 96},
        barmode="relative",
        bargap=0.35,
        xaxis=axis("ms a request", rangemode="tozero"),
        yaxis=ROWS,
        legend={**LEGEND_ABOVE, "yref": "container", "y": 0, "traceorder": "normal"},
    )


def _ms(value: float | None) -> str:
    return "–" if value is None else signed_ms(value) if value else "0 ms"


def _interval(bounds: tuple[float, float] | None) -> str:
    return "–" if bounds is None else f"{signed_ms(bounds[0]).removesuffix(' ms')} to {signed_ms(bounds[1])}"


def _signed(value: float, decimals: int) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value):.{decimals}f} ms"


def _signed_share(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) < 0.0005:
        return "0 %"
    return share(value) if value >= 0 else f"−{share(-value)}"
