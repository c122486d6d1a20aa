"""Sections of the rate search: the rates that were found, and their trials."""

from __future__ import annotations

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import measured, number
from loadgen.findings.rate_search import RateFound, RatesFound
from loadgen.records.run import shown
from loadgen.records.targets import Kind
from loadgen.verdict.result import Result

KEY = (*doc.names("scenario"), *doc.numbers("round"), *doc.names("arm"))


_RATE_CAPTION = (
    "The highest rate, of Poisson arrivals or of recorded traffic at that speed, at which no more requests were late "
    "than MLPerf's early-stopping bound allows ({}), and the lowest rate that failed; every trial is in result.json. "
    "Requests that queue together are late together, so this rate is an estimate and no lower bound{}."
)


LATENCY_CAPTION = _RATE_CAPTION.format(
    "0 of 459, 10 of 2,010, 100 of 12,571",
    ": on simulated queues nine in ten searches ended within −10 % and +15 % of the true rate, most of them above it",
)


GOODPUT_CAPTION = _RATE_CAPTION.format(
    "0 of 44, 2 of 81, 10 of 197, so that at least 90 % are good",
    ". Late are the answers that are not good: failed, short, or outside a limit",
)
CAPTIONS = {Kind.TENSORS: LATENCY_CAPTION, Kind.TOKENS: GOODPUT_CAPTION}


def rate_search(result: Result) -> doc.Section | None:
    """The result of each search; a page also shows every trial."""
    rates = result.of(RatesFound)
    rows = [
        (
            rate.workload,
            str(rate.round + 1),
            shown(rate.label),
            measured(rate.rate_per_s),
            measured(rate.failed_rate_per_s),
            "" if rate.speed is None else f"{number(rate.speed)}×",
            str(rate.trials),
            number(rate.seconds),
            _rate_note(rate),
        )
        for rate in rates.rates
    ]
    trials = [
        (
            trial.workload,
            str(trial.round + 1),
            shown(trial.label),
            str(trial.step + 1),
            number(trial.rate_per_s),
            f"{trial.requests:,} of {trial.planned:,}",
            f"{trial.late:,} of {trial.late_allowed:,}",
            measured(trial.p99_ms),
            "held" if trial.held else "failed",
        )
        for trial in rates.trials
    ]
    results = (
        *KEY,
        *doc.numbers("holds, requests/s", "fails at", "speed", "trials", "under load, s"),
        *doc.texts("note"),
    )
    details = (*KEY, *doc.numbers("trial", "requests/s", "sent", "late", "p99, ms"), *doc.names("note"))
    late = "Late: late requests of the number allowed. A trial ends as soon as the bound cannot hold."
    return doc.section(
        "The highest rate within the bound",
        doc.Table(
            results,
            rows,
            caption=CAPTIONS[result.experiment.kind],
            grouped=True,
        ),
        doc.Fold(
            f"Every trial of the searches: {len(trials)}", (doc.Table(details, trials, caption=late),), on=doc.HTML
        ),
        trial_chart(result),
    )


def trial_chart(result: Result) -> doc.Chart | None:
    """Every trial of every search: its rate, and whether it held."""
    rates = result.of(RatesFound)

    def trace(rate: RateFound) -> doc.Figure:
        key = (rate.workload, rate.round, rate.label)
        trials = [trial for trial in rates.trials if (trial.workload, trial.round, trial.label) == key]
        return charts.line(
            result,
            rate.label,
            [(trial.step + 1, trial.rate_per_s) for trial in trials],
            "%{y:.4~g} requests/s %{customdata[2]}: %{customdata[0]} of %{customdata[1]} late"
            f" in search {rate.round + 1}",
            marker=charts.hollow(result, rate.label, [trial.held for trial in trials]),
            showlegend=rate.round == 0,
            customdata=[[trial.late, trial.planned, "held" if trial.held else "failed"] for trial in trials],
        )

    data: list[doc.Figure] = []
    views = [
        charts.add_view(data, workload, [trace(rate) for rate in rates.rates if rate.workload == workload])
        for workload in dict.fromkeys(rate.workload for rate in rates.rates)
    ]
    if not data:
        return None
    return doc.Chart(
        "slo-trials",
        "Search for the highest rate within the bound",
        "Each point is a trial at a rate: filled where it held the bound, open where it did not. The rate is "
        "doubled while it holds, then bisected.",
        data,
        {
            "height": charts.tall(result, 380),
            "xaxis": charts.axis("trial", tickformat="d", range=[0.5, 0.5 + max(len(trace["x"]) for trace in data)]),
            "yaxis": charts.axis(
                "requests/s, log scale", **charts.log_axis(rate for trace in data for rate in trace["y"])
            ),
            "legend": charts.LEGEND_ABOVE,
        },
        views if len(views) > 1 else [],
    )


def _rate_note(rate: RateFound) -> str:
    if rate.client_limited:
        return "the generator was busy: the server may hold more"
    return {
        "found": "",
        "highest": "held the highest rate tried",
        "none": "late even at the lowest rate tried",
        None: "cut short",
    }[rate.ended]


SECTIONS = {"Detail": (rate_search,)}
