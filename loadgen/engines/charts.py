"""The charts of an engine matrix, each with a view per model, device and number of threads.

A configuration has the same colour, marker and line in every chart. Of a model with lengths, the charts over the batch
size show one length, and the chart over the length shows the largest batch; the tables hold every cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import counted, ratio
from loadgen.records.matrix import CellResult, Matrix, Scope, Shape, Winner
from loadgen.stats.estimates import Estimate

EXCLUDED_MARK = "not ranked"
ROOM = 22
"""Height of a line of the legend."""


def short_model(model: str) -> str:
    """resnet50 for torchvision:resnet50"""
    return model.rpartition(":")[2].rpartition("/")[2] or model


def scope_title(matrix: Matrix, scope: Scope) -> str:
    """resnet50 · 2 threads; with the device where there are several."""
    devices = {configuration.device for configuration in matrix.plan.configurations}
    names = [short_model(scope.model)]
    names += [scope.device] if len(devices) > 1 else []
    names += [] if scope.threads is None else [counted(scope.threads, "thread")]
    return " · ".join(names)


def scopes(matrix: Matrix) -> list[Scope]:
    """The scopes of the plan, each once."""
    return list(dict.fromkeys(configuration.scope for configuration in matrix.plan.configurations))


def views(matrix: Matrix) -> Iterator[tuple[Scope, str, tuple[CellResult, ...]]]:
    """Every scope with cells, its name for readers, and its cells."""
    configurations = matrix.plan.configurations
    for scope in scopes(matrix):
        cells = tuple(cell for cell in matrix.cells if configurations[cell.configuration].scope == scope)
        if cells:
            yield scope, scope_title(matrix, scope), cells


def style_place(matrix: Matrix, place: int) -> int:
    """The number of a configuration's style, the same in all scopes."""
    titles = list(dict.fromkeys(configuration.title for configuration in matrix.plan.configurations))
    return titles.index(matrix.plan.configurations[place].title)


def colour(style: int) -> str:
    return f"--{charts.style_at(style)}"


def shown_length(cells: Iterable[CellResult]) -> int | None:
    """The middle length of these cells, for charts over the batch size."""
    lengths = sorted({cell.length for cell in cells if cell.length is not None})
    return lengths[(len(lengths) - 1) // 2] if lengths else None


def _line(
    matrix: Matrix, place: int, points: Sequence[tuple[CellResult, float, Estimate]], hover: str, **more: object
) -> doc.Figure:
    """One configuration's values with error bars; a cell that is not ranked has a hollow marker."""
    style, name = style_place(matrix, place), charts.label_text(matrix.plan.configurations[place].title)
    symbol = charts.MARKERS[(style + style // len(charts.MARKERS)) % len(charts.MARKERS)]
    values = [estimate.value for _, _, estimate in points]
    bounds = [estimate.interval for _, _, estimate in points]
    places, text = [(x, estimate.value) for _, x, estimate in points], f"{hover} %{{customdata}}<extra>{name}</extra>"
    drawn = charts.joined(style, name, places, text)
    drawn["line"]["dash"] = charts.DASHES[style // len(doc.ARM_STYLES) % len(charts.DASHES)]
    drawn["marker"]["symbol"] = [symbol + ("-open" if cell.excluded else "") for cell, _, _ in points]
    about = {
        "legendgroup": str(style),
        "error_y": charts.errors(values, bounds, color=colour(style)),
        "customdata": [EXCLUDED_MARK if cell.excluded else "" for cell, _, _ in points],
    }
    return drawn | about | more


Get = Callable[[CellResult], Estimate | None]


def _lines(
    matrix: Matrix, cells: Sequence[CellResult], get: Get, x: Callable[[CellResult], float], hover: str, **more: object
) -> list[doc.Figure]:
    """A line per configuration that has this value."""
    lines = []
    for place in dict.fromkeys(cell.configuration for cell in cells):
        points = [(cell, x(cell), value) for cell in cells if cell.configuration == place and (value := get(cell))]
        if points:
            lines.append(_line(matrix, place, sorted(points, key=lambda point: point[1]), hover, **more))
    return lines


def latency_ms(cell: CellResult) -> Estimate:
    return cell.latency_ns.scaled(1e-6)


def _batch(cell: CellResult) -> float:
    return float(cell.batch)


def _values(lines: Iterable[doc.Figure]) -> list[float]:
    """All values of these lines with the ends of their error bars."""
    return [
        end
        for line in lines
        for y, more, less in zip(line["y"], line["error_y"]["array"], line["error_y"]["arrayminus"], strict=True)
        for end in (y - less, y, y + more)
    ]


def _views_at_one_length(matrix: Matrix) -> Iterator[tuple[str, list[CellResult]]]:
    """The label of every view, and its cells at its middle length."""
    for _, label, cells in views(matrix):
        length = shown_length(cells)
        at_length = [cell for cell in cells if cell.length == length]
        yield label if length is None else f"{label} · length {length}", at_length


Panel = tuple[str, list[doc.Figure], doc.Figure]
"""One view of a chart: the label of its button, its traces and its layout."""


def _chart(name: str, title: str, caption: str, panels: Iterable[Panel]) -> doc.Chart | None:
    data: list[doc.Figure] = []
    buttons = [charts.add_view(data, label, traces, **layout) for label, traces, layout in panels]
    return doc.Chart(name, title, caption, data, {}, buttons) if data else None


def _one_plot(lines: Sequence[doc.Figure], across: doc.Figure, up: str) -> doc.Figure:
    return {
        "height": _height(lines),
        "xaxis": across,
        "yaxis": charts.axis(up, **charts.log_axis(_values(lines))),
        "legend": charts.LEGEND_ABOVE,
    }


def _height(lines: Sequence[doc.Figure]) -> int:
    return 360 + ROOM * max((len(lines) + 3) // 4, 1)


def batch_chart(matrix: Matrix) -> doc.Chart | None:
    """Latency and throughput against batch size."""

    def panels() -> Iterator[Panel]:
        for label, cells in _views_at_one_length(matrix):
            left = _lines(matrix, cells, latency_ms, _batch, "batch %{x}: %{y:.4~g} ms", xaxis="x", yaxis="y")
            right = _lines(
                matrix, cells, lambda cell: cell.items_per_second, _batch, "batch %{x}: %{y:,.4~g}/s",
                xaxis="x2", yaxis="y2", showlegend=False,
            )  # fmt: skip
            layout = charts.two_panels(
                _height(left),
                "batch size",
                charts.axis("latency of a batch, ms", **charts.log_axis(_values(left))),
                charts.axis("throughput, items/s", **charts.log_axis(_values(right))),
                charts.doubling(cell.batch for cell in cells),
            )
            yield label, left + right, layout

    return _chart(
        "engine-batches", "Latency and throughput against batch size",
        "Both axes are logarithmic. Bars are 95 % intervals over rounds; a hollow marker is a cell that is not ranked. "
        "On a GPU both are without copies to and from the host, where the engine can execute without them.",
        panels(),
    )  # fmt: skip


def length_chart(matrix: Matrix) -> doc.Chart | None:
    """Latency against sequence length at the largest batch."""

    def panels() -> Iterator[Panel]:
        for _, label, cells in views(matrix):
            lengths = {cell.length for cell in cells if cell.length is not None}
            if len(lengths) < 2:
                continue
            batch = max(cell.batch for cell in cells)
            at_batch = [cell for cell in cells if cell.batch == batch and cell.length is not None]
            hover = "length %{x}: %{y:.4~g} ms"
            lines = _lines(matrix, at_batch, latency_ms, lambda cell: float(cell.length or 0), hover)
            across = charts.axis("sequence length", **charts.doubling(lengths))
            yield f"{label} · batch {batch}", lines, _one_plot(lines, across, "latency of a batch, ms")

    return _chart(
        "engine-lengths", "Latency against sequence length",
        "Both axes are logarithmic: a straight line that rises by one decade per decade is linear growth, by two is "
        "quadratic growth.",
        panels(),
    )  # fmt: skip


def _over_batch(matrix: Matrix, axis: str, hover: str, get: Get) -> Iterator[Panel]:
    for label, cells in _views_at_one_length(matrix):
        if lines := _lines(matrix, cells, get, _batch, hover):
            across = charts.axis("batch size", **charts.doubling(cell.batch for cell in cells))
            yield label, lines, _one_plot(lines, across, axis)


def speedup_chart(matrix: Matrix) -> doc.Chart | None:
    """Throughput over the baseline's."""
    baseline = f"{matrix.plan.baseline} fp32"
    return _chart(
        "engine-speedup", f"Speed-up over {baseline}",
        f"Throughput divided by that of {baseline} with the same threads, batch and length, paired by round; bars are "
        "95 % intervals.",
        _over_batch(matrix, "speed-up", "batch %{x}: %{y:.3f}×", lambda cell: cell.speedup),
    )  # fmt: skip


def energy_chart(matrix: Matrix) -> doc.Chart | None:
    """Energy per item, where it was measured."""
    return _chart(
        "engine-energy", "Energy per item",
        "Energy of the device over at least 0.3 s of batches after the timed ones, divided by their items.",
        _over_batch(
            matrix, "energy per item, J", "batch %{x}: %{y:.4~g} J", lambda cell: cell.joules_per_item
        ),
    )  # fmt: skip


MEMORY: tuple[tuple[str, Callable[[CellResult], int | None]], ...] = (
    ("allocated on the device", lambda cell: cell.allocated_bytes),
    ("reserved on the device", lambda cell: cell.reserved_bytes),
    ("process on the device (NVML)", lambda cell: cell.process_device_bytes),
    ("process on the host (RSS)", lambda cell: cell.rss_bytes),
)


def memory_chart(matrix: Matrix) -> doc.Chart | None:
    """The largest memory of each configuration over its cells."""

    def panels() -> Iterator[Panel]:
        for _, label, cells in views(matrix):
            places = list(dict.fromkeys(cell.configuration for cell in cells))
            rows = [charts.label_text(matrix.plan.configurations[place].title) for place in places]
            bars: list[doc.Figure] = []
            for kind, (name, get) in enumerate(MEMORY):
                largest = [
                    max(get(cell) or 0 for cell in cells if cell.configuration == place) / 2**20 for place in places
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
                yield label, bars, layout

    return _chart(
        "engine-memory", "Memory",
        "The largest of each configuration over its cells. Reserved memory includes allocated memory; the process's "
        "device memory, read after each cell, also has the context and the libraries. RSS is the peak of the process.",
        panels(),
    )  # fmt: skip


def winner_chart(matrix: Matrix) -> doc.Chart | None:
    """The fastest configuration at every batch size and length."""

    def panels() -> Iterator[Panel]:
        for scope in scopes(matrix):
            winners = {winner.shape: winner for winner in matrix.winners if winner.scope == scope}
            if winners:
                yield scope_title(matrix, scope), *_heat_map(matrix, winners)

    return _chart(
        "engine-winners", "The fastest configuration",
        "By batch size and length, with its throughput over that of the runner-up. A question mark: not certain, "
        "another configuration may be as fast.",
        panels(),
    )  # fmt: skip


def _heat_map(matrix: Matrix, winners: Mapping[Shape, Winner]) -> tuple[list[doc.Figure], doc.Figure]:
    batches = sorted({batch for batch, _ in winners})
    lengths = sorted({length for _, length in winners}, key=lambda length: length or 0)
    has_lengths = lengths != [None]
    grid = [[winners.get((batch, length)) for batch in batches] for length in lengths]
    styles = sorted({style_place(matrix, winner.configuration) for winner in winners.values()})
    z = [
        [None if winner is None else styles.index(style_place(matrix, winner.configuration)) for winner in row]
        for row in grid
    ]
    text = [["" if winner is None else _winner_text(matrix, winner) for winner in row] for row in grid]
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
        "hovertemplate": f"batch %{{x}}{', length %{y}' if has_lengths else ''}<br>%{{text}}<extra></extra>",
        "colorscale": steps,
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
    }
    layout = {
        "height": 120 + 74 * len(lengths),
        "xaxis": charts.axis("batch size", type="category"),
        "yaxis": charts.axis("length", type="category", visible=has_lengths),
    }
    return [trace], layout


def _winner_text(matrix: Matrix, winner: Winner) -> str:
    configuration = matrix.plan.configurations[winner.configuration]
    mark = "" if winner.certain else " ?"
    lines = [f"{configuration.engine}{mark}", f"{configuration.mode} {configuration.precision}"]
    if winner.ratio is not None:
        lines.append(ratio(winner.ratio.value, winner.ratio.interval))
    return "<br>".join(map(charts.label_text, lines))
