"""The charts of the HTML report as Plotly figures in plain data; every one of them also has its table.

Colours are names of the page's own CSS variables ("--a"), resolved in the browser, so that one figure serves the
light and the dark scheme. A and B also differ by marker and by line, for eyes and printers that see no colour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loadgen.analysis.result import Result
from loadgen.analysis.stages import STAGES, TITLES
from loadgen.report.tables import titles

Figure = dict[str, Any]
MARKERS = {"a": "circle", "b": "diamond"}
LEGEND_ABOVE: Figure = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
DASHES = {"a": "solid", "b": "dash"}


@dataclass(frozen=True, slots=True)
class View:
    """One choice of a chart's buttons: which traces it shows, and what it changes in the layout."""

    label: str
    traces: list[int]
    layout: Figure = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chart:
    """`caption` says how to read it; `data` and `layout` are Plotly's."""

    name: str
    title: str
    caption: str
    data: list[Figure]
    layout: Figure
    views: list[View] = field(default_factory=list)

    def figure(self) -> Figure:
        """For the page's script."""
        views = [{"label": v.label, "traces": v.traces, "layout": v.layout} for v in self.views]
        return {"data": self.data, "layout": self.layout, "views": views}


def axis(title: str, **more: object) -> Figure:
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **more}


def two_panels(height: int, across: str, left: Figure, right: Figure, ticks: Figure) -> Figure:
    """The layout of two plots side by side over the same quantity, with their y axes."""
    return {
        "height": height,
        "xaxis": axis(across, domain=[0, 0.45], anchor="y", **ticks),
        "yaxis": {**left, "anchor": "x"},
        "xaxis2": axis(across, domain=[0.55, 1], anchor="y2", **ticks),
        "yaxis2": {**right, "anchor": "x2"},
        "legend": LEGEND_ABOVE,
    }


def arm_name(result: Result, label: str) -> str:
    return f"{label.upper()} {titles(result)[label]}"


def latency(result: Result) -> Chart | None:
    """Share of requests answered within a time, one view a scenario."""
    data: list[Figure] = []
    views: list[View] = []
    for cell in dict.fromkeys(s.cell for s in result.summaries):
        traces = []
        for s in result.summaries:
            if s.cell != cell or not s.distribution_ms:
                continue
            traces.append(len(data))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"{arm_name(result, s.label)} ({s.latency.samples:,} requests)",
                    "x": [rounded(value) for value, _ in s.distribution_ms],
                    "y": [rounded(100 * part) for _, part in s.distribution_ms],
                    "line": {"color": f"--{s.label}", "width": 2.5, "dash": DASHES[s.label], "shape": "hv"},
                    "hovertemplate": "%{y:.1f} % within %{x:.4~g} ms<extra>" + s.label.upper() + "</extra>",
                }
            )
        if traces:
            views.append(View(cell, traces))
    if not views:
        return None
    return Chart(
        "latency",
        "Latency distribution",
        "Share of requests answered within a time, from the intended start to the last byte; all blocks of a scenario. "
        "Drag to zoom, double-click to return.",
        data,
        {
            "height": 400,
            "xaxis": axis("latency, ms", rangemode="tozero"),
            "yaxis": axis("requests answered, %", range=[0, 101.5], ticksuffix=" "),
            "legend": LEGEND_ABOVE,
        },
        main_view_first(result, views),
    )


def batch_sizes(result: Result) -> Chart | None:
    """Throughput and median latency against the batch size of a request."""
    sizes = {cell.name: cell.batch_size for cell in result.experiment.cells if cell.scenario == "batched"}
    data: list[Figure] = []
    for panel, attribute in (("", "throughput"), ("2", "p50")):
        for label in ("a", "b"):
            points = []
            for s in result.summaries:
                if s.cell not in sizes or s.label != label:
                    continue
                if attribute == "throughput":
                    value, interval = s.throughput_per_s, s.throughput_ci95
                else:
                    value, interval = s.latency.p50_ms, s.p50_ci95_ms
                if value is not None:
                    low, high = interval or (value, value)
                    points.append((sizes[s.cell], value, max(high - value, 0.0), max(value - low, 0.0)))
            if not points:
                continue
            unit = "images/s" if attribute == "throughput" else "ms"
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": arm_name(result, label),
                    "legendgroup": label,
                    "showlegend": attribute == "throughput",
                    "x": [p[0] for p in points],
                    "y": [rounded(p[1]) for p in points],
                    "xaxis": f"x{panel}",
                    "yaxis": f"y{panel}",
                    "error_y": {
                        "type": "data",
                        "array": [rounded(p[2]) for p in points],
                        "arrayminus": [rounded(p[3]) for p in points],
                        "color": f"--{label}",
                        "thickness": 1.5,
                        "width": 4,
                    },
                    "line": {"color": f"--{label}", "width": 2, "dash": DASHES[label]},
                    "marker": {"symbol": MARKERS[label], "size": 8, "color": f"--{label}"},
                    "hovertemplate": f"batch %{{x}}: %{{y:.4~g}} {unit}<extra>{label.upper()}</extra>",
                }
            )
    if not data:
        return None
    ticks = {"type": "log", "tickmode": "array", "tickvals": sorted(sizes.values())}
    ticks["ticktext"] = [str(size) for size in sorted(sizes.values())]
    return Chart(
        "batch-sizes",
        "Throughput and latency against batch size",
        "One request at a time with so many images in it; bars are 95 % intervals over the blocks of one arm and carry "
        "the machine's drift, which the paired ratios do not.",
        data,
        two_panels(
            380,
            "images a request",
            axis("images/s", rangemode="tozero"),
            axis("p50 latency, ms", rangemode="tozero"),
            ticks,
        ),
    )


def stages(result: Result) -> Chart | None:
    """Where the time of a request goes, both arms side by side, one view a scenario."""
    accounts = [account for account in result.stages if account.a or account.b]
    data: list[Figure] = []
    views: list[View] = []
    for account in accounts:
        arms = [arm for arm in (account.a, account.b) if arm]
        traces = []
        for place, stage in enumerate(STAGES):
            if not any(arm.stages_ms.get(stage) for arm in arms):
                continue
            traces.append(len(data))
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": stage,
                    "y": [arm_name(result, arm.label) for arm in arms],
                    "x": [rounded(arm.stages_ms.get(stage) or 0.0) for arm in arms],
                    "marker": {"color": f"--stage{place}", "line": {"color": "--card", "width": 1}},
                    "hovertemplate": TITLES[stage] + ": %{x:.3~g} ms<extra></extra>",
                }
            )
        views.append(View(account.cell, traces))
    if not views:
        return None
    return Chart(
        "stages",
        "Where the time of a request goes",
        "Means a request, in the same stages for both arms; what nobody times is outside the server's account. In a "
        "dynamic batch each request is charged the whole execution that it waited for.",
        data,
        {
            "height": 260,
            "margin": {"b": 96},
            "barmode": "relative",
            "bargap": 0.35,
            "xaxis": axis("ms a request", rangemode="tozero"),
            "yaxis": {"automargin": True, "autorange": "reversed"},
            "legend": {
                "orientation": "h",
                "yref": "container",
                "y": 0,
                "yanchor": "bottom",
                "x": 0,
                "traceorder": "normal",
            },
        },
        main_view_first(result, views),
    )


def main_view_first(result: Result, views: list[View]) -> list[View]:
    """The most loaded scenario is what a chart opens with."""
    return sorted(views, key=lambda view: view.label != result.verdict.main_scenario)


def rounded(value: float) -> float:
    """Six significant digits: a picture needs no more, and the file is a third smaller."""
    return float(f"{value:.6g}")
