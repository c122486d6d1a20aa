"""Values of one metric side by side: one of each arm from every complete pair of blocks or starts, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.analysis.metrics import ACHIEVED_RATE, TIME_TO_READY, Metric, leading_metric, metrics_of
from loadgen.analysis.summaries import NS_PER_S, BlockSummary
from loadgen.records.run import Cell, ColdStart, Label
from loadgen.records.searches import RampFound, RateFound
from loadgen.statistics.percentiles import samples_needed


@dataclass(frozen=True, slots=True)
class Pair:
    """What both arms measured side by side, and during which start of the servers."""

    a: float
    b: float
    restart: int = 0

    @property
    def ratio(self) -> float:
        """B over A."""
        return self.b / self.a


@dataclass(frozen=True, slots=True)
class PairedMetric:
    """One comparison's data; without pairs `reason` may say why."""

    cell: Cell
    metric: Metric
    pairs: tuple[Pair, ...]
    reason: str | None = None
    saturated: bool = False
    """Whether an arm did not sustain the rate of an open loop, so that the achieved rate is what tells them apart."""

    @property
    def leads(self) -> bool:
        """Whether it stands for its cell."""
        return self.metric == (ACHIEVED_RATE if self.saturated else leading_metric(self.cell))

    def by_restart(self) -> list[list[float]]:
        """Ratios, one list for each start of the servers."""
        groups: dict[int, list[float]] = {}
        for pair in self.pairs:
            groups.setdefault(pair.restart, []).append(pair.ratio)
        return list(groups.values())


def pair_metrics(
    cells: Sequence[Cell],
    blocks: Sequence[BlockSummary],
    cold_starts: Sequence[ColdStart],
    found: Sequence[RateFound | RampFound] = (),
) -> list[PairedMetric]:
    """Every metric of every cell, in the order of the report. `found` is what searches and ramps came to."""

    def pairs(cell: Cell, metric: Metric) -> PairedMetric:
        if cell.scenario == "cold-start":
            return _start_pairs(cell, metric, cold_starts)
        return _block_pairs(cell, metric, blocks) if cell.has_blocks else _search_pairs(cell, metric, found)

    return [pairs(cell, metric) for cell in cells for metric in metrics_of(cell)]


def _search_pairs(cell: Cell, metric: Metric, found: Sequence[RateFound | RampFound]) -> PairedMetric:
    """One a pair of searches or ramps that both came to a value."""
    values = {
        (one.pair, one.label): (one.rate_per_s if isinstance(one, RateFound) else one.saturation_per_s, one.restart)
        for one in found
        if one.cell == cell.name
    }
    pairs = []
    for number in sorted({number for number, _ in values}):
        a, restart = values.get((number, "a"), (None, 0))
        b, _ = values.get((number, "b"), (None, 0))
        if a and b:
            pairs.append(Pair(a, b, restart))
    return PairedMetric(cell, metric, tuple(pairs))


def _block_pairs(cell: Cell, metric: Metric, blocks: Sequence[BlockSummary]) -> PairedMetric:
    """With the reason where the samples do not suffice."""
    usable = [block for block in blocks if block.cell == cell.name and block.complete]
    by_pair = {(block.pair, block.label): block for block in usable}
    numbers = sorted({block.pair for block in usable})
    complete = [(by_pair.get((n, "a")), by_pair.get((n, "b"))) for n in numbers]
    couples = [(a, b) for a, b in complete if a is not None and b is not None]
    saturated = next(
        (block for couple in couples for block in couple if block.open_loop and block.open_loop.saturation), None
    )
    if metric.quantile is not None and saturated is not None and saturated.open_loop is not None:
        # Requests that were not answered in time are in no percentile, or in one that grows with the block's length.
        reason = f"{saturated.label.upper()} was {saturated.open_loop.saturation}"
        return PairedMetric(cell, metric, (), reason, saturated=True)
    if metric.quantile is not None:
        needed = samples_needed(metric.quantile)
        fewest = min((min(a.latency.samples, b.latency.samples) for a, b in couples), default=0)
        if couples and fewest < needed:
            reason = f"{metric.title} needs {needed} samples a block, the smallest block has {fewest}"
            return PairedMetric(cell, metric, (), reason)
    values = [(_value(a, metric), _value(b, metric), a.restart) for a, b in couples]
    pairs = tuple(Pair(a, b, restart) for a, b, restart in values if a is not None and b is not None)
    if len(pairs) < len(values):
        return PairedMetric(cell, metric, (), "a block has no good answer to measure")
    return PairedMetric(cell, metric, pairs, saturated=saturated is not None)


def _value(block: BlockSummary, metric: Metric) -> float | None:
    if metric.quantile is None:
        return block.throughput_per_s
    value: float | None = getattr(block.latency, f"{metric.name.removeprefix('latency_')}_ms")
    return value


def _start_pairs(cell: Cell, metric: Metric, starts: Sequence[ColdStart]) -> PairedMetric:
    """Seconds from process start in each repetition in which both arms got there."""
    moment: Callable[[ColdStart], int | None] = _ready if metric == TIME_TO_READY else _first_answer
    reached: dict[tuple[int, Label], float] = {}
    for start in starts:
        elapsed_ns = moment(start)
        if start.error is None and elapsed_ns:
            reached[start.repetition, start.label] = elapsed_ns / NS_PER_S
    repetitions = sorted({repetition for repetition, _ in reached})
    pairs = [Pair(reached[r, "a"], reached[r, "b"], r) for r in repetitions if {(r, "a"), (r, "b")} <= reached.keys()]
    return PairedMetric(cell, metric, tuple(pairs))


def _ready(start: ColdStart) -> int | None:
    return start.ready_ns


def _first_answer(start: ColdStart) -> int | None:
    return start.first_answer_ns
