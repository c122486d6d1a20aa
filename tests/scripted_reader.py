"""GPUs that exist only on paper: a scripted one that follows a timeline, and a null one that says why there is none.

The scripted GPU behaves as an H200 was seen to: utilisation samples every 200 ms, 71 of them kept, an energy counter
that steps every 100 ms. Its device name says that it is not real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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

SAMPLE_PERIOD_NS = 200_000_000
SAMPLES_KEPT = 71
ENERGY_STEP_NS = 100_000_000
LOST = "GPU_IS_LOST"


@dataclass(frozen=True, slots=True)
class Phase:
    """What the GPU does from `start_ns` to `end_ns`; outside all phases it idles."""

    start_ns: int
    end_ns: int
    busy: float
    watts: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that fails for a while; `call` "*" is every one. Code GPU_IS_LOST takes the device away."""

    start_ns: int
    end_ns: int
    call: str
    code: str


class ScriptedReader:
    """See `servers.gpu.readings.GpuReader`. One device."""

    def __init__(
        self,
        clock_ns: Callable[[], int],
        wall_ns: Callable[[], int],
        phases: Sequence[Phase] = (),
        faults: Sequence[Fault] = (),
        *,
        idle_watts: float = 80.0,
        idle_busy: float = 0.0,
        pids: Sequence[int] = (),
        uuid: str = "GPU-5c719ed0-0000-0000-0000-000000000000",
        driver_version: str = "580.0",
    ) -> None:
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._phases = phases
        self._faults = faults
        self._idle_watts = idle_watts
        self._idle_busy = idle_busy
        self._pids = pids
        self._uuid = uuid
        self._driver_version = driver_version

    def connect(self) -> NvmlConnection:
        """Fails while a fault of every call lasts."""
        code = self._fault("*")
        if code is not None:
            return NvmlConnection(status="gpu_lost" if code == LOST else "error", error=code)
        device = DeviceIdentity(
            0, self._uuid, "scripted GPU (not real)", "0000:00:00.0", mig_enabled=False, supports_gpm=False
        )
        return NvmlConnection("ok", None, self._driver_version, "13.580", "13.0", (device,), 1)

    def reading(self, index: int) -> Reading:
        """Energy, power, utilisation and memory."""
        now_ns = self._clock_ns()
        values = {
            "energy": ("energy_joules", self._energy_joules(now_ns)),
            "power": ("power_watts", self._at(now_ns).watts),
            "utilization": ("utilization_ratio", round(self._busy(now_ns - SAMPLE_PERIOD_NS, now_ns), 2)),
            "memory": ("memory_used_bytes", 2.0**30),
        }
        failed = {call: code for call in values if (code := self._fault(call)) is not None}
        return Reading(
            values=dict(value for call, value in values.items() if call not in failed),
            failed=failed,
            lost=LOST in failed.values(),
        )

    def samples(self, index: int, since_ns: int) -> SampleBatch:
        """Those of the last 14 s, on the wall clock, as the driver gives them."""
        code = self._fault("samples")
        if code is not None:
            return SampleBatch(failed={"samples": code}, lost=code == LOST)
        now_ns = self._clock_ns()
        shift_ns = self._wall_ns() - now_ns
        newest = now_ns // SAMPLE_PERIOD_NS
        found = []
        for number in range(max(1, newest - SAMPLES_KEPT + 1), newest + 1):
            end_ns = number * SAMPLE_PERIOD_NS
            stamp_ns = (end_ns + shift_ns) // 1000 * 1000
            if stamp_ns > since_ns:
                found.append((stamp_ns, round(self._busy(end_ns - SAMPLE_PERIOD_NS, end_ns), 2)))
        return SampleBatch(samples=tuple(found))

    def edge(self, index: int) -> EdgeReading:
        """The scripted processes."""
        failed = {call: code for call in ("processes", "ecc_errors") if (code := self._fault(call)) is not None}
        return EdgeReading(
            processes=None if "processes" in failed else tuple(GpuProcess(pid, 2**29) for pid in self._pids),
            ecc_errors=None if "ecc_errors" in failed else {"corrected": 0, "uncorrected": 0},
            failed=failed,
            lost=LOST in failed.values(),
        )

    def close(self) -> None:
        """Nothing to release."""

    def _fault(self, call: str) -> str | None:
        now_ns = self._clock_ns()
        for fault in self._faults:
            if fault.start_ns <= now_ns < fault.end_ns and fault.call in (call, "*"):
                return fault.code
        return None

    def _at(self, at_ns: int) -> Phase:
        for phase in self._phases:
            if phase.start_ns <= at_ns < phase.end_ns:
                return phase
        return Phase(at_ns, at_ns, self._idle_busy, self._idle_watts)

    def _mean(self, start_ns: int, end_ns: int, idle: float, value: Callable[[Phase], float]) -> float:
        """Of a quantity over a time; phases do not overlap."""
        total, rest_ns = 0.0, end_ns - start_ns
        for phase in self._phases:
            overlap_ns = min(end_ns, phase.end_ns) - max(start_ns, phase.start_ns)
            if overlap_ns > 0:
                total += value(phase) * overlap_ns
                rest_ns -= overlap_ns
        return (total + idle * rest_ns) / (end_ns - start_ns)

    def _busy(self, start_ns: int, end_ns: int) -> float:
        return self._mean(start_ns, end_ns, self._idle_busy, lambda phase: phase.busy)

    def _energy_joules(self, now_ns: int) -> float:
        until_ns = max(1, now_ns - now_ns % ENERGY_STEP_NS)
        return self._mean(0, until_ns, self._idle_watts, lambda phase: phase.watts) * until_ns / 1e9


class ScriptedMachine:
    """A `GpuReader` of several scripted GPUs, numbered in the order in which they are given; `names` selects some."""

    def __init__(self, gpus: Sequence[ScriptedReader], names: Sequence[str] | None = None) -> None:
        self._gpus = gpus
        self._names = names

    def connect(self) -> NvmlConnection:
        """Of all that answer; one that does not is left out and makes the status, as with a driver."""
        found = [gpu.connect() for gpu in self._gpus]
        devices = tuple(replace(device, index=index) for index, one in enumerate(found) for device in one.devices)
        status = next((one.status for one in found if one.status != "ok"), found[0].status)
        machine = replace(found[0], status=status, devices=devices, device_count=len(self._gpus))
        return select_devices(machine, self._names, lambda _: None)

    def reading(self, index: int) -> Reading:
        """Of one GPU."""
        return self._gpus[index].reading(index)

    def samples(self, index: int, since_ns: int) -> SampleBatch:
        """Of one GPU."""
        return self._gpus[index].samples(index, since_ns)

    def edge(self, index: int) -> EdgeReading:
        """Of one GPU."""
        return self._gpus[index].edge(index)

    def close(self) -> None:
        """Nothing to release."""


class NullReader:
    """A machine without a GPU, for the given reason."""

    def __init__(self, status: Status = "no_library") -> None:
        self._status = status

    def connect(self) -> NvmlConnection:
        """Never a device."""
        return NvmlConnection(status=self._status)

    def reading(self, index: int) -> Reading:
        """There is none."""
        return Reading(failed={"energy": "UNINITIALIZED"})

    def samples(self, index: int, since_ns: int) -> SampleBatch:
        """There are none."""
        return SampleBatch(failed={"samples": "UNINITIALIZED"})

    def edge(self, index: int) -> EdgeReading:
        """There is none."""
        return EdgeReading(failed={"processes": "UNINITIALIZED"})

    def close(self) -> None:
        """Nothing to release."""
