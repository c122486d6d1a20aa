"""The share of its engine ceiling that an arm serves: throughput over that of the engine alone, per workload.

The engine's rate is that of whole calls, with the copies that a server cannot avoid. It is taken at the size of a
request where requests come one at a time, and where they can be merged at the measured size nearest to the mean
executed batch. For sequences it is that of the length which all requests of the workload have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import WorkloadSummary
from loadgen.probes.ceiling.plan import DIFFERENT_LENGTHS, merges
from loadgen.probes.ceiling.records import EngineDocument
from loadgen.quantities import number, share
from loadgen.records.run import Found, Label, Record, Workload, shown
from loadgen.records.samples import NS_PER_S

BatchOrigin = Literal["request", "mean executed batch"]


class EngineShare(Record, frozen=True, kw_only=True):
    """The share of its engine ceiling that one arm serves in one workload."""

    workload: str
    label: Label
    batch: int
    """Batch size at which the engine is compared."""
    batch_origin: BatchOrigin
    """Source of that size: the items of a request, or what the server executed at once."""
    executed_batch_mean: float | None
    """Items per execution; None where the server does not report it."""
    engine_images_per_s: float
    """Items per second, of any kind, of the engine alone at that size, copies included."""
    served_images_per_s: float
    """Items per second, of any kind."""
    share: float
    """Served over engine; above 1 the ceiling is not reliable."""
    offered: bool
    """Whether the rate of an open loop, not the server, limited the served throughput."""
    sentence: str


class NoCeiling(Record, frozen=True, kw_only=True):
    """An arm, or one workload of it, without a ceiling."""

    label: Label
    workload: str | None
    """The workload; None for all workloads."""
    reason: str


class CeilingsFound(Found, frozen=True, kw_only=True):
    """How much of their engine ceilings the arms serve."""

    STUDY = "ceiling"
    shares: tuple[EngineShare, ...] = ()
    """The share of each arm and workload; empty if no ceiling was measured."""
    missing: tuple[NoCeiling, ...] = ()
    """Ceilings that could not be measured."""


def analyse(facts: Facts) -> CeilingsFound:
    """The share of every arm and workload whose engine was measured; empty if none was planned."""
    if facts.run.ceilings is None:
        return CeilingsFound()
    loads = {workload.name: workload for workload in facts.run.experiment.workloads if workload.has_blocks}
    documents: dict[Label, EngineDocument] = {}
    missing: list[NoCeiling] = []
    for one in facts.run.ceilings.measured:
        for label in one.labels:
            if one.document is not None:
                documents[label] = one.document
            else:
                missing.append(NoCeiling(label=label, workload=None, reason=one.reason or "nothing was measured"))
    shares: list[EngineShare] = []
    environment = facts.run.environment
    for summary in facts.summaries:
        if summary.label in documents and summary.throughput_per_s and summary.workload in loads:
            workload = loads[summary.workload]
            length = None if environment is None else environment.length_of(workload)
            found = _divide(workload, summary, summary.throughput_per_s, documents[summary.label], length)
            if isinstance(found, EngineShare):
                shares.append(found)
            else:
                missing.append(found)
    return CeilingsFound(shares=tuple(shares), missing=tuple(missing))


def nearest_size(measured: Sequence[int], mean: float) -> int:
    """The measured size nearest to a mean, the larger of two that are equally near."""
    return min(measured, key=lambda size: (abs(size - mean), -size))


def _divide(
    workload: Workload, summary: WorkloadSummary, served: float, document: EngineDocument, length: int | None
) -> EngineShare | NoCeiling:
    alike = [one for one in document.batches if not one.sizes or length in one.sizes.values()]
    rates = {one.batch: one.batch * NS_PER_S / one.call_ns for one in alike if one.call_ns > 0}
    mean = summary.executed_batch_mean
    origin: BatchOrigin = "mean executed batch" if merges(workload) else "request"
    if origin == "request" and workload.batch_size in rates:
        batch = workload.batch_size
    elif origin == "mean executed batch" and mean is not None and rates:
        batch = nearest_size(list(rates), mean)
    else:
        why = "its server does not report its executions" if merges(workload) else "that batch size was not measured"
        why = why if alike else DIFFERENT_LENGTHS
        return NoCeiling(label=summary.label, workload=workload.name, reason=why)
    part = served / rates[batch]
    at = f"batch {batch}"
    if merges(workload) and mean is not None:
        at += f" (its mean executed batch is {number(mean)})"
    sentence = f"In {workload.name}, {shown(summary.label)} serves {share(part)} of its engine ceiling at {at}"
    if workload.is_open:
        sentence += "; the requested rate limits that."
    elif part >= 1.0:
        sentence += "."
    else:
        on_cpu = document.engine.get("device") == "cpu"
        sentence += f"; server, transport and client take the rest{' and share its cores' if on_cpu else ''}."
    return EngineShare(
        workload=workload.name,
        label=summary.label,
        batch=batch,
        batch_origin=origin,
        executed_batch_mean=mean,
        engine_images_per_s=rates[batch],
        served_images_per_s=served,
        share=part,
        offered=workload.is_open,
        sentence=sentence,
    )
