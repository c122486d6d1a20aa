"""What is compared: the metrics of a cell, their units, and which of them stands for the cell."""

from __future__ import annotations

from loadgen.records import Cell, Record


class Metric(Record, frozen=True, kw_only=True):
    """One measured quantity, and which direction is better."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    quantile: float | None = None
    """Of the latency, where the metric is one."""


THROUGHPUT = Metric(name="throughput", title="throughput", unit="images/s", higher_is_better=True)
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
METRICS = {m.name: m for m in (THROUGHPUT, *LATENCIES, TIME_TO_READY, TIME_TO_FIRST_ANSWER)}


def metrics_of(cell: Cell) -> tuple[Metric, ...]:
    """What is compared in a cell, in the order of the report. An open loop asks for the same throughput of both arms,
    so there only latencies tell them apart."""
    if cell.scenario == "cold-start":
        return (TIME_TO_READY, TIME_TO_FIRST_ANSWER)
    return LATENCIES if cell.is_open else (THROUGHPUT, *LATENCIES)


def leading_metric(cell: Cell) -> Metric:
    """The one that stands for the cell in the verdict, and that decides when to stop."""
    if cell.scenario == "cold-start":
        return TIME_TO_FIRST_ANSWER
    return LATENCIES[0] if cell.is_open else THROUGHPUT
