"""Language models: how long until the first token, the pace after it, the gaps, and what the tokens cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import counted, measured, number, share
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.findings.rate_search import RatesFound
from loadgen.findings.tokens import Points, TokensFound, TokenTotals
from loadgen.metrics.registry import GOOD_SHARE, GOODPUT, METRICS, OUTPUT_TOKENS, TPOT, TTFT, Metric
from loadgen.metrics.summaries import WorkloadSummary, figure_of, items_per_request, tokens_per_answer, why_missing
from loadgen.metrics.tokens import per_million
from loadgen.records.run import Label, Workload, shown
from loadgen.records.targets import Kind
from loadgen.stats.ratios import geometric_mean
from loadgen.verdict.result import Result

USERS = ("single", "concurrent")
"""Scenarios that differ in the number of users alone."""


def _streamed(result: Result) -> dict[str, Workload]:
    """The workloads with streamed answers, in the order of the report."""
    return {w.name: w for w in result.experiment.workloads if w.has_blocks and w.kind is Kind.TOKENS}


def _shown() -> list[tuple[Metric, str]]:
    """The metrics of the table with their headings, after tokens/s and goodput."""
    shown = sorted((m.heading, m.name) for m in METRICS.values() if m.heading is not None)
    return [(METRICS[name], heading) for (_, heading), name in shown]


def token_table(result: Result) -> doc.Section | None:
    """The figures of each arm and scenario."""
    workloads = _streamed(result)
    summaries = [s for s in result.summaries if s.workload in workloads and s.requests]
    counted = {(s.workload, s.label): "" for s in summaries}
    counted |= {(total.workload, total.label): total.counted_by for total in result.of(TokensFound).totals}
    rows = [
        (
            s.workload,
            shown(s.label),
            measured(figure_of(s, OUTPUT_TOKENS)),
            *_goodput(s),
            *(measured(figure_of(s, metric)) for metric, _ in _shown()),
            counted[s.workload, s.label],
        )
        for s in summaries
    ]
    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers("output tokens/s"),
        *doc.numbers("good requests/s", "good"),
        *(
            doc.Column(title, "number", title.removesuffix(", ms"), roomy=place > 2)
            for place, (_, title) in enumerate(_shown())
        ),
        *doc.names("tokens counted by"),
    )
    caption = (
        "Time per answer: from the moment a request fell due to its last token. TTFT: to its first token. TPOT: time "
        "per output token after the first chunk, which is what one read brought. All three are means over the answers. "
        "Worst gap: the longest wait between two chunks of an answer. Gap: between two tokens, as a reader sees them."
    )
    caption += "".join(f" Not measured: {reason}." for reason in _reasons(result, workloads))
    if any(workload.limits for workload in workloads.values()):
        limits = dict.fromkeys(str(workload.limits) for workload in workloads.values() if workload.limits)
        caption += f" Good: answers that are complete and within {' or '.join(limits)}, of all requests that fell due."
    table = doc.Table(columns, rows, caption=caption, grouped=True)
    return doc.section("Tokens", table, _step_table(result), on=doc.READ)


def _reasons(result: Result, workloads: Iterable[str]) -> list[str]:
    """Why figures are missing, with the workload where an arm has them elsewhere: "TTFT, TPOT of B: its answers …"."""
    titles: dict[str, dict[str, None]] = {}
    for workload in workloads:
        for metric, title in _shown():
            blocks = (block for block in result.blocks if block.workload == workload)
            if (reason := why_missing(blocks, metric, result.names)) is not None:
                titles.setdefault(reason, {})[title.removesuffix(", ms")] = None
    return [f"{', '.join(names)} of {reason}" for reason, names in titles.items()]


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
        for total in result.of(TokensFound).in_workload(workload)
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
    return ("", "") if part is None else (measured(figure_of(summary, GOODPUT)), share(part))


def first_token_and_pace(result: Result) -> doc.Section | None:
    """Where each arm stands at each load: TTFT against TPOT, and the tokens per second of all users against those of
    one. Scenarios that differ in more than their users are drawn only where there are no others."""
    workloads = sorted(_streamed(result).values(), key=lambda workload: (workload.is_open, workload.concurrency))
    of_users = [workload for workload in workloads if workload.scenario in USERS]
    return doc.section(
        "Speed of an answer",
        _chart(
            result,
            "ttft-tpot",
            "First token and pace",
            "Mean time to the first token against mean time per token after it, from one user to the most. Lower left "
            "is better.",
            _lines(
                result, of_users or workloads, TTFT, TPOT, "first token after %{x:.4~g} ms, then %{y:.4~g} ms per token"
            ),
            ("TTFT, ms", "TPOT, ms"),
        ),
        _chart(
            result,
            "pareto",
            "Throughput against the speed that a user sees",
            "Output tokens/s of all users against 1 / TPOT, the tokens/s of one answer, from one user to the most. An "
            "arm whose line lies further out serves more at the same speed.",
            _lines(
                result,
                of_users if len(of_users) > 1 else [],
                TPOT,
                OUTPUT_TOKENS,
                "%{x:.4~g} tokens/s for each user, %{y:.4~g} for all",
                lambda tpot_ms: 1000.0 / tpot_ms,
            ),
            ("tokens/s per user", "output tokens/s"),
        ),
    )


def _lines(
    result: Result,
    workloads: Sequence[Workload],
    across: Metric,
    up: Metric,
    hover: str,
    convert: Callable[[float], float] = lambda value: value,
) -> list[doc.Figure]:
    """A line per arm through its points: two figures in each workload."""
    summaries = {(summary.workload, summary.label): summary for summary in result.summaries}
    traces = []
    for label in result.experiment.labels:
        measured_in = [(load, s) for load in workloads if (s := summaries.get((load.name, label))) is not None]
        points = [
            (charts.label_text(_load(load)), convert(x), y)
            for load, summary in measured_in
            if (x := figure_of(summary, across)) and (y := figure_of(summary, up))
        ]
        if points:
            traces.append(
                charts.line(
                    result,
                    label,
                    [(x, y) for _, x, y in points],
                    f"%{{text}}: {hover}",
                    mode="lines+markers+text",
                    text=[name for name, _, _ in points],
                    textposition="top center",
                    textfont={"size": 11},
                    cliponaxis=False,
                )
            )
    return traces


def _load(workload: Workload) -> str:
    """The load of a point: "1 user", "16 users", or the scenario's name."""
    return counted(workload.concurrency, "user") if workload.scenario in USERS else workload.name


def _chart(
    result: Result, name: str, title: str, caption: str, lines: list[doc.Figure], axes: tuple[str, str]
) -> doc.Chart | None:
    across, up = axes
    layout = {
        "height": charts.tall(result, 400),
        "xaxis": charts.value_axis(across, (x for line in lines for x in line["x"])),
        "yaxis": charts.value_axis(up, (y for line in lines for y in line["y"])),
        "legend": charts.LEGEND_ABOVE,
    }
    return doc.Chart(name, title, caption, lines, layout) if lines else None


def gaps(result: Result) -> doc.Section | None:
    """How the tokens of an answer arrive: the distribution of the gaps, and one answer of each arm over time."""

    def steps(workload: str, points: Callable[[TokenTotals], Points], hover: str) -> list[doc.Figure]:
        return [
            charts.line(result, total.label, drawn, hover, style={"width": 2.5, "shape": "hv"}, mode="lines")
            for total in result.of(TokensFound).in_workload(workload)
            if (drawn := points(total))
        ]

    def gap_traces(workload: str) -> list[doc.Figure]:
        return steps(
            workload,
            lambda total: tuple((ms, 100.0 * part) for ms, part in total.gaps_ms),
            "%{y:.4~g} % of gaps within %{x:.4~g} ms",
        )

    def timelines(workload: str) -> list[doc.Figure]:
        return steps(
            workload,
            lambda total: ((0.0, 0.0), *total.timeline_ms) if total.timeline_ms else (),
            "%{y} tokens after %{x:.4~g} ms",
        )

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
            axes=lambda _: {"xaxis": charts.axis("ms since the request fell due", rangemode="tozero")},
            height=charts.tall(result, 340),
            yaxis=charts.axis("tokens", rangemode="tozero"),
            legend=charts.LEGEND_ABOVE,
        ),
    )


def _gap_axis(values: Sequence[float]) -> doc.Figure:
    """From 0, or logarithmic where a stall would squeeze the rest; gaps of 0 are then left of it."""
    positive = sorted(value for value in values if value > 0.0)
    # The shortest gaps are those of chunks that were read together.
    return charts.value_axis("gap, ms", positive[len(positive) // 20 :])


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
                "" if fullest is None else measured(speed),
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
        caption += " Good: tokens of answers within the limits only, at the rate that brings the most of them."
    if any(row[6] for row in rows):
        caption += " Goodput: at the highest rate within the limits, with all its tokens."
    if price is not None:
        caption += f" The machine costs {price:g} per hour, in the currency of --price."
    return doc.section("Cost of tokens", doc.Table(columns, rows, caption=caption), on=doc.READ)


def _goodput_tokens_per_s(result: Result, label: Label) -> float | None:
    """Output tokens per second at the highest rate within the limits: the geometric mean of the searches; None unless
    each found one."""
    loads = result.experiment.workloads
    tokens = {
        load.name: items_per_request(load, label, loads, result.summaries, result.blocks)
        for load in loads
        if load.scenario == "goodput"
    }
    rates = [
        (search.rate_per_s or 0.0) * (tokens[search.workload] or 0.0)
        for search in result.of(RatesFound).rates
        if search.label == label and search.workload in tokens
    ]
    return geometric_mean(rates) if rates and all(rates) else None


def _joules_per_token(result: Result, summary: WorkloadSummary) -> float | None:
    """Energy of the GPU for one output token; None where none was measured."""
    joules, tokens = result.of(GpuFound).joules_per_item(summary.label, summary.workload), tokens_per_answer(summary)
    return joules / tokens if joules is not None and tokens else None
