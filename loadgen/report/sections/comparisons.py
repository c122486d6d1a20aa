"""Who is faster, by how much: every comparison with its interval, the forest plot, and the thresholds."""

from __future__ import annotations

import math

import loadgen.report.document as doc
from loadgen.analysis.result import Result
from loadgen.comparison.claims import claim, figure
from loadgen.comparison.comparisons import Comparison
from loadgen.comparison.pairs import METRICS
from loadgen.quantities import inverse, ratio, ratio_interval, share
from loadgen.report.sections.charts import axis, errors, log_axis

VERDICTS: dict[str, tuple[str, doc.Style]] = {
    "a_faster": ("A faster", "a"),
    "b_faster": ("B faster", "b"),
    "equivalent": ("equivalent", "ok"),
    "undecided": ("undecided", "note"),
    "invalid": ("invalid", "failed"),
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
    "scenario", "metric", "unit", "higher_is_better", "a", "b", "ratio_b_over_a", "ci95_low", "ci95_high", "verdict",
    "pairs", "restarts", "method", "p_value", "p_adjusted", "p_equivalence", "minimal_detectable_effect", "reason",
)  # fmt: skip
_THRESHOLDS: dict[str, tuple[str, doc.Style]] = {
    "kept": ("kept", "ok"),
    "broken": ("broken", "failed"),
    "not_measurable": ("not measurable", "failed"),
}


def comparison_cells(result: Result, one: Comparison) -> tuple[str | doc.Cell, ...]:
    """Scenario, metric, unit, A, B, B/A, interval and verdict."""
    words, style = VERDICTS[one.verdict]
    return (
        one.scenario,
        doc.Cell(METRICS[one.metric].title, short=SHORT.get(one.metric, "")),
        one.unit,
        figure(one, result.summaries, "a"),
        figure(one, result.summaries, "b"),
        ratio(one.ratio_b_over_a, one.ci95),
        ratio_interval(one.ci95),
        doc.Cell(words, style, hint=one.reason or ""),
    )


COLUMNS = (
    *doc.names("scenario", "metric"),
    doc.Column("unit", on=doc.PAGES),
    *doc.numbers("A", "B", "B/A", "95 % interval"),
    *doc.names("verdict"),
)
"""As `comparison_cells`."""


def comparisons(result: Result) -> doc.Section | None:
    """Every comparison; those that could not be made with their reasons."""
    shown = [one for one in result.comparisons if one.ratio_b_over_a is not None]
    missing = [one for one in result.comparisons if one.ratio_b_over_a is None]
    margin = share(result.experiment.equivalence_margin)
    counted = (doc.Column("pairs", "number", on=doc.PAGES), doc.Column("detectable", "number", on=doc.PAGES))
    nothing = "The run holds no pair of complete blocks; nothing can be compared."
    return doc.section(
        "Comparisons",
        doc.Table(
            (*COLUMNS, *counted),
            [(*comparison_cells(result, c), str(c.pairs), share(c.minimal_detectable_effect)) for c in shown],
            grouped=True,
            on=doc.READ,
        ),
        doc.Text(
            f"Above 1 B is better in images/s, worse in times. Equivalent: the whole interval lies within ±{margin}."
            if shown
            else nothing,
            "note",
        ),
        doc.Text(
            "Each pair is two adjacent blocks, one of each arm. A winner needs an interval without 1 and p < 5 % after "
            f"Holm's adjustment for all {len(shown)} comparisons. Detectable: the smallest true difference that 80 % "
            "of such runs would name."
            if shown
            else "",
            "note",
            on=doc.PAGES,
        ),
        doc.Text(_footing(result) if shown else "", "note"),
        doc.Fold(
            f"{len(missing)} comparisons could not be made",
            (
                doc.Table(
                    (*doc.names("scenario", "metric"), *doc.texts("reason")),
                    [(one.scenario, METRICS[one.metric].title, one.reason) for one in missing],
                ),
            ),
            on=doc.HTML,
        ),
        forest(result),
        doc.Table(doc.names(*CSV_FIELDS), [_values(one) for one in result.comparisons], name="comparisons", on=doc.CSV),
        _cases(result),
    )


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
        elif one.verdict == "undecided":
            text, outcome = f"undecided: {one.reason}", doc.Outcome("skipped")
        rows.append((f"{METRICS[one.metric].title} [{one.scenario}]", text))
        outcomes.append(outcome)
    seconds = sum(block.duration_s for block in result.blocks)
    return doc.Table(doc.names("name", "text"), rows, "comparisons", outcomes=outcomes, seconds=seconds, on=doc.JUNIT)


def advantage(one: Comparison) -> tuple[float, tuple[float, float] | None]:
    """Of B, as a factor above 1 where B is better, whichever way the metric goes."""
    value = one.ratio_b_over_a or 1.0
    return (value, one.ci95) if one.higher_is_better else (1.0 / value, inverse(one.ci95))


def forest(result: Result) -> doc.Chart | None:
    """Every ratio as B's advantage, with its interval and the band of equivalence."""
    rows = {
        f"{one.scenario} · {METRICS[one.metric].title}": one
        for one in result.comparisons
        if one.ratio_b_over_a is not None
    }
    if not rows:
        return None
    margin = result.experiment.equivalence_margin
    data: list[doc.Figure] = []
    reached = [1 / (1 + margin), 1 + margin]
    for verdict, (words, _) in VERDICTS.items():
        chosen = {name: one for name, one in rows.items() if one.verdict == verdict}
        if not chosen:
            continue
        values, bounds = zip(*map(advantage, chosen.values()), strict=True)
        reached += [*values, *(bound for pair in bounds if pair is not None for bound in pair)]
        colour = {"a_faster": "--a", "b_faster": "--b", "invalid": "--bad"}.get(verdict, "--muted")
        symbol = {"a_faster": "circle", "b_faster": "diamond"}.get(verdict, "square-open")
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": words,
                "x": list(values),
                "y": list(chosen),
                "error_x": errors(values, bounds, color=colour, thickness=2, width=0),
                "marker": {"color": colour, "size": 9, "symbol": symbol},
                "customdata": [
                    f"B/A {ratio(one.ratio_b_over_a, one.ci95)} ({ratio_interval(one.ci95)}), {one.pairs} pairs"
                    for one in chosen.values()
                ],
                "hovertemplate": "%{y}<br>%{customdata}<extra>" + words + "</extra>",
            }
        )
    upright = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1}
    band = {"type": "rect", "x0": 1 / (1 + margin), "x1": 1 + margin, "fillcolor": "--band", "layer": "below"}
    return doc.Chart(
        "forest",
        "How much better B is",
        "Right of 1, B is better; left of it, A is; log scale, with 95 % intervals. An interval inside the shaded band "
        f"(±{share(margin)}) is equivalence. Latencies and start times are inverted: right is better throughout.",
        data,
        {
            "height": 120 + 26 * len(rows),
            "xaxis": axis("B's advantage, ×", **log_axis(reached)),
            "yaxis": {
                "automargin": True,
                "categoryorder": "array",
                "categoryarray": list(rows)[::-1],
                "range": [-0.7, len(rows) - 0.3],
            },
            "shapes": [
                {**upright, **band, "line": {"width": 0}},
                {**upright, "type": "line", "x0": 1, "x1": 1, "line": {"color": "--ink", "width": 1, "dash": "dot"}},
            ],
            "showlegend": True,
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        },
    )


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
