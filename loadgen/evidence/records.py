"""What is stored about where an arm ran: every input of the decision, the decision, and the files behind it.

    DIR/gpu/NAME.jsonl    readings as the sampler process wrote them, see `loadgen.evidence.readings`
    DIR/evidence.json     EvidenceFile

`loadgen.evidence.decision.decide(record.inputs, record.thresholds)` gives the stored decision again.
None is "not known" everywhere, never 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from loadgen.evidence.thresholds import Thresholds
from loadgen.records.run import Label, Record

SCHEMA: Literal["abserve.evidence/1"] = "abserve.evidence/1"


class Finding(StrEnum):
    """Where the work ran."""

    GPU_VERIFIED = "GPU_VERIFIED"
    CPU_FALLBACK = "CPU_FALLBACK"
    INCONCLUSIVE = "INCONCLUSIVE"


class Code(StrEnum):
    """Why a finding is INCONCLUSIVE; the first ten say that the data carry no verdict."""

    NO_NVML = "no_nvml"
    GPU_LOST_MIDRUN = "gpu_lost_midrun"
    NVML_UNHEALTHY = "nvml_unhealthy"
    DEVICE_CHANGED = "device_changed"
    WRONG_GPU = "wrong_gpu"
    SHORT_WINDOW = "short_window"
    FEW_REQUESTS = "few_requests"
    MANY_ERRORS = "many_errors"
    NO_IDLE_GAP = "no_idle_gap"
    LOW_COVERAGE = "low_coverage"
    UNKNOWN_PLACEMENT = "unknown_placement"
    CONFLICT = "conflict"
    LOW_DUTY = "low_duty"
    UNATTRIBUTED = "unattributed"


Activity = Literal["active", "idle", "weak"]
PlacementResult = Literal["gpu", "cpu", "partial", "unknown"]


class Window(Record, frozen=True, kw_only=True):
    """A stretch of CLOCK_MONOTONIC, in ns."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return max(0, self.end_ns - self.start_ns) / 1e9


class Placement(Record, frozen=True, kw_only=True):
    """S: where the runtime says the model is, from decisive signals only."""

    result: PlacementResult
    cpu_share: float | None
    """Share of node time on the CPU; None where nobody measured it."""
    reason: str
    used_device_uuid: str | None = None


class Health(Record, frozen=True, kw_only=True):
    """Of NVML and of the device, at the edges of the load and in between."""

    status: str | None
    """The sampler's status when it started (`ok`, `no_library`, …); None: there are no readings."""
    uuid: str | None
    driver_version: str | None
    healthy_before: bool | None
    healthy_after: bool | None
    """Whether every reading of an edge succeeded; None: there is no edge there."""
    device_changed: bool
    """UUID or driver differ between files or edges, or the energy counter ran backwards."""
    gpu_lost: bool
    """NVML said GPU_IS_LOST between the first gap and the last."""


class Load(Record, frozen=True, kw_only=True):
    """What was asked of the arm, and when."""

    windows: tuple[Window, ...]
    gaps_before: tuple[Window, ...]
    gaps_after: tuple[Window, ...]
    """Idle gaps beside the load, what is cut off already cut."""
    window_s: float
    completed: int
    errors: int
    items: int
    server_cpu_s: float | None


class Gpu(Record, frozen=True, kw_only=True):
    """What the GPU did during the load and during the gaps. Utilisation: share of time with a kernel running.

    `_low` counts time without a sample as idle, `_high` as busy: a lost reading widens the range and moves neither
    "active" nor "idle" nearer.
    """

    busy_s: float
    covered_s: float
    coverage: float
    """The smaller one of the utilisation samples' and the energy readings', in the load."""
    gap_coverage: float
    utilisation_low: float
    utilisation_high: float
    idle_utilisation_low: float
    idle_utilisation_high: float
    gap_utilisation_high: tuple[float, ...]
    """Of each gap by itself."""
    idle_utilisation_sigma: float | None
    energy_joules: float | None
    energy_source: Literal["counter", "power"] | None
    """The device's energy counter, or the integral of its power readings where it has none."""
    idle_power_watts: float | None
    idle_power_sigma_watts: float | None
    energy_excess_joules: float | None
    joules_per_item: float | None
    excess_joules_per_item: float | None


class Attribution(Record, frozen=True, kw_only=True):
    """A: whether the activity was the arm's. Each way None where it could not be tried."""

    pid_resolved: bool | None
    """One of the server's processes is in the device's process list."""
    exclusive: bool | None
    """Every listed process is ours."""
    foreign_pids: tuple[int, ...]
    gaps_idle: bool | None
    correlation: float | None
    p_value: float | None
    bins: int


class Witness(Record, frozen=True, kw_only=True):
    """C: whether the CPU worked as it does when it executes the model itself. Both runs of the same cell."""

    cpu_s_per_request: float | None
    requests_per_s: float | None
    control_cpu_s_per_request: float | None
    control_requests_per_s: float | None
    """None: no deliberate CPU run."""


class EvidenceInputs(Record, frozen=True, kw_only=True):
    """All that `decide` reads."""

    placement: Placement
    health: Health
    load: Load
    gpu: Gpu | None
    attribution: Attribution
    witness: Witness


class EvidenceRecord(Record, frozen=True, kw_only=True):
    """The finding for one arm in one cell, or in all of its cells together (`cell` None)."""

    label: Label
    cell: str | None
    control: bool = False
    """The arm was run on the CPU deliberately: it must come out CPU_FALLBACK."""
    finding: Finding
    code: Code | None
    sentence: str
    notes: tuple[str, ...]
    activity: Activity | None
    attributed: bool | None
    cpu_witness: bool | None
    inputs: EvidenceInputs
    thresholds: Thresholds

    @property
    def uuid(self) -> str | None:
        """The device that the finding is about."""
        return self.inputs.health.uuid


class EvidenceFile(Record, frozen=True, kw_only=True):
    """DIR/evidence.json. `readings`: paths relative to DIR, in the order in which the samplers ran."""

    schema: Literal["abserve.evidence/1"] = SCHEMA
    readings: tuple[str, ...]
    gaps: tuple[Window, ...]
    records: tuple[EvidenceRecord, ...]
