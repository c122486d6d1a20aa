"""What is compared: the metrics of a cell, their units, and which of them stands for the cell."""

from __future__ import annotations

from loadgen.experiment.arrivals import arrival_count
from loadgen.records.run import Cell, Record
from loadgen.statistics.percentiles import samples_needed


class Metric(Record, frozen=True, kw_only=True):
    """One measured quantity, and which direction is better."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    quantile: float | None = None
    """Of the latency, where the metric is one."""


THROUGHPUT = Metric(name="throughput", title="throughput", unit="images/s", higher_is_better=True)
ACHIEVED_RATE = Metric(name="achieved_rate", title="achieved rate", unit="images/s", higher_is_better=True)
"""Of an open loop: below the rate asked for where an arm does not sustain it."""
LATENCIES = tuple(
    Metric(
        name=f"latency_p{percent}",
        title=f"p{percent} latency",
        unit="ms",
        higher_is_better=False,
        quantile=percent / 100,
    )
    for percent in (50, 90, 99)
)
TIME_TO_READY = Metric(name="time_to_ready", title="time to ready", unit="s", higher_is_better=False)
TIME_TO_FIRST_ANSWER = Metric(
    name="time_to_first_answer", title="time to first answer", unit="s", higher_is_better=False
)
SLO_RATE = Metric(name="slo_rate", title="rate within the bound", unit="requests/s", higher_is_better=True)
"""The highest Poisson rate whose p99 holds the cell's bound."""
SATURATION = Metric(name="saturation", title="throughput at saturation", unit="images/s", higher_is_better=True)
"""The best of a ramp, where more users bring no more."""
METRICS = {
    m.name: m
    for m in (THROUGHPUT, ACHIEVED_RATE, *LATENCIES, TIME_TO_READY, TIME_TO_FIRST_ANSWER, SLO_RATE, SATURATION)
}


def metrics_of(cell: Cell) -> tuple[Metric, ...]:
    """What is compared in a cell, in the order of the report. An open loop asks for the same throughput of both arms,
    so there latencies tell them apart, and the achieved rate where one does not keep up."""
    if cell.scenario == "cold-start":
        return (TIME_TO_READY, TIME_TO_FIRST_ANSWER)
    if cell.scenario in ("slo", "ramp"):
        return (SLO_RATE if cell.scenario == "slo" else SATURATION,)
    return (ACHIEVED_RATE, *LATENCIES) if cell.is_open else (THROUGHPUT, *LATENCIES)


def leading_metric(cell: Cell) -> Metric:
    """The one that stands for the cell in the verdict, and that decides when to stop. In an open loop it is the
    highest percentile that a block has requests for: an open loop is there to show the tail."""
    if cell.scenario == "cold-start":
        return TIME_TO_FIRST_ANSWER
    if cell.scenario in ("slo", "ramp"):
        return SLO_RATE if cell.scenario == "slo" else SATURATION
    if not cell.is_open or cell.rate_per_s is None:
        return THROUGHPUT
    requests = arrival_count(cell.rate_per_s, cell.requests, cell.seconds, cell.max_seconds)
    supported = [m for m in LATENCIES if m.quantile is not None and samples_needed(m.quantile) <= requests]
    return supported[-1] if supported else LATENCIES[0]
