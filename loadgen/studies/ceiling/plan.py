"""What is measured of the engines alone: of which arms, with which settings, at which batch sizes.

The settings are those in effect, by the server's own word. Arms whose engines have the same ones share a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadgen.records.payloads import base_name
from loadgen.records.run import ArmRecord, ArmRequest, Cell, Experiment, Label, setting_key

MAX_SIZES = 8
SECONDS_A_SIZE = 0.5
NAMED = {"engine": "kind", "precision": "precision", "mode": "mode", "device": "device", "weights": "weights"}
"""Settings that a server tells, and where `abserve engine` tells the same."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One call of `abserve engine` for one or several arms."""

    labels: tuple[Label, ...]
    options: tuple[str, ...]
    sizes: tuple[int, ...]
    told: tuple[tuple[str, str], ...]
    """What the servers said of their engine, by the names of `abserve engine`'s document; it must say the same."""


@dataclass(frozen=True, slots=True)
class NoRun:
    """An arm whose engine is not measured, and why."""

    label: Label
    reason: str


def wants_ceilings(experiment: Experiment) -> bool:
    """Whether there is anything to measure: an engine of a server that we start, and a load to divide."""
    return experiment.ceiling and any(cell.has_blocks for cell in experiment.cells)


def has_own_engines(arms: Sequence[ArmRequest], deployment: str) -> bool:
    """Whether abserve starts a server itself; those of a stack are its own, with packages of its own."""
    return deployment == "embedded" and any(arm.embedded for arm in arms)


def plan_ceilings(experiment: Experiment, records: Sequence[ArmRecord]) -> tuple[list[EngineRun], list[NoRun]]:
    """The runs in the order of the arms, and the arms without one."""
    runs: dict[tuple[str, ...], EngineRun] = {}
    missing: list[NoRun] = []
    for record in records:
        planned = _plan(experiment, experiment.arm(record.label), record)
        if isinstance(planned, NoRun):
            missing.append(planned)
            continue
        key = (*planned.options, *map(str, planned.sizes))
        labels = (*runs[key].labels, record.label) if key in runs else (record.label,)
        runs[key] = EngineRun(labels, planned.options, planned.sizes, planned.told)
    return list(runs.values()), missing


def merges(cell: Cell) -> bool:
    """Whether requests can meet in a batch, so that its size is not that of a request."""
    return cell.is_open or cell.concurrency > 1


def sizes_to_measure(cells: Sequence[Cell], max_batch_size: int) -> tuple[int, ...]:
    """The sizes of the requests; where they can be merged also powers of two up to the largest batch that they can
    make, and that. Of too many, the smallest powers are left out."""
    loads = [cell for cell in cells if cell.has_blocks and cell.batch_size <= max_batch_size]
    own = {cell.batch_size for cell in loads}
    largest = max((min(max_batch_size, c.concurrency * c.batch_size) for c in loads if merges(c)), default=0)
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    further = [size for size in sorted([*powers, largest], reverse=True) if size and size not in own]
    return tuple(sorted([*own, *further[: max(0, MAX_SIZES - len(own))]]))


def _plan(experiment: Experiment, request: ArmRequest, record: ArmRecord) -> EngineRun | NoRun:
    effect = record.in_effect
    kind, largest = effect.get("engine"), effect.get("max_batch_size")
    if not (request.embedded and record.launched):
        return NoRun(record.label, "its server is not one that abserve started, so its engine is not at hand")
    if kind == "null":
        return NoRun(record.label, "the null engine executes no model")
    if not isinstance(kind, str) or not isinstance(largest, int):
        return NoRun(record.label, "its server does not tell its engine and its largest batch")
    sizes = sizes_to_measure(experiment.cells, largest)
    if not sizes:
        return NoRun(record.label, f"every request is beyond its largest batch, {largest}")
    asked = {setting_key(name): value for name, value in request.settings.items()}
    payload = "fp32" if experiment.payload_of(request) == "fp32" else "uint8"  # a JPEG is decoded to bytes
    options: dict[str, str] = {
        "engine": kind,
        **{name: str(effect[name]) for name in ("precision", "mode", "device") if effect.get(name)},
        "payload": payload,
        "model": base_name(asked.get("model", experiment.model)),
        "weights": asked.get("weights", experiment.weights),
        "threads": str(effect.get("threads") or asked.get("threads", experiment.threads)),
        "max-batch-size": str(largest),
        **({"artefacts": asked["artefacts"]} if "artefacts" in asked else {}),
    }
    told = tuple((there, str(effect[here])) for here, there in NAMED.items() if _is_told(effect, here))
    return EngineRun((record.label,), tuple(f"--{name}={value}" for name, value in options.items()), sizes, told)


def _is_told(effect: Mapping[str, object], name: str) -> bool:
    return effect.get(name) not in (None, "", "auto")
