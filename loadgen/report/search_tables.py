"""Searches for a rate and ramps as rows of text: every format renders the same words and the same digits."""

from __future__ import annotations

from loadgen.analysis.result import Result
from loadgen.quantities import number
from loadgen.records.searches import RampFound, RampRung, RateFound

RATE_HEADINGS = ("scenario", "pair", "arm", "holds, requests/s", "fails at", "trials", "under load, s", "note")
RATE_CAPTION = (
    "The highest Poisson rate whose p99 held the bound at 99 % confidence (MLPerf's early-stopping bound: 0 late of "
    "459 requests, 10 of 2,010, 100 of 12,571), and the lowest that did not; every trial is in result.json."
)
TRIAL_HEADINGS = ("scenario", "pair", "arm", "trial", "requests/s", "sent", "late", "p99, ms", "note")
TRIAL_CAPTION = "Late: of how many that may be. A trial ends as soon as it cannot hold any more."
RAMP_HEADINGS = ("scenario", "pair", "arm", "best, images/s", "users at the knee", "rungs", "note")
RAMP_CAPTION = (
    "Users are doubled until two rungs in a row gain less than 5 % throughput while the median latency grows. The knee "
    "is the first rung from which no later one is 5 % better."
)
RUNG_HEADINGS = ("users", "A, images/s", "A p50, ms", "A p99, ms", "B, images/s", "B p50, ms", "B p99, ms")


def rate_rows(result: Result) -> list[tuple[str, ...]]:
    """One a search, as RATE_HEADINGS; empty without any."""
    return [
        (
            found.cell,
            str(found.pair + 1),
            found.label.upper(),
            _number(found.rate_per_s),
            _number(found.failed_rate_per_s),
            str(found.trials),
            number(found.seconds),
            _rate_note(found),
        )
        for found in result.rates
    ]


def trial_rows(result: Result) -> list[tuple[str, ...]]:
    """Every trial of every search, as TRIAL_HEADINGS; for documents that have room for them."""
    return [
        (
            trial.cell,
            str(trial.pair + 1),
            trial.label.upper(),
            str(trial.step + 1),
            _number(trial.rate_per_s),
            f"{trial.requests:,} of {trial.planned or 0:,}",
            f"{trial.late or 0:,} of {trial.late_allowed or 0:,}",
            _number(trial.p99_ms),
            "held" if trial.held else "failed",
        )
        for trial in result.trials
        if trial.rate_per_s is not None
    ]


def ramp_rows(result: Result) -> list[tuple[str, ...]]:
    """One a ramp, as RAMP_HEADINGS; empty without any."""
    return [
        (
            found.cell,
            str(found.pair + 1),
            found.label.upper(),
            _number(found.saturation_per_s),
            "–" if found.knee_concurrency is None else str(found.knee_concurrency),
            str(len(found.rungs)),
            _ramp_note(found),
        )
        for found in result.ramps
    ]


def rung_rows(result: Result) -> list[tuple[str, ...]]:
    """The curve of the first ramp of each arm, one row a rung, as RUNG_HEADINGS."""
    curves = {label: _first_curve(result, label) for label in ("a", "b")}
    users = sorted({rung for curve in curves.values() for rung in curve})
    return [
        (str(number_of), *_cells(curves["a"].get(number_of)), *_cells(curves["b"].get(number_of)))
        for number_of in users
    ]


def _first_curve(result: Result, label: str) -> dict[int, RampRung]:
    found = next((ramp for ramp in result.ramps if ramp.label == label), None)
    return {rung.concurrency: rung for rung in found.rungs} if found is not None else {}


def _cells(rung: RampRung | None) -> tuple[str, str, str]:
    if rung is None:
        return "–", "–", "–"
    return number(rung.throughput_per_s), _number(rung.p50_ms), _number(rung.p99_ms)


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
    return "" if found.saturated else "not saturated: still gaining on the last rung"


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)
