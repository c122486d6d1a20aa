"""The chart under the headline: what every arm serves under every load, with its interval, and who leads there."""

from __future__ import annotations

from collections.abc import Sequence

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import join, measured, ratio
from loadgen.metrics.claims import verdict_words
from loadgen.metrics.comparisons import Comparison, advantage, leading_comparisons
from loadgen.metrics.registry import METRICS, RATES, SERVED, Metric
from loadgen.metrics.summaries import WorkloadSummary, figure_of, interval_of
from loadgen.records.run import item_of, shown
from loadgen.report.sections.comparisons import against_baseline
from loadgen.verdict.result import Result

MOST_LOADS = 12
"""Most loads that the chart shows at once; more of them get a view per scenario."""

FAINT = 0.25
"""Opacity of the bars of a load without a verdict: they are no result."""
BESIDE_POINT = "\N{NO-BREAK SPACE}" * 4
"""Room for half a mark between its middle and its figure."""


def throughput_chart(result: Result) -> doc.Chart | None:
    """A group of bars per load, and below the name of the load its verdict; points where the axis is logarithmic,
    because there the length of a bar says nothing. None without any throughput, and for a shadow, whose arms get the
    same requests."""
    served = {workload.name: workload for workload in result.experiment.workloads if workload.scenario != "shadow"}
    metric = RATES[result.experiment.kind]
    summaries = [s for s in result.summaries if figure_of(s, metric) and s.workload in served]
    names = list(dict.fromkeys(s.workload for s in summaries))
    if not names:
        return None
    views = {"": names}
    if len(names) > MOST_LOADS:
        views = {}
        for name in names:
            views.setdefault(served[name].scenario, []).append(name)
    data: list[doc.Figure] = []
    made = []
    for title, loads in views.items():
        some = [s for s in summaries if s.workload in loads]
        is_log = charts.squeezed(_ends(some, metric))
        traces = [trace for label in result.experiment.labels for trace in _traces(result, label, some, is_log=is_log)]
        made.append(charts.add_view(data, title, traces, **_layout(result, loads, some)))
    is_log = any("log" in str(view.layout["xaxis"].get("type")) for view in made)
    item = charts.rate_in_words(result)
    return doc.Chart(
        "throughput",
        "",
        f"{item[0].upper()}{item[1:]} by load, {'mean' if is_log else 'bars'} and 95 % interval over the blocks of one "
        "arm. Below a load: its verdict, from the ratios of adjacent blocks.",
        data,
        made[0].layout if len(made) == 1 else {"height": max(view.layout["height"] for view in made)},
        made if len(made) > 1 else [],
        marks="points" if is_log else "bars",
    )


def _ends(summaries: Sequence[WorkloadSummary], metric: Metric) -> list[float]:
    return [value for s in summaries if (value := figure_of(s, metric))]


def _traces(result: Result, label: str, summaries: Sequence[WorkloadSummary], *, is_log: bool) -> list[doc.Figure]:
    """One arm's bars or points, and the figures beside them."""
    metric = RATES[result.experiment.kind]
    rows = [(s.workload, figure_of(s, metric), interval_of(s, metric)) for s in summaries if s.label == label]
    points = [(name, value, bounds) for name, value, bounds in rows if value]
    if not points:
        return []
    names, values, bounds = (list(column) for column in zip(*points, strict=True))
    texts = [measured(value) for _, value, interval in points]
    without = {c.workload for c in leading_comparisons(result.comparisons) if c.verdict == "invalid"}
    marker: doc.Figure = {"color": charts.colour(result, label)}
    common: doc.Figure = {
        "orientation": "h",
        "name": charts.arm_name(result, label),
        "y": names,
        "offsetgroup": label,
        "showlegend": False,
    }
    unit = metric.unit_for(item_of(result.environment))
    hover = f"%{{y}}: %{{customdata}} {unit}<extra>{charts.label_text(shown(label))}</extra>"
    drawn: doc.Figure = {
        **common,
        "x": [charts.rounded(value) for value in values],
        "error_x": charts.errors(values, bounds, color="--ink"),
        "customdata": texts,
        "hovertemplate": hover,
    }
    if is_log:
        marker["size"] = 10
        drawn |= {"type": "scatter", "mode": "markers", "marker": marker}
    else:
        shape = charts.PATTERNS[charts.place_of(result, label)]
        marker["opacity"] = [FAINT if name in without else 1.0 for name in names]
        marker["pattern"] = {"shape": shape, "fillmode": "overlay", "fgcolor": "--card", "size": 7}
        drawn |= {"type": "bar", "marker": marker}
    ends = [max(interval[1], value) if interval else value for _, value, interval in points]
    figures: doc.Figure = {
        **common,
        "type": "scatter",
        "mode": "text",
        "x": [charts.rounded(end) for end in ends],
        "text": [f"{BESIDE_POINT if is_log else ' '}{shown(label)} {text}" for text in texts],
        "textposition": "middle right",
        "hoverinfo": "skip",
        "cliponaxis": False,
    }
    return [drawn, figures]


def _layout(result: Result, names: Sequence[str], summaries: Sequence[WorkloadSummary]) -> doc.Figure:
    metric = RATES[result.experiment.kind]
    ends = _ends(summaries, metric)
    values = [*ends, *(bound for s in summaries for bound in interval_of(s, metric) or ())]
    unit = metric.unit_for(item_of(result.environment))
    across = charts.value_axis(unit, values if charts.squeezed(ends) else [max(values)])
    # Room for the figure beside the longest bar.
    if across.get("type") == "log":
        low, high = across["range"]
        across["range"] = [low, high + 0.16 * (high - low)]
    else:
        across["range"] = [0, charts.rounded(1.18 * max(values))]
    leaders = {name: leader_words(result, name) for name in names}
    return {
        "height": 76 + len(names) * (24 + 21 * len(result.experiment.arms)),
        "margin": {"t": 8, "b": 52, "r": 34},
        "barmode": "group",
        "scattermode": "group",
        "bargap": 0.26,
        "bargroupgap": 0.1,
        "xaxis": across,
        "yaxis": {
            **charts.ROWS,
            "type": "category",
            "showgrid": False,
            "tickmode": "array",
            "tickvals": list(names),
            "ticktext": [
                f"<b>{charts.label_text(name)}</b><br>{charts.label_text(leaders[name]) or ' '}" for name in names
            ],
        },
    }


def leader_words(result: Result, name: str) -> str:
    """Who leads in a workload by how much: "B faster, 1.47×", "A leads, 2.10× C", "no difference", "inconclusive"."""
    leading = [c for c in leading_comparisons(against_baseline(result)) if c.workload == name]
    if not leading:
        return "not compared"
    if not charts.several(result):
        return _two_words(leading[0])
    ranking = next((ranking for ranking in result.verdict.rankings if ranking.workload == name), None)
    if ranking is None:
        return "no verdict"
    first, second = ranking.order[:2]
    tied = [label for label in ranking.order if label == first or (first, label) in ranking.not_separated]
    if len(tied) > 1:
        return f"{join(sorted(map(shown, tied)))} not separated"
    between = next(
        c
        for c in result.comparisons
        if (c.workload, c.metric) == (name, ranking.metric) and {first, second} == set(c.pairing)
    )
    lead = advantage(between)
    factor = "" if lead is None else f" {ratio(lead.factor, lead.ci95)} {shown(second)}"
    return f"{shown(first)} leads,{factor}" + _by(between)


def _two_words(comparison: Comparison) -> str:
    lead = advantage(comparison)
    if comparison.verdict == "invalid":
        return "no verdict"
    if comparison.winner is None or lead is None:
        return verdict_words(comparison.verdict, comparison.pairing).replace("meaningful ", "")
    return f"{shown(comparison.winner)} faster, {ratio(lead.factor, lead.ci95)}" + _by(comparison)


def _by(comparison: Comparison) -> str:
    """The metric that decides a workload, where it is not what the bars show."""
    return "" if comparison.metric in SERVED else f" by {METRICS[comparison.metric].title}"
