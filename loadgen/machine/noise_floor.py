"""Where the noise floors of a machine are kept: one file a machine, an entry for each thing measured against itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from loadgen.comparison.pairs import pair_metrics
from loadgen.documents import DocumentError, read_record
from loadgen.machine.environment import utc_now
from loadgen.machine.fingerprint import cache_folder, fingerprint
from loadgen.records.machine import NoiseFloor
from loadgen.records.run import Environment, Experiment
from loadgen.result.noise_floor import COMMAND, floor_entries, gpu_of, is_self_comparison, servers_of, tail_floors
from loadgen.result.result_file import Result, write_atomically
from loadgen.studies.cold_start.analyse import ColdStartsFound


class NoiseFloorError(Exception):
    """A floor cannot be made from a run, stored or read; the message names the remedy."""


def path_of(digest: str) -> Path:
    """`$XDG_CACHE_HOME/abserve/noise-floor-FINGERPRINT.json`."""
    return cache_folder() / f"noise-floor-{digest}.json"


def own_floors(environment: Environment, experiment: Experiment) -> tuple[NoiseFloor, ...]:
    """Those of this machine, and of the same place of the servers. A file that cannot be read is none."""
    try:
        floors = read_floors(path_of(_digest(environment)))
    except NoiseFloorError:
        return ()
    return tuple(floor for floor in floors if floor.servers == servers_of(experiment))


def read_floors(path: Path) -> tuple[NoiseFloor, ...]:
    """Empty without a file. Raises `NoiseFloorError` for one that is none."""
    try:
        return cast("tuple[NoiseFloor, ...]", read_record(path.read_bytes(), tuple[NoiseFloor, ...]))
    except FileNotFoundError:
        return ()
    except (OSError, DocumentError) as exc:
        raise NoiseFloorError(f"{path} holds no noise floors: {exc}; remove it and run: {COMMAND}") from exc


def make_floor(result: Result) -> NoiseFloor:
    """From a run of an arm against itself. Raises `NoiseFloorError` for any other run and an invalid one."""
    experiment = result.experiment
    if not is_self_comparison(experiment):
        raise NoiseFloorError("the run compares different arms; a noise floor is measured with the same arm twice")
    if not result.valid or result.environment is None:
        raise NoiseFloorError(f"the run is not valid ({result.verdict.sentence}); mend that and run: {COMMAND}")
    entries = floor_entries(pair_metrics(experiment, result.blocks, result.of(ColdStartsFound).starts))
    entries += tail_floors(result.comparisons)
    if not entries:
        raise NoiseFloorError(f"the run measured no pairs of blocks; give it some with --rounds and run: {COMMAND}")
    return NoiseFloor(
        fingerprint=_digest(result.environment),
        servers=servers_of(experiment),
        title=next((arm.title for arm in result.arms), experiment.baseline.target),
        made_at=utc_now(),
        restarts=experiment.restarts,
        entries=entries,
    )


def store_floor(floor: NoiseFloor) -> Path:
    """In the machine's file, in place of an earlier one of the same title. Raises `NoiseFloorError`."""
    path = path_of(floor.fingerprint)
    others = [one for one in read_floors(path) if (one.title, one.servers) != (floor.title, floor.servers)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode_floors([*others, floor]))
    except OSError as exc:
        raise NoiseFloorError(f"cannot store {path}: {exc.strerror or exc}; set XDG_CACHE_HOME to a folder") from exc
    return path


def encode_floors(floors: Sequence[NoiseFloor]) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(list(floors)), indent=1) + b"\n"


def _digest(environment: Environment) -> str:
    return fingerprint(environment.host, gpu=gpu_of(environment.gpu))
