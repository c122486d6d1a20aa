"""The stored records: what a run writes while it happens, and all that analysis and report may read.

    DIR/experiment.json    Experiment     what was asked for; written first
    DIR/environment.json   Environment    host, versions, GPU
    DIR/arms.json          list[ArmRecord]
    DIR/parity.json        ParityRecord
    DIR/cold_starts.json   list[ColdStart], rewritten after each repetition
    DIR/container_cold_starts.json   list[ContainerColdStart], likewise; only with the deployment compose
    DIR/blocks/NNNN.json   BlockRecord    written when the block is complete, after its samples
    DIR/samples/NNNN.npy   see `loadgen.records.samples`
    DIR/calibration.json   Calibration    of the load generator on this machine, where there is one
    DIR/conditions.json    see `loadgen.records.conditions`: the machine right before the load
    DIR/causes.json, DIR/causes/   see `loadgen.records.causes`; only where differences were explained
    DIR/ceilings.json      see `loadgen.records.ceilings`; only where engines were measured alone
    DIR/gpu/, DIR/evidence.json   see `loadgen.evidence.records`; only where there is a GPU
    DIR/run.json           RunState       "running", then "finished", "interrupted" or "failed"

`result.json`, `report.html` and `summary.md` are made from these alone, at any time, by `abserve report DIR`.
Times in ns are of the generator's monotonic clock and only differences mean anything; `*_at` are UTC, ISO 8601, and
only label. A missing reading is None, never 0. Every file is written to a temporary name and renamed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.records.blocks import BlockRecord, StageTotals, WorkerRecord
from loadgen.records.experiment import (
    ArmRequest,
    Arrivals,
    Caches,
    Cell,
    DeploymentKind,
    Experiment,
    Label,
    Record,
    Scenario,
    Transport,
)

__all__ = [
    "ArmRecord",
    "ArmRequest",
    "Arrivals",
    "BlockRecord",
    "Caches",
    "Cell",
    "ColdStart",
    "ContainerColdStart",
    "DeploymentKind",
    "Environment",
    "Experiment",
    "Label",
    "ParityCase",
    "ParityRecord",
    "Record",
    "RunState",
    "Scenario",
    "StageTotals",
    "Transport",
    "WorkerRecord",
]


class Environment(Record, frozen=True, kw_only=True):
    """The machine and the software that the generator saw."""

    started_at: str
    command: str
    git_commit: str | None
    host: dict[str, str | int | float | None]
    """cpu_model, cpu_count, memory_bytes, kernel, glibc, os, virtualisation …"""
    packages: dict[str, str]
    gpu: dict[str, object]
    """The /gpu-info document of this machine, without processes; `status` says whether there is a GPU."""
    inputs: dict[str, str | int] = msgspec.field(default_factory=dict)
    """What was sent: kind (photographs, or synthetic for a model that we do not know), count, sha256."""


class ArmRecord(Record, frozen=True, kw_only=True):
    """One side as in effect. None where the server does not tell."""

    label: Label
    title: str
    """For people: "native PyTorch 2.15.0 fp32 (cpu)"."""
    target: str
    url: str
    server_name: str | None
    server_version: str | None
    launched: bool
    argv: tuple[str, ...] | None
    settings: dict[str, str]
    in_effect: dict[str, object]
    """engine, precision, device, threads, max_batch_size, max_queue_delay_us, weights …"""
    model_config: dict[str, object] | None
    gpu_info: dict[str, object] | None
    artefact: dict[str, object] | None
    """The manifest of the exported file that the arm executes."""


class ParityCase(Record, frozen=True, kw_only=True):
    """Answers of both arms to the same images. `reference` compares b with a; `alone` an arm's mixed batch with its
    own single answers."""

    name: str
    kind: Literal["reference", "alone"]
    images: int
    cosine_min: float
    max_abs: float
    ok: bool


class ParityRecord(Record, frozen=True, kw_only=True):
    """Whether both arms compute the same function; speed is compared only then."""

    threshold_cosine: float
    cases: tuple[ParityCase, ...]
    ok: bool
    error: str | None = None


class ColdStart(Record, frozen=True, kw_only=True):
    """One start of one server, from the moment before its process was created."""

    label: Label
    repetition: int
    live_ns: int | None
    ready_ns: int | None
    first_answer_ns: int | None
    error: str | None = None
    conditions: str | None = None
    """What the start found: "page cache warm, fresh ports, the other server stopped"."""


class ContainerColdStart(Record, frozen=True, kw_only=True):
    """One start of one container; all times but those of the batches are ns since the engine was asked to start it."""

    label: Label
    repetition: int
    service: str
    image: str
    conditions: str
    caches: Caches = "cached"
    """Whether what torch and Triton have compiled was kept."""
    started_ns: int | None = None
    """The engine had created the process."""
    milestones_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """By the names of `loadgen.run.container_cold_start.MILESTONES`: what was found in the log."""
    live_ns: int | None = None
    ready_ns: int | None = None
    first_answer_ns: int | None = None
    batch_answers_ns: dict[int, int] = msgspec.field(default_factory=dict)
    """Batch size → how long its own first request took, in ascending order, each after the one before."""
    error: str | None = None


class RunState(Record, frozen=True, kw_only=True):
    """How the run stands; "running" on disk with no process behind it means that it was killed."""

    state: Literal["running", "finished", "interrupted", "failed"]
    phase: str
    error: str | None = None
    finished_at: str | None = None
