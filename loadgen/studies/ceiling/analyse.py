"""What an arm serves of what its engine does alone: the throughput of each cell over that of the engine by itself.

The engine's rate is that of whole calls, with the copies that a server cannot do without. It is compared at the size of
a request where requests come one at a time, and where they can be merged at the measured size that is nearest to the
mean executed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from loadgen.comparison.facts import Facts
from loadgen.comparison.summaries import CellSummary
from loadgen.quantities import number, share
from loadgen.records.run import Cell, Found, Label, Record, shown
from loadgen.records.samples import NS_PER_S
from loadgen.studies.ceiling.plan import merges
from loadgen.studies.ceiling.records import Ceilings, EngineDocument

BatchOrigin = Literal["request", "mean executed batch"]


class EngineShare(Record, frozen=True, kw_only=True):
    """One arm in one cell."""

    cell: str
    label: Label
    batch: int
    """The size at which the engine is compared."""
    batch_origin: BatchOrigin
    """What decided it: the items of a request, or what the server executed at once."""
    executed_batch_mean: float | None
    """Items of an execution; None where the server does not tell."""
    engine_images_per_s: float
    """Of the engine alone at that size, copies included."""
    served_images_per_s: float
    share: float
    """Served over engine; above 1 the ceiling was none."""
    offered: bool
    """Whether the rate of an open loop, and not the server, decided what was served."""
    sentence: str


class NoCeiling(Record, frozen=True, kw_only=True):
    """An arm, or one cell of it, without a ceiling."""

    label: Label
    cell: str | None
    """None: all of them."""
    reason: str


class CeilingsFound(Found, frozen=True, kw_only=True):
    """What the arms serve of what their engines do alone."""

    STUDY = "ceiling"
    shares: tuple[EngineShare, ...] = ()
    """Empty where that was not measured."""
    missing: tuple[NoCeiling, ...] = ()
    """Where it was to be measured and could not be."""


def analyse(facts: Facts) -> CeilingsFound:
    """Of every cell that was loaded."""
    loads = [cell for cell in facts.run.experiment.cells if cell.has_blocks]
    shares, missing = divide_by_ceilings(facts.run.ceilings, loads, facts.summaries)
    return CeilingsFound(shares=shares, missing=missing)


def divide_by_ceilings(
    ceilings: Ceilings | None, cells: Sequence[Cell], summaries: Sequence[CellSummary]
) -> tuple[tuple[EngineShare, ...], tuple[NoCeiling, ...]]:
    """Every arm and cell that was loaded and whose engine was measured, and what is missing. Both empty where nothing
    was to be measured."""
    if ceilings is None:
        return (), ()
    by_name = {cell.name: cell for cell in cells}
    documents: dict[Label, EngineDocument] = {}
    missing: list[NoCeiling] = []
    for one in ceilings.measured:
        for label in one.labels:
            if one.document is not None:
                documents[label] = one.document
            else:
                missing.append(NoCeiling(label=label, cell=None, reason=one.reason or "nothing was measured"))
    shares: list[EngineShare] = []
    for summary in summaries:
        if summary.label in documents and summary.throughput_per_s and summary.cell in by_name:
            found = _divide(by_name[summary.cell], summary, summary.throughput_per_s, documents[summary.label])
            if isinstance(found, EngineShare):
                shares.append(found)
            else:
                missing.append(found)
    return tuple(shares), tuple(missing)


def images_per_second(document: EngineDocument) -> dict[int, float]:
    """Batch size → images a second of whole calls, by the median."""
    return {one.batch: one.batch * NS_PER_S / one.call_ns for one in document.batches if one.call_ns > 0}


def nearest_size(measured: Sequence[int], mean: float) -> int:
    """The measured size nearest to a mean, the larger of two that are equally near."""
    return min(measured, key=lambda size: (abs(size - mean), -size))


def _divide(cell: Cell, summary: CellSummary, served: float, document: EngineDocument) -> EngineShare | NoCeiling:
    rates = images_per_second(document)
    mean = summary.executed_batch_mean
    origin: BatchOrigin = "mean executed batch" if merges(cell) else "request"
    if origin == "request" and cell.batch_size in rates:
        batch = cell.batch_size
    elif origin == "mean executed batch" and mean is not None and rates:
        batch = nearest_size(list(rates), mean)
    else:
        why = "its server does not tell what it executed" if merges(cell) else "that batch size was not measured"
        return NoCeiling(label=summary.label, cell=cell.name, reason=why)
    part = served / rates[batch]
    return EngineShare(
        cell=cell.name,
        label=summary.label,
        batch=batch,
        batch_origin=origin,
        executed_batch_mean=mean,
        engine_images_per_s=rates[batch],
        served_images_per_s=served,
        share=part,
        offered=cell.is_open,
        sentence=_sentence(
            cell,
            summary.label,
            batch,
            part,
            mean if merges(cell) else None,
            on_cpu=document.engine.get("device") == "cpu",
        ),
    )


def _sentence(cell: Cell, label: Label, batch: int, part: float, mean: float | None, *, on_cpu: bool) -> str:
    at = f"batch {batch}" + ("" if mean is None else f" (its mean executed batch is {number(mean)})")
    said = f"In {cell.name} {shown(label)} serves {share(part)} of what its engine does alone at {at}"
    if cell.is_open:
        return f"{said}; the rate that was asked for decides that."
    if part >= 1.0:
        return f"{said}."
    return f"{said}; the rest is the server, the transport and the client{', which share its cores' if on_cpu else ''}."
