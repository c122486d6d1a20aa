"""The charts of an engine matrix, each with a view per model, device and number of threads.

A configuration has the same colour, marker and line in every chart. Of a model with lengths, the charts over the batch
size show one length, and the chart over the length shows the largest batch; the tables hold every cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.engine_matrix.records import CellResult, Configuration, Estimate, Matrix, Winner
from loadgen.quantities import ratio

EXCLUDED_MARK = "not ranked"
ROOM = 22
"""Height of a line of the legend."""


class Scope(NamedTuple):
    """What is compared in one view."""

    model: str
    device: str
    threads: int | None


@dataclass(frozen=True, slots=True)
class View:
    """The cells of a scope."""

    scope: Scope
    label: str
    cells: tuple[CellResult, ...]


def short_model(model: str) -> str:
    """resnet50 for torchvision:resnet50"""
    return model.rpartition(":")[2].rpartition("/")[2] or model


def title_of(one: Configuration) -> str:
    """torch/eager fp32"""
    return f"{one.engine}/{one.mode} {one.precision}"


def scope_of(one: Configuration) -> Scope:
    return Scope(one.model, one.device, one.threads)


def scope_title(matrix: Matrix, scope: Scope) -> str:
    """resnet50 · 2 threads; with the device where there are several."""
    devices = {one.device for one in matrix.plan.configurations}
    names = [short_model(scope.model)]
    names += [scope.device] if len(devices) > 1 else []
    names += [] if scope.threads is None else [f"{scope.threads} thread{'' if scope.threads == 1 else 's'}"]
    return " · ".join(names)


def scopes(matrix: Matrix) -> list[Scope]:
    return list(dict.fromkeys(map(scope_of, matrix.plan.configurations)))


def views(matrix: Matrix) -> list[View]:
    """A view per scope with cells."""
    configurations = matrix.plan.configurations
    found = []
    for scope in scopes(matrix):
        cells = tuple(one for one in matrix.cells if scope_of(configurations[one.configuration]) == scope)
        if cells:
            found.append(View(scope, scope_title(matrix, scope), cells))
    return found


def style_place(matrix: Matrix, place: int) -> int:
    """The number of a configuration's style, the same in all scopes."""
    kinds = list(dict.fromkeys(map(title_of, matrix.plan.configurations)))
    return kinds.index(title_of(matrix.plan.configurations[place]))


def colour(style: int) -> str:
    return f"--{doc.ARM_STYLES[style % len(doc.ARM_STYLES)]}"


def shown_length(cells: Iterable[CellResult]) -> int | None:
    """The middle length of these cells, for charts over the batch size."""
    lengths = sorted({one.length for one in cells if one.length is not None})
    return lengths[(len(lengths) - 1) // 2] if lengths else None


def _line(
    matrix: Matrix, place: int, points: Sequence[tuple[CellResult, float, Estimate]], hover: str, **more: object
) -> doc.Figure:
    """One configuration's values with error bars; a cell that is not ranked has a hollow marker."""
    style, name = style_place(matrix, place), title_of(matrix.plan.configurations[place])
    symbol = charts.MARKERS[(style + style // len(charts.MARKERS)) % len(charts.MARKERS)]
    own = colour(style)
    values = [found.value for _, _, found in points]
    bounds = [found.interval for _, _, found in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": charts.label_text(name),
        "legendgroup": str(style),
        "x": [charts.rounded(x) for _, x, _ in points],
        "y": [charts.rounded(value) for value in values],
        "error_y": charts.errors(values, bounds, color=own),
        "line": {"color": own, "width": 1.5, "dash": charts.DASHES[style // len(doc.ARM_STYLES) % len(charts.DASHES)]},
        "marker": {
            "symbol": [symbol + ("-open" if cell.excluded else "") for cell, _, _ in points],
            "size": 8,
            "color": own,
        },
        "customdata": [EXCLUDED_MARK if cell.excluded else "" for cell, _, _ in points],
        "hovertemplate": f"{hover} %{{customdata}}<extra>{charts.label_text(name)}</extra>",
        **more,
    }


Get = Callable[[CellResult], Estimate | None]


def _lines(
    matrix: Matrix, cells: Sequence[CellResult], get: Get, x: Callable[[CellResult], float], hover: str, **more: object
) -> list[doc.Figure]:
    """A line per configuration that has this value."""
    found = []
    for place in dict.fromkeys(one.configuration for one in cells):
        points = [(one, x(one), value) for one in cells if one.configuration == place and (value := get(one))]
        if points:
            found.append(_line(matrix, place, sorted(points, key=lambda point: point[1]), hover, **more))
    return found


def latency_ms(one: CellResult) -> Estimate:
    found = one.latency_ns
    low = None if found.low is None else found.low / 1e6
    high = None if found.high is None else found.high / 1e6
    return Estimate(value=found.value / 1e6, low=low, high=high)


def _batch(one: CellResult) -> float:
    return float(one.batch)


def _values(lines: Iterable[doc.Figure]) -> list[float]:
    """All values of these lines with the ends of their error bars."""
    return [
        end
        for line in lines
        for y, more, less in zip(line["y"], line["error_y"]["array"], line["error_y"]["arrayminus"], strict=True)
        for end in (y - less, y, y + more)
    ]


def _at_one_length(view: View) -> tuple[list[CellResult], str]:
    """The cells of a view at its middle length, and the view's label."""
    length = shown_length(view.cells)
    cells = [one for one in view.cells if one.length == length]
    return cells, view.label if length is None else f"{view.label} · length {length}"


def batch_chart(matrix: Matrix) -> doc.Chart | None:
    """Latency and throughput against batch size."""
    data: list[doc.Figure] = []
    buttons = []
    for view in views(matrix):
        cells, label = _at_one_length(view)
        left = _lines(matrix, cells, latency_ms, _batch, "batch %{x}: %{y:.4~g} ms", xaxis="x", yaxis="y")
        right = _lines(
            matrix, cells, lambda one: one.items_per_second, _batch, "batch %{x}: %{y:,.4~g}/s",
            xaxis="x2", yaxis="y2", showlegend=False,
        )  # fmt: skip
        layout = charts.two_panels(
            _height(left),
            "batch size",
            charts.axis("latency of a batch, ms", **charts.log_axis(_values(left))),
            charts.axis("throughput, items/s", **charts.log_axis(_values(right))),
            charts.doubling(one.batch for one in cells),
        )
        buttons.append(charts.add_view(data, label, left + right, **layout))
    return _chart(
        "engine-batches", "Latency and throughput against batch size",
        "Both axes are logarithmic. Bars are 95 % intervals over rounds; a hollow marker is a cell that is not ranked. "
        "On a GPU both are without copies to and from the host, where the engine can execute without them.",
        data, buttons,
    )  # fmt: skip


def length_chart(matrix: Matrix) -> doc.Chart | None:
    """Latency against sequence length at the largest batch."""
    data: list[doc.Figure] = []
    buttons = []
    for view in views(matrix):
        lengths = {one.length for one in view.cells if one.length is not None}
        if len(lengths) < 2:
            continue
        batch = max(one.batch for one in view.cells)
        cells = [one for one in view.cells if one.batch == batch and one.length is not None]
        lines = _lines(matrix, cells, latency_ms, lambda one: float(one.length or 0), "length %{x}: %{y:.4~g} ms")
        layout = {
            "height": _height(lines),
            "xaxis": charts.axis("sequence length", **charts.doubling(length for length in lengths)),
            "yaxis": charts.axis("latency of a batch, ms", **charts.log_axis(_values(lines))),
            "legend": charts.LEGEND_ABOVE,
        }
        buttons.append(charts.add_view(data, f"{view.label} · batch {batch}", lines, **layout))
    return _chart(
        "engine-lengths", "Latency against sequence length",
        "Both axes are logarithmic: a straight line that rises by one decade per decade is linear growth, by two is "
        "quadratic growth.",
        data, buttons,
    )  # fmt: skip


def _over_batch(
    matrix: Matrix, name: str, title: str, caption: str, axis: str, hover: str, get: Get
) -> doc.Chart | None:
    data: list[doc.Figure] = []
    buttons = []
    for view in views(matrix):
        cells, label = _at_one_length(view)
        if lines := _lines(matrix, cells, get, _batch, hover):
            layout = {
                "height": _height(lines),
                "xaxis": charts.axis("batch size", **charts.doubling(one.batch for one in cells)),
                "yaxis": charts.axis(axis, **charts.log_axis(_values(lines))),
                "legend": charts.LEGEND_ABOVE,
            }
            buttons.append(charts.add_view(data, label, lines, **layout))
    return _chart(name, title, caption, data, buttons)


def speedup_chart(matrix: Matrix) -> doc.Chart | None:
    """Throughput over the baseline's."""
    baseline = f"{matrix.plan.baseline} fp32"
    return _over_batch(
        matrix, "engine-speedup", f"Speed-up over {baseline}",
        f"Throughput divided by that of {baseline} with the same threads, batch and length, paired by round; bars are "
        "95 % intervals.",
        "speed-up", "batch %{x}: %{y:.3f}×", lambda one: one.speedup,
    )  # fmt: skip


def energy_chart(matrix: Matrix) -> doc.Chart | None:
    """Energy per item, where it was measured."""
    return _over_batch(
        matrix, "engine-energy", "Energy per item",
        "Energy of the device over at least 0.3 s of batches after the timed ones, divided by their items.",
        "energy per item, J", "batch %{x}: %{y:.4~g} J", lambda one: one.joules_per_item,
    )  # fmt: skip


MEMORY: tuple[tuple[str, Callable[[CellResult], int | None]], ...] = (
    ("allocated on the device", lambda one: one.allocated_bytes),
    ("reserved on the device", lambda one: one.reserved_bytes),
    ("process on the device (NVML)", lambda one: one.process_device_bytes),
    ("process on the host (RSS)", lambda one: one.rss_bytes),
)


def memory_chart(matrix: Matrix) -> doc.Chart | None:
    """The largest memory of each configuration over its cells."""
    data: list[doc.Figure] = []
    buttons = []
    for view in views(matrix):
        places = list(dict.fromkeys(one.configuration for one in view.cells))
        rows = [charts.label_text(title_of(matrix.plan.configurations[place])) for place in places]
        bars: list[doc.Figure] = []
        for kind, (name, get) in enumerate(MEMORY):
            largest = [
                max((get(one) or 0 for one in view.cells if one.configuration == place), default=0) / 2**20
                for place in places
            ]
            if any(largest):
                marker = {"color": f"--stage{kind}", "pattern": {"shape": charts.PATTERNS[len(bars)]}}
                hover = f"%{{y}}: %{{x:,.0f}} MiB<extra>{name}</extra>"
                bars.append(charts.bars_across(name, rows, largest, marker, hovertemplate=hover))
        if bars:
            layout = {
                "height": 130 + (14 * len(bars) + 14) * len(rows),
                "barmode": "group",
                "xaxis": charts.axis("largest over all cells, MiB", rangemode="tozero"),
                "yaxis": charts.ROWS,
                "showlegend": True,
                "legend": charts.LEGEND_ABOVE | {"traceorder": "normal"},
            }
            buttons.append(charts.add_view(data, view.label, bars, **layout))
    return _chart(
        "engine-memory", "Memory",
        "The largest of each configuration over its cells. Reserved memory includes allocated memory; the process's "
        "device memory, read after each cell, also has the context and the libraries. RSS is the peak of the process.",
        data, buttons,
    )  # fmt: skip


def winner_chart(matrix: Matrix) -> doc.Chart | None:
    """The fastest configuration at every batch size and length."""
    data: list[doc.Figure] = []
    buttons = []
    for scope in scopes(matrix):
        own = [one for one in matrix.winners if (one.model, one.device, one.threads) == scope]
        if not own:
            continue
        batches = sorted({one.batch for one in own})
        lengths = sorted({one.length for one in own}, key=lambda length: length or 0)
        at = {(one.batch, one.length): one for one in own}
        grid = [[at.get((batch, length)) for batch in batches] for length in lengths]
        styles = sorted({style_place(matrix, one.configuration) for one in own})
        z = [
            [None if one is None else styles.index(style_place(matrix, one.configuration)) for one in row]
            for row in grid
        ]
        text = [["" if one is None else _winner_text(matrix, one) for one in row] for row in grid]
        steps = [
            [edge, colour(style)]
            for place, style in enumerate(styles)
            for edge in (place / len(styles), (place + 1) / len(styles))
        ]
        trace = {
            "type": "heatmap",
            "x": [str(batch) for batch in batches],
            "y": ["–" if length is None else str(length) for length in lengths],
            "z": z,
            "zmin": -0.5,
            "zmax": len(styles) - 0.5,
            "text": text,
            "texttemplate": "%{text}",
            "textfont": {"color": "--card"},
            "hovertemplate": "batch %{x}, length %{y}<br>%{text}<extra></extra>",
            "colorscale": steps,
            "showscale": False,
            "xgap": 3,
            "ygap": 3,
        }
        layout = {
            "height": 120 + 74 * len(lengths),
            "xaxis": charts.axis("batch size", type="category"),
            "yaxis": charts.axis("length", type="category"),
        }
        buttons.append(charts.add_view(data, scope_title(matrix, scope), [trace], **layout))
    return _chart(
        "engine-winners", "The fastest configuration",
        "By batch size and length, with its throughput over that of the runner-up. A question mark: not certain, "
        "another configuration may be as fast.",
        data, buttons,
    )  # fmt: skip


def _winner_text(matrix: Matrix, one: Winner) -> str:
    asked = matrix.plan.configurations[one.configuration]
    mark = "" if one.certain else " ?"
    lines = [f"{asked.engine}{mark}", f"{asked.mode} {asked.precision}"]
    if one.ratio is not None:
        lines.append(ratio(one.ratio.value, one.ratio.interval))
    return "<br>".join(map(charts.label_text, lines))


def _height(lines: Sequence[doc.Figure]) -> int:
    return 360 + ROOM * max((len(lines) + 3) // 4, 1)


def _chart(name: str, title: str, caption: str, data: list[doc.Figure], buttons: list[doc.View]) -> doc.Chart | None:
    return doc.Chart(name, title, caption, data, {}, buttons) if data else None
