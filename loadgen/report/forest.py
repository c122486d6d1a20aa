"""The forest plot: every ratio of a run as B's advantage, with its interval and the band of equivalence."""

from __future__ import annotations

from loadgen.analysis.comparisons import METRICS
from loadgen.analysis.result import Result
from loadgen.quantities import ratio, ratio_interval, share
from loadgen.report.charts import Chart, Figure, axis
from loadgen.report.log_axis import log_axis
from loadgen.report.tables import VERDICT_WORDS


def forest(result: Result) -> Chart | None:
    """Every ratio as B's advantage, with its interval and the band of equivalence."""
    rows = [c for c in result.comparisons if c.ratio_b_over_a is not None]
    if not rows:
        return None
    margin = result.experiment.equivalence_margin
    data: list[Figure] = []
    reached = [1 / (1 + margin), 1 + margin]
    labels = [f"{c.scenario} · {METRICS[c.metric].title}" for c in rows]
    for verdict, words in VERDICT_WORDS.items():
        chosen = [(c, name) for c, name in zip(rows, labels, strict=True) if c.verdict == verdict]
        if not chosen:
            continue
        values, plus, minus, texts = [], [], [], []
        for c, _ in chosen:
            value = c.ratio_b_over_a or 1.0
            low, high = c.ci95 or (value, value)
            if not c.higher_is_better:
                value, low, high = 1 / value, 1 / high, 1 / low
            reached += [low, high]
            values.append(value)
            plus.append(high - value)
            minus.append(value - low)
            texts.append(f"B/A {ratio(c.ratio_b_over_a, c.ci95)} ({ratio_interval(c.ci95)}), {c.pairs} pairs")
        colour = {"a_faster": "--a", "b_faster": "--b", "invalid": "--bad"}.get(verdict, "--muted")
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": words,
                "x": values,
                "y": [name for _, name in chosen],
                "error_x": {
                    "type": "data",
                    "array": plus,
                    "arrayminus": minus,
                    "color": colour,
                    "thickness": 2,
                    "width": 0,
                },
                "marker": {
                    "color": colour,
                    "size": 9,
                    "symbol": {"a_faster": "circle", "b_faster": "diamond"}.get(verdict, "square-open"),
                },
                "customdata": texts,
                "hovertemplate": "%{y}<br>%{customdata}<extra>" + words + "</extra>",
            }
        )
    band = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below"}
    line = {"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1}
    return Chart(
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
                "categoryarray": labels[::-1],
                "range": [-0.7, len(rows) - 0.3],
            },
            "shapes": [
                {**band, "x0": 1 / (1 + margin), "x1": 1 + margin, "fillcolor": "--band"},
                {**line, "line": {"color": "--ink", "width": 1, "dash": "dot"}},
            ],
            "showlegend": True,
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        },
    )
