"""What the servers executed: the histogram of executed batches of each arm and cell, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.comparison.facts import Facts
from loadgen.comparison.summaries import CellSummary
from loadgen.quantities import number
from loadgen.records.run import Cell, Found, Label, Record

FORMED_FACTOR = 1.1
"""Executions hold on average so many times the items of one request where batches formed."""


class ExecutedBatches(Record, frozen=True, kw_only=True):
    """One arm in one cell."""

    cell: str
    label: Label
    request_items: int
    """Items of one request."""
    executions: dict[int, int]
    """Items executed at once → how often, in ascending order."""
    mean: float | None
    """Items of an execution; None where the server does not tell."""
    formed: bool | None
    """Whether requests were merged; None where the server does not tell."""
    sentence: str


class LoadFound(Found, frozen=True, kw_only=True):
    """What the load showed beyond what is compared."""

    STUDY = "load"
    executed_batches: tuple[ExecutedBatches, ...] = ()
    """One entry an arm and cell."""


def analyse(facts: Facts) -> LoadFound:
    """Of every arm and cell that was loaded."""
    loads = [cell for cell in facts.run.experiment.cells if cell.has_blocks]
    return LoadFound(executed_batches=executed_batches(loads, facts.summaries))


def executed_batches(cells: Sequence[Cell], summaries: Sequence[CellSummary]) -> tuple[ExecutedBatches, ...]:
    """Of every arm and cell that was loaded."""
    by_name = {cell.name: cell for cell in cells}
    return tuple(
        _judge(by_name[summary.cell], summary) for summary in summaries if summary.requests and summary.cell in by_name
    )


def _judge(cell: Cell, summary: CellSummary) -> ExecutedBatches:
    mean = summary.executed_batch_mean
    formed = None if mean is None else mean >= FORMED_FACTOR * cell.batch_size
    return ExecutedBatches(
        cell=cell.name,
        label=summary.label,
        request_items=cell.batch_size,
        executions=summary.executed_batches,
        mean=mean,
        formed=formed,
        sentence=_sentence(cell, mean, formed, summary.executed_batches),
    )


def _sentence(cell: Cell, mean: float | None, formed: bool | None, executions: Mapping[int, int]) -> str:
    if mean is None or formed is None:
        return "executed batches are unknown: the server does not report them"
    if formed:
        return f"batches formed: mean {number(mean)}" + (f", largest {max(executions)}" if executions else "")
    if cell.is_open:
        load = f"at {cell.rate_per_s or 0.0:g} requests/s"
    else:
        load = "load was serial" if cell.concurrency == 1 else f"at concurrency {cell.concurrency}"
    own = "" if cell.batch_size == 1 else f" with {cell.batch_size} items a request"
    return f"batching never formed: mean {number(mean)}{own}, {load}"
