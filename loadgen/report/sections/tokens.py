"""Language models: how long until the first token, the pace after it, the gaps, and what the tokens cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.metrics.registry import GOOD_SHARE, GOODPUT, METRICS, OUTPUT_TOKENS, TPOT, TTFT, Metric
from loadgen.metrics.summaries import WorkloadSummary, figure_of, interval_of, tokens_per_answer
from loadgen.metrics.tokens import per_million
from loadgen.probes.gpu.analysis import GpuFound
from loadgen.probes.rate_search_analysis import RatesFound
from loadgen.probes.tokens_analysis import TokensFound, TokenTotals
from loadgen.quantities import measured, number, share
from loadgen.records.run import Label, Workload, shown
from loadgen.stats.ratios import geometric_mean
from loadgen.verdict.result import Result

SHOWN = ("ttft", "ttft_p99", "tpot", "worst_gap_p90", "gap_p99", "tokens_per_chunk")
"""Metrics of the table, after tokens/s and goodput."""
USERS = ("single", "concurrent")
"""Scenarios that differ in the number of users alone."""


def _streamed(result: Result) -> dict[str, Workload]:
    """The workloads with streamed answers, in the order of the report."""
    return {w.name: w for w in result.experiment.workloads if w.has_blocks and w.is_streamed}


def _totals(result: Result, workload: str) -> list[TokenTotals]:
    return [total for total in result.of(TokensFound).totals if total.workload == workload]


def token_table(result: Result) -> doc.Section | None:
    """The figures of each arm and scenario."""
    workloads = _streamed(result)
    summaries = [s for s in result.summaries if s.workload in workloads and s.requests]
    rows = [
        (
            s.workload,
            shown(s.label),
            measured(figure_of(s, OUTPUT_TOKENS), interval_of(s, OUTPUT_TOKENS)),
            *_goodput(s),
            *(measured(figure_of(s, METRICS[name]), None) for name in SHOWN),
        )
        for s in summaries
    ]
    titles = ("TTFT, ms", "p99 TTFT, ms", "TPOT, ms", "p90 worst gap, ms", "p99 gap, ms", "tokens per chunk")
    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers("output tokens/s"),
        *doc.numbers("good requests/s", "good"),
        *(
            doc.Column(title, "number", title.removesuffix(", ms"), roomy=place > 2)
            for place, title in enumerate(titles)
        ),
    )
    caption = (
        "TTFT: from the moment a request fell due to its first token. TPOT: time per output token after the first "
        "chunk. Both are means over the answers. Worst gap: the longest wait between two chunks of an answer. Gap: "
        "between two tokens, as a reader sees them."
    )
    if any(workload.limits for workload in workloads.values()):
        limits = dict.fromkeys(str(workload.limits) for workload in workloads.values() if workload.limits)
        caption += f" Good: answers that are complete and within {' or '.join(limits)}, of all requests that fell due."
    table = doc.Table(columns, rows, caption=caption, grouped=True)
    return doc.section("Tokens", table, _step_table(result), on=doc.READ)


def _step_table(result: Result) -> doc.Table:
    """The steps of the engines, of the arms whose servers report them."""
    rows = [
        (
            total.workload,
            shown(total.label),
            f"{total.steps:,}",
            number(total.step_ms),
            "" if total.engine_share is None else number(total.engine_share),
        )
        for workload in _streamed(result)
        for total in _totals(result, workload)
        if total.steps is not None and total.step_ms is not None
    ]
    return doc.Table(
        (*doc.names("scenario", "arm"), *doc.numbers("steps", "ms per step", "served ÷ engine")),
        rows,
        title="Steps of the engines",
        grouped=True,
        caption="One forward pass for all requests at that moment, by the server's statistics; others report none. "
        "Served ÷ engine: the share of a closed loop's time in which a step ran; the rest passed between steps.",
    )


def _goodput(summary: WorkloadSummary) -> tuple[str, str]:
    """Good requests per second and their share; empty without limits."""
    part = figure_of(summary, GOOD_SHARE)
    return ("", "") if part is None else (measured(figure_of(summary, GOODPUT), None), share(part))


def first_token_and_pace(result: Result) -> doc.Section | None:
    """Where each arm stands at each load: TTFT against TPOT, and the tokens per second of all users against those of
    one."""
    workloads = _streamed(result)
    if len(workloads) == 0:
        return None
    return doc.section("Speed of an answer", _pace_chart(result, workloads), _pareto_chart(result, workloads))


def _points(
    result: Result, label: Label, workloads: dict[str, Workload], across: Metric, up: Metric
) -> Iterator[tuple[Workload, float, float]]:
    """Both figures of one arm in each workload, by its load."""
    ordered = sorted(workloads.values(), key=lambda workload: (workload.is_open, workload.concurrency))
    for workload in ordered:
        for summary in result.summaries:
            if (summary.workload, summary.label) == (workload.name, label):
                x, y = figure_of(summary, across), figure_of(summary, up)
                if x and y:
                    yield workload, x, y


def _lines(
    result: Result,
    workloads: dict[str, Workload],
    across: Metric,
    up: Metric,
    hover: str,
    convert: Callable[[float], float] = lambda value: value,
) -> list[doc.Figure]:
    traces = []
    for label in result.experiment.labels:
        points = list(_points(result, label, workloads, across, up))
        if points:
            names = [charts.label_text(_load(workload)) for workload, _, _ in points]
            traces.append(
                charts.line(
                    result,
                    label,
                    [(convert(x), y) for _, x, y in points],
                    f"%{{text}}: {hover}",
                    mode="lines+markers+text",
                    text=names,
                    textposition="top center",
                    textfont={"size": 11},
                    cliponaxis=False,
                )
            )
    return traces


def _load(workload: Workload) -> str:
    """The load of a point: "1 user", "16 users", or the scenario's name."""
    if workload.scenario in USERS:
        return f"{workload.concurrency} user{'' if workload.concurrency == 1 else 's'}"
    return workload.name


def _pace_chart(result: Result, workloads: dict[str, Workload]) -> doc.Chart | None:
    closed = {name: w for name, w in workloads.items() if w.scenario in USERS}
    data = _lines(
        result, closed or workloads, TTFT, TPOT, "first token after %{x:.4~g} ms, then %{y:.4~g} ms per token"
    )
    if not data:
        return None
    return doc.Chart(
        "ttft-tpot",
        "First token and pace",
        "Mean time to the first token against mean time per token after it, from one user to the most. Lower left is "
        "better.",
        data,
        {
            "height": charts.tall(result, 400),
            "xaxis": charts.value_axis("TTFT, ms", (x for trace in data for x in trace["x"])),
            "yaxis": charts.value_axis("TPOT, ms", (y for trace in data for y in trace["y"])),
            "legend": charts.LEGEND_ABOVE,
        },
    )


def _pareto_chart(result: Result, workloads: dict[str, Workload]) -> doc.Chart | None:
    """Only of the scenarios that differ in nothing but their users: others are other work."""
    closed = {name: w for name, w in workloads.items() if w.scenario in USERS}
    if len(closed) < 2:
        return None
    data = _lines(
        result,
        closed,
        TPOT,
        OUTPUT_TOKENS,
        "%{x:.4~g} tokens/s for each user, %{y:.4~g} for all",
        lambda tpot_ms: 1000.0 / tpot_ms,
    )
    if not data:
        return None
    return doc.Chart(
        "pareto",
        "Throughput against the speed that a user sees",
        "Output tokens/s of all users against 1 / TPOT, the tokens/s of one answer, from one user to the most. An arm "
        "whose line lies further out serves more at the same speed.",
        data,
        {
            "height": charts.tall(result, 400),
            "xaxis": charts.value_axis("tokens/s per user", (x for trace in data for x in trace["x"])),
            "yaxis": charts.value_axis("output tokens/s", (y for trace in data for y in trace["y"])),
            "legend": charts.LEGEND_ABOVE,
        },
    )


def gaps(result: Result) -> doc.Section | None:
    """How the tokens of an answer arrive: the distribution of the gaps, and one answer of each arm over time."""
    if not _streamed(result):
        return None

    def gap_traces(workload: str) -> list[doc.Figure]:
        return [
            charts.line(
                result,
                total.label,
                [(ms, 100.0 * part) for ms, part in total.gaps_ms],
                "%{y:.4~g} % of gaps within %{x:.4~g} ms",
                style={"width": 2.5, "shape": "hv"},
                mode="lines",
            )
            for total in _totals(result, workload)
            if total.gaps_ms
        ]

    def timelines(workload: str) -> list[doc.Figure]:
        return [
            charts.line(
                result,
                total.label,
                [(0.0, 0.0), *total.timeline_ms],
                "%{y} tokens after %{x:.4~g} ms",
                style={"width": 2.5, "shape": "hv"},
                mode="lines",
            )
            for total in _totals(result, workload)
            if total.timeline_ms
        ]

    def time_axis(title: str) -> Callable[[list[doc.Figure]], doc.Figure]:
        return lambda _: {"xaxis": charts.axis(title, rangemode="tozero")}

    return doc.section(
        "How tokens arrive",
        charts.chart_by_scenario(
            result,
            gap_traces,
            "gaps",
            "Gaps between tokens",
            "Share of the gaps between two tokens that are at most that long; tokens of one chunk have none. A long "
            "tail is a stall.",
            axes=lambda traces: {"xaxis": _gap_axis([x for trace in traces for x in trace["x"]])},
            height=charts.tall(result, 380),
            yaxis=charts.axis("gaps, %", range=[0, 101.5], ticksuffix=" "),
            legend=charts.LEGEND_ABOVE,
        ),
        charts.chart_by_scenario(
            result,
            timelines,
            "timeline",
            "One answer over time",
            "The answer with the median latency of each arm: tokens received since the request fell due.",
            axes=time_axis("ms since the request fell due"),
            height=charts.tall(result, 340),
            yaxis=charts.axis("tokens", rangemode="tozero"),
            legend=charts.LEGEND_ABOVE,
        ),
    )


def _gap_axis(values: Sequence[float]) -> doc.Figure:
    """From 0, or logarithmic where a stall would squeeze the rest; gaps of 0 are then left of it."""
    title = "gap, ms"
    positive = [value for value in values if value > 0.0]
    most = sorted(positive)[len(positive) // 20 :]  # the shortest gaps are those of chunks that were read together
    if charts.squeezed(most):
        return charts.axis(f"{title}, log scale", **charts.log_axis(most))
    return charts.axis(title, rangemode="tozero")


def costs(result: Result) -> doc.Section | None:
    """What a million output tokens cost at the highest measured tokens/s and within the limits, and their energy."""
    workloads, price = _streamed(result), result.experiment.price

    def at(tokens_per_s: float | None) -> str:
        return "" if price is None or not tokens_per_s else number(per_million(price, tokens_per_s))

    rows = []
    for label in result.experiment.labels:
        served = [
            (speed, s)
            for s in result.summaries
            if s.label == label and s.workload in workloads and (speed := figure_of(s, OUTPUT_TOKENS))
        ]  # fmt: skip
        speed, fullest = max(served, key=lambda entry: entry[0], default=(0.0, None))
        good = [
            rate * tokens
            for _, s in served
            if (rate := figure_of(s, GOODPUT)) and (tokens := tokens_per_answer(s)) and workloads[s.workload].is_open
        ]
        searched = _goodput_tokens_per_s(result, label)
        joules = None if fullest is None else _joules_per_token(result, fullest)
        if joules is None and (price is None or (fullest is None and searched is None)):
            continue
        rows.append(
            (
                shown(label),
                "" if fullest is None else fullest.workload,
                "" if fullest is None else measured(speed, interval_of(fullest, OUTPUT_TOKENS)),
                at(speed),
                at(speed * 1000.0),
                at(max(good, default=None)),
                at(searched),
                "" if joules is None else number(1e6 * joules),
                "" if joules is None else number(joules),
            )
        )
    columns = (
        *doc.names("arm", "at full load"),
        *doc.numbers("output tokens/s", "price per million", "per 1,000", "price per million, good"),
        doc.Column("price per million, goodput", "number"),
        *doc.numbers("J per million", "J per token"),
    )
    caption = "At full load: in the scenario with the most output tokens/s."
    if any(workload.limits and workload.is_open for workload in workloads.values()):
        caption += " Good: only tokens of answers within the limits count, in the open loop with most of them."
    if any(row[6] for row in rows):
        caption += " Goodput: at the highest rate within the limits, with all its tokens."
    if price is not None:
        caption += f" The machine costs {price:g} per hour, in the currency of --price."
    return doc.section("Cost of tokens", doc.Table(columns, rows, caption=caption), on=doc.READ)


def _goodput_tokens_per_s(result: Result, label: Label) -> float | None:
    """Output tokens per second at the highest rate within the limits: the geometric mean of the searches; None unless
    each found one."""
    tokens = {w.name: w.output_tokens or 0 for w in result.experiment.workloads if w.scenario == "goodput"}
    rates = [
        (search.rate_per_s or 0.0) * tokens[search.workload]
        for search in result.of(RatesFound).rates
        if search.label == label and search.workload in tokens
    ]
    return geometric_mean(rates) if rates and all(rates) else None


def _joules_per_token(result: Result, summary: WorkloadSummary) -> float | None:
    """Energy of the GPU for one output token; None where none was measured."""
    evidence, tokens = result.of(GpuFound).evidence, tokens_per_answer(summary)
    key = (summary.label, summary.workload, False, None)
    for record in () if evidence is None else evidence.records:
        if (record.label, record.workload, record.control, record.no_energy) == key:
            gpu = record.inputs.gpu
            return None if gpu is None or gpu.joules_per_item is None or not tokens else gpu.joules_per_item / tokens
    return None
