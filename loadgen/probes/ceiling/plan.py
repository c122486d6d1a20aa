"""Which engines to measure alone: of which arms, with which settings, at which batch sizes.

The settings are those in effect, as the server reports them. Arms whose engines have the same ones share a measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from loadgen.probes.ceiling.records import Ceiling
from loadgen.records.payloads import BACKEND_ENDINGS, OWN_TENSORS, reference
from loadgen.records.run import MODEL_WEIGHTS, ArmRecord, ArmRequest, Experiment, Label, Workload, setting_key

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
    own = {workload.batch_size for workload in loads}
    largest = max((min(max_batch_size, c.concurrency * c.batch_size) for c in loads if merges(c)), default=0)
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    further = [size for size in sorted([*powers, largest], reverse=True) if size and size not in own]
    return tuple(sorted([*own, *further[: max(0, MAX_SIZES - len(own))]]))


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
    asked = {setting_key(name): value for name, value in request.settings.items()}
    own = experiment.payload_of(request) in OWN_TENSORS
    weights = asked.get("weights", None if experiment.weights == MODEL_WEIGHTS else experiment.weights)
    options: dict[str, str] = {
        "engine": kind,
        **{name: str(effect[name]) for name in ("precision", "mode", "device") if effect.get(name)},
        **({} if own else {"payload": "uint8"}),  # a JPEG is decoded to bytes
        "model": reference(experiment.reference_of(request)),
        **({} if weights is None else {"weights": weights}),
        "threads": str(effect.get("threads") or asked.get("threads", experiment.threads)),
        "max-batch-size": str(largest),
        **{name: asked[name] for name in ("artefacts", "spinning") if name in asked},
        **({"sequence-length": ",".join(map(str, lengths))} if lengths else {}),
    }
    arguments = tuple(f"--{name}={value}" for name, value in options.items())
    reported = {there: effect.get(here) for here, there in NAMED.items()}
    known = tuple((there, str(value)) for there, value in reported.items() if value not in (None, "", "auto"))
    return EngineRun((record.label,), arguments, sizes, known)
