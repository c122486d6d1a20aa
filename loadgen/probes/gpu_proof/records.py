"""The stored evidence of where an arm ran: every input of the decision, the decision, and the files behind it.

    DIR/gpu/NAME.jsonl    readings as the sampler process wrote them, see `loadgen.probes.gpu_proof.readings`
    DIR/evidence.json     EvidenceFile

`loadgen.probes.gpu_proof.decision.decide(record.inputs, record.thresholds)` gives the stored decision again.
None means "not known" everywhere, never 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from loadgen.records.run import Label, Record


class Thresholds(Record, frozen=True, kw_only=True):
    """Starting points, to be calibrated per GPU. "Chosen" means without an outside source."""

    # Gates: below these the readings or the load support no verdict.
    min_coverage: float = 0.9
    """Share of the load that utilisation samples and energy readings must cover. Chosen: one lost drain of 2 s in 30 s
    is 0.93."""
    min_window_s: float = 10.0
    """Chosen: 100 steps of an H200's energy counter (one per 100 ms), 50 utilisation samples. MLPerf Power asks for
    60 s, but to measure energy, not to decide whether the GPU worked."""
    min_requests: int = 100
    """Chosen: with fewer, the rate of completed requests cannot be correlated with the GPU's activity."""
    max_error_share: float = 0.05
    """Chosen: with more failed requests the load is not the requested one."""
    min_gap_s: float = 4.0
    """Shortest usable idle gap before and after the load, after the two cuts below. Chosen: 20 utilisation samples."""
    gap_settle_s: float = 1.0
    """Cut from the start of each gap: a utilisation sample covers up to the last s (nvmlDeviceGetUtilizationRates)."""
    gap_margin_s: float = 0.5
    """Cut from the end of each gap: the driver's newest samples may end this long before it (200 ms on an H200)."""

    # Activity.
    active_utilisation_points: float = 5.0
    active_energy_share: float = 0.05
    idle_utilisation_points: float = 1.0
    max_gap_utilisation: float = 0.05
    """Share of the time that the GPU may be busy with nothing sent; above it something else uses the GPU. Idle servers
    on an H200 showed 0.000 in every published finding."""
    idle_energy_share: float = 0.03
    """Share of idle power times the window. An H200 draws 80 W idle and 690 W under full load."""
    sigmas: float = 3.0
    """Idle standard deviations (of 1 s bins) that a rise must exceed."""

    # Attribution.
    min_correlation: float = 0.6
    max_p_value: float = 0.01
    """Largest p of the circular-shift test, whose smallest p is 1/bins: it needs more than 100 bins of 1 s."""
    bin_s: float = 1.0

    # Placement and the CPU witness.
    max_cpu_node_share: float = 0.01
    """CPU share of node time up to which an ONNX Runtime session counts as placed on the GPU: shape nodes."""
    max_partial_cpu_share: float = 0.10
    """CPU share up to which a partial placement may still be verified, with a note."""
    witness_cpu_share: float = 0.5
    """CPU seconds per request, as a share of the CPU control run's, from which the CPU did the work."""
    witness_throughput_factor: float = 2.0
    """The throughput must also be at most this many times the CPU control run's."""

    # Reading the series.
    max_energy_bracket_s: float = 2.5
    """Longest distance between two readings across which energy and power are interpolated (the sampler reads at
    1 Hz, so one lost reading passes and two do not)."""
    max_sample_stretch: float = 1.5
    """A utilisation sample covers at most this many of the driver's sample periods: lost samples leave a hole."""


DEFAULT_THRESHOLDS = Thresholds()


class Finding(StrEnum):
    """The device that did the work."""

    GPU_VERIFIED = "GPU_VERIFIED"
    CPU_FALLBACK = "CPU_FALLBACK"
    INCONCLUSIVE = "INCONCLUSIVE"


class Code(StrEnum):
    """Why a finding is INCONCLUSIVE; with the first ten the data support no verdict."""

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
PlacementResult = Literal["gpu", "cpu", "partial", "unknown", "unreported"]
"""unreported: the server has no report of where its model's nodes are, as Triton's own backends without a log."""


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
    """Share of node time on the CPU; None if it was not measured."""
    reason: str
    used_device_uuid: str | None = None


class Health(Record, frozen=True, kw_only=True):
    """State of NVML and of the device, at the edges of the load and in between."""

    status: str | None
    """The sampler's status when it started (`ok`, `no_library`, …); None without readings."""
    uuid: str | None
    driver_version: str | None
    healthy_before: bool | None
    healthy_after: bool | None
    """Whether every reading of an edge succeeded; None without an edge there."""
    device_changed: bool
    """UUID or driver differ between files or edges, or the energy counter ran backwards."""
    gpu_lost: bool
    """NVML said GPU_IS_LOST between the first gap and the last."""


class Load(Record, frozen=True, kw_only=True):
    """The load on the arm, and when it ran."""

    windows: tuple[Window, ...]
    gaps_before: tuple[Window, ...]
    gaps_after: tuple[Window, ...]
    """Idle gaps before and after the load, already cut."""
    window_s: float
    completed: int
    errors: int
    items: int
    server_cpu_s: float | None


class Gpu(Record, frozen=True, kw_only=True):
    """The GPU's activity during the load and during the gaps. Utilisation: share of time with a kernel running.

    `_low` counts time without a sample as idle, `_high` as busy: a lost reading widens the range and moves neither
    "active" nor "idle" nearer.
    """

    busy_s: float
    covered_s: float
    coverage: float
    """Coverage of the utilisation samples or of the energy readings during the load, whichever is smaller."""
    gap_coverage: float
    utilisation_low: float
    utilisation_high: float
    idle_utilisation_low: float
    idle_utilisation_high: float
    gap_utilisation_high: tuple[float, ...]
    """One value per gap."""
    idle_utilisation_sigma: float | None
    energy_joules: float | None
    energy_source: Literal["counter", "power"] | None
    """Energy by the device's counter, or by the integral of its power readings if it has no counter."""
    idle_power_watts: float | None
    idle_power_sigma_watts: float | None
    energy_excess_joules: float | None
    joules_per_item: float | None
    excess_joules_per_item: float | None


class Attribution(Record, frozen=True, kw_only=True):
    """A: whether the arm caused the activity. None if a way could not be tried."""

    pid_resolved: bool | None
    """One of the server's processes is in the device's process list."""
    exclusive: bool | None
    """Every listed process belongs to an arm."""
    foreign_pids: tuple[int, ...]
    gaps_idle: bool | None
    correlation: float | None
    p_value: float | None
    bins: int
    foreign: bool | None = None
    """A process that belongs to no arm is on the device; None if the processes of an arm are unknown, or if the list
    has other PIDs than this machine."""
    memory_bytes: int | None = None
    """GPU memory of the server's processes, the most that was listed; None if the driver does not report it."""
    processes_unknown: str | None = None
    """Why the processes of the server are unknown."""


class Witness(Record, frozen=True, kw_only=True):
    """C: whether the CPU worked as it does when it executes the model. Both runs are of the same workload."""

    cpu_s_per_request: float | None
    requests_per_s: float | None
    control_cpu_s_per_request: float | None
    control_requests_per_s: float | None
    """Requests per second of the CPU control run; None without one."""


class EvidenceInputs(Record, frozen=True, kw_only=True):
    """All inputs of `decide`."""

    placement: Placement
    health: Health
    load: Load
    gpu: Gpu | None
    attribution: Attribution
    witness: Witness
    control_idle: bool | None = None
    """Whether the run's CPU control run came out CPU_FALLBACK beside an idle GPU; None without one."""


class Decision(Record, frozen=True, kw_only=True):
    """A finding with the signals behind it; those are None if they could not be judged."""

    finding: Finding
    code: Code | None
    sentence: str
    notes: tuple[str, ...]
    activity: Activity | None
    attributed: bool | None
    cpu_witness: bool | None
    no_energy: str | None = None
    """Why no energy per item is given: the GPU's energy is not this arm's."""


class EvidenceRecord(Decision, frozen=True, kw_only=True):
    """The finding for one arm in one workload, or in all of its workloads together (`workload` None)."""

    label: Label
    workload: str | None
    control: bool = False
    """This is the CPU control run: it must come out CPU_FALLBACK."""
    inputs: EvidenceInputs
    thresholds: Thresholds

    @property
    def uuid(self) -> str | None:
        """The device that the finding is about."""
        return self.inputs.health.uuid


class EvidenceFile(Record, frozen=True, kw_only=True):
    """DIR/evidence.json. `readings`: paths relative to DIR, in the order in which the samplers ran."""

    FILE = "evidence.json"
    schema: Literal["abserve.evidence/1"] = "abserve.evidence/1"
    readings: tuple[str, ...]
    gaps: tuple[Window, ...]
    records: tuple[EvidenceRecord, ...]
