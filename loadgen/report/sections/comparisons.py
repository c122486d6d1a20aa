"""Who is faster, by how much: every comparison with its interval, the ranking, the forest plot and the thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import loadgen.report.document as doc
from loadgen.comparison.claims import claim, figure, verdict_words
from loadgen.comparison.comparisons import Comparison, Outcome
from loadgen.comparison.pairs import METRICS
from loadgen.comparison.ranking import neighbours
from loadgen.quantities import Interval, inverse, ratio, ratio_interval, share
from loadgen.records.run import Pairing, shown
from loadgen.report.charts import (
    LEGEND_ABOVE,
    add_view,
    arm_style,
    axis,
    base_and_arm,
    colour,
    errors,
    label_text,
    marker_of,
    mirrored_axis,
    several,
)
from loadgen.result.result_file import Result

WITHOUT_WINNER: dict[Outcome, doc.Style] = {"no_difference": "ok", "inconclusive": "note", "invalid": "failed"}
CSV_FIELDS = (
    "scenario", "metric", "unit", "higher_is_better", "baseline", "arm", "baseline_value", "arm_value", "ratio",
    "ci95_low", "ci95_high", "verdict", "pairs", "restarts", "method", "p_value", "p_adjusted", "p_equivalence",
    "minimal_detectable_effect", "reason",
)  # fmt: skip
BETTER = (*doc.numbers("better arm", "95 % interval"),)
_THRESHOLDS: dict[str, doc.Cell] = {
    "kept": doc.Cell("kept", "ok"),
    "broken": doc.Cell("broken", "failed"),
    "not_measurable": doc.Cell("not measurable", "failed"),
}


def verdict_style(result: Result, one: Comparison) -> doc.Style:
    """The winner's colour, or that of the outcome without a winner."""
    return WITHOUT_WINNER[one.verdict] if one.winner is None else arm_style(result, one.winner)


def against_baseline(result: Result) -> list[Comparison]:
    """The comparisons with the baseline that have a ratio."""
    base = result.experiment.baseline.label
    return [one for one in result.comparisons if one.baseline == base and one.ratio is not None]


def short_metric(name: str, unit: str) -> str:
    """A metric with its unit, where there is little room."""
    title = METRICS[name].title.removesuffix(" latency").removeprefix("time to ")
    return unit if unit.endswith("/s") else f"{title}, {unit}"


def better_of(pairing: Pairing, value: float | None, ci95: Interval | None, higher_is_better: bool) -> tuple[str, str]:
    """A ratio of arm to baseline from the better arm, with its interval: ("A 2.02×", "1.91–2.15")."""
    if value is None:
        return "–", "–"
    label = pairing.arm if (value > 1.0) == higher_is_better else pairing.baseline
    if value < 1.0:
        value, ci95 = 1.0 / value, inverse(ci95)
    factor = ratio(value, ci95)
    return (factor if value == 1.0 else f"{shown(label)} {factor}"), ratio_interval(ci95)


def comparison_columns(result: Result, *, roomy: bool = False) -> tuple[doc.Column, ...]:
    """With two arms a column for each, with more a row for each but the baseline. A narrow screen leaves out what the
    verdict does not need; `roomy`: the metric, too."""
    base, *others = map(shown, result.experiment.labels)
    values = [doc.Column(others[0], "number", roomy=True)]
    if several(result):
        values = [doc.Column("arm"), doc.Column("its value", "number", "value", roomy=True)]
    return (
        *doc.names("scenario"),
        doc.Column("metric", roomy=roomy),
        doc.Column("unit", roomy=True, on=doc.PAGES),
        doc.Column(base, "number", roomy=True),
        *values,
        *BETTER,
        *doc.names("verdict"),
    )


def comparison_cells(result: Result, one: Comparison) -> tuple[str | doc.Cell, ...]:
    """The cells of `comparison_columns`."""
    arm = (doc.Cell(shown(one.arm), arm_style(result, one.arm)),) if several(result) else ()
    return (
        one.scenario,
        _metric(one),
        one.unit,
        figure(one, result.summaries, one.baseline),
        *arm,
        figure(one, result.summaries, one.arm),
        *_outcome(result, one),
    )


def _metric(one: Comparison) -> doc.Cell:
    return doc.Cell(METRICS[one.metric].title, short=short_metric(one.metric, one.unit))


def _outcome(result: Result, one: Comparison) -> tuple[doc.Cell, ...]:
    """The better arm, its interval and the verdict; dimmed where the verdict names no winner."""
    dim: doc.Style | None = None if one.winner else "note"
    found, interval = better_of(one.pairing, one.ratio, one.ci95, one.higher_is_better)
    style = verdict_style(result, one)
    return (
        doc.Cell(found, style if one.winner else dim),
        doc.Cell(interval, dim),
        doc.Cell(verdict_words(one.verdict, one.pairing), style, hint=one.reason or ""),
    )


def comparisons(result: Result) -> doc.Section | None:
    """Every arm beside the baseline; comparisons that could not be made are listed with their reasons."""
    made = [one for one in result.comparisons if one.ratio is not None]
    missing = [one for one in result.comparisons if one.ratio is None]
    rows = [
        (*comparison_cells(result, one), str(one.pairs), share(one.minimal_detectable_effect))
        for one in against_baseline(result)
    ]
    counted = [doc.Column(name, "number", roomy=True, on=doc.PAGES) for name in ("pairs", "detectable")]
    if made:
        notes = [
            doc.Text(
                "Better arm: a throughput is that many times higher, a time that many times lower. No meaningful "
                f"difference: the whole interval lies within ±{share(result.experiment.equivalence_margin)}.",
                "note",
            ),
            doc.Text(
                f"A pair is two {'blocks of one round' if several(result) else 'adjacent blocks'}, one per arm. A "
                f"winner needs an interval without 1 and p < 5 % after Holm's adjustment for all {len(made)} "
                f"comparisons{', those of the ranking included' if several(result) else ''}. Detectable: the smallest "
                "true difference that 80 % of such runs would find.",
                "note",
                on=doc.PAGES,
            ),
            doc.Text(_footing(result), "note"),
        ]
    else:
        notes = [doc.Text("Nothing can be compared: the run has no pair of complete blocks.", "note")]
    reasons = [(one.scenario, METRICS[one.metric].title, _arms(result, one), one.reason) for one in missing]
    return doc.section(
        "Comparisons",
        doc.Table((*comparison_columns(result), *counted), rows, grouped=True, on=doc.READ),
        *notes,
        doc.Fold(
            f"{len(missing)} comparisons could not be made",
            (doc.Table((*doc.names("scenario", "metric", "arms"), *doc.texts("reason")), reasons),),
            on=doc.HTML,
        ),
        forest(result),
        doc.Table(doc.names(*CSV_FIELDS), [_values(one) for one in result.comparisons], name="comparisons", on=doc.CSV),
        _cases(result),
    )


def _arms(result: Result, one: Comparison) -> str:
    """The two arms, where there are more."""
    return f"{shown(one.arm)} against {shown(one.baseline)}" if several(result) else ""


def ranking(result: Result) -> doc.Section | None:
    """With three or more arms: their order in each scenario, each arm beside the next one, and every comparison of the
    other arms with each other."""
    if not several(result):
        return None
    base = result.experiment.baseline.label
    others = [one for one in result.comparisons if one.baseline != base and one.ratio is not None]
    rows: list[tuple[str | doc.Cell, ...]] = []
    for one in result.verdict.rankings:
        for place, pair in enumerate(neighbours(result.comparisons, one)):
            first: tuple[str | doc.Cell, ...] = ("", "") if place else (_metric(pair), one.words())
            rows.append((one.scenario, *first, _two(pair), *_outcome(result, pair)))
    between = (*doc.names("arms"), *BETTER, doc.Column("verdict", on=doc.PAGES))
    return doc.section(
        "Ranking",
        doc.Table(
            (*doc.names("scenario", "metric"), *doc.texts("best to worst"), *between), rows, grouped=True, on=doc.READ
        ),
        doc.Text(
            "By the leading metric of each scenario, each arm beside the next one. Not separated: the run does not "
            "show which of them is better."
            if rows
            else "",
            "note",
        ),
        doc.Fold(
            f"The arms other than {shown(base)} with each other",
            (
                doc.Table(
                    (*doc.names("scenario", "metric"), *between),
                    [(one.scenario, _metric(one), _two(one), *_outcome(result, one)) for one in others],
                    grouped=True,
                ),
            ),
        ),
    )


def _two(one: Comparison) -> str:
    return f"{shown(one.arm)}/{shown(one.baseline)}"


def _footing(result: Result) -> str:
    """How the run ended and how far its intervals can be trusted, unless the verdict says so already."""
    parts = [result.noise_floor_sentence]
    if result.stopping is not None:
        parts = [result.stopping.sentence, result.stopping.coverage, *parts]
    return " ".join(part for part in parts if part and part not in result.verdict.caveats)


def _values(one: Comparison) -> list[str | float | bool | None]:
    bounds = dict(zip(("ci95_low", "ci95_high"), one.ci95 or (None, None), strict=True))
    return [bounds[name] if name in bounds else getattr(one, name) for name in CSV_FIELDS]


def _cases(result: Result) -> doc.Table:
    """For CI: a comparison passes with any verdict, is skipped where inconclusive, and fails where invalid."""
    rows, outcomes = [], []
    for one in result.comparisons:
        text, outcome = claim(one), doc.Outcome("passed")
        if one.verdict == "invalid":
            text, outcome = f"no verdict: {one.reason}", doc.Outcome("failure", "invalid")
        elif one.verdict == "inconclusive":
            text, outcome = f"inconclusive: {one.reason}", doc.Outcome("skipped")
        which = f" of {_arms(result, one)}" if several(result) else ""
        rows.append((f"{METRICS[one.metric].title}{which} [{one.scenario}]", text))
        outcomes.append(outcome)
    seconds = sum(block.duration_s for block in result.blocks)
    return doc.Table(doc.names("name", "text"), rows, "comparisons", outcomes=outcomes, seconds=seconds, on=doc.JUNIT)


def arm_factor(one: Comparison) -> tuple[float, Interval | None]:
    """How many times better the arm is than the baseline, below 1 where it is worse, whichever way the metric goes."""
    value = one.ratio or 1.0
    return (value, one.ci95) if one.higher_is_better else (1.0 / value, inverse(one.ci95))


def reach(one: Comparison, least: float) -> float:
    """How far from 1 an axis must go, as a logarithm; a very wide interval is cut rather than squeezing the others."""
    value, interval = arm_factor(one)
    centre = abs(math.log(value))
    widest = max((abs(math.log(bound)) for bound in interval or ()), default=0.0)
    return max(least, centre * 1.15, min(widest * 1.05, 3.0 * max(centre, least)))


def forest(result: Result) -> doc.Chart | None:
    """Every comparison with its interval and the band of no meaningful difference; a view per arm if there are many."""
    made = against_baseline(result)
    if not made:
        return None
    rows = list(dict.fromkeys(map(_row, made)))
    margin = result.experiment.equivalence_margin
    data: list[doc.Figure] = []
    views = [
        add_view(
            data,
            f"{shown(pairing.arm)} against {shown(pairing.baseline)}",
            _forest_traces(result, [one for one in made if one.pairing == pairing]),
            xaxis=_forest_axis(made, margin, pairing),
        )
        for pairing in dict.fromkeys(one.pairing for one in made)
    ]
    base, arm = base_and_arm(result)
    upright = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1}
    band = {"type": "rect", "x0": 1 / (1 + margin), "x1": 1 + margin, "fillcolor": "--band", "layer": "below"}
    return doc.Chart(
        "forest",
        "How much better an arm is",
        f"Left of 1 {base} is better, right of it {arm}, for throughputs and times alike; log scale, with 95 % "
        f"intervals. An interval inside the shaded band (±{share(margin)}) is no meaningful difference.",
        data,
        {
            "height": 120 + 26 * len(rows),
            "xaxis": _forest_axis(made, margin, made[0].pairing),
            "yaxis": {
                "automargin": True,
                "categoryorder": "array",
                "categoryarray": rows[::-1],
                "range": [-0.7, len(rows) - 0.3],
            },
            "shapes": [
                {**upright, **band, "line": {"width": 0}},
                {**upright, "type": "line", "x0": 1, "x1": 1, "line": {"color": "--ink", "width": 1, "dash": "dot"}},
            ],
            "showlegend": True,
            "legend": {**LEGEND_ABOVE, "y": 1},
        },
        views if several(result) else [],
    )


def _forest_axis(made: Sequence[Comparison], margin: float, pairing: Pairing) -> doc.Figure:
    reached = [1 + margin]
    for value, bounds in map(arm_factor, made):
        reached += [max(one, 1.0 / one) for one in (value, *(bounds or ()))]
    base, arm = (label_text(shown(label)) for label in pairing)
    return axis(f"← {base} is better · {arm} is better →", **mirrored_axis(max(reached)))


def _row(one: Comparison) -> str:
    return f"{one.scenario} · {METRICS[one.metric].title}"


def _forest_traces(result: Result, made: Sequence[Comparison]) -> list[doc.Figure]:
    """The comparisons of two arms, one trace per verdict."""
    traces: list[doc.Figure] = []
    for outcome in ("baseline_better", "arm_better", *WITHOUT_WINNER):
        chosen = [one for one in made if one.verdict == outcome]
        if not chosen:
            continue
        values, bounds = zip(*map(arm_factor, chosen), strict=True)
        better, words = chosen[0].winner, label_text(verdict_words(chosen[0].verdict, chosen[0].pairing))
        own = colour(result, better) if better else "--bad" if outcome == "invalid" else "--muted"
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": words,
                "x": list(values),
                "y": list(map(_row, chosen)),
                "error_x": errors(values, bounds, color=own, thickness=2, width=0),
                "marker": {"color": own, "size": 9, "symbol": marker_of(result, better) if better else "square-open"},
                "customdata": [label_text(f"{in_words(one)}, {one.pairs} pairs") for one in chosen],
                "hovertemplate": "%{y}<br>%{customdata}<extra>" + words + "</extra>",
            }
        )
    return traces


def in_words(one: Comparison) -> str:
    """ "A 2.02×, 95 % interval 1.91–2.15" """
    found, interval = better_of(one.pairing, one.ratio, one.ci95, one.higher_is_better)
    return f"{found}, 95 % interval {interval}"


def thresholds(result: Result) -> doc.Section | None:
    """Every condition of --fail-if, those that are not kept first."""
    ordered = sorted(result.thresholds, key=lambda one: one.state == "kept")
    return doc.section(
        "Thresholds",
        doc.Table(
            (*doc.names("fails if", "scenario", ""), *doc.texts("found")),
            [(one.condition, one.scenario, _THRESHOLDS[one.state], one.detail) for one in ordered],
            on=doc.READ,
        ),
        doc.Table(
            doc.names("name", "text"),
            [(f"fail if {one.condition} [{one.scenario}]", one.detail) for one in result.thresholds],
            name="thresholds",
            outcomes=[
                doc.Outcome("passed") if one.state == "kept" else doc.Outcome("failure", one.state)
                for one in result.thresholds
            ],
            on=doc.JUNIT,
        ),
    )


def threshold_sentence(result: Result) -> str | None:
    """How many thresholds are kept; None where none was set."""
    if not result.thresholds:
        return None
    total = len(result.thresholds)
    broken = [one for one in result.thresholds if one.state != "kept"]
    if not broken:
        return f"All {total} thresholds are kept." if total > 1 else "The threshold is kept."
    first = f"{broken[0].condition} in {broken[0].scenario} ({broken[0].detail})"
    return f"{'Threshold' if total == 1 else f'{len(broken)} of {total} thresholds'} not kept: {first}."
