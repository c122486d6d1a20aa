"""Readings of the GPU sampler process, read back from its files: `abserve.gpu-readings/1`, one JSON object a line.

    header   first line: clock, boot, driver, devices, what one call costs
    reading  one device at one moment: energy, power, memory, clocks …; a failed reading is absent and named in `failed`
    samples  the driver's utilisation samples since the last drain: [end of the sample in ns, busy share]
    edge     on demand: process list and ECC counters of every device
    event    gpu_lost, recovered, nvml_error, clock_step
    end      last line of a sampler that was stopped; missing when it was killed

All `*_ns` are of CLOCK_MONOTONIC, which is `time.perf_counter_ns()` on Linux: readings and request samples of one
boot of one machine share one time axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

SCHEMA = "abserve.gpu-readings/1"

Ns = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


class ReadingsError(Exception):
    """A file of readings cannot be used; the message names the file and the line."""


class HeaderDevice(msgspec.Struct, frozen=True):
    """A device as the sampler found it."""

    uuid: str
    index: int
    name: str | None = None
    mig_enabled: bool | None = None


class HeaderLine(msgspec.Struct, frozen=True, tag="header", tag_field="type"):
    """Who wrote the file, on which clock, about what."""

    schema: str
    clock: str
    monotonic_ns: int
    wall_ns: int
    status: str
    boot_id: str | None = None
    pid: int | None = None
    error: str | None = None
    driver_version: str | None = None
    devices: tuple[HeaderDevice, ...] = ()
    """Those that were read."""
    device_count: int | None = None
    """How many the machine has, read or not; None in files from before it was told, which hold all of them."""
    call_cost_ns: dict[str, int] = {}


class ReadingLine(msgspec.Struct, frozen=True, tag="reading", tag_field="type"):
    """One device at one moment."""

    at_ns: int
    uuid: str
    energy_joules: float | None = None
    power_watts: float | None = None
    utilization_ratio: float | None = None
    sm_active_ratio: float | None = None
    memory_used_bytes: float | None = None
    failed: dict[str, str] = {}


class SamplesLine(msgspec.Struct, frozen=True, tag="samples", tag_field="type"):
    """Utilisation samples: (end of the sample in ns, busy share 0–1), in order."""

    at_ns: int
    uuid: str
    utilization: tuple[tuple[int, float], ...]


class EdgeProcess(msgspec.Struct, frozen=True):
    """A process that holds memory on a device."""

    pid: int
    used_bytes: int | None = None


class EdgeDevice(msgspec.Struct, frozen=True):
    """One device at an edge; `processes` None where the list cannot be read."""

    uuid: str
    processes: tuple[EdgeProcess, ...] | None = None
    failed: dict[str, str] = {}
    failing: bool | None = None
    """Whether its last reading failed altogether; None in files that tell it for all devices together."""


class EdgeLine(msgspec.Struct, frozen=True, tag="edge", tag_field="type"):
    """Everything read once, on demand."""

    at_ns: int
    label: str
    status: str
    driver_version: str | None = None
    devices: tuple[EdgeDevice, ...] = ()


class EventLine(msgspec.Struct, frozen=True, tag="event", tag_field="type"):
    """Something that must not pass unnoticed."""

    at_ns: int
    event: str
    uuid: str | None = None
    call: str | None = None
    code: str | None = None


class EndLine(msgspec.Struct, frozen=True, tag="end", tag_field="type"):
    """The sampler was told to stop."""

    at_ns: int
    reason: str


Line = HeaderLine | ReadingLine | SamplesLine | EdgeLine | EventLine | EndLine
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class DeviceReadings:
    """The series of one device, each in order of time; only what could be read is there."""

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
        """Of the first sampler; None without any file."""
        return self.headers[0].status if self.headers else None

    @property
    def gpu_count(self) -> int:
        """GPUs of the machine, of which some may not have been read."""
        counts = [len(h.devices) if h.device_count is None else h.device_count for h in self.headers]
        return max([len(self.devices), *counts])


def read_readings(paths: Sequence[Path]) -> Readings:
    """Every file, in the order given. A last line that was cut off is dropped: its sampler was killed while writing.

    Raises `ReadingsError`.
    """
    headers: list[HeaderLine] = []
    lines: list[Line] = []
    for path in paths:
        found = _read_lines(path)
        if not found or not isinstance(found[0], HeaderLine):
            raise ReadingsError(f"{path} holds no readings: its first line is no header")
        if found[0].schema != SCHEMA:
            raise ReadingsError(f"{path} is {found[0].schema}; this version reads {SCHEMA}")
        headers.append(found[0])
        lines += found[1:]
    return Readings(
        headers=tuple(headers),
        devices={uuid: _series(uuid, lines) for uuid in _uuids(headers, lines)},
        edges=tuple(sorted((line for line in lines if isinstance(line, EdgeLine)), key=lambda line: line.at_ns)),
        events=tuple(line for line in lines if isinstance(line, EventLine)),
    )


def _read_lines(path: Path) -> list[Line]:
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ReadingsError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    whole, _, _rest = content.rpartition(b"\n")
    found = []
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            found.append(_DECODER.decode(text))
        except (ValueError, RecursionError) as exc:
            raise ReadingsError(f"{path}, line {number}: {exc}") from exc
    return found


def _uuids(headers: Sequence[HeaderLine], lines: Sequence[Line]) -> list[str]:
    named = [device.uuid for header in headers for device in header.devices]
    named += [line.uuid for line in lines if isinstance(line, ReadingLine | SamplesLine)]
    return list(dict.fromkeys(named))


def _series(uuid: str, lines: Sequence[Line]) -> DeviceReadings:
    samples = {
        end_ns: busy
        for line in lines
        if isinstance(line, SamplesLine) and line.uuid == uuid
        for end_ns, busy in line.utilization
    }
    readings = sorted(
        (line for line in lines if isinstance(line, ReadingLine) and line.uuid == uuid), key=lambda line: line.at_ns
    )
    energy = [(line.at_ns, line.energy_joules) for line in readings if line.energy_joules is not None]
    power = [(line.at_ns, line.power_watts) for line in readings if line.power_watts is not None]
    sm_active = [(line.at_ns, line.sm_active_ratio) for line in readings if line.sm_active_ratio is not None]
    ordered = sorted(samples.items())
    return DeviceReadings(
        uuid=uuid,
        sample_end_ns=_times(ordered),
        sample_busy=_values(ordered),
        energy_at_ns=_times(energy),
        energy_joules=_values(energy),
        power_at_ns=_times(power),
        power_watts=_values(power),
        sm_active_at_ns=_times(sm_active),
        sm_active=_values(sm_active),
    )


def _times(pairs: Sequence[tuple[int, float]]) -> Ns:
    return np.array([at_ns for at_ns, _ in pairs], dtype=np.int64)


def _values(pairs: Sequence[tuple[int, float]]) -> Values:
    return np.array([value for _, value in pairs], dtype=np.float64)
