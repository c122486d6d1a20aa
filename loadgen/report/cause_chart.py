"""What each cause makes of the difference, as bars with their intervals; the figures are in the table of causes."""

from __future__ import annotations

from loadgen.analysis.causes.ranking import CellCauses
from loadgen.analysis.result import Result
from loadgen.quantities import signed_ms
from loadgen.report.charts import Chart, Figure, View, axis, main_view_first


def causes(result: Result) -> Chart | None:
    """One view a cell that was explained; None where nothing was."""
    data: list[Figure] = []
    views: list[View] = []
    for found in result.causes:
        views.append(View(found.cell, [len(data)]))
        data.append(_bars(found))
    if not data:
        return None
    rows = max(len(trace["y"]) for trace in data)
    return Chart(
        "causes",
        "What each cause makes of the difference",
        "B minus A, in ms of the mean request time, with 95 % intervals: right of 0 a cause makes B slower, left of it "
        "A. The causes and what is unattributed add up to the difference; a cause within the noise counts for nothing.",
        data,
        {
            "height": 150 + 34 * rows,
            "bargap": 0.4,
            "showlegend": False,
            "xaxis": axis("B − A, ms a request", zeroline=True),
            "yaxis": {"automargin": True, "autorange": "reversed"},
        },
        main_view_first(result, views),
    )


def _bars(found: CellCauses) -> Figure:
    rows: list[tuple[str, float, tuple[float, float] | None, str]] = [
        ("the difference", found.b_minus_a_ms, found.ci95_ms, "--ink")
    ]
    for cause in found.causes:
        if cause.b_minus_a_ms is not None and cause.effects:
            name = cause.title if cause.found else f"{cause.title} (within the noise)"
            colour = ("--b" if cause.b_minus_a_ms > 0 else "--a") if cause.found else "--line"
            rows.append((name, cause.b_minus_a_ms, cause.ci95_ms, colour))
    rows.append(("unattributed", found.unattributed_ms, found.unattributed_ci95_ms, "--muted"))
    return {
        "type": "bar",
        "orientation": "h",
        "y": [name for name, _, _, _ in rows],
        "x": [round(value, 4) for _, value, _, _ in rows],
        "marker": {"color": [colour for _, _, _, colour in rows]},
        "error_x": {
            "type": "data",
            "array": [0.0 if bounds is None else round(bounds[1] - value, 4) for _, value, bounds, _ in rows],
            "arrayminus": [0.0 if bounds is None else round(value - bounds[0], 4) for _, value, bounds, _ in rows],
            "color": "--ink",
            "thickness": 1.5,
            "width": 4,
        },
        "customdata": [signed_ms(value) for _, value, _, _ in rows],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
    }
