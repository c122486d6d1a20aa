"""`result.json`: everything seen and everything concluded, schema abserve.result/2; see docs/result-format.md.

The report is rendered from this alone. Fields are only ever added, each with a default, so that a later reader takes
an older file; any other change raises the schema's number.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal, cast

import msgspec

from loadgen.analysis.batching import ExecutedBatches
from loadgen.analysis.checks.registry import Check
from loadgen.analysis.stopping import Stopping
from loadgen.analysis.thresholds import ThresholdOutcome
from loadgen.analysis.verdict import Verdict
from loadgen.comparison.comparisons import Comparison
from loadgen.comparison.stages import StageAccount
from loadgen.comparison.summaries import BlockSummary, CellSummary
from loadgen.documents import DocumentError, read_record
from loadgen.records.machine import NoiseFloor
from loadgen.records.run import (
    ArmRecord,
    ColdStart,
    ContainerColdStart,
    Environment,
    Experiment,
    ParityRecord,
    Record,
    RunState,
)
from loadgen.studies.causes.analyse import CellCauses
from loadgen.studies.ceiling.analyse import EngineShare, NoCeiling
from loadgen.studies.gpu_proof.records import EvidenceFile
from loadgen.studies.gpu_proof.signals import GpuSeries
from loadgen.studies.rate_search.records import RampFound, RateFound, Trial

FILE_NAME = "result.json"


class Result(Record, frozen=True, kw_only=True):
    """The whole result. None and empty mean that the run did not get that far."""

    schema: Literal["abserve.result/2"] = "abserve.result/2"
    valid: bool
    """No check that takes a verdict away failed, or is unknown where it must be known."""
    state: RunState | None
    verdict: Verdict
    environment: Environment | None
    experiment: Experiment
    arms: tuple[ArmRecord, ...]
    parity: ParityRecord | None
    checks: tuple[Check, ...]
    comparisons: tuple[Comparison, ...]
    summaries: tuple[CellSummary, ...]
    stages: tuple[StageAccount, ...]
    cold_starts: tuple[ColdStart, ...]
    blocks: tuple[BlockSummary, ...]
    evidence: EvidenceFile | None = None
    gpu: tuple[GpuSeries, ...] = ()
    container_cold_starts: tuple[ContainerColdStart, ...] = ()
    trials: tuple[Trial, ...] = ()
    """Of searches and ramps, in the order in which they ran."""
    rates: tuple[RateFound, ...] = ()
    """One a search for the highest rate within a latency bound."""
    ramps: tuple[RampFound, ...] = ()
    """One a climb to saturation."""
    causes: tuple[CellCauses, ...] = ()
    explained_cells: tuple[str, ...] | None = None
    """Those whose difference was to be explained; None where the run did not get there, or was not to."""
    causes_left_out: tuple[str, ...] = ()
    """Cells whose difference there was no time to explain."""
    batching: tuple[ExecutedBatches, ...] = ()
    stopping: Stopping | None = None
    """None in results of before there were several rules."""
    noise_floors: tuple[NoiseFloor, ...] = ()
    """Of the machine, as known when the run began."""
    noise_floor_sentence: str = ""
    thresholds: tuple[ThresholdOutcome, ...] = ()
    ceilings: tuple[EngineShare, ...] = ()
    """What the arms serve of what their engines do alone; empty where that was not measured."""
    ceilings_missing: tuple[NoCeiling, ...] = ()
    """Where it was to be measured and could not be."""


class ResultError(Exception):
    """A result file cannot be read; the message names it."""


def encode_result(result: Result) -> bytes:
    """Indented JSON, the same bytes for the same result."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def read_result(path: Path) -> Result:
    """Read a `result.json`. Raises `ResultError` for a missing file, another schema or an unknown field."""
    try:
        return cast("Result", read_record(path.read_bytes(), Result))
    except (OSError, DocumentError) as exc:
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
