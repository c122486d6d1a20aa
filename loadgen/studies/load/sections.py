"""The measurements: latencies, throughput, executed batches, and the speed of each block."""

from __future__ import annotations

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.quantities import measured, number, share
from loadgen.records.run import shown
from loadgen.result.result_file import Result
from loadgen.studies.load.analyse import LoadFound

MAX_SIZES = 6
BLOCK_FIELDS = (
    "index", "workload", "round", "restart", "label", "position", "start_s", "duration_s", "complete", "requests",
    "errors", "items", "throughput_per_s", "mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99_9_ms",
    "send_lag_p99_ms", "full_load_share", "generator_cpu_share", "server_cpu_cores", "request_bytes", "response_bytes",
    "note",
)  # fmt: skip


def latency(result: Result) -> doc.Section | None:
    """Share of requests answered within a time."""

    def traces(workload: str) -> list[doc.Figure]:
        return [
            charts.line(
                result,
                s.label,
                [(value, 100 * part) for value, part in s.distribution_ms],
                "%{y:.1f} % within %{x:.4~g} ms",
                name=f" ({s.latency.samples:,} requests)",
                style={"width": 2.5, "shape": "hv"},
                mode="lines",
            )
            for s in result.summaries
            if s.workload == workload and s.distribution_ms
        ]

    chart = charts.chart_by_scenario(
        result,
        traces,
        "latency",
        "Latency distribution",
        "Share of requests answered within a time, from the intended start to the last byte; all blocks of a scenario. "
        "Drag to zoom, double-click to reset.",
        height=charts.tall(result, 400),
        xaxis=charts.axis("latency, ms", rangemode="tozero"),
        yaxis=charts.axis("requests answered, %", range=[0, 101.5], ticksuffix=" "),
        legend=charts.LEGEND_ABOVE,
    )
    return doc.section("Latency distribution", chart)


def batch_sizes(result: Result) -> doc.Section | None:
    """Throughput and median latency against the batch size of a request."""
    sizes = {
        workload.name: workload.batch_size for workload in result.experiment.workloads if workload.scenario == "batched"
    }
    data: list[doc.Figure] = []
    for panel, unit in (("", "images/s"), ("2", "ms")):
        for label in result.experiment.labels:
            own = [s for s in result.summaries if s.workload in sizes and s.label == label]
            if unit == "ms":
                speeds = [(sizes[s.workload], s.latency.p50_ms, s.p50_ci95_ms) for s in own]
            else:
                speeds = [(sizes[s.workload], s.throughput_per_s, s.throughput_ci95) for s in own]
            found = [(size, value, bounds) for size, value, bounds in speeds if value is not None]
            if found:
                batches, values, intervals = zip(*found, strict=True)
                data.append(
                    charts.line(
                        result,
                        label,
                        zip(batches, values, strict=True),
                        f"batch %{{x}}: %{{y:.4~g}} {unit}",
                        showlegend=not panel,
                        xaxis=f"x{panel}",
                        yaxis=f"y{panel}",
                        error_y=charts.errors(values, intervals, color=charts.colour(result, label)),
                    )
                )
    if not data:
        return None
    chart = doc.Chart(
        "batch-sizes",
        "Throughput and latency against batch size",
        "One request at a time with this many images in it. Bars are 95 % intervals over the blocks of one arm; unlike "
        "the paired ratios, they include the machine's drift.",
        data,
        charts.two_panels(
            charts.tall(result, 380),
            "images per request",
            charts.axis("images/s", rangemode="tozero"),
            charts.axis("p50 latency, ms", rangemode="tozero"),
            charts.doubling(sizes.values()),
        ),
    )
    return doc.section("Batch sizes", chart)


def measurements(result: Result) -> doc.Section | None:
    """The figures of each arm and scenario."""
    rows = [
        (
            s.workload,
            shown(s.label),
            f"{s.requests:,}",
            f"{s.errors:,}",
            measured(s.throughput_per_s, s.throughput_ci95),
            *(measured(ms, None) for ms in (s.latency.mean_ms, s.latency.p50_ms, s.latency.p90_ms, s.latency.p99_ms)),
            measured(s.executed_batch_mean, None),
            *("–" if size is None else f"{size:,.0f}" for size in (s.request_bytes, s.response_bytes)),
            measured(s.server_cpu_cores, None),
            share(s.generator_cpu_share_max),
        )
        for s in result.summaries
        if s.requests
    ]
    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers("requests", "errors", "images/s", "mean ms", "p50 ms", "p90 ms", "p99 ms", "executed batch"),
        *doc.numbers("bytes sent", "bytes back", "server cores", "generator CPU"),
    )
    caption = "Complete blocks of each arm, pooled. A percentile needs enough samples: p50 11, p90 64, p99 662."
    return doc.section("Measurements", doc.Table(columns, rows, caption=caption, grouped=True), on=doc.PAGES)


def executed_batches(result: Result) -> doc.Section | None:
    """The most frequent sizes of the servers' executions, with a chart where requests could be merged."""
    rows: list[tuple[str, ...]] = []
    for found in result.of(LoadFound).executed_batches:
        total = sum(found.executions.values())
        frequent = sorted(found.executions, key=lambda size: -found.executions[size])[:MAX_SIZES]
        sizes = ", ".join(f"{size}: {share(found.executions[size] / total)}" for size in sorted(frequent))
        more = f", {len(found.executions) - len(frequent)} more sizes" if len(found.executions) > len(frequent) else ""
        mean = "–" if found.mean is None else number(found.mean)
        rows.append(
            (found.workload, shown(found.label), str(found.request_items), mean, sizes + more or "–", found.sentence)
        )
    merging = {workload.name for workload in result.experiment.workloads if workload.concurrency > 1}

    def traces(workload: str) -> list[doc.Figure]:
        return [
            {
                "type": "bar",
                "name": charts.arm_name(result, s.label),
                "x": list(s.executed_batches),
                "y": [charts.rounded(100 * n / sum(s.executed_batches.values())) for n in s.executed_batches.values()],
                "marker": {
                    "color": charts.colour(result, s.label),
                    "pattern": {"shape": charts.PATTERNS[charts.place_of(result, s.label)], "fillmode": "overlay"},
                },
                "hovertemplate": "batch %{x}: %{y:.3~g} % of executions"
                f"<extra>{charts.label_text(shown(s.label))}</extra>",
            }
            for s in result.summaries
            if s.workload == workload and workload in merging and s.executed_batches
        ]

    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers("items per request", "mean"),
        *doc.texts("executed at once", "verdict"),
    )
    return doc.section(
        "Executed batches",
        doc.Table(columns, rows, grouped=True),
        charts.chart_by_scenario(
            result,
            traces,
            "batches",
            "Executed batch sizes",
            "How the dynamic batcher merged concurrent requests: the share of executions at each batch size.",
            height=charts.tall(result, 320),
            barmode="group",
            xaxis=charts.axis("executed batch size"),
            yaxis=charts.axis("executions, %", rangemode="tozero"),
            legend=charts.LEGEND_ABOVE,
        ),
        on=doc.PAGES,
    )


def blocks(result: Result) -> doc.Section | None:
    """Speed of every block over the run, relative to its arm's mean or in images/s; CSV gets all of its figures."""
    fields = [
        [getattr(block.latency if hasattr(block.latency, name) else block, name) for name in BLOCK_FIELDS]
        for block in result.blocks
    ]
    return doc.section(
        "Block by block", _block_chart(result), doc.Table(doc.names(*BLOCK_FIELDS), fields, name="blocks", on=doc.CSV)
    )


def _block_chart(result: Result) -> doc.Chart | None:
    timed = [(block, block.throughput_per_s) for block in result.blocks if block.throughput_per_s is not None]
    if not timed:
        return None
    means = {(s.workload, s.label): s.throughput_per_s for s in result.summaries}

    def traces(workloads: set[str], hover: str, mode: str, relative: bool) -> list[doc.Figure]:
        found = []
        for label in result.experiment.labels:
            own = [(block, speed) for block, speed in timed if block.label == label and block.workload in workloads]
            if relative:
                pairs = [(block, speed, means.get((block.workload, label))) for block, speed in own]
                own = [(block, 100.0 * (speed / mean - 1.0)) for block, speed, mean in pairs if mean]
            points = [(block.start_s / 60.0, value) for block, value in own]
            marker = charts.hollow(result, label, [block.complete for block, _ in own])
            texts = [f"block {block.index}, {block.workload}, pair {block.round + 1}" for block, _ in own]
            text = f"%{{text}}: {hover}"
            found.append(charts.line(result, label, points, text, mode=mode, marker=marker, text=texts))
        return found

    workloads = dict.fromkeys(block.workload for block, _ in timed)
    data: list[doc.Figure] = []
    whole = traces(set(workloads), "%{y:+.2~f} %", "markers", relative=True)
    beside = {"title": {"text": "difference from the arm's mean, %"}}
    views = [charts.add_view(data, "all, relative", whole, yaxis=beside)]
    for workload in workloads:
        own = traces({workload}, "%{y:.4~g} images/s", "lines+markers", relative=False)
        views.append(charts.add_view(data, workload, own, yaxis={"title": {"text": "images/s"}}))
    return doc.Chart(
        "blocks",
        "Block by block",
        "All blocks in the order in which they ran, the arms interleaved. A slope is drift of the machine, which the "
        "pairing cancels; hollow marks were cut short and are not compared.",
        data,
        {
            "height": charts.tall(result, 380),
            "xaxis": charts.axis("minutes since the first block"),
            "yaxis": charts.axis(""),
            "legend": charts.LEGEND_ABOVE,
        },
        views,
    )


def open_loops(result: Result) -> doc.Section | None:
    """Offered and achieved rates of open loops, and how late requests were sent."""
    rows = []
    for summary in result.summaries:
        loop = summary.open_loop
        if loop is None:
            continue
        blocks = [
            b for b in result.blocks if (b.workload, b.label, b.complete) == (summary.workload, summary.label, True)
        ]
        lags = [
            max((lag for block in blocks if (lag := getattr(block, name)) is not None), default=None)
            for name in ("send_lag_p50_ms", "send_lag_p99_ms", "send_lag_max_ms")
        ]
        rows.append(
            (
                summary.workload,
                shown(summary.label),
                f"{loop.offered:,}",
                number(loop.offered_per_s),
                measured(loop.achieved_per_s, None),
                share(loop.answered_share, 3),
                f"{loop.unsent:,}",
                *(measured(lag, None) for lag in (*lags, loop.generator_lag_p99_ms)),
            )
        )
    columns = (
        *doc.names("scenario", "arm"),
        doc.Column("due", "number", on=doc.PAGES),
        doc.Column("due per second", "number", "due/s"),
        doc.Column("answered per second", "number", "done/s"),
        doc.Column("answered in time", "number", "in time"),
        *doc.numbers("unsent"),
        doc.Column("lag p50, ms", "number", on=doc.PAGES),
        doc.Column("lag p99, ms", "number", "lag p99"),
        doc.Column("largest lag, ms", "number", "max"),
        doc.Column("generator's p99, ms", "number", "own p99"),
    )
    caption = (
        "Requests fall due by a schedule. In time: answered before the last one was due. Lag: how late a request "
        "was sent, in the worst block; the generator's own lag excludes waiting for a busy connection."
    )
    return doc.section("Open loops", doc.Table(columns, rows, caption=caption, grouped=True))


SECTIONS = {"Detail": (latency, batch_sizes, open_loops, executed_batches, measurements, blocks)}
