"""Sections of the load: latencies, batches and the measurements of every block."""

from __future__ import annotations

from collections.abc import Mapping

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import items, join, measured, number, share
from loadgen.findings.load import LoadFound
from loadgen.metrics.registry import METRICS, THROUGHPUT
from loadgen.metrics.summaries import WorkloadSummary, figure_of, further_metrics, interval_of
from loadgen.records.run import item_of, shown
from loadgen.records.targets import Kind
from loadgen.verdict.result import Result

MAX_SIZES = 6


BLOCK_FIELDS = (
    "index", "workload", "round", "restart", "label", "position", "start_s", "duration_s", "complete", "requests",
    "errors", "items", "throughput_per_s", "mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99_9_ms",
    "send_lag_p99_ms", "full_load_share", "generator_cpu_share", "server_cpu_cores", "request_bytes", "response_bytes",
    "note",
)  # fmt: skip


def latency(result: Result) -> doc.Section | None:
    """Share of requests answered within a time. Of streamed answers the gaps between tokens say more."""
    if result.experiment.kind is Kind.TOKENS:
        return None

    def traces(workload: str) -> list[doc.Figure]:
        return [
            charts.line(
                result,
                s.label,
                [(value, 100 * part) for value, part in s.distribution_ms],
                "%{y:.1f} % within %{x:.4~g} ms",
                name=f" ({s.samples:,} requests)",
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
        axes=lambda traces: {"xaxis": charts.value_axis("latency, ms", (ms for trace in traces for ms in trace["x"]))},
        height=charts.tall(result, 400),
        yaxis=charts.axis("requests answered, %", range=[0, 101.5], ticksuffix=" "),
        legend=charts.LEGEND_ABOVE,
    )
    return doc.section("Latency distribution", chart)


def batch_sizes(result: Result) -> doc.Section | None:
    """Throughput and median latency against the batch size of a request."""
    several = items(item_of(result.environment))
    sizes = {
        workload.name: workload.batch_size
        for workload in result.experiment.workloads
        if workload.scenario == "batched" and workload.sequence_length is None
    }
    data = _speeds(result, sizes)
    if not data:
        return None
    left, right = ([y for trace in data if trace["yaxis"] == panel for y in trace["y"]] for panel in ("y", "y2"))
    chart = doc.Chart(
        "batch-sizes",
        "Throughput and latency against batch size",
        f"One request at a time with this many {several} in it. Bars are 95 % intervals over the blocks of one arm; "
        "unlike the paired ratios, they include the machine's drift.",
        data,
        charts.two_panels(
            charts.tall(result, 380),
            f"{several} per request",
            charts.value_axis(charts.rate_unit(result), left),
            charts.value_axis("p50 latency, ms", right),
            charts.doubling(sizes.values()),
        ),
    )
    return doc.section("Batch sizes", chart)


def _speeds(result: Result, sizes: Mapping[str, int]) -> list[doc.Figure]:
    """Throughput and median latency of each arm in these workloads, by their batch size."""
    rate = charts.rate_unit(result)
    data: list[doc.Figure] = []
    for panel, metric, unit in (("", THROUGHPUT, rate), ("2", METRICS["latency_p50"], "ms")):
        for label in result.experiment.labels:
            summaries = [s for s in result.summaries if s.workload in sizes and s.label == label]
            speeds = [(sizes[s.workload], figure_of(s, metric), interval_of(s, metric)) for s in summaries]
            points = [(size, value, bounds) for size, value, bounds in speeds if value is not None]
            if points:
                across, values, intervals = zip(*points, strict=True)
                data.append(
                    charts.line(
                        result,
                        label,
                        zip(across, values, strict=True),
                        f"batch %{{x}}: %{{y:.4~g}} {unit}",
                        showlegend=not panel,
                        xaxis=f"x{panel}",
                        yaxis=f"y{panel}",
                        error_y=charts.errors(values, intervals, color=charts.colour(result, label)),
                    )
                )
    return data


def measurements(result: Result) -> doc.Section | None:
    """The figures of each arm and scenario; those of tokens have their own table, and CSV has all."""
    more = [] if result.experiment.kind is Kind.TOKENS else further_metrics(result.summaries)
    rows = [
        (
            s.workload,
            shown(s.label),
            f"{s.requests:,}",
            f"{s.errors:,}",
            measured(s.throughput_per_s),
            _tokens_per_s(result, s),
            *(measured(s.latency_ms(name)) for name in ("mean", "p50", "p90", "p99")),
            measured(s.executed_batch_mean),
            *("–" if size is None else f"{size:,.0f}" for size in (s.request_bytes, s.response_bytes)),
            measured(s.server_cpu_cores),
            measured(s.server_cpu_ms),
            share(s.generator_cpu_share_max),
            *(measured(figure_of(s, metric)) for metric in more),
        )
        for s in result.summaries
        if s.requests
    ]
    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers(
            "requests",
            "errors",
            charts.rate_unit(result),
            "tokens/s",
            "mean ms",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "executed batch",
        ),
        *doc.numbers("bytes sent", "bytes back", "server cores", "server CPU ms", "generator CPU"),
        *doc.numbers(*(f"{metric.title}, {metric.unit_for(item_of(result.environment))}" for metric in more)),
    )
    caption = "Complete blocks of each arm, pooled. A percentile needs enough samples: p50 11, p90 64, p99 662."
    return doc.section("Measurements", doc.Table(columns, rows, caption=caption, grouped=True), on=doc.PAGES)


def _tokens_per_s(result: Result, summary: WorkloadSummary) -> str:
    """Throughput in tokens, without padding; empty where the inputs are no sequences."""
    workload = next((entry for entry in result.experiment.workloads if entry.name == summary.workload), None)
    tokens = result.environment.tokens_per_item(workload) if result.environment and workload else None
    if tokens is None:
        return ""
    return measured(None if summary.throughput_per_s is None else tokens * summary.throughput_per_s)


def executed_batches(result: Result) -> doc.Section | None:
    """The most frequent sizes of the servers' executions, with a chart where requests could be merged; none of language
    models, whose executions are steps."""
    if not result.of(LoadFound).executed_batches:
        return None
    rows: list[tuple[str, ...]] = []
    for batches in result.of(LoadFound).executed_batches:
        total = sum(batches.executions.values())
        frequent = sorted(batches.executions, key=lambda size: -batches.executions[size])[:MAX_SIZES]
        sizes = ", ".join(f"{size}: {share(batches.executions[size] / total)}" for size in sorted(frequent))
        more = (
            f", {len(batches.executions) - len(frequent)} more sizes" if len(batches.executions) > len(frequent) else ""
        )
        mean = "–" if batches.mean is None else number(batches.mean)
        rows.append(
            (
                batches.workload,
                shown(batches.label),
                f"{batches.request_items:.3g}",
                mean,
                sizes + more or "–",
                batches.sentence,
            )
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
        doc.Table(columns, rows, grouped=True, caption=_of_ensembles(result)),
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


def _of_ensembles(result: Result) -> str:
    """Whose executions these are where an arm is an ensemble; empty without."""
    ensembles = [shown(arm.label) for arm in result.arms if arm.steps]
    names = f"{join(ensembles)} {'is an ensemble' if len(ensembles) == 1 else 'are ensembles'}"
    return f"{names}: the batches are those of the step that executes the model." if ensembles else ""


def blocks(result: Result) -> doc.Section | None:
    """Speed of every block over the run, relative to its arm's mean or as a throughput; CSV gets all of its figures."""
    more = further_metrics(result.blocks)
    of_column = {metric.column: metric for metric in reversed(METRICS.values())}
    rows = [
        [
            *(
                figure_of(block, of_column[name]) if name in of_column else getattr(block, name)
                for name in BLOCK_FIELDS
            ),
            *(figure_of(block, metric) for metric in more),
        ]
        for block in result.blocks
    ]
    columns = doc.names(*BLOCK_FIELDS, *(metric.name for metric in more))
    return doc.section("Block by block", _block_chart(result), doc.Table(columns, rows, name="blocks", on=doc.CSV))


def _block_chart(result: Result) -> doc.Chart | None:
    timed = [(block, block.throughput_per_s) for block in result.blocks if block.throughput_per_s is not None]
    if not timed:
        return None
    means = {(s.workload, s.label): s.throughput_per_s for s in result.summaries}
    rate = charts.rate_unit(result)

    def traces(workloads: set[str], hover: str, mode: str, relative: bool) -> list[doc.Figure]:
        lines = []
        for label in result.experiment.labels:
            speeds = [(block, speed) for block, speed in timed if block.label == label and block.workload in workloads]
            if relative:
                pairs = [(block, speed, means.get((block.workload, label))) for block, speed in speeds]
                speeds = [(block, 100.0 * (speed / mean - 1.0)) for block, speed, mean in pairs if mean]
            points = [(block.start_s / 60.0, value) for block, value in speeds]
            marker = charts.hollow(result, label, [block.complete for block, _ in speeds])
            texts = [f"block {block.index}, {block.workload}, pair {block.round + 1}" for block, _ in speeds]
            text = f"%{{text}}: {hover}"
            lines.append(charts.line(result, label, points, text, mode=mode, marker=marker, text=texts))
        return lines

    workloads = dict.fromkeys(block.workload for block, _ in timed)
    data: list[doc.Figure] = []
    whole = traces(set(workloads), "%{y:+.2~f} %", "markers", relative=True)
    beside = {"title": {"text": "difference from the arm's mean, %"}}
    views = [charts.add_view(data, "all, relative", whole, yaxis=beside)]
    for workload in workloads:
        absolute = traces({workload}, f"%{{y:.4~g}} {rate}", "lines+markers", relative=False)
        speeds = [y for trace in absolute for y in trace["y"]]
        across = charts.value_axis(rate, speeds) if charts.squeezed(speeds) else charts.axis(rate)
        views.append(charts.add_view(data, workload, absolute, yaxis=across))
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
                measured(loop.achieved_per_s),
                share(loop.answered_share, 3),
                f"{loop.unsent:,}",
                *(measured(lag) for lag in (*lags, loop.generator_lag_p99_ms)),
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
