"""`result.json`, schema abserve.result/2: everything measured and concluded; see docs/result-format.md.

Reports are rendered from this alone. Fields are only ever added, each with a default, so that a later version reads an
older file; any other change raises the schema's number.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from loadgen.comparison.comparisons import Comparison
from loadgen.comparison.stages import LatencyBreakdown
from loadgen.comparison.summaries import BlockSummary, WorkloadSummary
from loadgen.documents import DocumentError, read_record, read_stored
from loadgen.records.machine import NoiseFloor
from loadgen.records.run import ArmRecord, Environment, Experiment, Found, ParityRecord, Record, RunState
from loadgen.verdict.checks.registry import Check
from loadgen.verdict.stopping import Stopping
from loadgen.verdict.thresholds import ThresholdOutcome
from loadgen.verdict.verdict import Verdict

FILE_NAME = "result.json"
F = TypeVar("F", bound=Found)


class Result(Record, frozen=True, kw_only=True):
    """The whole result. None or empty: the run did not get that far."""

    schema: Literal["abserve.result/2"] = "abserve.result/2"
    valid: bool
    """Whether the verdict stands: no check that can remove it failed, and none that must be known is unknown."""
    state: RunState | None
    verdict: Verdict
    environment: Environment | None
    experiment: Experiment
    arms: tuple[ArmRecord, ...]
    parity: ParityRecord | None
    checks: tuple[Check, ...]
    comparisons: tuple[Comparison, ...]
    summaries: tuple[WorkloadSummary, ...]
    stages: tuple[LatencyBreakdown, ...]
    blocks: tuple[BlockSummary, ...]
    studies: dict[str, Any] = msgspec.field(default_factory=dict)
    """Each probe's finding by its name; a probe that found nothing is left out."""
    stopping: Stopping | None = None
    """None in results from before there were several stopping rules."""
    noise_floors: tuple[NoiseFloor, ...] = ()
    """The machine's noise floors, as known when the run began."""
    noise_floor_sentence: str = ""
    thresholds: tuple[ThresholdOutcome, ...] = ()

    def of(self, kind: type[F]) -> F:
        return kind.among(self.studies)


class ResultError(Exception):
    """A result file cannot be read; the message names it."""


def encode_result(result: Result) -> bytes:
    """Indented JSON, the same bytes for the same result."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def read_result(path: Path) -> Result:
    """Read a `result.json`, also compressed. Raises `ResultError` for a missing file, another schema or an unknown
    field."""
    from loadgen.probes.registry import finding_types

    try:
        result = cast("Result", read_record(read_stored(path), Result))
        kinds = finding_types()
        found = {name: msgspec.convert(value, kinds[name], str_keys=True) for name, value in result.studies.items()}
        return msgspec.structs.replace(result, studies=found)
    except KeyError as exc:
        raise ResultError(f"{path} is not a result of this version of abserve: there is no study {exc}") from exc
    except (OSError, DocumentError, msgspec.ValidationError) as exc:
        raise ResultError(f"{path} is not a result of this version of abserve: {exc}") from exc


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name and rename: a reader sees the old file or the new one, whole. Raises `OSError`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
