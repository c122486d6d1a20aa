"""From what a run has stored to its evidence records: one for each arm and cell, and one for each arm."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.evidence.assessment import ArmLoad, assess
from loadgen.evidence.devices import used_gpu
from loadgen.evidence.readings import Ns, Readings, read_readings
from loadgen.evidence.records import EvidenceFile, EvidenceRecord, Window
from loadgen.records.run import ArmRecord, BlockRecord, Label
from loadgen.records.samples import Samples
from loadgen.storage.stored_run import StoredBlock

GPU_INFO_SECONDS = 60.0


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
    requests = sum(block.record.requests - block.record.errors for block in blocks)
    items = sum(block.record.items for block in blocks)
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


def ask_gpu_info(arm: ArmRecord, model: str, log_path: Path, abserve: Sequence[str]) -> dict[str, Any] | None:
    """The `/gpu-info` document of a server that has no such route, made up from its config and its log by
    `abserve gpu-info`; None where that fails."""
    argv = [*abserve, "gpu-info", arm.url, "--model", model, "--json"]
    argv += ["--log", str(log_path)] if log_path.exists() else []
    try:
        done = subprocess.run(argv, capture_output=True, check=False, timeout=GPU_INFO_SECONDS)
        document = msgspec.json.decode(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return document if isinstance(document, dict) else None
