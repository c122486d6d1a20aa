"""Records of GPU readings, the interface between the readers and their users, and the choice of the GPUs to read.

None means unknown, never zero. A failed reading is absent from `values` and named in `failed`: a missing reading must
not look like an idle GPU. The GPUs that are read are those that CUDA_VISIBLE_DEVICES or `--gpu` names: reading a GPU
that the comparison does not use costs time (energy alone takes 3.7 ms of the driver's lock on an H200) and records the
work of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Status = Literal["ok", "no_library", "no_driver", "driver_mismatch", "no_device", "no_permission", "gpu_lost", "error"]

SENTENCES: Mapping[Status, str] = {
    "ok": "The NVIDIA driver answers.",
    "no_library": "No NVIDIA driver library (libnvidia-ml.so.1) is installed, so this machine has no usable GPU.",
    "no_driver": "The NVIDIA library is installed but its kernel driver is not loaded: load or install the driver.",
    "driver_mismatch": "The NVIDIA library and the kernel driver have different versions: reboot, or restart the "
    "container after the driver update.",
    "no_device": "The NVIDIA driver answers but shows no GPU to this process.",
    "no_permission": "This process may not use the NVIDIA driver: check its user and the container's devices.",
    "gpu_lost": "A GPU has fallen off the bus: reset it or reboot the machine.",
    "error": "The NVIDIA driver answered with an error.",
}

CLOCK_EVENTS: Mapping[int, str] = {
    0x1: "idle",
    0x2: "applications_clocks",
    0x4: "software_power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
"""Bits of `clock_event_reasons`: why the clocks are not higher."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a compute context; in a container the PID may be the host's."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """A GPU, read once when the library is opened. `failed` maps a field to the driver's error code."""

    index: int
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    compute_capability: str | None = None
    mig_enabled: bool | None = None
    supports_gpm: bool | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NvmlConnection:
    """The opened library, or why it cannot be opened; `return_code` and `error` are the library's own."""

    status: Status
    error: str | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_driver_version: str | None = None
    devices: tuple[DeviceIdentity, ...] = ()
    """The devices that are read."""
    device_count: int | None = None
    """All devices that the driver shows, read or not."""
    return_code: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of one device: values by quantity, and error codes by call (see `servers.gpu.nvml`). `lost`: it fell
    off the bus. `utilization_ratio` is the share of the driver's last interval (1/6 to 1 s) in which any kernel ran;
    power is from Ampere on the mean of the last second; the energy counter steps about every 100 ms."""

    values: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Utilisation samples of the driver's ring buffer: (time stamp in ns, busy share 0–1). The time stamps are on the
    driver's clock when a `GpuReader` returns them, and on the recording's when it passes them on."""

    samples: tuple[tuple[int, float], ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False


@dataclass(frozen=True, slots=True)
class EdgeReading:
    """Values that take too long to read every second, or change too seldom; None if they cannot be read."""

    processes: tuple[GpuProcess, ...] | None = None
    ecc_errors: Mapping[str, int] | None = None
    """Since the driver was loaded, by type: corrected, uncorrected."""
    failed: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False


class GpuReader(Protocol):
    """Reads GPUs. Never raises: a failure is a status or a failed call. One thread at a time."""

    def connect(self) -> NvmlConnection:
        """Open the library, or open it again. The devices are in the order of their index."""

    def reading(self, index: int) -> Reading:
        """All fast quantities, and energy; about 4 ms on an H200, of which energy takes 3.7."""

    def samples(self, index: int, since_ns: int) -> SampleBatch:
        """Utilisation samples later than `since_ns`, in order; about 2 ms. An empty batch is not a failure."""

    def edge(self, index: int) -> EdgeReading:
        """Process list and ECC counters."""

    def close(self) -> None:
        """Release the library. Idempotent."""


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ALL = "all"


def visible(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names in CUDA_VISIBLE_DEVICES; None (all GPUs) if it is not set. CUDA ignores an invalid name and everything
    after it."""
    text = environment.get(VISIBLE_DEVICES)
    if text is None:
        return None
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        names.append(name)
    return tuple(names)


def matching(
    names: Sequence[str], devices: Sequence[DeviceIdentity], parent_of: Callable[[str], str | None]
) -> tuple[DeviceIdentity, ...]:
    """The named devices, each once, in their own order; an unknown name is skipped.

    A name is an index, a UUID or an unambiguous beginning of one, or a MIG instance, which `parent_of` maps to its GPU.
    An index is NVML's, by PCI address. CUDA counts like that only with CUDA_DEVICE_ORDER=PCI_BUS_ID, or if all cards
    are of one kind. So `abserve compare` names UUIDs as soon as the servers report theirs.
    """
    selected: set[int] = set()
    for name in names:
        if name.isdecimal():
            matches = [device.index for device in devices if device.index == int(name)]
        else:
            uuid: str | None = name
            if name.startswith("MIG-GPU-"):  # MIG-GPU-UUID/INSTANCE/COMPUTE of drivers before 470
                uuid = name.removeprefix("MIG-").partition("/")[0]
            elif name.startswith("MIG-"):
                uuid = parent_of(name)
            matches = [device.index for device in devices if uuid and device.uuid.startswith(uuid)]
        if len(matches) == 1:
            selected.add(matches[0])
    return tuple(device for device in devices if device.index in selected)


def select_devices(
    connection: NvmlConnection, names: Sequence[str] | None, parent_of: Callable[[str], str | None]
) -> NvmlConnection:
    """The connection with the named devices only; with `names` None, all. `device_count` stays that of the machine. The
    status is `ok` if the driver answers for the named devices, even if another one fails. Without a match there is no
    device, and `error` gives the reason."""
    if names is None or not connection.devices:
        return connection
    chosen = matching(names, connection.devices, parent_of)
    if chosen:
        return replace(connection, status="ok", devices=chosen)
    named = ", ".join(names) or f"in {VISIBLE_DEVICES}, which is empty"
    error = connection.error or f"this machine has {connection.device_count} GPUs, but no GPU named {named}"
    return replace(connection, error=error, devices=())
