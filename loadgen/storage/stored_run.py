"""Reads the records of a complete or partial run from its directory.

Only `experiment.json` must exist, since a killed run may lack the rest. What is missing is None or empty; what exists
and cannot be read is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from loadgen.documents import DocumentError, list_inside, read_inside, read_record
from loadgen.probes.answers.records import AnswersCompared
from loadgen.probes.causes.records import Explanation
from loadgen.probes.ceiling.records import Ceilings
from loadgen.probes.cold_start.records import ColdStart, ContainerColdStart
from loadgen.probes.fairness.records import CacheProbe, Conditions
from loadgen.probes.gpu_proof.readings import Readings, ReadingsError, read_readings
from loadgen.probes.gpu_proof.records import EvidenceFile
from loadgen.probes.rate_search.records import Trial
from loadgen.records.machine import Calibration, NoiseFloor
from loadgen.records.run import (
    ArmRecord,
    BlockRecord,
    Environment,
    Experiment,
    ParityRecord,
    Record,
    RunState,
    Workload,
)
from loadgen.records.samples import SampleFile, Samples, find_samples
from loadgen.storage.run_lock import is_running

R = TypeVar("R", bound=Record)


class StoredRunError(Exception):
    """A directory holds no run, or a record in it cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block's record and its samples, which stay on disk; `stored` is None if the file is missing or broken, see
    `problem`."""

    record: BlockRecord
    workload: Workload
    stored: SampleFile | Samples | None
    problem: str | None = None

    @property
    def samples(self) -> Samples | None:
        """The samples, read anew: keep them no longer than you need them. Raises `StoredRunError` if they can no
        longer be read."""
        if not isinstance(self.stored, SampleFile):
            return self.stored
        try:
            return self.stored.read()
        except (OSError, ValueError) as exc:
            raise StoredRunError(f"samples of block {self.record.index}: {exc}") from exc

    @property
    def has_samples(self) -> bool:
        """Whether there is at least one sample."""
        if self.stored is None:
            return False
        return (self.stored.count if isinstance(self.stored, SampleFile) else len(self.stored)) > 0


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """Samples of the unfinished block of a killed run."""

    path: str
    requests: int


@dataclass(frozen=True, slots=True)
class StoredRun:
    """All records of a directory."""

    directory: Path
    experiment: Experiment
    environment: Environment | None = None
    arms: tuple[ArmRecord, ...] = ()
    parity: ParityRecord | None = None
    cold_starts: tuple[ColdStart, ...] = ()
    blocks: tuple[StoredBlock, ...] = ()
    partial_blocks: tuple[PartialBlock, ...] = ()
    state: RunState | None = None
    running: bool = False
    """Whether a process of this machine ran it when the records were read."""
    evidence: EvidenceFile | None = None
    readings: Readings | None = None
    """Readings of the GPU, if there is evidence."""
    container_cold_starts: tuple[ContainerColdStart, ...] = ()
    trials: tuple[Trial, ...] = ()
    """Trials of searches and ramps, in the order in which they ran."""
    calibration: Calibration | None = None
    """Calibration of the load generator on the machine of the run, if there is one."""
    cache_probes: tuple[CacheProbe, ...] = ()
    """A cache probe per arm, if there was load."""
    answers: tuple[AnswersCompared, ...] | None = None
    """Per arm, workload and start of the servers; None in older runs, which did not compare answers under load."""
    noise_floors: tuple[NoiseFloor, ...] = ()
    """Noise floors of the machine, as known when the run began."""
    conditions: Conditions | None = None
    """State of the machine right before the load."""
    explanation: Explanation | None = None
    ablation_blocks: tuple[tuple[StoredBlock, ...], ...] = ()
    """Blocks of each ablation in `explanation.done`, in that order."""
    ceilings: Ceilings | None = None
    """Ceilings of the engines alone, if they were measured."""

    def one(self, kind: type[R]) -> R | None:
        """Return a study's own record, or None. Raises `StoredRunError`."""
        return _one(self.directory, kind)

    def blocks_in(self, folder: str, workloads: Sequence[Workload]) -> tuple[StoredBlock, ...]:
        """Read a study's own blocks, in the order in which they ran. Raises `StoredRunError`."""
        return _read_blocks(self.directory, folder, workloads)


def read_run(directory: Path) -> StoredRun:
    """Read DIR. Raises `StoredRunError` if it holds no run or a record is unreadable."""
    experiment = _one(directory, Experiment)
    if experiment is None:
        raise StoredRunError(
            f"{directory} holds no run: experiment.json is missing; give the directory that `abserve compare` wrote to"
        )
    blocks = _read_blocks(directory, ".", experiment.workloads)
    evidence = _one(directory, EvidenceFile)
    explanation = _one(directory, Explanation)
    return StoredRun(
        directory=directory,
        experiment=experiment,
        environment=_one(directory, Environment),
        arms=_all(directory, ArmRecord) or (),
        parity=_one(directory, ParityRecord),
        cold_starts=_all(directory, ColdStart) or (),
        blocks=blocks,
        partial_blocks=_read_partial(directory, {block.record.samples for block in blocks}),
        state=_one(directory, RunState),
        running=is_running(directory),
        evidence=evidence,
        readings=_read_gpu(directory, evidence),
        container_cold_starts=_all(directory, ContainerColdStart) or (),
        trials=tuple(_numbered(directory, "trials", Trial)),
        calibration=_one(directory, Calibration),
        cache_probes=_all(directory, CacheProbe) or (),
        answers=_all(directory, AnswersCompared),
        noise_floors=_all(directory, NoiseFloor) or (),
        conditions=_one(directory, Conditions),
        explanation=explanation,
        ablation_blocks=tuple(
            _read_blocks(directory, one.folder, one.workloads) for one in (explanation.done if explanation else ())
        ),
        ceilings=_one(directory, Ceilings),
    )


def _read_blocks(directory: Path, folder: str, workloads: Sequence[Workload]) -> tuple[StoredBlock, ...]:
    """Read the blocks of a folder in `directory`, in the order in which they ran."""
    named = {workload.name: workload for workload in workloads}
    records = sorted(_numbered(directory, f"{folder}/blocks", BlockRecord), key=lambda record: record.index)
    return tuple(read_block(directory, record, named, folder) for record in records)


def _read_gpu(directory: Path, evidence: EvidenceFile | None) -> Readings | None:
    if evidence is None:
        return None
    try:
        return read_readings(directory, evidence.readings)
    except ReadingsError as exc:
        raise StoredRunError(str(exc)) from exc


def _one(directory: Path, kind: type[R]) -> R | None:
    return cast("R | None", _read(directory, kind.FILE, kind))


def _all(directory: Path, kind: type[R]) -> tuple[R, ...] | None:
    return cast("tuple[R, ...] | None", _read(directory, kind.FILE, tuple[kind, ...]))  # type: ignore[valid-type]


def _numbered(directory: Path, folder: str, kind: type[R]) -> list[R]:
    records = (_read(directory, name, kind) for name in _files(directory, folder) if name.endswith(".json"))
    return [cast("R", record) for record in records if record is not None]


def _files(directory: Path, folder: str) -> list[str]:
    try:
        return list_inside(directory, folder)
    except (OSError, DocumentError) as exc:
        raise StoredRunError(f"{directory / folder} cannot be read: {exc}") from exc


def _read(directory: Path, name: str, kind: object) -> object | None:
    """Read a file; None if it does not exist."""
    try:
        return cast("object", read_record(read_inside(directory, name), kind))
    except FileNotFoundError:
        return None
    except (OSError, DocumentError) as exc:
        raise StoredRunError(f"{directory / name} cannot be read: {exc}") from exc


def read_block(
    directory: Path, record: BlockRecord, workloads: Mapping[str, Workload], folder: str = "."
) -> StoredBlock:
    """Read a block of a folder in `directory` and find its samples. Raises `StoredRunError` for an unknown workload."""
    if record.workload not in workloads:
        raise StoredRunError(
            f"block {record.index} belongs to the workload {record.workload}, which the experiment does not have"
        )
    try:
        found = find_samples(directory, f"{folder}/{record.samples}")
        stored = found.at_most(max(0, record.requests) + 1)
    except (OSError, ValueError) as exc:
        return StoredBlock(record, workloads[record.workload], None, f"samples of block {record.index}: {exc}")
    problem = None
    if found.count != record.requests:
        problem = f"block {record.index} counted {record.requests} requests, its file holds {found.count}"
    return StoredBlock(record, workloads[record.workload], stored, problem)


def _read_partial(directory: Path, known: set[str]) -> tuple[PartialBlock, ...]:
    found = []
    for name in _files(directory, "samples"):
        if name in known or not name.endswith((".npy", ".npy.part")):
            continue
        try:
            found.append(PartialBlock(name, find_samples(directory, name).count))
        except (OSError, ValueError):
            found.append(PartialBlock(name, 0))
    return tuple(found)
