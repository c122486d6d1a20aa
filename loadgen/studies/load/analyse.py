"""The batches that the servers executed: one histogram per arm and workload, and whether requests were merged."""

from __future__ import annotations

from loadgen.comparison.claims import place
from loadgen.comparison.facts import Facts
from loadgen.comparison.summaries import CellSummary
from loadgen.quantities import number
from loadgen.records.run import Cell, Found, Label, Record

FORMED_FACTOR = 1.1
"""Requests were merged if the mean execution holds at least this many times the items of one request."""


class ExecutedBatches(Record, frozen=True, kw_only=True):
    """One arm in one workload."""

    cell: str
    label: Label
    request_items: int
    """Items per request."""
    executions: dict[int, int]
    """Items executed at once → number of executions, in ascending order."""
    mean: float | None
    """Items per execution; None where the server does not report it."""
    formed: bool | None
    """Whether requests were merged; None where the server does not report its executions."""
    sentence: str


class LoadFound(Found, frozen=True, kw_only=True):
    """What the load showed besides the comparisons."""

    STUDY = "load"
    executed_batches: tuple[ExecutedBatches, ...] = ()
    """One entry per arm and workload."""


def analyse(facts: Facts) -> LoadFound:
    """The executed batches of every arm and workload with requests."""
    loads = {cell.name: cell for cell in facts.run.experiment.cells if cell.has_blocks}
    return LoadFound(
        executed_batches=tuple(
            _judge(loads[summary.cell], summary)
            for summary in facts.summaries
            if summary.requests and summary.cell in loads
        )
    )


def _judge(cell: Cell, summary: CellSummary) -> ExecutedBatches:
    mean, executions = summary.executed_batch_mean, summary.executed_batches
    formed = None if mean is None else mean >= FORMED_FACTOR * cell.batch_size
    if mean is None:
        sentence = "unknown: the server does not report its executions"
    elif formed:
        sentence = f"requests were merged: mean {number(mean)}" + (f", largest {max(executions)}" if executions else "")
    elif cell.concurrency == 1:
        sentence = "requests were not merged: one at a time"
    else:
        sentence = f"requests were not merged {place(cell)}: mean {number(mean)}"
    return ExecutedBatches(
        cell=cell.name,
        label=summary.label,
        request_items=cell.batch_size,
        executions=executions,
        mean=mean,
        formed=formed,
        sentence=sentence,
    )
