"""The metrics of a workload, and the values of two arms side by side from every round that both completed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from loadgen.comparison.loops import pool_open_loops
from loadgen.comparison.pool import Pool
from loadgen.comparison.summaries import BlockSummary, measured_latencies_ms
from loadgen.experiment.arrivals import arrival_count
from loadgen.quantities import per_second
from loadgen.records.run import Experiment, Figure, Label, Pairing, Workload, shown
from loadgen.run.storage import StoredBlock
from loadgen.stats.percentiles import samples_needed
from loadgen.stats.ratios import Values, lag_one
from loadgen.stats.tails import Round


class Metric(NamedTuple):
    """One measured quantity, and which direction is better."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    quantile: float | None = None
    """Quantile of the latency, if the metric is a latency."""

    @property
    def is_tail(self) -> bool:
        """Whether it is a percentile that needs the samples of all blocks together."""
        return self.quantile is not None and self.quantile > 0.5


PER_SECOND = per_second("item")
THROUGHPUT = Metric("throughput", "throughput", PER_SECOND, higher_is_better=True)
ACHIEVED_RATE = Metric("achieved_rate", "achieved rate", PER_SECOND, higher_is_better=True)
"""The achieved rate of an open loop: below the requested rate if an arm cannot sustain it."""
LATENCIES = tuple(
    Metric(f"latency_p{percent}", f"p{percent} latency", "ms", higher_is_better=False, quantile=percent / 100)
    for percent in (50, 90, 99)
)
TIME_TO_READY = Metric("time_to_ready", "time to ready", "s", higher_is_better=False)
TIME_TO_FIRST_ANSWER = Metric("time_to_first_answer", "time to first answer", "s", higher_is_better=False)
SLO_RATE = Metric("slo_rate", "rate within the bound", "requests/s", higher_is_better=True)
"""The highest Poisson rate whose p99 holds the bound of the workload."""
SATURATION = Metric("saturation", "throughput at saturation", PER_SECOND, higher_is_better=True)
"""The highest throughput of a ramp."""
METRICS = {
    m.name: m
    for m in (THROUGHPUT, ACHIEVED_RATE, *LATENCIES, TIME_TO_READY, TIME_TO_FIRST_ANSWER, SLO_RATE, SATURATION)
}


def unit_of(metric: Metric, item: str) -> str:
    """The unit of a metric for inputs that are called `item`."""
    return per_second(item) if metric.unit == PER_SECOND else metric.unit


def metrics_of(workload: Workload) -> tuple[Metric, ...]:
    """The metrics that a workload compares, in the order of the report. An open loop requests the same throughput from
    every arm, so latencies are compared, and the achieved rate if an arm cannot keep up."""
    if workload.scenario == "cold-start":
        return (TIME_TO_READY, TIME_TO_FIRST_ANSWER)
    if workload.scenario in ("slo", "ramp"):
        return (SLO_RATE if workload.scenario == "slo" else SATURATION,)
    return (ACHIEVED_RATE, *LATENCIES) if workload.is_open else (THROUGHPUT, *LATENCIES)


def leading_metric(workload: Workload) -> Metric:
    """The metric that gives a workload's verdict and decides when to stop. In an open loop it is the highest percentile
    that the planned pairs have enough requests for."""
    if workload.scenario == "cold-start":
        return TIME_TO_FIRST_ANSWER
    if not workload.is_open or workload.rate_per_s is None:
        return metrics_of(workload)[0]
    requests = workload.rounds * arrival_count(
        workload.rate_per_s, workload.requests, workload.seconds, workload.max_seconds
    )
    supported = [m for m in LATENCIES if m.quantile is not None and samples_needed(m.quantile) <= requests]
    return supported[-1] if supported else LATENCIES[0]


T = TypeVar("T")
Latencies = Mapping[int, Values]
"""Latencies of each block's measured good responses, in ms, by the block's index."""


class PooledLatencies:
    """The latencies for high percentiles: a pool per arm and workload, to which blocks are added as they are stored."""

    def __init__(self, blocks: Sequence[StoredBlock] = ()) -> None:
        self._pools: dict[tuple[str, Label], Pool] = {}
        self.add(blocks)

    def add(self, blocks: Sequence[StoredBlock]) -> None:
        """Read the samples of further blocks."""
        for block in blocks:
            pool = self._pools.setdefault((block.record.workload, block.record.label), Pool())
            pool.add(block.record.index, measured_latencies_ms(block))

    @property
    def by_block(self) -> Latencies:
        return {index: values for pool in self._pools.values() for index, values in pool.blocks.items()}


def latencies_of(blocks: Sequence[StoredBlock]) -> Latencies:
    """Read the samples for high percentiles."""
    return PooledLatencies(blocks).by_block


@dataclass(frozen=True, slots=True)
class Pair:
    """The values of two arms in one round, and during which start of the servers."""

    baseline: float
    arm: float
    restart: int = 0

    @property
    def ratio(self) -> float:
        """The arm's value over the baseline's."""
        return self.arm / self.baseline


@dataclass(frozen=True)
class PairedMetric:
    """One comparison's data; without pairs `reason` may say why."""

    workload: Workload
    metric: Metric
    pairing: Pairing
    pairs: tuple[Pair, ...]
    reason: str | None = None
    rounds: tuple[Round, ...] = ()
    """The samples for a high percentile; `pairs` are then for display only."""
    saturated: bool = False
    """Whether an arm could not sustain the rate of an open loop, so that the achieved rate leads."""

    @property
    def leads(self) -> bool:
        """Whether this metric leads its workload."""
        return self.metric == (ACHIEVED_RATE if self.saturated else leading_metric(self.workload))

    @cached_property
    def is_one_series(self) -> bool:
        """Whether successive rounds may resemble each other: not those of cold starts and searches, nor restarts, each
        of which begins anew."""
        restarted = len({one.unit for one in self.rounds}) < len(self.rounds)
        return self.workload.has_blocks and len(self.by_restart()) < 2 and not restarted

    @cached_property
    def correlation(self) -> float | None:
        """`lag_one` of the pairs, if they are one series."""
        return lag_one([pair.ratio for pair in self.pairs]) if self.is_one_series else None

    def by_restart(self) -> list[list[float]]:
        """Ratios, one list per start of the servers."""
        groups: dict[int, list[float]] = {}
        for pair in self.pairs:
            groups.setdefault(pair.restart, []).append(pair.ratio)
        return list(groups.values())


def side_by_side(values: Mapping[tuple[int, Label], T], pairing: Pairing) -> list[tuple[int, T, T]]:
    """(number, baseline's value, arm's value) of every number that both arms have, in order."""
    base, arm = pairing
    numbers = sorted({number for number, _ in values})
    return [(n, values[n, base], values[n, arm]) for n in numbers if {(n, base), (n, arm)} <= values.keys()]


def pair_metrics(
    experiment: Experiment,
    blocks: Sequence[BlockSummary],
    figures: Sequence[Figure],
    latencies: Latencies | None = None,
) -> list[PairedMetric]:
    """Every metric of every workload of each arm beside the baseline, in the order of the report; then, for ranking,
    the leading one of the other arms among themselves. Without `latencies` high percentiles have no data."""

    def pairs(workload: Workload, metric: Metric, pairing: Pairing) -> PairedMetric:
        if workload.has_blocks:
            return _block_pairs(workload, metric, pairing, blocks, latencies or {})
        return _figure_pairs(workload, metric, pairing, figures)

    paired = []
    for workload in experiment.workloads:
        paired += [pairs(workload, metric, two) for metric in metrics_of(workload) for two in experiment.pairings]
        others = (
            pairs(workload, metric, two) for metric in metrics_of(workload) for two in experiment.pairings_of_others
        )
        paired += [one for one in others if one.leads]
    return paired


def _figure_pairs(workload: Workload, metric: Metric, pairing: Pairing, figures: Sequence[Figure]) -> PairedMetric:
    """A pair per round in which both arms have a value."""
    values = {
        (figure.round, figure.label): (figure.value, figure.restart)
        for figure in figures
        if figure.value and (figure.metric, figure.workload) == (metric.name, workload.name)
    }
    rounds = side_by_side(values, pairing)
    pairs = tuple(Pair(base, arm, restart) for _, (base, restart), (arm, _) in rounds)
    return PairedMetric(workload, metric, pairing, pairs)


def _block_pairs(
    workload: Workload, metric: Metric, pairing: Pairing, blocks: Sequence[BlockSummary], latencies: Latencies
) -> PairedMetric:
    usable = {
        (block.round, block.label): block for block in blocks if block.workload == workload.name and block.complete
    }
    couples = [(base, arm) for _, base, arm in side_by_side(usable, pairing)]
    arms = zip(pairing, zip(*couples, strict=True), strict=True) if couples else ()
    loops = ((label, pool_open_loops([b.open_loop for b in own if b.open_loop is not None])) for label, own in arms)
    saturated = [f"{shown(label)} was {loop.saturation}" for label, loop in loops if loop and loop.saturation]
    if metric.quantile is not None and saturated:
        # The latency of a growing backlog depends on the length of the block.
        return PairedMetric(workload, metric, pairing, (), saturated[0], saturated=True)
    if metric.quantile is not None:
        needed = samples_needed(metric.quantile)
        if metric.is_tail or any(block.latency.samples < needed for couple in couples for block in couple):
            return _tail(workload, metric, pairing, metric.quantile, couples, latencies)
    pairs = _pairs(couples, metric)
    if len(pairs) < len(couples):
        return PairedMetric(workload, metric, pairing, (), "a block has no good response")
    return PairedMetric(workload, metric, pairing, pairs, saturated=bool(saturated))


def _pairs(couples: Sequence[tuple[BlockSummary, BlockSummary]], metric: Metric) -> tuple[Pair, ...]:
    values = [(_value(base, metric), _value(arm, metric), base.restart) for base, arm in couples]
    return tuple(Pair(base, arm, restart) for base, arm, restart in values if base is not None and arm is not None)


def _tail(
    workload: Workload,
    metric: Metric,
    pairing: Pairing,
    quantile: float,
    couples: Sequence[tuple[BlockSummary, BlockSummary]],
    latencies: Latencies,
) -> PairedMetric:
    """Pool the rounds. The independent unit is the start of the servers if there are several, else the round."""
    several = len({a.restart for a, _ in couples}) > 1
    none = np.empty(0)
    rounds = tuple(
        Round(latencies.get(a.index, none), latencies.get(b.index, none), a.restart if several else a.round)
        for a, b in couples
    )
    needed = samples_needed(quantile)
    fewest = min(sum(len(one.a) for one in rounds), sum(len(one.b) for one in rounds))
    if rounds and fewest < needed:
        reason = f"{metric.title} needs {needed} samples per arm; one arm has {fewest}"
        return PairedMetric(workload, metric, pairing, (), reason)
    pairs = _pairs(couples, metric)
    return PairedMetric(workload, metric, pairing, pairs if len(pairs) == len(couples) else (), rounds=rounds)


def _value(block: BlockSummary, metric: Metric) -> float | None:
    if metric.quantile is None:
        return block.throughput_per_s
    value: float | None = getattr(block.latency, f"{metric.name.removeprefix('latency_')}_ms")
    return value
