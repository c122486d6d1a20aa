"""The cells of a matrix with their rounds, and ratios of two cells that are paired by round.

A cell's value in a round is the median of its samples: executions on a GPU, calls on a CPU. The round is the unit of
replication, see `loadgen.stats.ratios`; rounds that only one of two cells has are left out of their ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from loadgen.engine_matrix.records import CellResult, Configuration, Estimate, Measured, Plan, Visit
from loadgen.stats.ratios import geometric_mean, interval_of_mean

Shape = tuple[int, int | None]
"""Batch size and length."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration at one batch size and length, with its measurement in every round that has calls."""

    configuration: int
    batch: int
    length: int | None
    rounds: Mapping[int, Measured]
    latencies_ns: Mapping[int, float]
    """Median sample by round."""
    excluded: str | None
    """Why it is not ranked."""

    @property
    def shape(self) -> Shape:
        return self.batch, self.length

    @property
    def measured(self) -> tuple[Measured, ...]:
        """Its measurements in the order of the rounds."""
        return tuple(self.rounds.values())


def cells_of(plan: Plan, visits: Sequence[Visit]) -> tuple[Cell, ...]:
    """All cells with at least one timed call, by configuration, length and batch size."""
    found: dict[tuple[int, int | None, int], dict[int, Measured]] = {}
    for visit in sorted(visits, key=lambda one: one.round):
        for one in visit.cells:
            if one.calls_ns:
                found.setdefault((visit.configuration, one.length, one.batch), {})[visit.round] = one
    order = sorted(found, key=lambda key: (key[0], key[1] or 0, key[2]))
    return tuple(
        Cell(
            configuration=configuration,
            batch=batch,
            length=length,
            rounds=(rounds := found[configuration, length, batch]),
            latencies_ns={
                number: float(median(samples_ns(one, plan.configurations[configuration].device)))
                for number, one in rounds.items()
            },
            excluded=reason_against(plan, tuple(rounds.values())),
        )
        for configuration, length, batch in order
    )


def samples_ns(measured: Measured, device: str) -> tuple[int, ...]:
    """The times of one batch that count. On a GPU those between device events: a call also waits for copies of pageable
    memory, which take longer than many models and vary more, and which a server hides behind the next batch. On a CPU,
    and for an engine without such times, those of whole calls."""
    return measured.calls_ns if device == "cpu" else measured.executions_ns or measured.calls_ns


def has_copies(one: CellResult, device: str) -> bool:
    """Whether a cell on a GPU could only be timed with copies to and from the host."""
    return device != "cpu" and one.latency_ns == one.call_ns


def reason_against(plan: Plan, measured: Sequence[Measured]) -> str | None:
    """Why a cell with these measurements is not ranked: one wrong or too inaccurate answer in any round suffices."""
    fault = next((one.fault for one in measured if one.fault is not None), None)
    if fault is not None:
        return f"wrong answers: {fault}"
    for name, value, limit in (
        ("cosine to FP32", worst((one.cosine_min for one in measured), min), plan.min_cosine),
        ("top-1 agreement with FP32", worst((one.top1 for one in measured), min), plan.min_top1),
    ):
        if value is not None and value < limit:
            return f"the lowest {name} is {value:.6g}, below the limit of {limit:g}"
    return None


def worst(values: Iterable[float | None], choose: Callable[[Iterable[float]], float]) -> float | None:
    """The lowest or highest of the known values; None without any."""
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def first_call_ns(plan: Plan, one: Cell) -> float:
    """The first call in this shape: the median over rounds, or the earliest where the processes were kept, since
    later rounds have no first call."""
    calls = [measured.first_call_ns for measured in one.measured]
    return float(calls[0] if plan.processes == "kept" else median(calls))


def estimate(values: Sequence[float]) -> Estimate | None:
    """Geometric mean of positive values over rounds with its 95 % t interval on logs; None without values."""
    if not values:
        return None
    low, high = interval_of_mean(values) or (None, None)
    return Estimate(value=geometric_mean(values), low=low, high=high)


def ratios(over: Cell, under: Cell) -> list[float]:
    """Throughput of `over` divided by that of `under`, per item, in every round that has both."""
    return [
        (over.batch / own) / (under.batch / under.latencies_ns[number])
        for number, own in over.latencies_ns.items()
        if number in under.latencies_ns
    ]


def engine_mode(one: Configuration) -> str:
    """torch/eager"""
    return f"{one.engine}/{one.mode}"


def baseline_of(plan: Plan, one: Configuration, precision: str = "fp32") -> int | None:
    """The place of the baseline's engine and mode in a precision, for a configuration: of the same model, device and
    threads; None if it is not measured."""
    asked = (plan.baseline, precision, one.group, one.threads)
    found = [(engine_mode(each), each.precision, each.group, each.threads) for each in plan.configurations]
    return found.index(asked) if asked in found else None


def baseline_cell(
    plan: Plan, by_place: Mapping[tuple[int, Shape], Cell], one: Cell, precisions: Sequence[str] = ("fp32",)
) -> Cell | None:
    """The baseline's cell of the same shape, in the first of these precisions in which it is ranked; None for that cell
    itself."""
    asked = plan.configurations[one.configuration]
    places = (baseline_of(plan, asked, precision) for precision in precisions)
    found = (by_place.get((place, one.shape)) for place in places if place is not None)
    base = next((each for each in found if each is not None and not each.excluded), None)
    return None if base is one else base
