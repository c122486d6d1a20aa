"""The measurements: latencies, throughput, executed batches, and the speed of each block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.metrics.comparisons import Comparison, advantage
from loadgen.metrics.registry import THROUGHPUT
from loadgen.metrics.summaries import WorkloadSummary, figure_of, without_field_in
from loadgen.probes.load.analyse import LoadFound
from loadgen.quantities import items, join, measured, number, share
from loadgen.records.run import Pairing, Workload, item_of, shown
from loadgen.verdict.result import Result

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
    """Throughput and median latency against the batch size of a request; with sequences of several lengths
    `sequence_lengths` shows them."""
    batched = [one for one in result.experiment.workloads if one.scenario == "batched"]
    if not batched or _lengths(result):
        return None
    several = items(item_of(result.environment))
    sizes = {one.name: one.batch_size for one in batched}
    data = _speeds(result, sizes, "batch %{x}")
    if not data:
        return None
    chart = doc.Chart(
        "batch-sizes",
        "Throughput and latency against batch size",
        f"One request at a time with this many {several} in it. Bars are 95 % intervals over the blocks of one arm; "
        "unlike the paired ratios, they include the machine's drift.",
        data,
        _speed_panels(result, f"{several} per request", sizes.values()),
    )
    return doc.section("Batch sizes", chart)


def _speeds(result: Result, places: Mapping[str, int], at: str) -> list[doc.Figure]:
    """Throughput and median latency of each arm in these workloads, each at its place; `at` names a place."""
    rate = charts.rate_unit(result)
    data: list[doc.Figure] = []
    for panel, unit in (("", rate), ("2", "ms")):
        for label in result.experiment.labels:
            own = [s for s in result.summaries if s.workload in places and s.label == label]
            if unit == "ms":
                speeds = [(places[s.workload], s.latency.p50_ms, s.p50_ci95_ms) for s in own]
            else:
                speeds = [(places[s.workload], s.throughput_per_s, s.throughput_ci95) for s in own]
            found = [(size, value, bounds) for size, value, bounds in speeds if value is not None]
            if found:
                across, values, intervals = zip(*found, strict=True)
                data.append(
                    charts.line(
                        result,
                        label,
                        zip(across, values, strict=True),
                        f"{at}: %{{y:.4~g}} {unit}",
                        showlegend=not panel,
                        xaxis=f"x{panel}",
                        yaxis=f"y{panel}",
                        error_y=charts.errors(values, intervals, color=charts.colour(result, label)),
                    )
                )
    return data


def _speed_panels(result: Result, across: str, places: Iterable[int]) -> doc.Figure:
    return charts.two_panels(
        charts.tall(result, 380),
        across,
        charts.axis(charts.rate_unit(result), rangemode="tozero"),
        charts.axis("p50 latency, ms", rangemode="tozero"),
        charts.doubling(places),
    )


def _lengths(result: Result) -> list[int]:
    """The lengths of sequences, if the run has workloads of several."""
    found = result.experiment.lengths
    return sorted(found) if len(found) > 1 else []


def _size(workload: Workload) -> int:
    """What a scenario varies beside the length: the users of `concurrent`, else the batch size."""
    return workload.concurrency if workload.scenario == "concurrent" else workload.batch_size


def _length(workload: Workload) -> int:
    return workload.sequence_length or 0


def sequence_lengths(result: Result) -> doc.Section | None:
    """Throughput and latency against the length of the sequences and against batch size or users, and each arm's ratio
    to the baseline over both."""
    lengths = _lengths(result)
    crossed = {
        scenario: [
            one for one in result.experiment.workloads if one.scenario == scenario and one.sequence_length in lengths
        ]
        for scenario in ("single", "batched", "concurrent")
    }
    blocks: list[doc.Block | None] = []
    for scenario, workloads in crossed.items():
        if len(workloads) > 1:
            what = "users" if scenario == "concurrent" else "batch"
            blocks += [
                _ratio_table(result, pairing, scenario, what, workloads) for pairing in result.experiment.pairings
            ]
            blocks += [_crossed_chart(result, scenario, what, workloads), _ratio_map(result, scenario, what, workloads)]
    return doc.section("Sequence lengths", *blocks, on=doc.READ)


def _places(workloads: Sequence[Workload]) -> tuple[list[int], list[int]]:
    """All sizes and all lengths, ascending."""
    return sorted(set(map(_size, workloads))), sorted(set(map(_length, workloads)))


def _ratios(result: Result, pairing: Pairing, workloads: Sequence[Workload]) -> list[list[Comparison | None]]:
    """The comparisons of the throughputs that have a ratio, a row per size and a column per length."""
    own = [one for one in result.comparisons if one.pairing == pairing and one.metric == THROUGHPUT.name]
    found = {one.scenario: one for one in own if one.ratio is not None}
    by_place = {(_size(one), _length(one)): found.get(one.name) for one in workloads}
    sizes, lengths = _places(workloads)
    return [[by_place.get((size, length)) for length in lengths] for size in sizes]


def _better(one: Comparison | None) -> str:
    found = None if one is None else advantage(one)
    return "–" if found is None else found.words


def _ratio_table(
    result: Result, pairing: Pairing, scenario: str, what: str, workloads: Sequence[Workload]
) -> doc.Table:
    """The better arm's throughput ratio, a row per size and a column per length."""
    sizes, lengths = _places(workloads)
    rows = zip(sizes, _ratios(result, pairing, workloads), strict=True)
    return doc.Table(
        (*doc.numbers(what), *doc.numbers(*(f"length {length}" for length in lengths))),
        [(str(size), *map(_better, row)) for size, row in rows],
        title=f"{scenario}: throughput of {' and '.join(map(shown, pairing))}, the better arm's ratio",
    )


def _crossed_chart(result: Result, scenario: str, what: str, workloads: Sequence[Workload]) -> doc.Chart | None:
    """A view per size against the length, and a view per length against the size."""
    data: list[doc.Figure] = []
    views: list[doc.View] = []
    for held, along, name, across in (
        (_size, _length, what, "sequence length"),
        (_length, _size, "length", "users" if what == "users" else "batch size"),
    ):
        for value in sorted(set(map(held, workloads))):
            places = {one.name: along(one) for one in workloads if held(one) == value}
            traces = _speeds(result, places, f"{'length' if held is _size else what} %{{x}}")
            if len(places) > 1 and traces:
                panels = _speed_panels(result, across, places.values())
                views.append(charts.add_view(data, f"{name} {value}", traces, **panels))
    if not data:
        return None
    return doc.Chart(
        f"lengths-{scenario}",
        f"{scenario.capitalize()}: throughput and latency against length and {what}",
        f"Each button holds one thing fixed, the {what} or the length of the sequences. Bars are 95 % intervals over "
        "the blocks of one arm.",
        data,
        {"height": charts.tall(result, 380), "legend": charts.LEGEND_ABOVE},
        views,
    )


def _ratio_map(result: Result, scenario: str, what: str, workloads: Sequence[Workload]) -> doc.Chart | None:
    """Each arm's throughput ratio to the baseline as a colour: neutral at 1, the arm's own where it is better."""
    sizes, lengths = _places(workloads)
    data: list[doc.Figure] = []
    views: list[doc.View] = []
    for pairing in result.experiment.pairings:
        rows = _ratios(result, pairing, workloads)
        logs = [[None if one is None else charts.rounded(math.log2(one.ratio or 1.0)) for one in row] for row in rows]
        found = [abs(value) for row in logs for value in row if value is not None]
        if not found:
            continue
        reach = max(0.1, *found)
        trace = {
            "type": "heatmap",
            "x": [str(length) for length in lengths],
            "y": [str(size) for size in sizes],
            "z": logs,
            "text": [list(map(_better, row)) for row in rows],
            "texttemplate": "%{text}",
            "hovertemplate": f"{what} %{{y}}, length %{{x}}: %{{text}}<extra></extra>",
            "colorscale": [
                [0, charts.colour(result, pairing.baseline)], [0.5, "--card"], [1, charts.colour(result, pairing.arm)],
            ],
            "zmin": -reach,
            "zmax": reach,
            "showscale": False,
        }  # fmt: skip
        views.append(charts.add_view(data, f"{shown(pairing.arm)} against {shown(pairing.baseline)}", [trace]))
    if not data:
        return None
    return doc.Chart(
        f"length-ratios-{scenario}",
        f"{scenario.capitalize()}: who serves more, over length and {what}",
        "The ratio of the throughputs in the colour of the better arm; the deeper, the larger.",
        data,
        {
            "height": 160 + 40 * len(sizes),
            "xaxis": charts.axis("sequence length", type="category"),
            "yaxis": charts.axis("users" if what == "users" else "batch size", type="category"),
        },
        views if len(views) > 1 else [],
    )


def measurements(result: Result) -> doc.Section | None:
    """The figures of each arm and scenario."""
    more = without_field_in(result.summaries)
    rows = [
        (
            s.workload,
            shown(s.label),
            f"{s.requests:,}",
            f"{s.errors:,}",
            measured(s.throughput_per_s, s.throughput_ci95),
            _tokens_per_s(result, s),
            *(measured(ms, None) for ms in (s.latency.mean_ms, s.latency.p50_ms, s.latency.p90_ms, s.latency.p99_ms)),
            measured(s.executed_batch_mean, None),
            *("–" if size is None else f"{size:,.0f}" for size in (s.request_bytes, s.response_bytes)),
            measured(s.server_cpu_cores, None),
            measured(s.server_cpu_ms, None),
            share(s.generator_cpu_share_max),
            *(measured(figure_of(s, metric), None) for metric in more),
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
    workload = next((one for one in result.experiment.workloads if one.name == summary.workload), None)
    tokens = result.environment.tokens_per_item(workload) if result.environment and workload else None
    if tokens is None:
        return ""
    return measured(None if summary.throughput_per_s is None else tokens * summary.throughput_per_s, None)


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
    found = [shown(arm.label) for arm in result.arms if arm.steps]
    names = f"{join(found)} {'is an ensemble' if len(found) == 1 else 'are ensembles'}"
    return f"{names}: the batches are those of the step that executes the model." if found else ""


def blocks(result: Result) -> doc.Section | None:
    """Speed of every block over the run, relative to its arm's mean or as a throughput; CSV gets all of its figures."""
    more = without_field_in(result.blocks)
    rows = [
        [
            *(getattr(block.latency if hasattr(block.latency, name) else block, name) for name in BLOCK_FIELDS),
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
        own = traces({workload}, f"%{{y:.4~g}} {rate}", "lines+markers", relative=False)
        views.append(charts.add_view(data, workload, own, yaxis={"title": {"text": rate}}))
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


SECTIONS = {"Detail": (latency, batch_sizes, sequence_lengths, open_loops, executed_batches, measurements, blocks)}
