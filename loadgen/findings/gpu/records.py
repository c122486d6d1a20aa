"""The stored evidence of which processor did an arm's work, and the GPU readings behind it.

    DIR/evidence.json     EvidenceFile   every input of each decision, and the decision
    DIR/gpu/NAME.jsonl    readings as the sampler process wrote them

`loadgen.findings.gpu.decision.decide` gives the stored record again from its inputs and thresholds.
None means "not known" everywhere, never 0.

A file of readings is `abserve.gpu-readings/1`, one JSON object per line:

    header   first line: schema, status, driver, devices, cost of each call
    reading  one device at one moment: energy, power, SM activity …; a reading that failed is absent
    samples  the driver's utilisation samples since the last drain: [end of the sample in ns, busy share]
    edge     on demand: the process list of every device
    event    gpu_lost, recovered, nvml_error, clock_step
    end      last line of a sampler that was stopped; missing when it was killed

All `*_ns` are of CLOCK_MONOTONIC, which is `time.perf_counter_ns()` on Linux: readings and request samples of one
boot of one machine share one time axis. Fields that no rule needs are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.base.documents import DocumentError, read_inside
from loadgen.records.run import Label, Record
from loadgen.records.store import StoredRunError


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
    min_streams: int = 5
    """The same for answers that come token by token. Chosen: each of them is dozens of steps of the GPU."""
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


class GpuFinding(StrEnum):
    """The device that did the work."""

    GPU_VERIFIED = "GPU_VERIFIED"
    CPU_FALLBACK = "CPU_FALLBACK"
    INCONCLUSIVE = "INCONCLUSIVE"


class InconclusiveCode(StrEnum):
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


class TimeSpan(Record, frozen=True, kw_only=True):
    """A stretch of CLOCK_MONOTONIC, in ns."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return max(0, self.end_ns - self.start_ns) / 1e9


class Placement(Record, frozen=True, kw_only=True):
    """Where the runtime says the model is, from decisive signals only."""

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

    windows: tuple[TimeSpan, ...]
    gaps_before: tuple[TimeSpan, ...]
    gaps_after: tuple[TimeSpan, ...]
    """Idle gaps before and after the load, already cut."""
    window_s: float
    completed: int
    errors: int
    items: int
    server_cpu_s: float | None


class Gpu(Record, frozen=True, kw_only=True):
    """The GPU's activity during the load and during the gaps. Utilisation: share of time with a kernel running. `_low`
    counts time without a sample as idle, `_high` as busy: a lost reading widens the range and moves neither "active"
    nor "idle" nearer."""

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
    """Whether the arm caused the activity. None if a way could not be tried."""

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
    """Whether the CPU worked as it does when it executes the model. Both runs are of the same workload."""

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


class EvidenceRecord(Record, frozen=True, kw_only=True):
    """The finding for one arm in one workload, or in all of its workloads together (`workload` None), with the signals
    behind it; those are None if they could not be judged."""

    finding: GpuFinding
    code: InconclusiveCode | None
    sentence: str
    notes: tuple[str, ...]
    activity: Activity | None
    attributed: bool | None
    cpu_witness: bool | None
    no_energy: str | None = None
    """Why no energy per item is given: the GPU's energy is not this arm's."""
    label: Label
    workload: str | None
    control: bool = False
    """This is the CPU control run: it must come out CPU_FALLBACK."""
    inputs: EvidenceInputs
    thresholds: Thresholds
    gpus: tuple[EvidenceRecord, ...] = ()
    """Of an arm on several GPUs: the finding for each. Those above are for all of them together."""

    @property
    def uuid(self) -> str | None:
        """The device that the finding is about; several are separated by commas."""
        return self.inputs.health.uuid


class EvidenceFile(Record, frozen=True, kw_only=True):
    """DIR/evidence.json. `readings`: paths relative to DIR, in the order in which the samplers ran."""

    FILE = "evidence.json"
    schema: Literal["abserve.evidence/1"] = "abserve.evidence/1"
    readings: tuple[str, ...]
    gaps: tuple[TimeSpan, ...]
    records: tuple[EvidenceRecord, ...]


SCHEMA = "abserve.gpu-readings/1"
MOST_BYTES = 2**29
"""Limit of a file: a day of one GPU has about a tenth of it."""

Ns = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


class EdgeProcess(msgspec.Struct, frozen=True):
    """A process that holds memory on a device."""

    pid: int
    used_bytes: int | None = None
    """None where the driver does not report it."""


class GpuDevice(msgspec.Struct, frozen=True):
    """A device that the sampler reads: in a header with its name, at an edge with its processes."""

    uuid: str
    name: str | None = None
    processes: tuple[EdgeProcess, ...] | None = None
    """None where the list cannot be read."""
    failing: bool | None = None
    """Whether every call of its last reading failed; None in older files, which have one status for all devices."""


class HeaderLine(msgspec.Struct, frozen=True, tag="header", tag_field="type"):
    """The header: the writer of the file, and its devices."""

    schema: str
    status: str
    boot_id: str | None = None
    error: str | None = None
    driver_version: str | None = None
    devices: tuple[GpuDevice, ...] = ()
    device_count: int | None = None
    """GPUs of the machine, read or not; None in older files, which hold all of them."""


class ReadingLine(msgspec.Struct, frozen=True, tag="reading", tag_field="type"):
    """One reading of one device."""

    at_ns: int
    uuid: str
    energy_joules: float | None = None
    power_watts: float | None = None
    sm_active_ratio: float | None = None


class SamplesLine(msgspec.Struct, frozen=True, tag="samples", tag_field="type"):
    """Utilisation samples: (end of the sample in ns, busy share 0–1), in order."""

    uuid: str
    utilization: tuple[tuple[int, float], ...]


class EdgeLine(msgspec.Struct, frozen=True, tag="edge", tag_field="type"):
    """Everything read once, on demand."""

    at_ns: int
    label: str
    status: str
    driver_version: str | None = None
    devices: tuple[GpuDevice, ...] = ()


class EventLine(msgspec.Struct, frozen=True, tag="event", tag_field="type"):
    """An event that a finding may have to consider."""

    at_ns: int
    event: str
    uuid: str | None = None
    code: str | None = None


class EndLine(msgspec.Struct, frozen=True, tag="end", tag_field="type"):
    """The last line of a sampler that was stopped."""


Line = HeaderLine | ReadingLine | SamplesLine | EdgeLine | EventLine | EndLine
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class DeviceReadings:
    """The series of one device, each in order of time; a failed reading leaves no entry."""

    uuid: str
    sample_end_ns: Ns
    sample_busy: Values
    energy_at_ns: Ns
    energy_joules: Values
    power_at_ns: Ns
    power_watts: Values
    sm_active_at_ns: Ns
    sm_active: Values


@dataclass(frozen=True, slots=True)
class Readings:
    """All files of a run."""

    headers: tuple[HeaderLine, ...]
    devices: dict[str, DeviceReadings]
    edges: tuple[EdgeLine, ...]
    events: tuple[EventLine, ...]

    @property
    def status(self) -> str | None:
        """Status of the first sampler; None without any file."""
        return self.headers[0].status if self.headers else None

    @property
    def gpu_count(self) -> int:
        """GPUs of the machine, including those that were not read."""
        counts = [len(h.devices) if h.device_count is None else h.device_count for h in self.headers]
        return max([len(self.devices), *counts])


def read_readings(folder: Path, names: Sequence[str]) -> Readings:
    """Read every file, by its path relative to `folder`, in the order given. A truncated last line is dropped: its
    sampler was killed while writing. Raises `StoredRunError`."""
    headers: list[HeaderLine] = []
    lines: list[Line] = []
    for name in names:
        path, content = folder / name, _read_lines(folder, name)
        if not content or not isinstance(content[0], HeaderLine):
            raise StoredRunError(f"{path} holds no readings: its first line is not a header")
        if content[0].schema != SCHEMA:
            raise StoredRunError(f"{path} is {content[0].schema}; this version reads {SCHEMA}")
        headers.append(content[0])
        lines += content[1:]
    uuids = [device.uuid for header in headers for device in header.devices]
    uuids += [line.uuid for line in lines if isinstance(line, ReadingLine | SamplesLine)]
    return Readings(
        headers=tuple(headers),
        devices={uuid: _device_readings(uuid, lines) for uuid in dict.fromkeys(uuids)},
        edges=tuple(sorted((line for line in lines if isinstance(line, EdgeLine)), key=lambda line: line.at_ns)),
        events=tuple(line for line in lines if isinstance(line, EventLine)),
    )


def _read_lines(folder: Path, name: str) -> list[Line]:
    path = folder / name
    try:
        content = read_inside(folder, name, MOST_BYTES)
    except OSError as exc:
        raise StoredRunError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except DocumentError as exc:
        raise StoredRunError(f"{path} cannot be read: {exc}") from exc
    whole, _, _ = content.rpartition(b"\n")
    lines = []
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            lines.append(_DECODER.decode(text))
        except (ValueError, RecursionError) as exc:
            raise StoredRunError(f"{path}, line {number}: {exc}") from exc
    return lines


def _device_readings(uuid: str, lines: Sequence[Line]) -> DeviceReadings:
    """Merge lines by time: a restarted sampler drains the driver's whole buffer a second time."""
    samples: dict[int, float] = {}
    energy: dict[int, float] = {}
    power: dict[int, float] = {}
    sm_active: dict[int, float] = {}
    for line in lines:
        if isinstance(line, SamplesLine) and line.uuid == uuid:
            samples.update(line.utilization)
        elif isinstance(line, ReadingLine) and line.uuid == uuid:
            quantities = ((energy, line.energy_joules), (power, line.power_watts), (sm_active, line.sm_active_ratio))
            for series, value in quantities:
                if value is not None:
                    series[line.at_ns] = value
    return DeviceReadings(uuid, *_arrays(samples), *_arrays(energy), *_arrays(power), *_arrays(sm_active))


def _arrays(series: dict[int, float]) -> tuple[Ns, Values]:
    ordered = sorted(series.items())
    return (
        np.array([at_ns for at_ns, _ in ordered], dtype=np.int64),
        np.array([value for _, value in ordered], dtype=np.float64),
    )
