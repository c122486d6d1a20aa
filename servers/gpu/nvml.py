"""Reads NVIDIA GPUs: the only importer of `pynvml`, and the only place that turns its errors into a status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, TypeVar

import pynvml

from servers.gpu.readings import (
    DeviceIdentity,
    EdgeReading,
    GpuProcess,
    NvmlConnection,
    Reading,
    SampleBatch,
    Status,
    select_devices,
)

T = TypeVar("T")
ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
"""Every exception of a call: the second is not a subclass of the first."""

_STATUS: Mapping[int, Status] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no_library",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "no_driver",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver_mismatch",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "gpu_lost",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "no_device",
}


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


_IDENTITY_CALLS: Mapping[str, Callable[[Any], Any]] = {
    "name": lambda handle: _text(pynvml.nvmlDeviceGetName(handle)),
    "pci_bus_id": lambda handle: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
    "compute_capability": lambda handle: ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
    "mig_enabled": lambda handle: pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
    "supports_gpm": lambda handle: bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice),
    "pcie_gen": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
    "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
}
"""The call for each field of a `DeviceIdentity` except its index and UUID."""

Values = dict[str, float]

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


def _single(name: str, call: Callable[[Any], float]) -> Callable[[Any], Values]:
    return lambda handle: {name: call(handle)}


_READING_CALLS: Mapping[str, Callable[[Any], Values]] = {
    # Energy first: the time stamp of a reading is that of its energy.
    "energy": _single("energy_joules", lambda h: pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3),
    "power": _single("power_watts", lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1e3),
    "power_limit": _single("power_limit_watts", lambda h: pynvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3),
    "utilization": _utilization,
    "memory": _memory,
    "clocks": lambda h: {name: pynvml.nvmlDeviceGetClockInfo(h, kind) * 1e6 for name, kind in _CLOCKS.items()},
    "clock_events": _single("clock_event_reasons", lambda h: pynvml.nvmlDeviceGetCurrentClocksEventReasons(h)),
    "temperature": _single(
        "temperature_celsius", lambda h: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU)
    ),
}
"""The calls of one reading, besides `_read_field_values` and GPM."""


def _read_field_values(handle: Any) -> tuple[Values, dict[str, str]]:
    """Throttle times and PCIe counters, and the error code of each that failed, in one call that does not block."""
    values: Values = {}
    failed: dict[str, str] = {}
    field_values = pynvml.nvmlDeviceGetFieldValues(handle, list(_FIELD_VALUES.values()))
    for name, value in zip(_FIELD_VALUES, field_values, strict=True):
        if value.nvmlReturn != pynvml.NVML_SUCCESS:
            failed[name] = _code_name(value.nvmlReturn)
        elif value.valueType < len(_UNION_FIELDS):
            values[name] = getattr(value.value, _UNION_FIELDS[value.valueType])
        else:  # of a newer driver
            failed[name] = f"VALUE_TYPE_{value.valueType}"
    return values, failed


def _read_samples(handle: Any, since_ns: int) -> list[tuple[int, float]]:
    """The driver's utilisation samples after `since_ns`, in order. The driver counts microseconds."""
    try:
        kind, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, since_ns // 1000)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NOT_FOUND:
            return []
        raise
    pairs = [(s.timeStamp * 1000, getattr(s.sampleValue, _UNION_FIELDS[kind]) / 100) for s in samples]
    return sorted((at_ns, share) for at_ns, share in pairs if at_ns > since_ns and 0 <= share <= 1)


def _read_processes(handle: Any) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    )


def _read_ecc_errors(handle: Any) -> dict[str, int]:
    types = {"corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": 1}
    return {
        name: pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC) for name, kind in types.items()
    }


class _GpmCounters:
    """GPM of one device: activity between two samples, which are swapped at each reading."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._before = pynvml.nvmlGpmSampleAlloc()
        self._now = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, self._before)

    def read(self) -> Values:
        """Shares since the last call. An H200 returns NaN if that was less than 100 ms ago; such a share is absent."""
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


_CODES: Mapping[int, str] = {
    value: name.removeprefix("NVML_ERROR_") for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")
}


def _code_name(code: int) -> str:
    """The name of a return code, such as GPU_IS_LOST for 15."""
    return _CODES.get(code, f"ERROR_{code}")


def _status_of(error: Exception) -> Status:
    """The status of the machine that a failed call implies."""
    if isinstance(error, pynvml.NVMLLibraryMismatchError):  # the library lacks a newer function
        return "driver_mismatch"
    return _STATUS.get(getattr(error, "value", -1), "error")


def _failure(error: Exception) -> tuple[Status, str, int | None]:
    return _status_of(error), str(error), getattr(error, "value", None)


def mig_parent(uuid: str) -> str | None:
    """The UUID of the GPU that contains a MIG instance; None if the driver knows no such instance."""
    try:
        instance = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)))
    except ERRORS:
        return None


def _version(call: Callable[[], Any]) -> str | None:
    try:
        version = call()
    except ERRORS:
        return None
    # CUDA's version is a number, 13010 for 13.1
    return f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else _text(version)


class NvmlReader:
    """A `servers.gpu.readings.GpuReader` that keeps the library open, with one handle per device."""

    def __init__(self, names: Sequence[str] | None = None) -> None:
        """`names`: the GPUs to read, as `select_devices` takes them; None reads all."""
        self._names = names
        self._open = False
        self._handles: dict[int, Any] = {}
        self._gpm: dict[int, _GpmCounters] = {}

    def connect(self) -> NvmlConnection:
        """Open the library again. A device without a handle or UUID is left out, and its error is the status."""
        self.close()
        devices: list[DeviceIdentity] = []
        count: int | None = None
        status: Status = "ok"
        problem: str | None = None
        code: int | None = pynvml.NVML_SUCCESS
        try:
            pynvml.nvmlInit()
            self._open = True
            count = int(pynvml.nvmlDeviceGetCount())
            status = "ok" if count else "no_device"
        except ERRORS as error:
            status, problem, code = _failure(error)
        for index in range(count or 0):
            try:
                devices.append(self._open_device(index))
            except ERRORS as error:
                status, problem, code = _failure(error)
        connection = NvmlConnection(
            status=status,
            error=problem,
            driver_version=_version(pynvml.nvmlSystemGetDriverVersion) if self._open else None,
            nvml_version=_version(pynvml.nvmlSystemGetNVMLVersion) if self._open else None,
            cuda_driver_version=_version(pynvml.nvmlSystemGetCudaDriverVersion) if self._open else None,
            devices=tuple(devices),
            device_count=count,
            return_code=code,
        )
        return select_devices(connection, self._names, mig_parent)

    def reading(self, index: int) -> Reading:
        """Every quantity; the failure of one does not affect the others."""
        calls = _Calls()
        handle = self._handles[index]
        values: dict[str, float] = {}
        for name, call in _READING_CALLS.items():
            values.update(calls.run(name, call, handle) or {})
        fields = calls.run("field_values", _read_field_values, handle)
        if fields is not None:
            values.update(fields[0])
            calls.failed.update(fields[1])
        if index in self._gpm:
            values.update(calls.run("gpm", lambda _: self._gpm[index].read(), handle) or {})
        return Reading(values=values, failed=calls.failed, lost=calls.lost)

    def energy_joules(self, index: int) -> float | None:
        """The energy counter alone, which is faster than a whole reading; None if it cannot be read."""
        return (_Calls().run("energy", _READING_CALLS["energy"], self._handles[index]) or {}).get("energy_joules")

    def samples(self, index: int, since_ns: int) -> SampleBatch:
        """New utilisation samples."""
        calls = _Calls()
        samples = calls.run("samples", lambda handle: _read_samples(handle, since_ns), self._handles[index])
        return SampleBatch(samples=tuple(samples or ()), failed=calls.failed, lost=calls.lost)

    def edge(self, index: int) -> EdgeReading:
        """Process list and ECC counters."""
        calls = _Calls()
        handle = self._handles[index]
        return EdgeReading(
            processes=calls.run("processes", _read_processes, handle),
            ecc_errors=calls.run("ecc_errors", _read_ecc_errors, handle),
            failed=calls.failed,
            lost=calls.lost,
        )

    def close(self) -> None:
        """Release the library."""
        for counters in self._gpm.values():
            with suppress(*ERRORS):
                counters.close()
        self._gpm.clear()
        self._handles.clear()
        if self._open:
            self._open = False
            with suppress(*ERRORS):  # the library may be gone
                pynvml.nvmlShutdown()

    def _open_device(self, index: int) -> DeviceIdentity:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        calls = _Calls()
        fields = {name: calls.run(name, call, handle) for name, call in _IDENTITY_CALLS.items()}
        self._handles[index] = handle
        if fields["supports_gpm"]:
            counters = calls.run("gpm", _GpmCounters, handle)
            if counters is not None:
                self._gpm[index] = counters
        return DeviceIdentity(index, uuid, failed=calls.failed, **fields)


class _Calls:
    """Runs calls and keeps the error codes of those that fail."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.lost = False

    def run(self, name: str, call: Callable[[Any], T], handle: Any) -> T | None:
        """The call's value; None if it fails, or if this module cannot read the driver's answer."""
        try:
            return call(handle)
        except ERRORS as error:
            self.failed[name] = _code_name(error.value) if isinstance(error, pynvml.NVMLError) else "LIBRARY_MISMATCH"
            self.lost = self.lost or _status_of(error) == "gpu_lost"
        except Exception as error:  # noqa: BLE001  such as text that is not UTF-8; its code is published
            self.failed[name] = type(error).__name__
        return None
