"""The one schedule on which GPUs are read, and what was read as lines; knows no file, no signal and no sleep.

Per device: a reading every second, the driver's utilisation samples every 2 s, process list and ECC counters every
10 s and whenever an edge is asked for. The driver keeps about 16 s of samples, so a drain that comes late loses none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from servers.gpu.readings import (
    SENTENCES,
    Connection,
    DeviceIdentity,
    EdgeReading,
    GpuReader,
    Reading,
    SampleBatch,
    Status,
)

SCHEMA = "abserve.gpu-readings/1"
IDENTITY_FIELDS = ("uuid", "index", "name", "pci_bus_id", "mig_enabled", "supports_gpm")
Line = dict[str, object]
Clock = Callable[[], int]
Observer = Callable[[DeviceIdentity, Reading | SampleBatch | EdgeReading], None]
"""Gets every answer of the reader; of samples only new ones, with their time in ns on the recording's clock."""

CLOCK_STEP_NS = 50_000_000
"""Wall clock against monotonic clock; a slewing NTP daemon stays below it for hours."""
SAMPLE_CLOCK_RANGE_NS = 60_000_000_000
"""How far a newest sample's time stamp may lie from now on the clock that it is taken for."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Seconds between two readings of a kind."""

    reading: float = 1.0
    drain: float = 2.0
    edge: float = 10.0
    reconnect: float = 5.0


@dataclass(slots=True)
class _Device:
    identity: DeviceIdentity
    last_sample_us: int = 0
    last_sample_ns: int = 0
    reading_failed: bool = False


@dataclass(slots=True)
class _Due:
    reading_ns: int
    drain_ns: int
    edge_ns: int
    reconnect_ns: int = field(default=0)


class Recording:
    """One sampler's work: `header` once, then `tick` whenever `next_due_ns` has come, `edge` on demand.

    `clock_ns` is CLOCK_MONOTONIC: on Linux both `time.monotonic_ns` and `time.perf_counter_ns`. `wall_ns` is the
    clock of the driver's time stamps, used for nothing else.
    """

    def __init__(
        self,
        reader: GpuReader,
        intervals: Intervals,
        clock_ns: Clock,
        wall_ns: Clock,
        observe: Observer = lambda _device, _answer: None,
    ) -> None:
        self._reader = reader
        self._observe = observe
        self._intervals = intervals
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._offset_ns = wall_ns() - clock_ns()
        self._sample_clock: str | None = None
        self._connection = reader.connect()
        self._devices = [_Device(identity) for identity in self._connection.devices]
        self._lost = self._connection.status != "ok"
        now_ns = clock_ns()
        self._due = _Due(now_ns, now_ns, now_ns + int(intervals.edge * 1e9), self._later(now_ns, intervals.reconnect))

    @property
    def connection(self) -> Connection:
        """As last opened."""
        return self._connection

    def header(self, pid: int) -> Line:
        """The first line."""
        connection = self._connection
        costs: Mapping[str, int] = {}
        if not self._lost and self._devices:
            costs = self._reader.call_costs(self._devices[0].identity.index)
        return {
            "type": "header",
            "schema": SCHEMA,
            "clock": "CLOCK_MONOTONIC",
            "boot_id": boot_id(),
            "pid": pid,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "monotonic_ns": self._clock_ns(),
            "wall_ns": self._wall_ns(),
            "status": connection.status,
            "message": SENTENCES[connection.status],
            "error": connection.error,
            "driver_version": connection.driver_version,
            "nvml_version": connection.nvml_version,
            "cuda_driver_version": connection.cuda_driver_version,
            "device_count": connection.device_count,
            "devices": [{name: getattr(device.identity, name) for name in IDENTITY_FIELDS} for device in self._devices],
            "call_cost_ns": dict(costs),
            "intervals_s": {name: getattr(self._intervals, name) for name in ("reading", "drain", "edge")},
        }

    @property
    def devices(self) -> tuple[DeviceIdentity, ...]:
        """Those that can be read now: none while the driver does not answer or a device is lost."""
        return () if self._lost else tuple(device.identity for device in self._devices)

    @property
    def status(self) -> Status:
        """That of the driver, or `error` while every call of a device's reading fails."""
        if not self._lost:
            return "error" if any(device.reading_failed for device in self._devices) else "ok"
        return "gpu_lost" if self._connection.status == "ok" else self._connection.status

    def next_due_ns(self) -> int:
        """When `tick` has something to do."""
        if self._lost:
            return self._due.reconnect_ns
        return min(self._due.reading_ns, self._due.drain_ns, self._due.edge_ns)

    def tick(self) -> list[Line]:
        """Whatever is due. A reading that is late is taken once, not made up for."""
        now_ns = self._clock_ns()
        if self._lost:
            return self._reconnect(now_ns) if now_ns >= self._due.reconnect_ns else []
        lines: list[Line] = []
        if now_ns >= self._due.reading_ns:
            lines += self._read()
            self._due.reading_ns = self._later(self._due.reading_ns, self._intervals.reading)
        if now_ns >= self._due.drain_ns:
            lines += self._drain()
            self._due.drain_ns = self._later(self._due.drain_ns, self._intervals.drain)
        if now_ns >= self._due.edge_ns:
            lines += self._edge("periodic")
            self._due.edge_ns = self._later(self._due.edge_ns, self._intervals.edge)
        return lines

    def edge(self, label: str) -> list[Line]:
        """Everything now; the last line is the edge itself."""
        lines = [] if self._lost else [*self._read(), *self._drain()]
        return [*lines, *self._edge(label)]

    def close(self) -> list[Line]:
        """A last reading, so that what came before has an end."""
        lines = [] if self._lost else [*self._read(), *self._drain()]
        self._reader.close()
        return lines

    def _later(self, due_ns: int, seconds: float) -> int:
        step = int(seconds * 1e9)
        behind = max(0, self._clock_ns() - due_ns)
        return due_ns + step * (1 + behind // step)

    def _read(self) -> list[Line]:
        lines: list[Line] = []
        for device in self._devices:
            before_ns = self._clock_ns()
            reading = self._reader.reading(device.identity.index)
            at_ns = (before_ns + self._clock_ns()) // 2
            self._observe(device.identity, reading)
            if reading.values:
                lines.append(_reading_line(at_ns, device.identity.uuid, reading))
            lines += self._failures(at_ns, device, reading)
        return lines

    def _failures(self, at_ns: int, device: _Device, reading: Reading) -> list[Line]:
        """An event when a device is lost, and when every call of a reading begins to fail."""
        uuid = device.identity.uuid
        if reading.lost:
            return self._lose(at_ns, uuid, reading.failed)
        failed, device.reading_failed = device.reading_failed, not reading.values
        if failed or not device.reading_failed:
            return []
        call, code = next(iter(reading.failed.items()), (None, None))
        return [{"type": "event", "at_ns": at_ns, "event": "nvml_error", "uuid": uuid, "call": call, "code": code}]

    def _lose(self, at_ns: int, uuid: str, failed: Mapping[str, str]) -> list[Line]:
        if self._lost:
            return []
        self._lost = True
        self._due.reconnect_ns = self._later(at_ns, self._intervals.reconnect)
        call, code = next(iter(failed.items()), (None, None))
        return [{"type": "event", "at_ns": at_ns, "event": "gpu_lost", "uuid": uuid, "call": call, "code": code}]

    def _drain(self) -> list[Line]:
        lines: list[Line] = self._check_clock()
        for device in self._devices:
            batch = self._reader.samples(device.identity.index, device.last_sample_us)
            now_ns = self._clock_ns()
            if batch.lost:
                self._observe(device.identity, batch)
                lines += self._lose(now_ns, device.identity.uuid, batch.failed)
                continue
            shift_ns = self._sample_shift_ns(batch.samples[-1][0], now_ns) if batch.samples else 0
            # A time stamp from before the wall clock was set back lies in the future: it came with an earlier drain.
            fresh = [
                (at_ns, share)
                for at_us, share in batch.samples
                if device.last_sample_ns < (at_ns := at_us * 1000 - shift_ns) <= now_ns + CLOCK_STEP_NS
            ]
            self._observe(device.identity, replace(batch, samples=tuple(fresh)))
            if fresh:
                device.last_sample_ns = fresh[-1][0]
                device.last_sample_us = (device.last_sample_ns + shift_ns) // 1000
                lines.append({"type": "samples", "at_ns": now_ns, "uuid": device.identity.uuid, "utilization": fresh})
        return lines

    def _check_clock(self) -> list[Line]:
        """A stepped wall clock shifts the driver's time stamps; ask for the whole buffer again, by the new offset."""
        at_ns = self._clock_ns()
        offset_ns = self._wall_ns() - at_ns
        stepped = abs(offset_ns - self._offset_ns) > CLOCK_STEP_NS
        self._offset_ns = offset_ns
        if not stepped:
            return []
        for device in self._devices:
            device.last_sample_us = 0
        return [{"type": "event", "at_ns": at_ns, "event": "clock_step", "uuid": None, "call": None, "code": None}]

    def _sample_shift_ns(self, newest_us: int, now_ns: int) -> int:
        """From the driver's clock to ours: wall time as seen on real drivers, or monotonic, or else the newest sample
        counts as of now. Which one is decided once."""
        if self._sample_clock is None:
            near = [
                name
                for name, shift_ns in (("wall", self._offset_ns), ("monotonic", 0))
                if abs(newest_us * 1000 - shift_ns - now_ns) < SAMPLE_CLOCK_RANGE_NS
            ]
            self._sample_clock = near[0] if near else "own"
        return {"wall": self._offset_ns, "monotonic": 0, "own": newest_us * 1000 - now_ns}[self._sample_clock]

    def _edge(self, label: str) -> list[Line]:
        lines: list[Line] = []
        devices: list[Line] = []
        for device in [] if self._lost else self._devices:
            found = self._reader.edge(device.identity.index)
            self._observe(device.identity, found)
            if found.lost:
                lines += self._lose(self._clock_ns(), device.identity.uuid, found.failed)
                break
            processes = found.processes
            devices.append(
                {
                    "uuid": device.identity.uuid,
                    "processes": None
                    if processes is None
                    else [{"pid": process.pid, "used_bytes": process.used_bytes} for process in processes],
                    "ecc_errors": None if found.ecc_errors is None else dict(found.ecc_errors),
                    "failed": dict(found.failed),
                    "failing": device.reading_failed,
                }
            )
        edge: Line = {
            "type": "edge",
            "at_ns": self._clock_ns(),
            "label": label,
            "status": self.status,
            "driver_version": self._connection.driver_version,
            "devices": [] if self._lost else devices,
        }
        return [*lines, edge]

    def _reconnect(self, now_ns: int) -> list[Line]:
        self._due.reconnect_ns = self._later(now_ns, self._intervals.reconnect)
        connection = self._reader.connect()
        if connection.status != "ok":
            return []
        self._connection = connection
        self._devices = [_Device(identity, last_sample_ns=now_ns) for identity in connection.devices]
        self._lost = False
        self._due.reading_ns = self._due.drain_ns = self._due.edge_ns = now_ns
        return [{"type": "event", "at_ns": now_ns, "event": "recovered", "uuid": None, "call": None, "code": None}]


def boot_id() -> str | None:
    """Two monotonic times compare only within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _reading_line(at_ns: int, uuid: str, reading: Reading) -> Line:
    line: Line = {"type": "reading", "at_ns": at_ns, "uuid": uuid, **reading.values}
    if reading.failed:
        line["failed"] = dict(reading.failed)
    return line
