"""Who is faster, by how much: every comparison with its interval, the forest plot, and the thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import loadgen.report.document as doc
from loadgen.comparison.claims import claim, figure, verdict_words
from loadgen.comparison.comparisons import Comparison, Outcome, winner_of
from loadgen.comparison.pairs import METRICS
from loadgen.comparison.ranking import neighbours
from loadgen.quantities import inverse, ratio, ratio_interval, share
from loadgen.records.run import Label, Pairing, shown
from loadgen.report.charts import (
    add_view,
    arm_style,
    axis,
    base_and_arm,
    colour,
    errors,
    label_text,
    log_axis,
    marker_of,
    several,
)
from loadgen.result.result_file import Result

STYLES: dict[Outcome, doc.Style] = {
    "no_difference": "ok",
    "inconclusive": "note",
    "invalid": "failed",
}
SHORT = {
    "throughput": "images/s",
    "achieved_rate": "images/s",
    "latency_p50": "p50, ms",
    "latency_p90": "p90, ms",
    "latency_p99": "p99, ms",
    "time_to_ready": "ready, s",
    "time_to_first_answer": "first answer, s",
    "slo_rate": "requests/s",
    "saturation": "images/s",
}
"""A metric with its unit, where there is little room."""
CSV_FIELDS = (
    "scenario", "metric", "unit", "higher_is_better", "baseline", "arm", "baseline_value", "arm_value", "ratio",
    "ci95_low", "ci95_high", "verdict", "pairs", "restarts", "method", "p_value", "p_adjusted", "p_equivalence",
    "minimal_detectable_effect", "reason",
)  # fmt: skip
_THRESHOLDS: dict[str, tuple[str, doc.Style]] = {
    "kept": ("kept", "ok"),
    "broken": ("broken", "failed"),
    "not_measurable": ("not measurable", "failed"),
}


def verdict_style(result: Result, outcome: Outcome, pairing: Pairing) -> doc.Style:
    """The winner's colour, or that of there being none."""
    better = winner_of(outcome, pairing)
    return STYLES[outcome] if better is None else arm_style(result, better)


def against_baseline(result: Result) -> list[Comparison]:
    """Without those of the other arms among themselves."""
    return [one for one in result.comparisons if one.baseline == result.experiment.baseline.label]


def comparison_columns(result: Result, *, roomy: bool = False) -> tuple[doc.Column, ...]:
    """With two arms a column for each, with more a row for each but the baseline. `roomy`: whether a narrow screen goes
    without what the verdict does not need."""
    base, *others = map(shown, result.experiment.labels)
    values = [doc.Column(others[0], "number", roomy=roomy)]
    if several(result):
        values = [doc.Column("arm"), doc.Column("its value", "number", "value", roomy=roomy)]
    return (
        *doc.names("scenario"),
        doc.Column("metric", roomy=roomy),
        doc.Column("unit", roomy=roomy, on=doc.PAGES),
        doc.Column(base, "number", roomy=roomy),
        *values,
        *doc.numbers(f"{'arm' if several(result) else others[0]}/{base}", "95 % interval"),
        *doc.names("verdict"),
    )


def comparison_cells(result: Result, one: Comparison) -> tuple[str | doc.Cell, ...]:
    """As `comparison_columns`."""
    arm = (doc.Cell(shown(one.arm), arm_style(result, one.arm)),) if several(result) else ()
    return (
        one.scenario,
        _metric(one.metric),
        one.unit,
        figure(one, result.summaries, one.baseline),
        *arm,
        figure(one, result.summaries, one.arm),
        ratio(one.ratio, one.ci95),
        ratio_interval(one.ci95),
        _verdict(result, one),
    )


def _metric(name: str) -> doc.Cell:
    return doc.Cell(METRICS[name].title, short=SHORT.get(name, ""))


def _verdict(result: Result, one: Comparison) -> doc.Cell:
    words, style = verdict_words(one.verdict, one.pairing), verdict_style(result, one.verdict, one.pairing)
    return doc.Cell(words, style, hint=one.reason or "")


def comparisons(result: Result) -> doc.Section | None:
    """Every arm beside the baseline; the comparisons that could not be made with their reasons."""
    made = [one for one in result.comparisons if one.ratio is not None]
    missing = [one for one in result.comparisons if one.ratio is None]
    margin = share(result.experiment.equivalence_margin)
    counted = (doc.Column("pairs", "number", on=doc.PAGES), doc.Column("detectable", "number", on=doc.PAGES))
    nothing = "The run holds no pair of complete blocks; nothing can be compared."
    base, arm = base_and_arm(result)
    than = f" than {base}" if several(result) else ""
    return doc.section(
        "Comparisons",
        doc.Table(
            (*comparison_columns(result), *counted),
            [
                (*comparison_cells(result, one), str(one.pairs), share(one.minimal_detectable_effect))
                for one in against_baseline(result)
                if one.ratio is not None
            ],
            grouped=True,
            on=doc.READ,
        ),
        doc.Text(
            f"Above 1 {arm} is better{than} in images/s, worse in times. Equivalent: the whole interval lies within "
            f"±{margin}."
            if made
            else nothing,
            "note",
        ),
        doc.Text(
            f"Each pair is two {'blocks of one round' if several(result) else 'adjacent blocks'}, one of each arm. A "
            f"winner needs an interval without 1 and p < 5 % after Holm's adjustment for all {len(made)} comparisons"
            f"{', those of the ranking included' if several(result) else ''}. Detectable: the smallest true difference "
            "that 80 % of such runs would name."
            if made
            else "",
            "note",
            on=doc.PAGES,
        ),
        doc.Text(_footing(result) if made else "", "note"),
        doc.Fold(
            f"{len(missing)} comparisons could not be made",
            (
                doc.Table(
                    (*doc.names("scenario", "metric", "arms"), *doc.texts("reason")),
                    [(one.scenario, METRICS[one.metric].title, _arms(result, one), one.reason) for one in missing],
                ),
            ),
            on=doc.HTML,
        ),
        forest(result),
        doc.Table(doc.names(*CSV_FIELDS), [_values(one) for one in result.comparisons], name="comparisons", on=doc.CSV),
        _cases(result),
    )


def _arms(result: Result, one: Comparison) -> str:
    """Which are compared, where there are more than two."""
    return f"{shown(one.arm)} against {shown(one.baseline)}" if several(result) else ""


def ranking(result: Result) -> doc.Section | None:
    """With three or more arms: their order in each scenario with the ratios of neighbours, and every comparison of the
    other arms among themselves."""
    if not several(result):
        return None
    base = result.experiment.baseline.label
    others = [one for one in result.comparisons if one.baseline != base and one.ratio is not None]
    rows: list[tuple[str | doc.Cell, ...]] = []
    for one in result.verdict.rankings:
        first: tuple[str | doc.Cell, ...] = (_metric(one.metric), one.words())
        for pair in neighbours(result.comparisons, one):
            rows.append((one.scenario, *first, *_between(result, pair)))
            first = ("", "")
    between = (*doc.names("pair"), *doc.numbers("ratio", "95 % interval"), doc.Column("verdict", on=doc.PAGES))
    return doc.section(
        "Ranking",
        doc.Table(
            (*doc.names("scenario", "metric"), *doc.texts("best to worst"), *between), rows, grouped=True, on=doc.READ
        ),
        doc.Text(
            "By the leading metric of each scenario, with the ratio of each arm to the next. Not separated: the run "
            "does not show which of them is better."
            if rows
            else "",
            "note",
        ),
        doc.Fold(
            f"The arms other than {shown(base)} with each other",
            (
                doc.Table(
                    (*doc.names("scenario", "metric"), *between),
                    [(one.scenario, _metric(one.metric), *_between(result, one)) for one in others],
                    grouped=True,
                ),
            ),
        ),
    )


def _between(result: Result, one: Comparison) -> tuple[str | doc.Cell, ...]:
    """Two arms in a row of the ranking."""
    pair = f"{shown(one.arm)}/{shown(one.baseline)}"
    return pair, ratio(one.ratio, one.ci95), ratio_interval(one.ci95), _verdict(result, one)


def _footing(result: Result) -> str:
    """What the intervals stand on: how the run ended, and the noise floor of the machine."""
    parts = [result.noise_floor_sentence]
    if result.stopping is not None:
        told_before = result.stopping.sentence in result.verdict.caveats
        parts = ["" if told_before else result.stopping.sentence, result.stopping.coverage, *parts]
    return " ".join(part for part in parts if part)


def _values(one: Comparison) -> list[str | float | bool | None]:
    bounds = dict(zip(("ci95_low", "ci95_high"), one.ci95 or (None, None), strict=True))
    return [bounds[name] if name in bounds else getattr(one, name) for name in CSV_FIELDS]


def _cases(result: Result) -> doc.Table:
    """A comparison passes with any verdict; one that is undecided is skipped, one that is invalid fails."""
    rows, outcomes = [], []
    for one in result.comparisons:
        text, outcome = claim(one), doc.Outcome("passed")
        if one.verdict == "invalid":
            text, outcome = f"no verdict: {one.reason}", doc.Outcome("failure", "invalid")
        elif one.verdict == "inconclusive":
            text, outcome = f"undecided: {one.reason}", doc.Outcome("skipped")
        which = f" of {_arms(result, one)}" if several(result) else ""
        rows.append((f"{METRICS[one.metric].title}{which} [{one.scenario}]", text))
        outcomes.append(outcome)
    seconds = sum(block.duration_s for block in result.blocks)
    return doc.Table(doc.names("name", "text"), rows, "comparisons", outcomes=outcomes, seconds=seconds, on=doc.JUNIT)


def advantage(one: Comparison) -> tuple[float, tuple[float, float] | None]:
    """Of the arm over the baseline, as a factor above 1 where it is better, whichever way the metric goes."""
    value = one.ratio or 1.0
    return (value, one.ci95) if one.higher_is_better else (1.0 / value, inverse(one.ci95))


def forest(result: Result) -> doc.Chart | None:
    """Every ratio as the arm's advantage over the baseline, with its interval and the band of equivalence; each arm has
    a view."""
    made = [one for one in against_baseline(result) if one.ratio is not None]
    if not made:
        return None
    rows = list(dict.fromkeys(map(_row, made)))
    margin = result.experiment.equivalence_margin
    reached = [1 / (1 + margin), 1 + margin]
    for value, bounds in map(advantage, made):
        reached += [value, *(bounds or ())]
    data: list[doc.Figure] = []
    views = [
        add_view(
            data,
            f"{shown(pairing.arm)} against {shown(pairing.baseline)}",
            _forest_traces(result, [one for one in made if one.pairing == pairing]),
            xaxis=axis(_advantage_of(pairing.arm)),
        )
        for pairing in dict.fromkeys(one.pairing for one in made)
    ]
    base, arm = base_and_arm(result)
    upright = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1}
    band = {"type": "rect", "x0": 1 / (1 + margin), "x1": 1 + margin, "fillcolor": "--band", "layer": "below"}
    return doc.Chart(
        "forest",
        f"How much better than {base} each arm is" if several(result) else f"How much better {arm} is",
        f"Right of 1, {arm} is better; left of it, {base} is; log scale, with 95 % intervals. An interval inside the "
        f"shaded band (±{share(margin)}) is equivalence. Latencies and start times are inverted: right is better "
        "throughout.",
        data,
        {
            "height": 120 + 26 * len(rows),
            "xaxis": axis(_advantage_of(made[0].arm), **log_axis(reached)),
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
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        },
        views if several(result) else [],
    )


def _advantage_of(label: Label) -> str:
    return f"{label_text(shown(label))}'s advantage, ×"


def _row(one: Comparison) -> str:
    return f"{one.scenario} · {METRICS[one.metric].title}"


def _forest_traces(result: Result, comparisons: Sequence[Comparison]) -> list[doc.Figure]:
    """Of one pairing, by verdict."""
    traces: list[doc.Figure] = []
    outcomes: tuple[Outcome, ...] = ("baseline_better", "arm_better", *STYLES)
    for outcome in outcomes:
        chosen = [one for one in comparisons if one.verdict == outcome]
        if not chosen:
            continue
        values, bounds = zip(*map(advantage, chosen), strict=True)
        better, words = chosen[0].winner, label_text(verdict_words(outcome, chosen[0].pairing))
        own = colour(result, better) if better else "--bad" if outcome == "invalid" else "--muted"
        what = label_text(f"{shown(chosen[0].arm)}/{shown(chosen[0].baseline)}")
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": words,
                "x": list(values),
                "y": list(map(_row, chosen)),
                "error_x": errors(values, bounds, color=own, thickness=2, width=0),
                "marker": {"color": own, "size": 9, "symbol": marker_of(result, better) if better else "square-open"},
                "customdata": [
                    f"{what} {ratio(one.ratio, one.ci95)} ({ratio_interval(one.ci95)}), {one.pairs} pairs"
                    for one in chosen
                ],
                "hovertemplate": "%{y}<br>%{customdata}<extra>" + words + "</extra>",
            }
        )
    return traces


def thresholds(result: Result) -> doc.Section | None:
    """Those that are not kept first."""
    ordered = sorted(result.thresholds, key=lambda one: one.state == "kept")
    return doc.section(
        "Thresholds",
        doc.Table(
            (*doc.names("fails if", "scenario", ""), *doc.texts("found")),
            [(one.condition, one.scenario, doc.Cell(*_THRESHOLDS[one.state]), one.detail) for one in ordered],
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
    """How many are kept; None where none was set."""
    if not result.thresholds:
        return None
    total = len(result.thresholds)
    broken = [one for one in result.thresholds if one.state != "kept"]
    if not broken:
        return f"All {total} thresholds are kept." if total > 1 else "The threshold is kept."
    first = f"{broken[0].condition} in {broken[0].scenario} ({broken[0].detail})"
    return f"{'Threshold' if total == 1 else f'{len(broken)} of {total} thresholds'} not kept: {first}."


def reach(one: Comparison, least: float) -> float:
    """How far from 1 an axis must go, as a logarithm; a very wide interval is cut rather than squeezing the others."""
    value, interval = advantage(one)
    centre = abs(math.log(value))
    widest = max((abs(math.log(bound)) for bound in interval or ()), default=0.0)
    return max(least, centre * 1.15, min(widest * 1.05, 3.0 * max(centre, least)))
