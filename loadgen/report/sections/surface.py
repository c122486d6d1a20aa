"""The decision surface: a map of the best arm over users and batch size, with the crossings, as a chart and a table.

The chart shows each arm by its letter, so that it reads without colour; where nothing can be told there is a question
mark on hatching. Users go up and sizes across, because a phone is narrow and sizes are few.
"""

from __future__ import annotations

import math

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import counted, ratio, ratio_interval, sentence, share
from loadgen.metrics.surface import AXIS_TITLES, Surface, SurfacePoint, place_of_users, rows_in_words
from loadgen.records.run import shown
from loadgen.verdict.result import Result

WIDTH = 0.97
"""Of a field of the map, whose place is 1 wide and 1 high."""
FAINTEST, DEEPEST = 0.18, 0.6
"""Opacity of an arm's colour at the smallest and at the largest margin; the text on it stays readable."""
EQUAL, UNDECIDED, INVALID = "= equal", "? nothing can be told", "✗ a check failed"


def surface_chart(result: Result) -> doc.Chart | None:
    """The map, and the crossings as lines across it with their intervals; None of a run without a surface."""
    surface = result.verdict.surface
    if surface is None:
        return None
    sizes, users = _axes(surface)
    margins = [math.log(point.ratio) for point in surface.points if point.winner and point.ratio]
    deepest = max(margins, default=1.0) or 1.0
    data: list[doc.Figure] = []
    for label in result.experiment.labels:
        won = [point for point in surface.points if point.winner == label]
        depths = [math.log(point.ratio or 1.0) / deepest for point in won]
        marker: doc.Figure = {
            "color": charts.colour(result, label),
            "opacity": [charts.rounded(FAINTEST + (DEEPEST - FAINTEST) * depth) for depth in depths],
        }
        if won:  # the arms are listed above the map
            fields = _fields(surface, won, charts.label_text(shown(label)), marker)
            data.append(fields | {"showlegend": False})
    pattern = {"shape": "/", "fgcolor": "--muted", "bgcolor": "--card", "size": 9, "solidity": 0.12}
    for state, name, marker in (
        ("no_difference", EQUAL, {"color": "--card"}),
        ("inconclusive", UNDECIDED, {"color": "--card", "pattern": pattern}),
        ("invalid", INVALID, {"color": "--card", "pattern": {**pattern, "shape": "x"}}),
    ):
        points = [point for point in surface.points if point.state == state]
        if points:
            data.append(_fields(surface, points, name, marker))
    data += _crossing_lines(surface, sizes, users)
    return doc.Chart(
        "surface",
        "",
        f"The best arm and how many times better it is than the next, by {charts.rate_in_words(result)}; the deeper "
        "the colour, the larger. The line is where another arm becomes the best, the bar its 95 % interval.",
        data,
        {
            "height": 112 + 40 * len(users),
            "margin": {"t": 60, "b": 52, "r": 16},
            "barmode": "overlay",
            "legend": charts.LEGEND_ABOVE,
            "xaxis": _axis(AXIS_TITLES[surface.across], sizes),
            "yaxis": _axis("users", users),
        },
        marks="fields",
    )


def decision_surface(result: Result) -> doc.Section | None:
    """The map as a table, a row per number of users, and what each column says in a sentence."""
    surface = result.verdict.surface
    if surface is None:
        return None
    sizes, users = _axes(surface)
    places = {(point.users, point.size): point for point in surface.points}
    rows: list[list[doc.Value]] = [
        [counted(number, "user"), *(_cell(result, places.get((number, size))) for size in sizes)] for number in users
    ]
    margin = share(result.experiment.equivalence_margin)
    return doc.section(
        "Decision surface",
        # The map of a single column is the same list.
        doc.Table(
            doc.names("load", *map(surface.at, sizes)), rows, on=doc.READ if len(sizes) > 1 else doc.READ & ~doc.HTML
        ),
        doc.Items([doc.Item(sentence(text)) for text in rows_in_words(surface, result.names)]),
        doc.Text(
            f"The best arm and how many times better it is than the next, by {charts.rate_in_words(result)}. = means "
            f"equal within ±{margin}, ? that nothing can be told, ✗ that a check failed. A crossing is interpolated "
            "between the loads beside it; in brackets its 95 % interval.",
            "note",
            on=doc.TERMINAL | doc.MARKDOWN,
        ),
        on=doc.READ,
    )


def _axes(surface: Surface) -> tuple[list[int], list[int]]:
    """All sizes and all numbers of users, ascending."""
    return sorted({point.size for point in surface.points}), sorted({point.users for point in surface.points})


def _factor(point: SurfacePoint) -> str:
    return ratio(point.ratio, point.ci95)


def _text(point: SurfacePoint) -> str:
    """A field of the map: the winner with its margin, or a sign."""
    if point.winner is not None:
        return f"{shown(point.winner)} {_factor(point)}"
    return {"no_difference": "=", "invalid": "✗"}.get(point.state, "?")


def _measured(point: SurfacePoint) -> str:
    """What was measured, whatever it shows: "B 1.04× A (0.98–1.11)"."""
    if point.best is None or point.runner_up is None:
        return "not measured"
    return f"{shown(point.best)} {_factor(point)} {shown(point.runner_up)} ({ratio_interval(point.ci95)})"


def _cell(result: Result, point: SurfacePoint | None) -> doc.Cell:
    if point is None:
        return doc.Cell("–")
    style = "note" if point.winner is None else charts.arm_style(result, point.winner)
    return doc.Cell(_text(point), style, hint=_measured(point))


def _fields(surface: Surface, points: list[SurfacePoint], name: str, marker: doc.Figure) -> doc.Figure:
    """Fields of the map as bars, which unlike a heat map can be hatched."""
    sizes, users = _axes(surface)
    return {
        "type": "bar",
        "name": name,
        "x": [sizes.index(point.size) for point in points],
        "base": [users.index(point.users) - WIDTH / 2 for point in points],
        "y": [WIDTH for _ in points],
        "width": WIDTH,
        "marker": {**marker, "line": {"color": "--grid", "width": 1}},
        "text": [_text(point) for point in points],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "insidetextfont": {"color": "--ink"},
        "customdata": [
            charts.label_text(f"{point.users} users, {surface.at(point.size)}: {_measured(point)}") for point in points
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _crossing_lines(surface: Surface, sizes: list[int], users: list[int]) -> list[doc.Figure]:
    """A line across the column of each crossing, and a bar for its interval."""
    if not surface.crossings:
        return []
    across: list[float | None] = []
    up: list[float | None] = []
    bars: list[tuple[float, float, float, float]] = []
    for crossing in surface.crossings:
        column = sizes.index(crossing.size)
        low, centre, high = (
            place_of_users(value, users) for value in (crossing.ci95[0], crossing.users, crossing.ci95[1])
        )
        across += [column - WIDTH / 2, column + WIDTH / 2, None]
        up += [centre, centre, None]
        bars.append((column + 0.42, low, centre, high))
    line: doc.Figure = {"color": "--ink", "width": 3}
    texts = [f"{crossing.words}, {surface.at(crossing.size)}" for crossing in surface.crossings]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "crossing",
            "x": across,
            "y": up,
            "line": line,
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "showlegend": False,
            "x": [place for place, *_ in bars],
            "y": [centre for _, _, centre, _ in bars],
            "marker": {"color": "--ink", "size": 8},
            "error_y": charts.errors(
                [centre for _, _, centre, _ in bars], [(low, high) for _, low, _, high in bars], color="--ink"
            ),
            "customdata": texts,
            "hovertemplate": "%{customdata}<extra></extra>",
        },
    ]


def _axis(title: str, values: list[int]) -> doc.Figure:
    """An axis with a place for each value."""
    return charts.axis(
        title,
        tickmode="array",
        tickvals=list(range(len(values))),
        ticktext=[str(value) for value in values],
        range=[-0.5, len(values) - 0.5],
        showgrid=False,
        fixedrange=True,
    )
