"""Ceilings: the stored measurements of engines alone, which engines to measure, and the share that each arm serves.

    DIR/ceilings.json   Ceilings   with the documents that `abserve engine` wrote

An engine is measured with the settings in effect, as the server reports them. Arms whose engines have the same ones
share a measurement.

The share is the served throughput over that of the engine alone, per workload. The engine's rate is that of whole
calls, with the copies that a server cannot avoid. It is taken at the size of a request where requests come one at a
time, and where they can be merged at the measured size nearest to the mean executed batch. For sequences it is that of
the length which all requests of the workload have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from loadgen.base.quantities import number, share
from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import WorkloadSummary
from loadgen.records.payloads import BACKEND_ENDINGS, OWN_TENSORS, reference
from loadgen.records.run import (
    MODEL_WEIGHTS,
    ArmRecord,
    ArmRequest,
    Experiment,
    Found,
    Label,
    Record,
    Workload,
    setting_key,
)
from loadgen.records.samples import NS_PER_S


class EngineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of one batch size."""

    batch: int
    call_ns: int
    """Median of the whole call with its copies, which a server cannot avoid."""
    sizes: dict[str, int] = {}
    """By axis; others have their default."""


class EngineDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a document of `abserve engine --json`, see docs/engines.md; its other fields are only stored."""

    schema: Literal["abserve.engine/1", "abserve.engine/2"]
    engine: dict[str, object]
    """Settings in effect: kind, version, precision, mode, device, threads, max_batch_size, weights, details."""
    batches: tuple[EngineBatch, ...]


class Ceiling(Record, frozen=True, kw_only=True):
    """One engine alone, or why it was not measured."""

    labels: tuple[Label, ...]
    """The arms with this ceiling: several if their engines have the same settings."""
    command: str | None = None
    """The command that measured it; None if nothing was started."""
    document: dict[str, Any] | None = None
    """As `abserve engine` wrote it; `EngineDocument` is what is read of it."""
    reason: str | None = None
    """Why the document is missing."""


class Ceilings(Record, frozen=True, kw_only=True):
    """DIR/ceilings.json, rewritten after each measurement."""

    FILE = "ceilings.json"
    schema: Literal["abserve.ceilings/1"] = "abserve.ceilings/1"
    measured: tuple[Ceiling, ...]


MAX_SIZES = 8
SECONDS_A_SIZE = 0.5
DIFFERENT_LENGTHS = "its requests differ in length, or their length is not known; --sequence-length sets one"
NAMED = {"engine": "kind", "precision": "precision", "mode": "mode", "device": "device", "weights": "weights"}
"""Settings that a server reports → their names in the document of `abserve engine`."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One call of `abserve engine` for one or several arms."""

    labels: tuple[Label, ...]
    options: tuple[str, ...]
    sizes: tuple[int, ...]
    reported: tuple[tuple[str, str], ...]
    """The engine's settings as servers report them, by the names in `abserve engine`'s document, which must agree."""


def wants_ceilings(experiment: Experiment) -> bool:
    """Whether ceilings are requested, and there is load to compare with them."""
    return experiment.ceiling and any(workload.has_blocks for workload in experiment.workloads)


def has_own_engines(arms: Sequence[ArmRequest], deployment: str) -> bool:
    """Whether abserve starts a server itself; servers of a compose stack come with packages that may differ."""
    return deployment == "embedded" and any(arm.embedded and not arm.own_repository for arm in arms)


def plan_ceilings(
    experiment: Experiment, records: Sequence[ArmRecord], lengths: Collection[int] = ()
) -> tuple[list[EngineRun], list[Ceiling]]:
    """The runs in the order of the arms, and the arms without one, each with its reason. `lengths`: those of the
    samples."""
    runs: dict[tuple[str, ...], EngineRun] = {}
    missing: list[Ceiling] = []
    for record in records:
        planned = _plan(experiment, experiment.arm(record.label), record, experiment.lengths or tuple(set(lengths)))
        if isinstance(planned, str):
            missing.append(Ceiling(labels=(record.label,), reason=planned))
            continue
        key = (*planned.options, *map(str, planned.sizes))
        runs[key] = replace(planned, labels=(*runs[key].labels, record.label)) if key in runs else planned
    return list(runs.values()), missing


def merges(workload: Workload) -> bool:
    """Whether requests can be merged, so that a batch may be larger than a request."""
    return workload.is_open or workload.concurrency > 1


def sizes_to_measure(workloads: Sequence[Workload], max_batch_size: int) -> tuple[int, ...]:
    """The sizes of the requests; if requests can be merged, also the largest batch that they can make and the powers of
    two below it. Of too many, the smallest powers are left out."""
    loads = [workload for workload in workloads if workload.has_blocks and workload.batch_size <= max_batch_size]
    requested = {workload.batch_size for workload in loads}
    largest = max((min(max_batch_size, c.concurrency * c.batch_size) for c in loads if merges(c)), default=0)
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    further = [size for size in sorted([*powers, largest], reverse=True) if size and size not in requested]
    return tuple(sorted([*requested, *further[: max(0, MAX_SIZES - len(requested))]]))


def _plan(experiment: Experiment, request: ArmRequest, record: ArmRecord, lengths: tuple[int, ...]) -> EngineRun | str:
    """The run of one arm, or why it does not have one."""
    effect = record.in_effect
    kind, largest, device = effect.get("engine"), effect.get("max_batch_size"), str(effect.get("device"))
    if not (request.embedded and record.launched):
        return "abserve did not start its server, so its engine is not available"
    if request.own_repository or effect.get("backend") in BACKEND_ENDINGS:
        return "Triton's own backend executes it, which cannot be measured outside a server"
    if "," in device:
        return f"its engines are on {device}, and abserve engine measures one device"
    if kind == "null":
        return "the null engine executes no model"
    if not isinstance(kind, str) or not isinstance(largest, int):
        return "its server does not report its engine and its largest batch"
    sizes = sizes_to_measure(experiment.workloads, largest)
    if not sizes:
        return f"every request exceeds its largest batch, {largest}"
    if len(lengths) > 1 and not experiment.lengths:
        return DIFFERENT_LENGTHS
    requested = {setting_key(name): value for name, value in request.settings.items()}
    takes_tensors = experiment.payload_of(request) in OWN_TENSORS
    weights = requested.get("weights", None if experiment.weights == MODEL_WEIGHTS else experiment.weights)
    options: dict[str, str] = {
        "engine": kind,
        **{name: str(effect[name]) for name in ("precision", "mode", "device") if effect.get(name)},
        **({} if takes_tensors else {"payload": "uint8"}),  # a JPEG is decoded to bytes
        "model": reference(experiment.reference_of(request), experiment.inputs),
        **({} if weights is None else {"weights": weights}),
        "threads": str(effect.get("threads") or requested.get("threads", experiment.threads)),
        "max-batch-size": str(largest),
        **{name: requested[name] for name in ("artefacts", "spinning") if name in requested},
        **({"sequence-length": ",".join(map(str, lengths))} if lengths else {}),
    }
    arguments = tuple(f"--{name}={value}" for name, value in options.items())
    reported = {there: effect.get(here) for here, there in NAMED.items()}
    named = tuple((there, str(value)) for there, value in reported.items() if value not in (None, "", "auto"))
    return EngineRun((record.label,), arguments, sizes, named)


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
    stored = facts.run.record_of(Ceilings)
    if stored is None:
        return CeilingsFound()
    loads = {workload.name: workload for workload in facts.run.experiment.workloads if workload.has_blocks}
    documents: dict[Label, EngineDocument] = {}
    missing: list[NoCeiling] = []
    for ceiling in stored.measured:
        for label in ceiling.labels:
            if ceiling.document is not None:
                documents[label] = msgspec.convert(ceiling.document, EngineDocument)
            else:
                reason = ceiling.reason or "nothing was measured"
                missing.append(NoCeiling(label=label, workload=None, reason=reason))
    shares: list[EngineShare] = []
    environment = facts.run.environment
    for summary in facts.summaries:
        if summary.label in documents and summary.throughput_per_s and summary.workload in loads:
            workload = loads[summary.workload]
            length = None if environment is None else environment.length_of(workload)
            divided = _divide(
                facts.names[summary.label],
                workload,
                summary,
                summary.throughput_per_s,
                documents[summary.label],
                length,
            )
            if isinstance(divided, EngineShare):
                shares.append(divided)
            else:
                missing.append(divided)
    return CeilingsFound(shares=tuple(shares), missing=tuple(missing))


def nearest_size(measured: Sequence[int], mean: float) -> int:
    """The measured size nearest to a mean, the larger of two that are equally near."""
    return min(measured, key=lambda size: (abs(size - mean), -size))


def _divide(
    name: str, workload: Workload, summary: WorkloadSummary, served: float, document: EngineDocument, length: int | None
) -> EngineShare | NoCeiling:
    alike = [entry for entry in document.batches if not entry.sizes or length in entry.sizes.values()]
    rates = {entry.batch: entry.batch * NS_PER_S / entry.call_ns for entry in alike if entry.call_ns > 0}
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
    sentence = f"In {workload.name}, {name} serves {share(part)} of its engine ceiling at {at}"
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
