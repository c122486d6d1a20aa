"""From the stored readings and blocks of a run to evidence records: one per arm and workload, and one per arm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.base.quantities import significant
from loadgen.findings.gpu.decision import (
    EndedBefore,
    decide,
    decide_together,
    judge_placement,
    measure_attribution,
    measure_gpu,
    usable_gaps,
)
from loadgen.findings.gpu.records import (
    DEFAULT_THRESHOLDS,
    Attribution,
    DeviceReadings,
    EdgeLine,
    EvidenceFile,
    EvidenceInputs,
    EvidenceRecord,
    Gpu,
    GpuFinding,
    Health,
    Load,
    Ns,
    Placement,
    Readings,
    Thresholds,
    TimeSpan,
    Values,
    Witness,
    read_readings,
)
from loadgen.metrics.facts import Facts
from loadgen.records.machine import used_gpus
from loadgen.records.model_config import executed_config, mapping
from loadgen.records.run import ArmRecord, BlockRecord, Found, Label, Record
from loadgen.records.samples import Samples, good
from loadgen.records.store import StoredBlock
from loadgen.records.targets import Kind

LOST = "gpu_lost"
SERIES_STEP_S = 1.0
EDGE_MARGIN_NS = 2_000_000_000
"""From a block or a usable gap to the edges at its ends: `gap_settle_s` and the time of a reading."""
PERIODIC = "periodic"
"""The label of the edges that the sampler reads by itself."""
NO_ATTRIBUTION = Attribution(
    pid_resolved=None, exclusive=None, foreign_pids=(), gaps_idle=None, correlation=None, p_value=None, bins=0
)


def assess(
    readings: Readings,
    *,
    label: Label,
    workload: str | None,
    blocks: Sequence[BlockRecord],
    gaps: Sequence[TimeSpan],
    ended_before: EndedBefore,
    gpu_info: Mapping[str, Any] | None,
    model_config: Mapping[str, Any] | None,
    gpu_uuids: Sequence[str] = (),
    server_pids: Collection[int] = (),
    own_pids: Collection[int] = (),
    processes_unknown: Mapping[Label, str] | None = None,
    control: EvidenceRecord | None = None,
    is_control: bool = False,
    control_idle: bool | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> EvidenceRecord:
    """Judge the blocks of one arm in one workload (or in all of them), and keep every input of the decision.

    `gaps`: every idle gap of the run; those beside the blocks are chosen here. `ended_before` counts the good answers
    of these blocks. `gpu_uuids`: the GPUs to judge where the server names none, as in the CPU control run. PIDs are as
    this machine shows them; empty where unknown. `processes_unknown`: the arms whose processes are unknown, and why.
    `control`: the finding for the arm's CPU control run; `control_idle`: whether the run's control was recognised.

    An arm on several GPUs is judged on each: all blocks with that GPU's readings.
    """
    placement = judge_placement(gpu_info, model_config, thresholds)
    load = _load(blocks, gaps, thresholds)
    if blocks and all(block.kind is Kind.TOKENS for block in blocks):
        thresholds = msgspec.structs.replace(thresholds, min_requests=thresholds.min_streams)
    idle = (*load.gaps_before, *load.gaps_after)
    span = span_of((*idle, *load.windows)) or TimeSpan(start_ns=0, end_ns=0)
    loaded = span_of(load.windows)
    before = [edge for edge in readings.edges if loaded and edge.at_ns <= loaded.start_ns]
    after = [edge for edge in readings.edges if loaded and edge.at_ns >= loaded.end_ns]
    during = [edge for edge in readings.edges if _beside(edge, (*load.windows, *idle))]
    edges = [*before[-1:], *during, *after[:1]]

    def on(device: DeviceReadings | None, placement: Placement) -> EvidenceRecord:
        gpu: Gpu | None = None
        attribution = NO_ATTRIBUTION
        if device is not None:
            gpu = measure_gpu(device, load.windows, idle, load.items, thresholds)
            attribution = measure_attribution(
                device, edges, load.windows, idle, gpu, ended_before, server_pids, own_pids, thresholds,
                processes_unknown or {}, label,
            )  # fmt: skip
        inputs = EvidenceInputs(
            placement=placement,
            health=_health(readings, device, before[-1:], after[:1], span),
            load=load,
            gpu=gpu,
            attribution=attribution,
            witness=_witness(load, control, is_control),
            control_idle=control_idle,
        )
        return decide(label, workload, inputs, thresholds, control=is_control)

    if len(named := used_gpus(gpu_info)) > 1:
        placements = [msgspec.structs.replace(placement, used_device_uuid=uuid) for uuid in named]
        return decide_together([on(readings.devices.get(str(one.used_device_uuid)), one) for one in placements])
    if not named and len(gpu_uuids) > 1:
        return decide_together([on(readings.devices.get(uuid), placement) for uuid in gpu_uuids])
    several = "," in str(mapping((gpu_info or {}).get("runtime")).get("device"))
    chosen = None if several else _choose_device(readings, placement, (*before, *after), server_pids, gpu_uuids)
    return on(chosen, placement)


def _beside(edge: EdgeLine, windows: Sequence[TimeSpan]) -> bool:
    """Whether an edge is of this load or its gaps: between them, and before the first gap, servers may start that are
    none of the arms, such as one at its defaults. Only an edge that was asked for may lie just outside a window."""
    margin = 0 if edge.label == PERIODIC else EDGE_MARGIN_NS
    return any(window.start_ns - margin <= edge.at_ns <= window.end_ns + margin for window in windows)


def span_of(windows: Sequence[TimeSpan]) -> TimeSpan | None:
    """The span from the first start to the last end; None without windows."""
    if not windows:
        return None
    return TimeSpan(
        start_ns=min(window.start_ns for window in windows), end_ns=max(window.end_ns for window in windows)
    )


def _load(blocks: Sequence[BlockRecord], gaps: Sequence[TimeSpan], thresholds: Thresholds) -> Load:
    blocks = sorted(blocks, key=lambda block: block.window_start_ns)
    windows = tuple(TimeSpan(start_ns=block.window_start_ns, end_ns=block.window_end_ns) for block in blocks)
    errors = sum(block.errors for block in blocks)
    cpu_ns = [block.server_cpu_ns for block in blocks if block.server_cpu_ns is not None]
    before, after = _gaps_beside(windows, usable_gaps(gaps, thresholds))
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


def _gaps_beside(
    windows: Sequence[TimeSpan], gaps: Sequence[TimeSpan]
) -> tuple[tuple[TimeSpan, ...], tuple[TimeSpan, ...]]:
    """The last gap before the load with every gap inside it, and the first gap after it. A gap that overlaps a block
    of the arm does not count."""
    load = span_of(windows)
    if load is None:
        return (), ()
    clear = [g for g in gaps if all(g.end_ns <= w.start_ns or g.start_ns >= w.end_ns for w in windows)]
    clear.sort(key=lambda gap: gap.start_ns)
    before = [gap for gap in clear if gap.end_ns <= load.start_ns]
    inside = [gap for gap in clear if gap.start_ns >= load.start_ns and gap.end_ns <= load.end_ns]
    after = [gap for gap in clear if gap.start_ns >= load.end_ns]
    return (*before[-1:], *inside) if before else (), tuple(after[:1])


def _choose_device(
    readings: Readings,
    placement: Placement,
    edges: Sequence[EdgeLine],
    server_pids: Collection[int],
    gpu_uuids: Sequence[str],
) -> DeviceReadings | None:
    """The device that the server names; else the one with its process, the one given, the only one of the machine. None
    if several remain: reading only one does not show which was used."""
    if placement.used_device_uuid is not None:
        return readings.devices.get(placement.used_device_uuid)
    holding = {
        device.uuid
        for edge in edges
        for device in edge.devices
        if any(process.pid in server_pids for process in device.processes or ())
    }
    if len(holding) == 1:
        return readings.devices.get(holding.pop())
    if gpu_uuids:
        return readings.devices.get(gpu_uuids[0])
    return next(iter(readings.devices.values()), None) if readings.gpu_count == 1 else None


def _health(
    readings: Readings,
    device: DeviceReadings | None,
    before: Sequence[EdgeLine],
    after: Sequence[EdgeLine],
    span: TimeSpan,
) -> Health:
    uuid = None if device is None else device.uuid
    drivers = {h.driver_version for h in readings.headers} | {e.driver_version for e in readings.edges}
    drivers.discard(None)
    device_sets = [{d.uuid for d in header.devices} for header in readings.headers if header.devices]
    changed = (
        any(uuids != device_sets[0] for uuids in device_sets[1:])
        if uuid is None
        else any(uuid not in k for k in device_sets)
    )
    backwards = device is not None and bool((np.diff(device.energy_joules) < 0).any())
    return Health(
        status=readings.status,
        uuid=uuid,
        driver_version=min(filter(None, drivers), default=None),
        healthy_before=_healthy(before, uuid),
        healthy_after=_healthy(after, uuid),
        device_changed=len(drivers) > 1 or changed or backwards,
        gpu_lost=any(
            event.event == LOST and span.start_ns <= event.at_ns <= span.end_ns and event.uuid in (None, uuid)
            for event in readings.events
        ),
    )


def _healthy(edges: Sequence[EdgeLine], uuid: str | None) -> bool | None:
    """Whether NVML answered at the edges for this device, even if it failed for others. A list that a driver does not
    offer is not a failure."""
    if not edges:
        return None
    return all(
        any(
            device.uuid == uuid and (edge.status == "ok" or (edge.status == "error" and device.failing is False))
            for device in edge.devices
        )
        for edge in edges
    )


def _witness(load: Load, control: EvidenceRecord | None, is_control: bool) -> Witness:
    """The control's figures are scaled to the items of a request: a CPU's work is proportional to the items, so one run
    of the smallest request serves every workload of its arm. The control itself is compared with itself."""
    done = load.completed
    cpu_s = load.server_cpu_s / done if load.server_cpu_s is not None and done > 0 else None
    rate = done / load.window_s if load.window_s > 0 else None
    control_cpu_s, control_rate = (cpu_s, rate) if is_control else (None, None)
    if control is not None and done > 0:
        control_cpu_s = control.inputs.witness.cpu_s_per_request
        control_rate = control.inputs.witness.requests_per_s
        other = control.inputs.load
        if control_cpu_s is not None and control_rate is not None and other.items > 0 and load.items > 0:
            factor = load.items / done * other.completed / other.items
            control_cpu_s, control_rate = control_cpu_s * factor, control_rate / factor
    return Witness(
        cpu_s_per_request=cpu_s,
        requests_per_s=rate,
        control_cpu_s_per_request=control_cpu_s,
        control_requests_per_s=control_rate,
    )


@dataclass(frozen=True, slots=True)
class ControlRun:
    """The CPU control run of one arm: its record, its only block with the samples, its server's processes."""

    arm: ArmRecord
    block: BlockRecord
    samples: Samples
    pids: frozenset[int]


def assess_run(
    directory: Path,
    files: Sequence[str],
    *,
    arms: Sequence[ArmRecord],
    blocks: Sequence[StoredBlock],
    gaps: Sequence[TimeSpan],
    pids: Mapping[Label, Collection[int]],
    controls: Mapping[Label, ControlRun],
    processes_unknown: Mapping[Label, str] | None = None,
) -> EvidenceFile:
    """Read the readings in `directory` and judge every arm. `processes_unknown`: the arms without PIDs, and why. Raises
    `StoredRunError`."""
    readings = read_readings(directory, files)
    run_pids = frozenset(
        pid for several in (*pids.values(), *(run.pids for run in controls.values())) for pid in several
    )
    gpus = {arm.label: used_gpus(arm.gpu_info) for arm in arms}

    def judge(
        arm: ArmRecord, workload: str | None, chosen: Sequence[BlockRecord], ended_before: EndedBefore, **more: Any
    ) -> EvidenceRecord:
        return assess(
            readings,
            label=arm.label,
            workload=workload,
            blocks=chosen,
            gaps=gaps,
            ended_before=ended_before,
            gpu_info=arm.gpu_info,
            model_config=executed_config(arm),
            processes_unknown=processes_unknown,
            **more,
        )

    judged = {
        label: judge(
            run.arm, run.block.workload, [run.block], count_ends([run]),
            gpu_uuids=gpus.get(label, ()), server_pids=run.pids, own_pids=run_pids, is_control=True,
        )
        for label, run in controls.items()
    }  # fmt: skip
    records = []
    recognised = [
        control.finding is GpuFinding.CPU_FALLBACK and control.activity == "idle" for control in judged.values()
    ]
    for arm in arms:
        stored = [
            block
            for block in blocks
            if block.record.label == arm.label and block.record.complete and block.stored is not None
        ]
        for workload in (*dict.fromkeys(block.record.workload for block in stored), None):
            chosen = [block for block in stored if workload in (None, block.record.workload)]
            more = {
                "server_pids": pids.get(arm.label, ()),
                "own_pids": run_pids,
                "control": judged.get(arm.label),
                "control_idle": all(recognised) if recognised else None,
            }
            records.append(judge(arm, workload, [block.record for block in chosen], count_ends(chosen), **more))
    return EvidenceFile(readings=tuple(files), gaps=tuple(gaps), records=(*records, *judged.values()))


def count_ends(blocks: Sequence[StoredBlock | ControlRun]) -> EndedBefore:
    """Count the good answers that ended before each moment; the samples of one block at a time are in memory."""

    def ended_before(moments_ns: Ns) -> Ns:
        count = np.zeros(moments_ns.shape, dtype=np.int64)
        for block in blocks:
            if (samples := block.samples) is not None:
                count += np.searchsorted(np.sort(good(samples)["end_ns"]), moments_ns)
        return count

    return ended_before


Points = tuple[tuple[float, float], ...]


class GpuSeries(Record, frozen=True, kw_only=True):
    """Activity of one device. Points are (seconds since the run's first request, mean over the second before)."""

    uuid: str
    name: str | None
    utilisation: Points
    """Share of the time in which a kernel ran."""
    power_watts: Points
    sm_active: Points
    """Share of the multiprocessors' time with a warp on them; empty if the device does not report it."""


class GpuFound(Found, frozen=True, kw_only=True):
    """GPU verification: where the arms ran, with the readings."""

    STUDY = "gpu_proof"
    evidence: EvidenceFile | None = None
    """The findings; None without a GPU."""
    series: tuple[GpuSeries, ...] = ()
    """The GPUs' activity over the run, for the chart."""

    def joules_per_item(self, label: Label, workload: str) -> float | None:
        """Energy of the GPU per item of an arm in a workload; None where it was not measured, or is not this arm's."""
        records = () if self.evidence is None else self.evidence.records
        for record in records:
            if (record.label, record.workload, record.control, record.no_energy) == (label, workload, False, None):
                return None if record.inputs.gpu is None else record.inputs.gpu.joules_per_item
        return None


def analyse(facts: Facts) -> GpuFound:
    """The evidence as it was stored with the run, and the readings behind it."""
    run = facts.run
    origin_ns = min((block.record.window_start_ns for block in run.blocks), default=0)
    evidence = run.record_of(EvidenceFile)
    if evidence is None:
        return GpuFound()
    readings = read_readings(run.directory, evidence.readings)
    return GpuFound(evidence=evidence, series=_series(readings, evidence, origin_ns))


def _series(readings: Readings, evidence: EvidenceFile, origin_ns: int) -> tuple[GpuSeries, ...]:
    """The devices that a finding names, or all if none does, from the first gap to the last."""
    named = {record.uuid for record in evidence.records if record.uuid is not None} & set(readings.devices)
    names = {device.uuid: device.name for header in readings.headers for device in header.devices}
    loads = (window for record in evidence.records for window in record.inputs.load.windows)
    span = span_of((*evidence.gaps, *loads))
    return tuple(
        GpuSeries(
            uuid=uuid,
            name=names.get(uuid),
            utilisation=_points(device.sample_end_ns, device.sample_busy, span, origin_ns),
            power_watts=_points(device.power_at_ns, device.power_watts, span, origin_ns),
            sm_active=_points(device.sm_active_at_ns, device.sm_active, span, origin_ns),
        )
        for uuid, device in readings.devices.items()
        if not named or uuid in named
    )


def _points(at_ns: Ns, values: Values, span: TimeSpan | None, origin_ns: int) -> Points:
    if span is not None:
        inside = (at_ns >= span.start_ns) & (at_ns <= span.end_ns)
        at_ns, values = at_ns[inside], values[inside]
    steps = np.ceil((at_ns - origin_ns) / (SERIES_STEP_S * 1e9)).astype(np.int64)
    ends, places = np.unique(steps, return_inverse=True)
    means = (np.bincount(places, weights=values) / np.bincount(places)).tolist()
    return tuple((float(end * SERIES_STEP_S), significant(mean, 4)) for end, mean in zip(ends, means, strict=True))
