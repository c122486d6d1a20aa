"""Readings over time through NVIDIA's management library: one open library, one handle a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter_ns
from typing import Any, TypeVar

from servers.gpu import nvml
from servers.gpu.reader import Status
from servers.gpu.series import Connection, DeviceIdentity, EdgeReading, Reading, SampleBatch

T = TypeVar("T")
COST_REPETITIONS = 3


class NvmlSeriesReader:
    """See `servers.gpu.series.SeriesReader`."""

    def __init__(self) -> None:
        self._open = False
        self._handles: dict[int, Any] = {}
        self._gpm: dict[int, nvml.GpmCounters] = {}

    def connect(self) -> Connection:
        """Open the library anew; a device that gives no handle or UUID is left out and makes the status."""
        self.close()
        try:
            nvml.open_library()
            self._open = True
            count = nvml.count_devices()
        except nvml.ERRORS as error:
            return Connection(status=nvml.status_of(error), error=str(error))
        devices: list[DeviceIdentity] = []
        status: Status = "ok" if count else "no_device"
        problem: str | None = None
        for index in range(count):
            try:
                devices.append(self._open_device(index))
            except nvml.ERRORS as error:
                status, problem = nvml.status_of(error), str(error)
        return Connection(
            status=status, error=problem, devices=tuple(devices), device_count=count, **nvml.read_versions()
        )

    def reading(self, index: int) -> Reading:
        """Each quantity by itself: one that fails costs no other."""
        calls = _Calls()
        handle = self._handles[index]
        values: dict[str, float] = {}
        for name, call in nvml.READING_CALLS.items():
            values.update(calls.run(name, call, handle) or {})
        fields = calls.run("field_values", nvml.read_field_values, handle)
        if fields is not None:
            values.update(fields[0])
            calls.failed.update(fields[1])
        if index in self._gpm:
            values.update(calls.run("gpm", lambda _: self._gpm[index].read(), handle) or {})
        return Reading(values=values, failed=calls.failed, lost=calls.lost)

    def samples(self, index: int, since_us: int) -> SampleBatch:
        """New utilisation samples."""
        calls = _Calls()
        found = calls.run("samples", lambda handle: nvml.read_samples(handle, since_us), self._handles[index])
        return SampleBatch(samples=tuple(found or ()), failed=calls.failed, lost=calls.lost)

    def edge(self, index: int) -> EdgeReading:
        """Process list and ECC counters."""
        calls = _Calls()
        handle = self._handles[index]
        return EdgeReading(
            processes=calls.run("processes", nvml.read_processes, handle),
            ecc_errors=calls.run("ecc_errors", nvml.read_ecc_errors, handle),
            failed=calls.failed,
            lost=calls.lost,
        )

    def call_costs(self, index: int) -> Mapping[str, int]:
        """The first call of each kind is not counted: it loads what the others find loaded."""
        handle = self._handles[index]
        timed: dict[str, Callable[[Any], object]] = {
            **nvml.READING_CALLS,
            "field_values": nvml.read_field_values,
            "samples": lambda h: nvml.read_samples(h, 0),
            "processes": nvml.read_processes,
            "ecc_errors": nvml.read_ecc_errors,
        }
        if index in self._gpm:
            timed["gpm"] = lambda _: self._gpm[index].read()
        costs: dict[str, int] = {}
        for name, call in timed.items():
            try:
                call(handle)
                costs[name] = int(median(_time_ns(call, handle) for _ in range(COST_REPETITIONS)))
            except nvml.ERRORS:
                continue
        return costs

    def close(self) -> None:
        """Release the library."""
        for counters in self._gpm.values():
            try:
                counters.close()
            except nvml.ERRORS:
                continue
        self._gpm.clear()
        self._handles.clear()
        if self._open:
            self._open = False
            nvml.close_library()

    def _open_device(self, index: int) -> DeviceIdentity:
        handle = nvml.device_handle(index)
        uuid = nvml.SNAPSHOT_FIELDS["uuid"](handle)
        calls = _Calls()
        known: dict[str, Any] = {
            name: calls.run(name, nvml.SNAPSHOT_FIELDS[name], handle)
            for name in ("name", "pci_bus_id", "mig_enabled", "supports_gpm")
        }
        self._handles[index] = handle
        if known["supports_gpm"]:
            counters = calls.run("gpm", nvml.GpmCounters, handle)
            if counters is not None:
                self._gpm[index] = counters
        return DeviceIdentity(index=index, uuid=str(uuid), **known)


class _Calls:
    """Runs calls and keeps what went wrong."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.lost = False

    def run(self, name: str, call: Callable[[Any], T], handle: Any) -> T | None:
        """The answer; None after a failure, which is then in `failed`."""
        try:
            return call(handle)
        except nvml.ERRORS as error:
            self.failed[name] = nvml.failure_code(error)
            self.lost = self.lost or nvml.status_of(error) == "gpu_lost"
            return None


def _time_ns(call: Callable[[Any], object], handle: Any) -> int:
    start_ns = perf_counter_ns()
    call(handle)
    return perf_counter_ns() - start_ns
