"""Load: the batches that the servers executed."""

from __future__ import annotations

from loadgen.base.quantities import number
from loadgen.metrics.claims import place
from loadgen.metrics.facts import Facts
from loadgen.metrics.registry import has_whole_answers
from loadgen.metrics.summaries import WorkloadSummary, items_per_request
from loadgen.records.run import Found, Label, Record, Workload

FORMED_FACTOR = 1.1
"""Requests were merged if the mean execution holds at least this many times the items of one request."""


class ExecutedBatches(Record, frozen=True, kw_only=True):
    """The batches of one arm in one workload."""

    workload: str
    label: Label
    request_items: float
    """Items per request; of recorded requests on average."""
    executions: dict[int, int]
    """Items executed at once → number of executions, in ascending order."""
    mean: float | None
    """Items per execution; None if the server does not report it."""
    formed: bool | None
    """Whether requests were merged, from `FORMED_FACTOR`; None if the server does not report its executions, or if no
    recorded request was answered."""
    sentence: str


class LoadFound(Found, frozen=True, kw_only=True):
    """Findings of the load in addition to the comparisons."""

    STUDY = "load"
    executed_batches: tuple[ExecutedBatches, ...] = ()
    """One entry per arm and workload."""

    def of_workload(self, name: str) -> list[ExecutedBatches]:
        """Those of a workload, by arm."""
        return [batches for batches in self.executed_batches if batches.workload == name]


def analyse(facts: Facts) -> LoadFound:
    """The executed batches of every arm and workload with requests."""
    loads = {
        workload.name: workload
        for workload in facts.run.experiment.workloads
        if has_whole_answers(workload)  # else executions are steps of many requests each
    }
    return LoadFound(
        executed_batches=tuple(
            _judge(loads[summary.workload], summary, facts)
            for summary in facts.summaries
            if summary.requests and summary.workload in loads
        )
    )


def _judge(workload: Workload, summary: WorkloadSummary, facts: Facts) -> ExecutedBatches:
    mean, executions = summary.executed_batch_mean, summary.executed_batches
    workloads = facts.run.experiment.workloads
    items = items_per_request(workload, summary.label, workloads, facts.summaries, facts.blocks)
    formed = None if mean is None or items is None else mean >= FORMED_FACTOR * items
    if mean is None:
        sentence = "unknown: the server does not report its executions"
    elif items is None:
        sentence = "unknown: no recorded request was answered in a replay"
    elif formed:
        sentence = f"requests were merged: mean {number(mean)}" + (f", largest {max(executions)}" if executions else "")
    elif workload.concurrency == 1:
        sentence = "requests were not merged: one at a time"
    else:
        sentence = f"requests were not merged {place(workload)}: mean {number(mean)}"
    return ExecutedBatches(
        workload=workload.name,
        label=summary.label,
        request_items=workload.batch_size if items is None else items,
        executions=executions,
        mean=mean,
        formed=formed,
        sentence=sentence,
    )
