"""The sections of recorded traffic: how it arrives, and where each arm lost time on it."""

from __future__ import annotations

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import measured, number, share
from loadgen.findings.traffic import BURST_FACTOR, COMPANY, PartOfTraffic, ReplayedTraffic, TrafficFound
from loadgen.records.run import shown
from loadgen.verdict.result import Result


def traffic(result: Result) -> doc.Section | None:
    """What the recorded requests are, and when they came."""
    recording = result.of(TrafficFound).traffic
    if recording is None:
        return None
    sizes = recording.bytes
    rows: list[tuple[str, str]] = [
        ("requests", f"{recording.requests:,} in {number(recording.seconds)} s, {number(recording.rate_per_s)}/s"),
        (
            f"burstiness: variance over mean of the requests per {recording.together_seconds:g} s",
            _bursty(recording.dispersion),
        ),
        ("variation of the gaps between requests", _bursty(recording.gap_variation)),
        (
            "requests whose content came before",
            f"{share(recording.repeated_share)}; {recording.contents:,} different contents",
        ),
        ("bytes per request", f"{sizes['min']:,} to {sizes['max']:,}; p50 {sizes['p50']:,}, p99 {sizes['p99']:,}"),
        ("requests with a recorded answer", f"{recording.answers:,}"),
    ]
    if recording.left_out_seconds:
        rows.append(("left out of the recording, and of every window", f"{number(recording.left_out_seconds)} s"))
    shapes = [(shape, f"{count:,}", share(count / recording.requests)) for shape, count in recording.shapes.items()]
    if recording.further_shapes:
        others = recording.requests - sum(recording.shapes.values())
        shapes.append((f"{recording.further_shapes:,} more shapes", f"{others:,}", share(others / recording.requests)))
    return doc.section(
        "Recorded traffic",
        doc.Table((*doc.names(""), *doc.texts("")), rows),
        doc.Table((*doc.texts("shape"), *doc.numbers("requests", "share")), shapes),
        _arrivals(recording),
    )


def _bursty(value: float | None) -> str:
    return "–" if value is None else f"{number(value)} (independent arrivals: 1)"


def _arrivals(recording: ReplayedTraffic) -> doc.Chart:
    width = recording.bar_seconds
    rates = [charts.rounded(count / width) for count in recording.arrivals]
    bars: doc.Figure = {
        "type": "bar",
        "x": [charts.rounded((place + 0.5) * width) for place in range(len(rates))],
        "y": rates,
        "width": width,
        "marker": {"color": "--muted"},
        "hovertemplate": "%{x:.4~g} s: %{y:.4~g} requests/s<extra></extra>",
        "showlegend": False,
    }
    return doc.Chart(
        "arrivals",
        "Arrivals over time",
        f"Requests per second of the recording, at speed 1, in bars of {width:g} s. A round replays one window.",
        [bars],
        {
            "height": 280,
            "bargap": 0,
            "xaxis": charts.axis("seconds since the first request"),
            "yaxis": charts.axis("requests/s", rangemode="tozero"),
        },
    )


def bursts(result: Result) -> doc.Section | None:
    """The latencies of each arm in bursts and in quiet."""
    latencies = result.of(TrafficFound).latencies
    if not latencies:
        return None
    kind = result.experiment.kind
    has_batches = any(each.bursts.executed_batch is not None for each in latencies)
    rows = [
        (
            each.workload, shown(each.label), when, f"{part.requests:,}", measured(part.p50_ms), measured(part.p99_ms),
            measured(part.under_way), _ratio(part), *([measured(part.executed_batch)] if has_batches else []),
        )
        for each in latencies
        for when, part in (("bursts", each.bursts), ("quiet", each.quiet))
        if part.requests
    ]  # fmt: skip
    base = shown(result.experiment.baseline.label)
    columns = (
        *doc.names("scenario", "arm", "when"),
        *doc.numbers(
            "requests",
            "p50, ms",
            "p99, ms",
            "under way",
            f"p50 ÷ {base}'s",
            *(["executed batch"] if has_batches else []),
        ),
    )
    company = COMPANY[kind]
    near = f"{1000 * company.near_s:g} ms"
    caption = (
        f"{company.title} from the moment a request was due. In a burst: more than {BURST_FACTOR:g} times as many "
        f"others as on average, and more than one, were due within {near}. Under way: requests without an answer when "
        "one was sent, on average. The ratio is the mean over the rounds, with its 95 % interval, which is not "
        "corrected for several comparisons."
    )
    if has_batches:
        caption += (
            " Executed batch: mean items per execution in the half of the blocks with the larger share of requests in "
            "bursts, and in the other half."
        )
    return doc.section(
        "In bursts and in quiet",
        doc.Table(columns, rows, caption=caption, grouped=True),
        charts.chart_by_scenario(
            result,
            lambda workload: [
                charts.line(result, each.label, each.by_crowd.items(), "%{x} or more due together: %{y:.4~g} ms")
                for each in latencies
                if each.workload == workload and each.by_crowd
            ],
            "crowds",
            "Latency by how many requests come together",
            f"The median of the requests with so many due within {near}, themselves included, and fewer than twice as "
            "many. Where the lines part, the arms differ.",
            lambda traces: {
                "xaxis": charts.axis(
                    "requests due together", **charts.doubling(int(x) for trace in traces for x in trace["x"])
                ),
                "yaxis": charts.value_axis("p50, ms", [y for trace in traces for y in trace["y"]]),
            },
            height=charts.tall(result, 320),
            legend=charts.LEGEND_ABOVE,
        ),
    )


def _ratio(part: PartOfTraffic) -> str:
    if part.ratio is None:
        return ""
    return f"{part.ratio:.3f}" + ("" if part.ci95 is None else f" ({part.ci95[0]:.3f}–{part.ci95[1]:.3f})")


SECTIONS = {"Detail": (traffic, bursts)}
"""The sections of a report: each function makes one of them from a result, or None if there is nothing to show."""
