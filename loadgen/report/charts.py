"""What charts share: lines, bars and axes as Plotly takes them, and how an arm is named and marked.

Arms also differ by marker, line and hatching, for readers and printers without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import loadgen.report.document as doc
from loadgen.base.documents import printable
from loadgen.base.quantities import per_second, significant
from loadgen.metrics.registry import OUTPUT_TOKENS, RATES
from loadgen.records.run import Label, item_of, shown
from loadgen.verdict.result import Result

MARKERS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "pentagon", "triangle-down")
DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot", "8px,2px", "2px,6px", "12px,3px,2px,3px,2px,3px")
PATTERNS = ("", "/", "\\", "x", "-", "|", "+", ".")
"""Hatchings of bars."""
LEGEND_ABOVE: doc.Figure = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
LEAST_GAP = 1 / 8
"""Least distance of two ticks, as a share of the axis: room for a label of five characters in a small window."""
_TIERS = (
    (1.0,), (2.0, 5.0), (1.5, 3.0, 7.0), (1.25, 4.0, 6.0, 8.0), (1.1, 9.0), (1.05, 9.5), (1.02, 9.8), (1.01, 9.9),
    (1.005, 9.95),
)  # fmt: skip
"""Mantissas of ticks, the roundest first."""


def arm_name(result: Result, label: Label) -> str:
    """An arm in a legend: its label and its name."""
    return label_text(f"{shown(label)} {result.titles[label]}")


def rate_unit(result: Result) -> str:
    """The unit of a throughput: images/s."""
    return per_second(item_of(result.environment))


def rate_in_words(result: Result) -> str:
    """What the arms are compared by: "images/s", of a language model "output tokens/s"."""
    metric = RATES[result.experiment.kind]
    return f"{'output ' if metric is OUTPUT_TOKENS else ''}{metric.unit_for(item_of(result.environment))}"


def several(result: Result) -> bool:
    """Whether there are more than two arms, so that a sentence must say which of them it compares."""
    return len(result.experiment.arms) > 2


def base_and_arm(result: Result) -> tuple[str, str]:
    """The two sides of a comparison in a sentence: "A" and "B", or "A" and "the arm" where there are several."""
    base, *others = map(shown, result.experiment.labels)
    return base, "the arm" if several(result) else others[0]


def style_at(place: int) -> doc.Style:
    """The colour of a place in tables and lists; there are as many markers and lines of charts."""
    return doc.ARM_STYLES[place % len(doc.ARM_STYLES)]


def place_of(result: Result, label: Label) -> int:
    """The place of an arm's colour, marker and line; 0 is the baseline."""
    return result.experiment.labels.index(label) % len(doc.ARM_STYLES)


def arm_style(result: Result, label: Label) -> doc.Style:
    """An arm's colour in a table or a list."""
    return style_at(place_of(result, label))


def colour(result: Result, label: Label) -> str:
    """An arm's colour in a chart."""
    return f"--{arm_style(result, label)}"


def label_text(text: str) -> str:
    """Text for a chart; Plotly interprets some HTML in it."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;")


def rounded(value: float) -> float:
    """Round to six significant digits: enough for a picture, and the file is a third smaller."""
    return significant(value, 6)


def scatter(points: Iterable[tuple[float | str, float]], mode: str, **more: object) -> doc.Figure:
    """Points of a chart: "markers", "lines" or both."""
    places = list(points)
    across, up = [x if isinstance(x, str) else rounded(x) for x, _ in places], [rounded(y) for _, y in places]
    return {"type": "scatter", "mode": mode, "x": across, "y": up, **more}


def front(points: Iterable[tuple[float, float]], color: str, name: str = "", **line: object) -> doc.Figure:
    """A line through the best of the points that are drawn, in the legend if it has a name."""
    named: doc.Figure = {"name": name} if name else {"showlegend": False}
    return scatter(points, "lines", line={"color": color, **line}, hoverinfo="skip", **named)


def joined(
    place: int, name: str, points: Iterable[tuple[float | str, float]], hover: str, *, size: int = 8
) -> doc.Figure:
    """Points that are joined and marked in the way of a place. `hover` is the text at a point."""
    shade, number = f"--{style_at(place)}", place % len(DASHES)
    return scatter(
        points, "lines+markers", name=name, line={"color": shade, "width": 1.5, "dash": DASHES[number]},
        marker={"symbol": MARKERS[number], "size": size, "color": shade}, hovertemplate=hover,
    )  # fmt: skip


def line(
    result: Result,
    label: Label,
    points: Iterable[tuple[float, float]],
    hover: str,
    *,
    name: str = "",
    marker: doc.Figure | None = None,
    style: doc.Figure | None = None,
    **more: object,
) -> doc.Figure:
    """Points of one arm, joined and marked. `name` is added to the arm's name."""
    text = f"{hover}<extra>{label_text(shown(label))}</extra>"
    drawn = joined(place_of(result, label), arm_name(result, label) + name, points, text)
    drawn["line"] |= style or {}
    drawn["marker"] |= marker or {}
    return drawn | {"legendgroup": label + name} | more


def tall(result: Result, height: int) -> int:
    """The height of a chart whose legend names every arm; `height` is that for two arms."""
    return height + 22 * (len(result.experiment.arms) - 2)


def hollow(result: Result, label: Label, filled: Iterable[bool]) -> doc.Figure:
    """An arm's markers, some of them not filled."""
    marker = MARKERS[place_of(result, label)]
    return {"symbol": [marker + ("" if is_filled else "-open") for is_filled in filled]}


def bars_across(
    name: str, rows: Sequence[str], values: Iterable[float], marker: doc.Figure, **more: object
) -> doc.Figure:
    """Horizontal bars, one per row."""
    lengths = [rounded(value) for value in values]
    return {"type": "bar", "orientation": "h", "name": name, "y": list(rows), "x": lengths, "marker": marker, **more}


def errors(values: Sequence[float], bounds: Sequence[tuple[float, float] | None], **more: object) -> doc.Figure:
    """Error bars from the intervals around these values."""
    pairs = [(value, limits or (value, value)) for value, limits in zip(values, bounds, strict=True)]
    return {
        "type": "data",
        "array": [rounded(max(high - value, 0.0)) for value, (_, high) in pairs],
        "arrayminus": [rounded(max(value - low, 0.0)) for value, (low, _) in pairs],
        "thickness": 1.5,
        "width": 4,
        **more,
    }


def axis(title: str, **more: object) -> doc.Figure:
    """A linear axis with room for its labels."""
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **more}


def upright_line(x: float, color: str, **line: object) -> doc.Figure:
    """The shape of a line from the bottom to the top of a chart."""
    place: doc.Figure = {"xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", **place, "line": {"color": color, **line}}


def label_at(x: float, y: float, text: str, color: str, **more: object) -> doc.Figure:
    """The annotation of a place of the x axis, on a logarithmic one its logarithm, at a share `y` of the height."""
    place: doc.Figure = {"xref": "x", "yref": "paper", "x": x, "y": y, "showarrow": False}
    return {**place, "text": label_text(text), "font": {"color": color, "size": 11}, **more}


ROWS: doc.Figure = {"automargin": True, "autorange": "reversed"}
"""The y axis of horizontal bars, the first row on top."""


SQUEEZED = 20.0
"""On a linear axis from 0 the smallest of values that differ by this factor has a twentieth of the axis."""


def squeezed(values: Iterable[float]) -> bool:
    """Whether a linear axis hides the small ones of these values, so that they need a logarithmic one."""
    positive = [value for value in values if 0.0 < value < math.inf]
    return bool(positive) and max(positive) > SQUEEZED * min(positive)


def value_axis(title: str, values: Iterable[float], **more: object) -> doc.Figure:
    """An axis from 0, or a logarithmic one where that would squeeze the `values`; its title says so."""
    measured = list(values)
    if squeezed(measured):
        return axis(f"{title}, log scale", **log_axis(measured), **more)
    return axis(title, rangemode="tozero", **more)


def doubling(values: Iterable[int]) -> doc.Figure:
    """A logarithmic axis with a tick at each of these sizes."""
    sizes = sorted(set(values))
    return {"type": "log", "tickmode": "array", "tickvals": sizes, "ticktext": [str(size) for size in sizes]}


def two_panels(height: int, across: str, left: doc.Figure, right: doc.Figure, ticks: doc.Figure) -> doc.Figure:
    """The layout of two plots side by side over the same x axis."""
    return {
        "height": height,
        "xaxis": axis(across, domain=[0, 0.45], anchor="y", **ticks),
        "yaxis": {**left, "anchor": "x"},
        "xaxis2": axis(across, domain=[0.55, 1], anchor="y2", **ticks),
        "yaxis2": {**right, "anchor": "x2"},
        "legend": LEGEND_ABOVE,
    }


def add_view(data: list[doc.Figure], label: str, traces: list[doc.Figure], **layout: object) -> doc.View:
    """Add traces to a chart's data and return the button that shows them."""
    view = doc.View(label, list(range(len(data), len(data) + len(traces))), layout)
    data += traces
    return view


def chart_by_scenario(
    result: Result,
    make: Callable[[str], list[doc.Figure]],
    name: str,
    title: str,
    caption: str,
    axes: Callable[[list[doc.Figure]], doc.Figure] = lambda _: {},
    **layout: object,
) -> doc.Chart | None:
    """A chart with a view per scenario, the most loaded first; None where no scenario has traces. `axes` makes the part
    of the layout that depends on a view's traces."""
    data: list[doc.Figure] = []
    scenarios = [(workload.name, traces) for workload in result.experiment.workloads if (traces := make(workload.name))]
    scenarios.sort(key=lambda scenario: scenario[0] != result.verdict.main_scenario)
    views = [add_view(data, workload, traces, **axes(traces)) for workload, traces in scenarios]
    return doc.Chart(name, title, caption, data, layout, views) if data else None


def round_ticks(low: float, high: float, gap: float = LEAST_GAP) -> list[float]:
    """Round numbers from `low` to `high`, both above 0, ascending, no two nearer than this share of the axis. Plotly's
    own ticks stand too close in narrow and in wide ranges. The roundest numbers take their places first; a less round
    one gets a tick only where no other is near."""
    start, end = math.log10(low), math.log10(high)
    least = (end - start) * gap
    taken: list[float] = []
    decades = sorted(range(math.floor(start), math.floor(end) + 1), key=abs)
    for tier in _TIERS:
        for decade in decades:
            for mantissa in tier:
                place = math.log10(mantissa * 10.0**decade)
                if start <= place <= end and all(abs(place - other) >= least for other in taken):
                    taken.append(place)
    return [significant(10**place, 4) for place in sorted(taken)]


def log_axis(values: Iterable[float]) -> doc.Figure:
    """A logarithmic axis over all finite `values` above 0 with a little room beyond them; Plotly's own ticks where no
    number is round."""
    positive = [value for value in values if 0.0 < value < math.inf]
    if not positive:
        return {"type": "log"}
    low, high = min(positive), max(positive)
    room = max((high / low) ** 0.04, 1.02)
    low, high = low / room, high * room
    layout: doc.Figure = {"type": "log", "range": [math.log10(low), math.log10(high)]}
    ticks = round_ticks(low, high)
    if len(ticks) > 1:
        layout |= {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}
    return layout
