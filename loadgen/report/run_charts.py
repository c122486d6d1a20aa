"""The charts of how the run went: cold starts, speed block by block, executed batches."""

from __future__ import annotations

from loadgen.analysis.result import Result
from loadgen.report.charts import (
    DASHES,
    LEGEND_ABOVE,
    MARKERS,
    Chart,
    Figure,
    View,
    arm_name,
    axis,
    main_view_first,
    rounded,
)

PHASES = (
    ("live", "live_ns", "process start to live"),
    ("ready", "ready_ns", "live to ready: load and warm-up"),
    ("first answer", "first_answer_ns", "ready to first answer"),
)


def cold_starts(result: Result) -> Chart | None:
    """One bar a start, from the creation of the process to its first answer."""
    starts = [s for s in result.cold_starts if s.first_answer_ns is not None or s.ready_ns is not None]
    if not starts:
        return None
    starts = sorted(starts, key=lambda start: (start.label, start.repetition))
    rows = [f"{start.label.upper()} start {start.repetition + 1}" for start in starts]
    data: list[Figure] = []
    reached = [0] * len(starts)
    for place, (_, attribute, title) in enumerate(PHASES):
        seconds = []
        for index, start in enumerate(starts):
            moment = getattr(start, attribute)
            seconds.append(rounded((moment - reached[index]) / 1e9) if moment is not None else 0.0)
            reached[index] = moment if moment is not None else reached[index]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": title,
                "y": rows,
                "x": seconds,
                "marker": {
                    "color": [f"--{start.label}" for start in starts],
                    "opacity": (0.45, 0.75, 1.0)[place],
                    "line": {"color": "--card", "width": 1},
                },
                "showlegend": False,
                "hovertemplate": title + ": %{x:.3~g} s<extra>%{y}</extra>",
            }
        )
    return Chart(
        "cold-starts",
        "Cold start",
        "From the creation of the process; from pale to full: until it is live, until it is ready (model loaded and "
        "warm), until its first answer. File caches are warm after the first start.",
        data,
        {
            "height": 110 + 26 * len(rows),
            "barmode": "stack",
            "bargap": 0.3,
            "xaxis": axis("seconds since process start", rangemode="tozero"),
            "yaxis": {"automargin": True, "autorange": "reversed"},
        },
    )


def blocks(result: Result) -> Chart | None:
    """Speed of every block over the run, relative to its arm's mean, then in images/s a scenario."""
    measured = [b for b in result.blocks if b.throughput_per_s is not None]
    if not measured:
        return None
    means = {(s.cell, s.label): s.throughput_per_s for s in result.summaries}
    data: list[Figure] = []
    relative, views = [], []
    for label in ("a", "b"):
        own = [(b, means.get((b.cell, label))) for b in measured if b.label == label]
        points = [(b, 100.0 * ((b.throughput_per_s or 0.0) / mean - 1.0)) for b, mean in own if mean]
        relative.append(len(data))
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": arm_name(result, label),
                "x": [rounded(b.start_s / 60.0) for b, _ in points],
                "y": [rounded(value) for _, value in points],
                "marker": _marker(label, [b.complete for b, _ in points]),
                "text": [f"block {b.index}, {b.cell}, pair {b.pair + 1}" for b, _ in points],
                "hovertemplate": "%{text}: %{y:+.2~f} %<extra>" + label.upper() + "</extra>",
            }
        )
    views.append(View("all, relative", relative, {"yaxis": {"title": {"text": "against the arm's own mean, %"}}}))
    for cell in dict.fromkeys(b.cell for b in measured):
        traces = []
        for label in ("a", "b"):
            blocks_of = [b for b in measured if b.label == label and b.cell == cell]
            traces.append(len(data))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": arm_name(result, label),
                    "x": [rounded(b.start_s / 60.0) for b in blocks_of],
                    "y": [rounded(b.throughput_per_s or 0.0) for b in blocks_of],
                    "line": {"color": f"--{label}", "width": 1, "dash": DASHES[label]},
                    "marker": _marker(label, [b.complete for b in blocks_of]),
                    "text": [f"block {b.index}, pair {b.pair + 1}" for b in blocks_of],
                    "hovertemplate": "%{text}: %{y:.4~g} images/s<extra>" + label.upper() + "</extra>",
                }
            )
        views.append(View(cell, traces, {"yaxis": {"title": {"text": "images/s"}}}))
    return Chart(
        "blocks",
        "Block by block",
        "Every block of load in the order in which it ran, arms interleaved in pairs. A slope is drift of the machine, "
        "which the pairing absorbs; hollow marks were cut short and are not compared.",
        data,
        {
            "height": 380,
            "xaxis": axis("minutes since the first block"),
            "yaxis": axis(""),
            "legend": LEGEND_ABOVE,
        },
        views,
    )


def _marker(label: str, complete: list[bool]) -> Figure:
    symbols = [MARKERS[label] if whole else f"{MARKERS[label]}-open" for whole in complete]
    return {"symbol": symbols, "size": 8, "color": f"--{label}"}


def executed_batches(result: Result) -> Chart | None:
    """Share of executions by executed batch size, where requests could be merged."""
    merging = [cell.name for cell in result.experiment.cells if cell.concurrency > 1]
    data: list[Figure] = []
    views = []
    for cell in merging:
        traces = []
        for s in result.summaries:
            if s.cell != cell or not s.executed_batches:
                continue
            total = sum(s.executed_batches.values())
            traces.append(len(data))
            data.append(
                {
                    "type": "bar",
                    "name": arm_name(result, s.label),
                    "x": list(s.executed_batches),
                    "y": [rounded(100 * count / total) for count in s.executed_batches.values()],
                    "marker": {
                        "color": f"--{s.label}",
                        "pattern": {"shape": "/" if s.label == "b" else "", "fillmode": "overlay"},
                    },
                    "hovertemplate": "batch %{x}: %{y:.3~g} % of executions<extra>" + s.label.upper() + "</extra>",
                }
            )
        if traces:
            views.append(View(cell, traces))
    if not views:
        return None
    return Chart(
        "batches",
        "Executed batch sizes",
        "What the dynamic batcher made of concurrent requests: the share of executions at each batch size.",
        data,
        {
            "height": 320,
            "barmode": "group",
            "xaxis": axis("executed batch size"),
            "yaxis": axis("executions, %", rangemode="tozero"),
            "legend": LEGEND_ABOVE,
        },
        main_view_first(result, views),
    )
