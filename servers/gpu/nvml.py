"""NVIDIA's management library: the only importer of `pynvml`, and the one place where its failures become a status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from servers.gpu.reader import DeviceSnapshot, GpuProcess, GpuSnapshot, Status

_STATUS: Mapping[int, Status] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no_library",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "no_driver",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver_mismatch",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "gpu_lost",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "no_device",
}

_CLOCK_EVENTS = {
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


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    )


def _clock_events(handle: Any) -> tuple[str, ...]:
    mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return tuple(name for bit, name in _CLOCK_EVENTS.items() if mask & bit)


_FIELDS: Mapping[str, Callable[[Any], object]] = {
    "uuid": lambda handle: _text(pynvml.nvmlDeviceGetUUID(handle)),
    "name": lambda handle: _text(pynvml.nvmlDeviceGetName(handle)),
    "pci_bus_id": lambda handle: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
    "compute_capability": lambda handle: ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
    "mig_enabled": lambda handle: pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
    "memory_total_bytes": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    "memory_used_bytes": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
    "utilization_ratio": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    "power_watts": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "power_limit_watts": lambda handle: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "energy_joules_total": lambda handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    "temperature_celsius": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    "sm_clock_hertz": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1_000_000,
    "clock_event_reasons": _clock_events,
    "pcie_gen": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
    "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
    "processes": _processes,
    "supports_gpm": lambda handle: bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice),
}


class NvmlReader:
    """See `servers.gpu.reader.GpuReader`. Not thread-safe."""

    def __init__(self) -> None:
        self._open = False

    def read(self) -> GpuSnapshot:
        """Everything now. A GPU that is lost makes the whole snapshot `gpu_lost`."""
        try:
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
            count = pynvml.nvmlDeviceGetCount()
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
            return self._failed(error)
        devices: list[DeviceSnapshot] = []
        lost = False
        for index in range(count):
            device, device_lost = _read_device(index)
            devices.append(device)
            lost = lost or device_lost
        status: Status = "gpu_lost" if lost else "ok" if devices else "no_device"
        return GpuSnapshot(
            status=status,
            return_code=pynvml.NVML_ERROR_GPU_IS_LOST if lost else pynvml.NVML_SUCCESS,
            driver_version=_version(pynvml.nvmlSystemGetDriverVersion),
            nvml_version=_version(pynvml.nvmlSystemGetNVMLVersion),
            cuda_driver_version=_version(pynvml.nvmlSystemGetCudaDriverVersion),
            devices=tuple(devices),
        )

    def close(self) -> None:
        """Release the library."""
        if not self._open:
            return
        self._open = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # it is gone already

    def _failed(self, error: Exception) -> GpuSnapshot:
        return GpuSnapshot(status=_status(error), return_code=getattr(error, "value", None), error=str(error))


def _status(error: Exception) -> Status:
    # NVMLLibraryMismatchError is not an NVMLError: pynvml raises it where the library lacks a newer function.
    if isinstance(error, pynvml.NVMLLibraryMismatchError):
        return "driver_mismatch"
    return _STATUS.get(getattr(error, "value", -1), "error")


def _version(call: Callable[[], str | bytes | int]) -> str | None:
    try:
        version = call()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None
    # CUDA's version is a number, 13010 for 13.1
    return f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else _text(version)


def _read_device(index: int) -> tuple[DeviceSnapshot, bool]:
    values: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        return DeviceSnapshot(index, unavailable=dict.fromkeys(_FIELDS, str(error))), _status(error) == "gpu_lost"
    lost = False
    for name, call in _FIELDS.items():
        try:
            values[name] = call(handle)
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
            unavailable[name] = str(error)
            lost = lost or _status(error) == "gpu_lost"
    return DeviceSnapshot(index, **values, unavailable=unavailable), lost
