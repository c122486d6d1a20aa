"""From the stored readings and blocks of a run to evidence records: one for each arm and cell, and one for each arm.

Pure: whoever runs or reports gives it what was stored, and stores what it returns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.comparison.facts import Facts
from loadgen.records.machine import used_gpu
from loadgen.records.run import ArmRecord, BlockRecord, Found, Label
from loadgen.records.samples import Samples
from loadgen.storage.stored_run import StoredBlock
from loadgen.studies.gpu_proof.decision import decide, judge_placement
from loadgen.studies.gpu_proof.readings import DeviceReadings, EdgeDevice, EdgeLine, Ns, Readings, read_readings
from loadgen.studies.gpu_proof.records import (
    DEFAULT_THRESHOLDS,
    Attribution,
    EvidenceFile,
    EvidenceInputs,
    EvidenceRecord,
    Gpu,
    Health,
    Load,
    Placement,
    Thresholds,
    Window,
    Witness,
)
from loadgen.studies.gpu_proof.signals import GpuSeries, gpu_series, measure_attribution, measure_gpu, usable_gaps

LOST = "gpu_lost"


@dataclass(frozen=True, slots=True)
class ArmLoad:
    """The blocks of one arm in one cell (or in all of them) with what is known about its server.

    `gaps`: every idle gap of the run; those beside the blocks are chosen here. `completions_ns`: ends of the good
    answers of these blocks. `gpu_uuid`: the GPU to look at where the server names none, as a deliberate CPU run does
    not. PIDs are those that this machine shows; empty where unknown. `control`: the evidence of
    the same cell from the deliberate CPU run.
    """

    label: Label
    cell: str | None
    blocks: Sequence[BlockRecord]
    gaps: Sequence[Window]
    completions_ns: Ns
    gpu_info: Mapping[str, Any] | None
    model_config: Mapping[str, Any] | None
    gpu_uuid: str | None = None
    server_pids: Collection[int] = ()
    own_pids: Collection[int] = ()
    control: EvidenceRecord | None = None
    is_control: bool = False


def assess(readings: Readings, arm: ArmLoad, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> EvidenceRecord:
    """Measure, decide, and keep every input of the decision."""
    placement = judge_placement(arm.gpu_info, arm.model_config, thresholds)
    load = _load(arm, thresholds)
    start_ns, end_ns = _span(load)
    edges_before, edges_after = _edges_beside(readings.edges, load)
    gaps = (*load.gaps_before, *load.gaps_after)
    device = _choose_device(readings, placement, (*edges_before, *edges_after), arm)
    gpu: Gpu | None = None
    attribution = NO_ATTRIBUTION
    if device is not None:
        gpu = measure_gpu(device, load.windows, gaps, load.items, thresholds)
        during = [e for e in readings.edges if start_ns <= e.at_ns <= end_ns]
        attribution = measure_attribution(
            device, [*edges_before[-1:], *during, *edges_after[:1]], load.windows, gaps, gpu, arm.completions_ns,
            arm.server_pids, arm.own_pids, thresholds,
        )  # fmt: skip
    inputs = EvidenceInputs(
        placement=placement,
        health=_health(readings, device, edges_before[-1:], edges_after[:1], (start_ns, end_ns)),
        load=load,
        gpu=gpu,
        attribution=attribution,
        witness=_witness(load, arm),
    )
    decision = decide(inputs, thresholds)
    return EvidenceRecord(
        label=arm.label,
        cell=arm.cell,
        control=arm.is_control,
        finding=decision.finding,
        code=decision.code,
        sentence=decision.sentence,
        notes=decision.notes,
        activity=decision.activity,
        attributed=decision.attributed,
        cpu_witness=decision.cpu_witness,
        inputs=inputs,
        thresholds=thresholds,
    )


NO_ATTRIBUTION = Attribution(
    pid_resolved=None, exclusive=None, foreign_pids=(), gaps_idle=None, correlation=None, p_value=None, bins=0
)


def _load(arm: ArmLoad, thresholds: Thresholds) -> Load:
    blocks = sorted(arm.blocks, key=lambda block: block.window_start_ns)
    windows = tuple(Window(start_ns=block.window_start_ns, end_ns=block.window_end_ns) for block in blocks)
    errors = sum(block.errors for block in blocks)
    cpu_ns = [block.server_cpu_ns for block in blocks if block.server_cpu_ns is not None]
    before, after = _gaps_beside(windows, usable_gaps(arm.gaps, thresholds))
    return Load(
        windows=windows,
        gaps_before=before,
        gaps_after=after,
        window_s=sum(window.seconds for window in windows),
        completed=sum(block.requests + block.cool_down for block in blocks) - errors,
        errors=errors,
        items=sum(block.executed_items for block in blocks),
        server_cpu_s=sum(cpu_ns) / 1e9 if cpu_ns and len(cpu_ns) == len(blocks) else None,
    )


def _gaps_beside(windows: Sequence[Window], gaps: Sequence[Window]) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
    """The last gap before the load, with every gap inside it, and the first one after it. A gap that overlaps one of
    the arm's own blocks is none."""
    if not windows:
        return (), ()
    start_ns, end_ns = windows[0].start_ns, max(window.end_ns for window in windows)
    clear = [g for g in gaps if all(g.end_ns <= w.start_ns or g.start_ns >= w.end_ns for w in windows)]
    clear.sort(key=lambda gap: gap.start_ns)
    before = [gap for gap in clear if gap.end_ns <= start_ns]
    inside = [gap for gap in clear if gap.start_ns >= start_ns and gap.end_ns <= end_ns]
    after = [gap for gap in clear if gap.start_ns >= end_ns]
    return (*before[-1:], *inside) if before else (), tuple(after[:1])


def _span(load: Load) -> tuple[int, int]:
    """From the first gap to the end of the last one."""
    every = (*load.gaps_before, *load.windows, *load.gaps_after)
    if not every:
        return 0, 0
    return min(w.start_ns for w in every), max(w.end_ns for w in every)


def _edges_beside(edges: Sequence[EdgeLine], load: Load) -> tuple[list[EdgeLine], list[EdgeLine]]:
    if not load.windows:
        return [], []
    first, last = load.windows[0].start_ns, max(window.end_ns for window in load.windows)
    return [e for e in edges if e.at_ns <= first], [e for e in edges if e.at_ns >= last]


def _choose_device(
    readings: Readings,
    placement: Placement,
    edges: Sequence[EdgeLine],
    arm: ArmLoad,
) -> DeviceReadings | None:
    """The one that the server names; else the one with its process, the one that was to be looked at, the only one of
    the machine. None where that is open: that only one was read tells nothing about which one was used."""
    if placement.used_device_uuid is not None:
        return readings.devices.get(placement.used_device_uuid)
    holding = {
        device.uuid
        for edge in edges
        for device in edge.devices
        if any(process.pid in arm.server_pids for process in device.processes or ())
    }
    if len(holding) == 1:
        return readings.devices.get(holding.pop())
    if arm.gpu_uuid is not None:
        return readings.devices.get(arm.gpu_uuid)
    return next(iter(readings.devices.values()), None) if readings.gpu_count == 1 else None


def _health(
    readings: Readings,
    device: DeviceReadings | None,
    before: Sequence[EdgeLine],
    after: Sequence[EdgeLine],
    span_ns: tuple[int, int],
) -> Health:
    uuid = None if device is None else device.uuid
    drivers = {h.driver_version for h in readings.headers if h.driver_version is not None}
    drivers |= {e.driver_version for e in readings.edges if e.driver_version is not None}
    known = [{d.uuid for d in header.devices} for header in readings.headers if header.devices]
    changed = any(uuids != known[0] for uuids in known[1:]) if uuid is None else any(uuid not in k for k in known)
    backwards = device is not None and bool((np.diff(device.energy_joules) < 0).any())
    return Health(
        status=readings.status,
        uuid=uuid,
        driver_version=sorted(drivers)[0] if drivers else None,
        healthy_before=_healthy(before, uuid),
        healthy_after=_healthy(after, uuid),
        device_changed=len(drivers) > 1 or changed or backwards,
        gpu_lost=any(
            event.event == LOST and span_ns[0] <= event.at_ns <= span_ns[1] and event.uuid in (None, uuid)
            for event in readings.events
        ),
    )


def _healthy(edges: Sequence[EdgeLine], uuid: str | None) -> bool | None:
    """Whether NVML answered at the edge for the device, whatever it said of others. Lists that a driver does not offer
    are no fault."""
    if not edges:
        return None
    return all(
        any(device.uuid == uuid and (edge.status == "ok" or _well(edge, device)) for device in edge.devices)
        for edge in edges
    )


def _well(edge: EdgeLine, device: EdgeDevice) -> bool:
    """The edge has failures, and they are another device's."""
    return edge.status == "error" and device.failing is False


def _witness(load: Load, arm: ArmLoad) -> Witness:
    done = load.completed
    own_cpu = load.server_cpu_s / done if load.server_cpu_s is not None and done > 0 else None
    rate = done / load.window_s if load.window_s > 0 else None
    control = None if arm.control is None else arm.control.inputs.witness
    control_cpu = None if control is None else control.cpu_s_per_request
    control_rate = None if control is None else control.requests_per_s
    if arm.is_control:  # it is the run that others are compared with, itself included
        control_cpu, control_rate = own_cpu, rate
    return Witness(
        cpu_s_per_request=own_cpu,
        requests_per_s=rate,
        control_cpu_s_per_request=control_cpu,
        control_requests_per_s=control_rate,
    )


@dataclass(frozen=True, slots=True)
class ControlRun:
    """The deliberate CPU run of one arm: its only block, when its requests were answered, what its server said."""

    arm: ArmRecord
    block: BlockRecord
    samples: Samples
    pids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the evidence of a run is made from."""

    arms: Sequence[ArmRecord]
    blocks: Sequence[StoredBlock]
    gaps: Sequence[Window]
    pids: Mapping[Label, Collection[int]]
    controls: Mapping[Label, ControlRun] = field(default_factory=dict)


def assess_run(directory: Path, files: Sequence[str], evidence: Evidence) -> EvidenceFile:
    """Read the readings in `directory` and judge every arm. Raises `ReadingsError`."""
    readings = read_readings([directory / name for name in files])
    own = frozenset(pid for pids in evidence.pids.values() for pid in pids)
    controls = {label: _assess_control(readings, evidence, run, own) for label, run in evidence.controls.items()}
    records = []
    for arm in evidence.arms:
        blocks = [
            b for b in evidence.blocks if b.record.label == arm.label and b.record.complete and b.samples is not None
        ]
        cells = list(dict.fromkeys(block.record.cell for block in blocks))
        for cell in (*cells, None):
            chosen = [block for block in blocks if cell in (None, block.record.cell)]
            records.append(_assess_arm(readings, evidence, arm, cell, chosen, controls.get(arm.label), own))
    return EvidenceFile(readings=tuple(files), gaps=tuple(evidence.gaps), records=(*records, *controls.values()))


def _assess_arm(
    readings: Readings,
    evidence: Evidence,
    arm: ArmRecord,
    cell: str | None,
    blocks: Sequence[StoredBlock],
    control: EvidenceRecord | None,
    own: Collection[int],
) -> EvidenceRecord:
    requests = sum(block.record.requests + block.record.cool_down - block.record.errors for block in blocks)
    items = sum(block.record.executed_items for block in blocks)
    return assess(
        readings,
        ArmLoad(
            label=arm.label,
            cell=cell,
            blocks=[block.record for block in blocks],
            gaps=evidence.gaps,
            completions_ns=completions([block.samples for block in blocks if block.samples is not None]),
            gpu_info=arm.gpu_info,
            model_config=arm.model_config,
            server_pids=evidence.pids.get(arm.label, ()),
            own_pids=own,
            control=None if control is None or not requests else scaled_control(control, items / requests),
        ),
    )


def _assess_control(
    readings: Readings, evidence: Evidence, control: ControlRun, own: Collection[int]
) -> EvidenceRecord:
    return assess(
        readings,
        ArmLoad(
            label=control.arm.label,
            cell=control.block.cell,
            blocks=[control.block],
            gaps=evidence.gaps,
            completions_ns=completions([control.samples]),
            gpu_info=control.arm.gpu_info,
            model_config=control.arm.model_config,
            gpu_uuid=next((used_gpu(arm.gpu_info) for arm in evidence.arms if arm.label == control.arm.label), None),
            server_pids=control.pids,
            own_pids={*own, *control.pids},
            is_control=True,
        ),
    )


def scaled_control(control: EvidenceRecord, items_per_request: float) -> EvidenceRecord:
    """The control as if its requests held so many images: a CPU works in proportion to the images, so one run of the
    smallest request stands for every cell of its arm."""
    witness, load = control.inputs.witness, control.inputs.load
    if witness.cpu_s_per_request is None or witness.requests_per_s is None or load.items <= 0:
        return control
    factor = items_per_request * load.completed / load.items
    scaled = msgspec.structs.replace(
        witness,
        cpu_s_per_request=witness.cpu_s_per_request * factor,
        requests_per_s=witness.requests_per_s / factor,
    )
    return msgspec.structs.replace(control, inputs=msgspec.structs.replace(control.inputs, witness=scaled))


def completions(samples: Sequence[Samples]) -> Ns:
    """Ends of the good answers, in order."""
    ends = [np.asarray(part["end_ns"][part["error"] < 0], dtype=np.int64) for part in samples]
    return np.sort(np.concatenate(ends)) if ends else np.empty(0, dtype=np.int64)


class GpuFound(Found, frozen=True, kw_only=True):
    """Where the arms ran."""

    STUDY = "gpu_proof"
    evidence: EvidenceFile | None = None
    """None without a GPU."""
    series: tuple[GpuSeries, ...] = ()
    """What the GPUs did over the run, for drawing."""


def analyse(facts: Facts) -> GpuFound:
    """The evidence as it was stored with the run, and the readings that it is made of."""
    run = facts.run
    origin_ns = min((block.record.window_start_ns for block in run.blocks), default=0)
    return GpuFound(evidence=run.evidence, series=gpu_series(run.readings, run.evidence, origin_ns))
