"""Searches for the highest rate within a bound, and ramps to saturation."""

from __future__ import annotations

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.probes.rate_search.records import RampFound, RampRung, RateFound, RatesFound
from loadgen.quantities import measured, number
from loadgen.records.run import Pairing, shown
from loadgen.verdict.result import Result

KEY = (*doc.names("scenario"), *doc.numbers("round"), *doc.names("arm"))
RATE_CAPTION = (
    "The highest Poisson rate at which no more requests were late than MLPerf's early-stopping bound allows (0 of 459, "
    "10 of 2,010, 100 of 12,571), and the lowest rate that failed; every trial is in result.json. Requests that queue "
    "together are late together, so this rate is an estimate and no lower bound: on simulated queues nine in ten "
    "searches ended within −10 % and +15 % of the true rate, most of them above it."
)
RAMP_CAPTION = (
    "Users are doubled until two steps in a row gain less than 5 % throughput while the median latency grows. The knee "
    "is the first step that no later one exceeds by 5 %. The best of several steps is a little too high: by 2 % if a "
    "step's noise is 2 %."
)


def rate_search(result: Result) -> doc.Section | None:
    """The result of each search; a page also shows every trial."""
    rates = result.of(RatesFound)
    found = [
        (
            one.workload,
            str(one.round + 1),
            shown(one.label),
            measured(one.rate_per_s, None),
            measured(one.failed_rate_per_s, None),
            str(one.trials),
            number(one.seconds),
            _rate_note(one),
        )
        for one in rates.rates
    ]
    trials = [
        (
            trial.workload,
            str(trial.round + 1),
            shown(trial.label),
            str(trial.step + 1),
            number(trial.rate_per_s),
            f"{trial.requests:,} of {trial.planned or 0:,}",
            f"{trial.late or 0:,} of {trial.late_allowed or 0:,}",
            measured(trial.p99_ms, None),
            "held" if trial.held else "failed",
        )
        for trial in rates.trials
        if trial.rate_per_s is not None
    ]
    results = (*KEY, *doc.numbers("holds, requests/s", "fails at", "trials", "under load, s"), *doc.texts("note"))
    details = (*KEY, *doc.numbers("trial", "requests/s", "sent", "late", "p99, ms"), *doc.names("note"))
    late = "Late: late requests of the number allowed. A trial ends as soon as the bound cannot hold."
    return doc.section(
        "The highest rate within the bound",
        doc.Table(results, found, caption=RATE_CAPTION, grouped=True),
        doc.Fold(
            f"Every trial of the searches: {len(trials)}", (doc.Table(details, trials, caption=late),), on=doc.HTML
        ),
        trial_chart(result),
    )


def trial_chart(result: Result) -> doc.Chart | None:
    """Every trial of every search: its rate, and whether it held."""
    rates = result.of(RatesFound)

    def trace(found: RateFound) -> doc.Figure:
        own = (found.workload, found.round, found.label)
        trials = [trial for trial in rates.trials if (trial.workload, trial.round, trial.label) == own]
        return charts.line(
            result,
            found.label,
            [(trial.step + 1, trial.rate_per_s or 0.0) for trial in trials],
            "%{y:.4~g} requests/s %{customdata[2]}: %{customdata[0]} of %{customdata[1]} late"
            f" in search {found.round + 1}",
            marker=charts.hollow(result, found.label, [bool(trial.held) for trial in trials]),
            showlegend=found.round == 0,
            customdata=[[trial.late, trial.planned, "held" if trial.held else "failed"] for trial in trials],
        )

    data: list[doc.Figure] = []
    views = [
        charts.add_view(data, workload, [trace(found) for found in rates.rates if found.workload == workload])
        for workload in dict.fromkeys(found.workload for found in rates.rates)
    ]
    if not data:
        return None
    return doc.Chart(
        "slo-trials",
        "Search for the highest rate within the bound",
        "Each point is a trial at a Poisson rate: filled where p99 held the bound, open where it did not. The rate is "
        "doubled while it holds, then bisected.",
        data,
        {
            "height": charts.tall(result, 380),
            "xaxis": charts.axis("trial", tickformat="d", range=[0.5, 0.5 + max(len(trace["x"]) for trace in data)]),
            "yaxis": charts.axis("requests/s", **charts.log_axis(rate for trace in data for rate in trace["y"])),
            "legend": charts.LEGEND_ABOVE,
        },
        views if len(views) > 1 else [],
    )


def ramp(result: Result) -> doc.Section | None:
    """The result of each ramp, and the curve of the first ramp of each arm."""
    found = [
        (
            one.workload,
            str(one.round + 1),
            shown(one.label),
            measured(one.saturation_per_s, None),
            "–" if one.knee_concurrency is None else str(one.knee_concurrency),
            str(len(one.rungs)),
            _ramp_note(one),
        )
        for one in result.of(RatesFound).ramps
    ]
    columns = (
        *KEY,
        *doc.numbers(f"best, {charts.rate_unit(result)}", "users at the knee", "steps"),
        *doc.texts("note"),
    )
    return doc.section(
        "Ramp to saturation",
        doc.Table(columns, found, caption=RAMP_CAPTION, grouped=True),
        *(_first_ramps(result, two) for two in result.experiment.pairings),
        ramp_chart(result),
    )


def _first_ramps(result: Result, pairing: Pairing) -> doc.Table:
    """First ramps of an arm and of the baseline side by side, one row per number of users."""
    curves: list[dict[int, RampRung]] = []
    for label in pairing:
        ramps = (one.rungs for one in result.of(RatesFound).ramps if one.label == label)
        curves.append({rung.concurrency: rung for rung in next(ramps, ())})
    rungs = [
        (str(users), *(text for curve in curves for text in _rung(curve.get(users))))
        for users in sorted({users for curve in curves for users in curve})
    ]
    figures = [
        f"{shown(label)}{what}"
        for label in pairing
        for what in (f", {charts.rate_unit(result)}", " p50, ms", " p99, ms")
    ]
    whose = "each arm" if len(result.experiment.arms) == 2 else " and of ".join(map(shown, pairing))
    return doc.Table(doc.numbers("users", *figures), rungs, title=f"The first ramp of {whose}")


def _rung(rung: RampRung | None) -> tuple[str, str, str]:
    if rung is None:
        return "–", "–", "–"
    return number(rung.throughput_per_s), measured(rung.p50_ms, None), measured(rung.p99_ms, None)


def ramp_chart(result: Result) -> doc.Chart | None:
    """Throughput and latency over the number of users, one line per ramp."""
    ramps, unit_per_s = result.of(RatesFound).ramps, charts.rate_unit(result)
    data: list[doc.Figure] = []
    named: set[tuple[str, str]] = set()
    for panel, attribute, what, unit in (
        ("", "throughput_per_s", "", unit_per_s),
        ("2", "p50_ms", ", p50", "ms"),
        ("2", "p99_ms", ", p99", "ms"),
    ):
        for found in ramps:
            points = [
                (rung.concurrency, value) for rung in found.rungs if (value := getattr(rung, attribute)) is not None
            ]
            if not points:
                continue
            knees = [not panel and users == found.knee_concurrency for users, _ in points]
            star = {"symbol": ["star" if knee else charts.marker_of(result, found.label) for knee in knees]}
            data.append(
                charts.line(
                    result,
                    found.label,
                    points,
                    f"%{{x}} users: %{{y:.4~g}} {unit}{what}, ramp {found.round + 1}",
                    name=what,
                    marker=star | {"size": [13 if knee else 7 for knee in knees]},
                    style={"dash": "dot"} if attribute == "p99_ms" else {},
                    showlegend=(found.label, attribute) not in named,
                    xaxis=f"x{panel}",
                    yaxis=f"y{panel}",
                )
            )
            named.add((found.label, attribute))
    if not data:
        return None
    latencies = (ms for found in ramps for rung in found.rungs for ms in (rung.p50_ms, rung.p99_ms) if ms)
    return doc.Chart(
        "ramp",
        "Throughput and latency over the number of users",
        "Users are doubled until more of them bring no more throughput. A star marks the knee, the first step that no "
        "later one exceeds by 5 %.",
        data,
        charts.two_panels(
            charts.tall(result, 400),
            "users",
            charts.axis(unit_per_s, rangemode="tozero"),
            charts.axis("latency, ms", **charts.log_axis(latencies)),
            charts.doubling(rung.concurrency for found in ramps for rung in found.rungs),
        ),
    )


def _rate_note(found: RateFound) -> str:
    if found.client_limited:
        return "the generator was busy: the server may hold more"
    return {
        "found": "",
        "highest": "held the highest rate tried",
        "none": "late even at the lowest rate tried",
        None: "cut short",
    }[found.ended]


def _ramp_note(found: RampFound) -> str:
    if found.client_limited:
        return "the generator was busy: the server may do more"
    if found.saturation_per_s is None:
        return "cut short"
    return "" if found.saturated else "not saturated: throughput still grew in the last step"


SECTIONS = {"Detail": (rate_search, ramp)}
