"""The file with the noise floors of this machine: a floor per arm, model, payload and transport."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec

from loadgen.base.documents import DocumentError, read_named, read_record
from loadgen.checks.noise_floor import (
    COMMAND,
    floor_entries,
    floor_of_arm,
    gpu_of,
    is_self_comparison,
    server_of,
)
from loadgen.measure.machine import MachineRecordError, cache_path, fingerprint, store_record, utc_now
from loadgen.metrics.comparisons import pair_metrics
from loadgen.records.machine import NoiseFloor
from loadgen.records.run import Environment, Experiment
from loadgen.verdict.result import Result


def own_floors(environment: Environment, experiment: Experiment) -> tuple[NoiseFloor, ...]:
    """The floors of this machine for servers in the same places; if the file cannot be read, one that says so."""
    digest, servers = _digest(environment), {server_of(arm) for arm in experiment.arms}
    try:
        floors = read_floors(cache_path("noise-floor", digest))
    except MachineRecordError as exc:
        return (
            NoiseFloor(
                fingerprint=digest, servers="", title="", made_at=utc_now(), restarts=0, entries=(),
                problem=f"{exc} and run: {COMMAND}",
            ),
        )  # fmt: skip
    return tuple(floor for floor in floors if floor.servers in servers)


def read_floors(path: Path) -> tuple[NoiseFloor, ...]:
    """The stored floors, empty without a file. Raises `MachineRecordError` for an unreadable one."""
    try:
        return cast("tuple[NoiseFloor, ...]", read_record(read_named(path), tuple[NoiseFloor, ...]))
    except FileNotFoundError:
        return ()
    except (OSError, DocumentError) as exc:
        raise MachineRecordError(f"cannot read the noise floors in {path}: {exc}; remove the file") from exc


def make_floor(result: Result) -> NoiseFloor:
    """The floor from a run of an arm against itself. Raises `MachineRecordError` for any other or an invalid run."""
    experiment = result.experiment
    if not is_self_comparison(experiment):
        raise MachineRecordError("the run compares different arms; measure a noise floor with the same arm twice")
    if not result.valid or result.environment is None:
        raise MachineRecordError(f"the run is not valid ({result.verdict.sentence}); fix that and run: {COMMAND}")
    figures = [figure for finding in result.studies.values() for figure in finding.figures()]
    entries = floor_entries(pair_metrics(experiment, result.blocks, figures), result.comparisons)
    if not entries:
        raise MachineRecordError(f"the run measured no pairs of blocks; raise --rounds and run: {COMMAND}")
    return msgspec.structs.replace(
        floor_of_arm(experiment, experiment.baseline, result.arms),
        fingerprint=_digest(result.environment),
        made_at=utc_now(),
        restarts=experiment.restarts,
        entries=entries,
    )


def store_floor(floor: NoiseFloor) -> Path:
    """Store it in the machine's file, in place of an earlier one of the same arm in the same scenarios. Raises
    `MachineRecordError`."""
    path = cache_path("noise-floor", floor.fingerprint)
    measured = {entry.workload for entry in floor.entries}
    others = []
    for stored in read_floors(path):
        entries = tuple(entry for entry in stored.entries if stored.arm != floor.arm or entry.workload not in measured)
        if entries:
            others.append(msgspec.structs.replace(stored, entries=entries))
    store_record(path, [*others, floor], "set XDG_CACHE_HOME to a folder")
    return path


def _digest(environment: Environment) -> str:
    return fingerprint(environment.host, gpu=gpu_of(environment.gpu))
