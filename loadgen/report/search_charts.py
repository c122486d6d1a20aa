"""The charts of searches for a rate and of ramps; see `loadgen.report.charts` for how a figure is written."""

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
    rounded,
    two_panels,
)
from loadgen.report.log_axis import log_axis


def slo_trials(result: Result) -> Chart | None:
    """Every trial of every search: the rate tried, and whether it held; one view a scenario."""
    cells = list(dict.fromkeys(found.cell for found in result.rates))
    data: list[Figure] = []
    views = []
    for cell in cells:
        shown = []
        for found in (one for one in result.rates if one.cell == cell):
            trials = [
                trial
                for trial in result.trials
                if (trial.cell, trial.pair, trial.label) == (cell, found.pair, found.label)
            ]
            shown.append(len(data))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": arm_name(result, found.label),
                    "legendgroup": found.label,
                    "showlegend": found.pair == 0,
                    "x": [trial.step + 1 for trial in trials],
                    "y": [rounded(trial.rate_per_s or 0.0) for trial in trials],
                    "customdata": [[trial.late, trial.planned, "held" if trial.held else "failed"] for trial in trials],
                    "line": {"color": f"--{found.label}", "width": 1, "dash": DASHES[found.label]},
                    "marker": {
                        "symbol": [MARKERS[found.label] + ("" if trial.held else "-open") for trial in trials],
                        "size": 9,
                        "color": f"--{found.label}",
                    },
                    "hovertemplate": "%{y:.4~g} requests/s %{customdata[2]}: %{customdata[0]} of %{customdata[1]} late"
                    f"<extra>{found.label.upper()}, search {found.pair + 1}</extra>",
                }
            )
        views.append(View(cell, shown))
    if not data:
        return None
    return Chart(
        "slo-trials",
        "Search for the highest rate within the bound",
        "Each point is a trial at a Poisson rate: filled where p99 held the bound, open where it did not. The rate is "
        "doubled while it holds, then bisected.",
        data,
        {
            "height": 380,
            "xaxis": axis("trial", tickformat="d", range=[0.5, 0.5 + max(len(trace["x"]) for trace in data)]),
            "yaxis": axis("requests/s", **log_axis(rate for trace in data for rate in trace["y"])),
            "legend": LEGEND_ABOVE,
        },
        views if len(views) > 1 else [],
    )


def ramp(result: Result) -> Chart | None:
    """Throughput and latency over the number of users, every ramp a line."""
    data: list[Figure] = []
    named: set[tuple[str, str]] = set()
    for panel, attribute, unit in (("", "throughput_per_s", "images/s"), ("2", "p50_ms", "ms"), ("2", "p99_ms", "ms")):
        for found in result.ramps:
            points = [
                (rung.concurrency, value) for rung in found.rungs if (value := getattr(rung, attribute)) is not None
            ]
            if not points:
                continue
            what = {"throughput_per_s": "", "p50_ms": ", p50", "p99_ms": ", p99"}[attribute]
            key = (found.label, attribute)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": arm_name(result, found.label) + what,
                    "legendgroup": f"{found.label}{what}",
                    "showlegend": key not in named,
                    "x": [point[0] for point in points],
                    "y": [rounded(point[1]) for point in points],
                    "xaxis": f"x{panel}",
                    "yaxis": f"y{panel}",
                    "line": {
                        "color": f"--{found.label}",
                        "width": 1.5,
                        "dash": "dot" if attribute == "p99_ms" else DASHES[found.label],
                    },
                    "marker": {
                        "symbol": [
                            "star" if attribute == "throughput_per_s" and x == found.knee_concurrency
                            else MARKERS[found.label]
                            for x, _ in points
                        ],
                        "size": [
                            13 if attribute == "throughput_per_s" and x == found.knee_concurrency else 7
                            for x, _ in points
                        ],
                        "color": f"--{found.label}",
                    },
                    "hovertemplate": f"%{{x}} users: %{{y:.4~g}} {unit}{what}"
                    f"<extra>{found.label.upper()}, ramp {found.pair + 1}</extra>",
                }
            )  # fmt: skip
            named.add(key)
    if not data:
        return None
    latencies = (ms for found in result.ramps for rung in found.rungs for ms in (rung.p50_ms, rung.p99_ms) if ms)
    users = sorted({rung.concurrency for found in result.ramps for rung in found.rungs})
    ticks = {"type": "log", "tickmode": "array", "tickvals": users, "ticktext": [str(number) for number in users]}
    return Chart(
        "ramp",
        "Throughput and latency over the number of users",
        "Users are doubled until more of them bring no more throughput; a star marks the knee, the first rung from "
        "which no later one is 5 % better.",
        data,
        two_panels(
            400, "users", axis("images/s", rangemode="tozero"), axis("latency, ms", **log_axis(latencies)), ticks
        ),
    )
