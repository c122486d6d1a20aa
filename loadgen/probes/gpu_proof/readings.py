"""Reads back the files of the GPU sampler process: `abserve.gpu-readings/1`, one JSON object per line.

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
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.documents import DocumentError, read_inside

SCHEMA = "abserve.gpu-readings/1"
MOST_BYTES = 2**29
"""Limit of a file: a day of one GPU has about a tenth of it."""

Ns = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


class ReadingsError(Exception):
    """A file of readings cannot be used; the message names the file and the line."""


class HeaderDevice(msgspec.Struct, frozen=True):
    """A device that the sampler reads."""

    uuid: str
    name: str | None = None


class HeaderLine(msgspec.Struct, frozen=True, tag="header", tag_field="type"):
    """The header: the writer of the file, and its devices."""

    schema: str
    status: str
    boot_id: str | None = None
    error: str | None = None
    driver_version: str | None = None
    devices: tuple[HeaderDevice, ...] = ()
    device_count: int | None = None
    """GPUs of the machine, read or not; None in older files, which hold all of them."""
    call_cost_ns: dict[str, int] = {}


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


class EdgeProcess(msgspec.Struct, frozen=True):
    """A process that holds memory on a device."""

    pid: int
    used_bytes: int | None = None
    """None where the driver does not report it."""


class EdgeDevice(msgspec.Struct, frozen=True):
    """One device at an edge; `processes` is None where the list cannot be read."""

    uuid: str
    processes: tuple[EdgeProcess, ...] | None = None
    failing: bool | None = None
    """Whether every call of its last reading failed; None in older files, which have one status for all devices."""


class EdgeLine(msgspec.Struct, frozen=True, tag="edge", tag_field="type"):
    """Everything read once, on demand."""

    at_ns: int
    label: str
    status: str
    driver_version: str | None = None
    devices: tuple[EdgeDevice, ...] = ()


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
    sampler was killed while writing.

    Raises `ReadingsError`.
    """
    headers: list[HeaderLine] = []
    lines: list[Line] = []
    for name in names:
        path, found = folder / name, _read_lines(folder, name)
        if not found or not isinstance(found[0], HeaderLine):
            raise ReadingsError(f"{path} holds no readings: its first line is not a header")
        if found[0].schema != SCHEMA:
            raise ReadingsError(f"{path} is {found[0].schema}; this version reads {SCHEMA}")
        headers.append(found[0])
        lines += found[1:]
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
        raise ReadingsError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except DocumentError as exc:
        raise ReadingsError(f"{path} cannot be read: {exc}") from exc
    whole, _, _ = content.rpartition(b"\n")
    found = []
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            found.append(_DECODER.decode(text))
        except (ValueError, RecursionError) as exc:
            raise ReadingsError(f"{path}, line {number}: {exc}") from exc
    return found


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
