"""NVIDIA's management library: the only importer of `pynvml`, and the one place where its failures become a status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import pynvml

from servers.gpu.reader import GpuProcess, Status

ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
"""All that a call may raise: the second one is not a subclass of the first."""

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


SNAPSHOT_FIELDS: Mapping[str, Callable[[Any], object]] = {
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
"""The fields of a `DeviceSnapshot` but its index, each with the call that reads it."""

Values = dict[str, float]
Partial = tuple[Values, dict[str, str]]
"""What was read, and the error code of each part that was not."""

_CLOCKS = {
    "graphics_clock_hertz": pynvml.NVML_CLOCK_GRAPHICS,
    "sm_clock_hertz": pynvml.NVML_CLOCK_SM,
    "memory_clock_hertz": pynvml.NVML_CLOCK_MEM,
}
_FIELD_VALUES = {
    "software_power_cap_ns": pynvml.NVML_FI_DEV_PERF_POLICY_POWER,
    "software_thermal_ns": 269,  # names that older releases of nvidia-ml-py lack
    "hardware_thermal_ns": 270,
    "power_brake_ns": 271,
    "pcie_transmit_bytes": 197,
    "pcie_receive_bytes": 198,
}
_GPM_METRICS = {
    "sm_active_ratio": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active_ratio": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active_ratio": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
_UNION_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by value type


def _utilization(handle: Any) -> Values:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {"utilization_ratio": rates.gpu / 100, "memory_utilization_ratio": rates.memory / 100}


def _memory(handle: Any) -> Values:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _clocks(handle: Any) -> Values:
    return {name: pynvml.nvmlDeviceGetClockInfo(handle, kind) * 1e6 for name, kind in _CLOCKS.items()}


def _single(name: str, call: Callable[[Any], float]) -> Callable[[Any], Values]:
    return lambda handle: {name: call(handle)}


READING_CALLS: Mapping[str, Callable[[Any], Values]] = {
    # Energy first: its moment is the one that a reading is stamped with.
    "energy": _single("energy_joules", lambda h: pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3),
    "power": _single("power_watts", lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1e3),
    "power_limit": _single("power_limit_watts", lambda h: pynvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3),
    "utilization": _utilization,
    "memory": _memory,
    "clocks": _clocks,
    "clock_events": _single("clock_event_reasons", lambda h: pynvml.nvmlDeviceGetCurrentClocksEventReasons(h)),
    "temperature": _single(
        "temperature_celsius", lambda h: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU)
    ),
}
"""What one second's reading consists of, besides `read_field_values` and GPM."""


def read_field_values(handle: Any) -> Partial:
    """Throttle times and PCIe counters, in one call that does not block."""
    values: Values = {}
    failed: dict[str, str] = {}
    found = pynvml.nvmlDeviceGetFieldValues(handle, list(_FIELD_VALUES.values()))
    for name, value in zip(_FIELD_VALUES, found, strict=True):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            values[name] = getattr(value.value, _UNION_FIELDS[value.valueType])
        else:
            failed[name] = code_name(value.nvmlReturn)
    return values, failed


def read_samples(handle: Any, since_us: int) -> list[tuple[int, float]]:
    """The driver's utilisation samples after `since_us`, in order; none new is an empty list."""
    try:
        kind, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, since_us)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NOT_FOUND:
            return []
        raise
    pairs = [(s.timeStamp, getattr(s.sampleValue, _UNION_FIELDS[kind]) / 100) for s in samples]
    return sorted((at_us, share) for at_us, share in pairs if at_us > since_us and 0 <= share <= 1)


def read_processes(handle: Any) -> tuple[GpuProcess, ...]:
    """Processes with a compute context."""
    return _processes(handle)


def read_ecc_errors(handle: Any) -> dict[str, int]:
    """Since the driver was loaded."""
    types = {"corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": 1}
    return {
        name: pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC) for name, kind in types.items()
    }


class GpmCounters:
    """GPM of one device: activity between two samples, which are swapped at each reading."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._before = pynvml.nvmlGpmSampleAlloc()
        self._now = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, self._before)

    def read(self) -> Values:
        """Shares since the last call. Where less than 100 ms lie between, the driver answers NaN (seen on an H200):
        such a share is absent, as every failed reading is."""
        pynvml.nvmlGpmSampleGet(self._handle, self._now)
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_GPM_METRICS)
        request.sample1, request.sample2 = self._before, self._now
        for place, metric in enumerate(_GPM_METRICS.values()):
            request.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(request)
        self._before, self._now = self._now, self._before
        return {
            name: request.metrics[place].value / 100
            for place, name in enumerate(_GPM_METRICS)
            if request.metrics[place].nvmlReturn == pynvml.NVML_SUCCESS and isfinite(request.metrics[place].value)
        }

    def close(self) -> None:
        """Free both samples."""
        pynvml.nvmlGpmSampleFree(self._before)
        pynvml.nvmlGpmSampleFree(self._now)


def code_name(code: int) -> str:
    """GPU_IS_LOST for 15, and so on."""
    return _CODES.get(code, f"ERROR_{code}")


def failure_code(error: Exception) -> str:
    """The driver's name of what a call raised."""
    return code_name(error.value) if isinstance(error, pynvml.NVMLError) else "LIBRARY_MISMATCH"


_CODES: Mapping[int, str] = {
    value: name.removeprefix("NVML_ERROR_") for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")
}


def status_of(error: Exception) -> Status:
    """What a failed call says about the whole machine."""
    if isinstance(error, pynvml.NVMLLibraryMismatchError):  # the library lacks a newer function
        return "driver_mismatch"
    return _STATUS.get(getattr(error, "value", -1), "error")


def open_library() -> None:
    """Initialise. Raises one of `ERRORS`."""
    pynvml.nvmlInit()


def close_library() -> None:
    """Undo one `open_library`; quiet when the library has gone."""
    try:
        pynvml.nvmlShutdown()
    except ERRORS:
        return


def count_devices() -> int:
    """Devices that this process may see. Raises one of `ERRORS`."""
    return int(pynvml.nvmlDeviceGetCount())


def device_handle(index: int) -> Any:
    """What every other call takes. Raises one of `ERRORS`."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def mig_parent(uuid: str) -> str | None:
    """The UUID of the GPU that a MIG instance is of; None where the driver knows no such instance."""
    try:
        instance = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)))
    except ERRORS:
        return None


def read_versions() -> dict[str, str | None]:
    """Of driver, library and CUDA; None where one cannot be read."""
    return {
        "driver_version": _version(pynvml.nvmlSystemGetDriverVersion),
        "nvml_version": _version(pynvml.nvmlSystemGetNVMLVersion),
        "cuda_driver_version": _version(pynvml.nvmlSystemGetCudaDriverVersion),
    }


def _version(call: Callable[[], Any]) -> str | None:
    try:
        found = call()
    except ERRORS:
        return None
    # CUDA's version is a number, 13010 for 13.1
    return f"{found // 1000}.{found % 1000 // 10}" if isinstance(found, int) else _text(found)
