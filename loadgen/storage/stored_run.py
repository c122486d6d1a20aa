"""Reads the records of a run back from its directory, whole or partial, and judges nothing.

Only `experiment.json` must be there: a run that was killed leaves the rest in any state of completeness. Whatever is
missing is None or empty; whatever is there and cannot be read is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from loadgen.evidence.readings import Readings, ReadingsError, read_readings
from loadgen.evidence.records import EvidenceFile
from loadgen.records.calibration import Calibration
from loadgen.records.causes import Counterfactual, Explanation
from loadgen.records.ceilings import Ceilings
from loadgen.records.conditions import Conditions
from loadgen.records.noise_floor import NoiseFloor
from loadgen.records.probes import CacheProbe
from loadgen.records.run import (
    ArmRecord,
    BlockRecord,
    Cell,
    ColdStart,
    ContainerColdStart,
    Environment,
    Experiment,
    ParityRecord,
    RunState,
)
from loadgen.records.sample_files import read_samples
from loadgen.records.samples import Samples
from loadgen.records.searches import Trial

T = TypeVar("T")


class StoredRunError(Exception):
    """A directory holds no run, or a record in it cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block's record with its samples; `samples` is None where the file is missing or broken, see `problem`."""

    record: BlockRecord
    cell: Cell
    samples: Samples | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """Samples of a block that was under way when the run was killed: whose it was is not known for certain."""

    path: str
    requests: int


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Everything that a directory holds."""

    directory: Path
    experiment: Experiment
    environment: Environment | None
    arms: tuple[ArmRecord, ...]
    parity: ParityRecord | None
    cold_starts: tuple[ColdStart, ...]
    blocks: tuple[StoredBlock, ...]
    partial_blocks: tuple[PartialBlock, ...]
    state: RunState | None
    evidence: EvidenceFile | None = None
    readings: Readings | None = None
    """Of the GPU, where there is evidence."""
    container_cold_starts: tuple[ContainerColdStart, ...] = ()
    trials: tuple[Trial, ...] = ()
    """Of searches and ramps, in the order in which they ran."""
    calibration: Calibration | None = None
    """Of the load generator on the machine of the run, where there is one."""
    cache_probes: tuple[CacheProbe, ...] = ()
    """One an arm, where there was load."""
    noise_floors: tuple[NoiseFloor, ...] = ()
    """Of the machine, as known when the run began."""
    conditions: Conditions | None = None
    """Of the machine, right before the load."""
    explanation: Explanation | None = None
    counterfactual_blocks: tuple[tuple[StoredBlock, ...], ...] = ()
    """Of each counterfactual in `explanation.done`, in that order."""
    ceilings: Ceilings | None = None
    """Of the engines alone, where they were to be measured and the run got there."""


def read_run(directory: Path) -> StoredRun:
    """Read DIR. Raises `StoredRunError` where there is no run or a record is unreadable."""
    experiment = _read(directory / "experiment.json", Experiment)
    if experiment is None:
        raise StoredRunError(
            f"{directory} holds no run: experiment.json is missing; give the directory that `abserve compare` wrote to"
        )
    cells = {cell.name: cell for cell in experiment.cells}
    records = [_read(path, BlockRecord) for path in sorted((directory / "blocks").glob("*.json"))]
    blocks = tuple(
        read_block(directory, record, cells) for record in sorted(filter(None, records), key=lambda r: r.index)
    )
    evidence = _read(directory / "evidence.json", EvidenceFile)
    explanation = _read(directory / "causes.json", Explanation)
    return StoredRun(
        directory=directory,
        experiment=experiment,
        environment=_read(directory / "environment.json", Environment),
        arms=_read(directory / "arms.json", tuple[ArmRecord, ...]) or (),
        parity=_read(directory / "parity.json", ParityRecord),
        cold_starts=_read(directory / "cold_starts.json", tuple[ColdStart, ...]) or (),
        blocks=blocks,
        partial_blocks=_read_partial(directory, {block.record.samples for block in blocks}),
        state=_read(directory / "run.json", RunState),
        evidence=evidence,
        readings=_read_gpu(directory, evidence),
        container_cold_starts=_read(directory / "container_cold_starts.json", tuple[ContainerColdStart, ...]) or (),
        trials=tuple(filter(None, (_read(path, Trial) for path in sorted((directory / "trials").glob("*.json"))))),
        calibration=_read(directory / "calibration.json", Calibration),
        cache_probes=_read(directory / "cache_probes.json", tuple[CacheProbe, ...]) or (),
        noise_floors=_read(directory / "noise_floors.json", tuple[NoiseFloor, ...]) or (),
        conditions=_read(directory / "conditions.json", Conditions),
        explanation=explanation,
        counterfactual_blocks=tuple(
            _read_counterfactual(directory / one.folder, one) for one in (explanation.done if explanation else ())
        ),
        ceilings=_read(directory / "ceilings.json", Ceilings),
    )


def _read_counterfactual(directory: Path, counterfactual: Counterfactual) -> tuple[StoredBlock, ...]:
    cells = {cell.name: cell for cell in counterfactual.cells}
    records = (_read(path, BlockRecord) for path in sorted((directory / "blocks").glob("*.json")))
    return tuple(read_block(directory, record, cells) for record in records if record is not None)


def _read_gpu(directory: Path, evidence: EvidenceFile | None) -> Readings | None:
    if evidence is None:
        return None
    try:
        return read_readings([directory / name for name in evidence.readings])
    except ReadingsError as exc:
        raise StoredRunError(str(exc)) from exc


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:  # that is msgspec's, and what is no UTF-8
        raise StoredRunError(f"{path} cannot be read: {exc}") from exc


def read_block(directory: Path, record: BlockRecord, cells: Mapping[str, Cell]) -> StoredBlock:
    """A block with its samples. Raises `StoredRunError` for one of an unknown cell."""
    if record.cell not in cells:
        raise StoredRunError(f"block {record.index} belongs to the cell {record.cell}, which the experiment lacks")
    try:
        samples = read_samples(directory / record.samples)
    except (OSError, ValueError) as exc:
        return StoredBlock(record, cells[record.cell], None, f"samples of block {record.index}: {exc}")
    if len(samples) != record.requests:
        problem = f"block {record.index} counted {record.requests} requests, its file holds {len(samples)}"
        return StoredBlock(record, cells[record.cell], samples, problem)
    return StoredBlock(record, cells[record.cell], samples)


def _read_partial(directory: Path, known: set[str]) -> tuple[PartialBlock, ...]:
    found = []
    for path in sorted((directory / "samples").glob("*")):
        name = str(path.relative_to(directory))
        if name in known or not path.name.endswith((".npy", ".npy.part")):
            continue
        try:
            found.append(PartialBlock(name, len(read_samples(path))))
        except (OSError, ValueError):
            found.append(PartialBlock(name, 0))
    return tuple(found)
