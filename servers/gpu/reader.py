"""What can be known about the GPUs of this machine, as records, and the narrow interface that reads it.

None means unknown, never zero: a missing reading must not look like an idle GPU. `unavailable` names the reason for
each field that could not be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Status = Literal["ok", "no_library", "no_driver", "driver_mismatch", "no_device", "no_permission", "gpu_lost", "error"]

SENTENCES: Mapping[Status, str] = {
    "ok": "The NVIDIA driver answers.",
    "no_library": "No NVIDIA driver library (libnvidia-ml.so.1) is installed here: this machine has no usable GPU.",
    "no_driver": "The NVIDIA library is here but its kernel driver is not loaded: load it or install the driver.",
    "driver_mismatch": "The NVIDIA library and the kernel driver have different versions: reboot, or restart the "
    "container after the driver's update.",
    "no_device": "The NVIDIA driver answers but shows no GPU to this process.",
    "no_permission": "This process may not ask the NVIDIA driver: check its user and the container's devices.",
    "gpu_lost": "A GPU has fallen off the bus: reset or reboot the machine.",
    "error": "The NVIDIA driver answered with an error.",
}


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a compute context; in a container the PID may be the host's."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One GPU. `utilization_ratio` is the share of the driver's last interval in which any kernel ran."""

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    compute_capability: str | None = None
    mig_enabled: bool | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules_total: float | None = None
    temperature_celsius: int | None = None
    sm_clock_hertz: int | None = None
    clock_event_reasons: tuple[str, ...] | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    supports_gpm: bool | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """All GPUs at one moment, or why there are none to see. `return_code` and `error` are the driver library's own."""

    status: Status
    return_code: int | None = None
    error: str | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_driver_version: str | None = None
    devices: tuple[DeviceSnapshot, ...] = ()


class GpuReader(Protocol):
    """Reads the GPUs; never raises, for whatever goes wrong is a status."""

    def read(self) -> GpuSnapshot:
        """Everything now; some milliseconds."""

    def close(self) -> None:
        """Release the library. Idempotent."""
