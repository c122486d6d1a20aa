"""Readings of a GPU over time: the narrow interface between whatever reads and the sampler, exporter and tests.

Where `servers.gpu.reader` answers "what is there now?" once, a series reader keeps the library open and reads each
quantity by itself at its own price. A failed reading is absent from `values` and named in `failed`, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from servers.gpu.reader import GpuProcess, Status

CLOCK_EVENTS: Mapping[int, str] = {
    0x1: "idle",
    0x4: "software_power_cap",
    0x8: "hardware_slowdown",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
"""Bits of `clock_event_reasons` that say why the clocks are not higher."""

QUANTITIES: Mapping[str, str] = {
    "energy_joules": "since the driver was loaded; steps about every 100 ms",
    "power_watts": "on Ampere and later the mean of the last second",
    "power_limit_watts": "enforced",
    "utilization_ratio": "share of the driver's last interval (1/6 to 1 s) in which any kernel ran",
    "memory_utilization_ratio": "share of it in which memory was read or written",
    "memory_used_bytes": "by all processes and the driver",
    "memory_total_bytes": "of the device",
    "graphics_clock_hertz": "now",
    "sm_clock_hertz": "now",
    "memory_clock_hertz": "now",
    "clock_event_reasons": "bit mask, see CLOCK_EVENTS",
    "temperature_celsius": "of the die",
    "software_power_cap_ns": "clocks held down so long since the driver was loaded",
    "software_thermal_ns": "the same",
    "hardware_thermal_ns": "the same",
    "power_brake_ns": "the same",
    "pcie_transmit_bytes": "counter that wraps",
    "pcie_receive_bytes": "counter that wraps",
    "sm_active_ratio": "share of the SMs' time with work since the last reading (GPM, Hopper and later)",
    "tensor_active_ratio": "share of it with tensor operations",
    "dram_active_ratio": "share of the memory's bandwidth",
}
"""Every name that `Reading.values` may hold."""


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """What does not change while a driver is loaded."""

    index: int
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    mig_enabled: bool | None = None
    supports_gpm: bool | None = None


@dataclass(frozen=True, slots=True)
class Connection:
    """The library as opened, or why it cannot be."""

    status: Status
    error: str | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_driver_version: str | None = None
    devices: tuple[DeviceIdentity, ...] = ()
    """Those that are read."""
    device_count: int | None = None
    """How many the driver shows, read or not."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One device now. `failed` maps a call to the driver's error code; `lost`: the device has fallen off the bus."""

    values: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Utilisation samples of the driver's ring buffer: (time stamp in µs on the driver's clock, busy share 0–1)."""

    samples: tuple[tuple[int, float], ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False


@dataclass(frozen=True, slots=True)
class EdgeReading:
    """What is too dear or too dull for every second. None where it cannot be read."""

    processes: tuple[GpuProcess, ...] | None = None
    ecc_errors: Mapping[str, int] | None = None
    """Since the driver was loaded, by type: corrected, uncorrected."""
    failed: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False


class SeriesReader(Protocol):
    """Never raises: whatever goes wrong is a status or a failed call. One thread at a time."""

    def connect(self) -> Connection:
        """Open the library, or open it anew. The devices are in the order of their index."""

    def reading(self, index: int) -> Reading:
        """Everything cheap, and energy; about 4 ms on an H200, of which energy takes 3.7."""

    def samples(self, index: int, since_us: int) -> SampleBatch:
        """Utilisation samples later than `since_us`, in order; about 2 ms. None new is no failure."""

    def edge(self, index: int) -> EdgeReading:
        """Process list and ECC counters."""

    def call_costs(self, index: int) -> Mapping[str, int]:
        """What each call takes, in ns: the median of three. Calls that fail are left out."""

    def close(self) -> None:
        """Release the library. Idempotent."""
