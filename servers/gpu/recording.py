"""The schedule on which GPUs are read, and the readings as lines of JSON. Opens no file and does not sleep.

Per device: a reading every second, the driver's utilisation samples every 2 s, process list and ECC counters every
10 s and at each edge. The driver keeps about 16 s of samples, so a late drain loses none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
"""Gets every answer of the reader. Of samples only new ones, with their time in ns on the recording's clock."""

CLOCK_STEP_NS = 50_000_000
"""A larger change between wall clock and monotonic clock is a step; a slewing NTP daemon stays below it for hours."""
SAMPLE_CLOCK_RANGE_NS = 60_000_000_000
"""The newest sample's time stamp must be this close to now on the clock that it is assumed to use."""


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
    last_stamp_ns: int = 0  # of the newest sample, on the driver's clock
    last_sample_ns: int = 0  # the same on the recording's clock
    reading_failed: bool = False


class Recording:
    """The work of one sampler: `header` once, then `tick` whenever `next_due_ns` has come, `edge` on demand.

    `clock_ns` is CLOCK_MONOTONIC (on Linux `time.monotonic_ns` and `time.perf_counter_ns`). `wall_ns` only converts
    the driver's time stamps.
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
        self.connection: Connection = reader.connect()
        self._devices = [_Device(identity) for identity in self.connection.devices]
        self._lost = self.connection.status != "ok"
        now_ns = clock_ns()
        self._due_ns = {
            "reading": now_ns,
            "drain": now_ns,
            "edge": now_ns + int(intervals.edge * 1e9),
            "reconnect": self._later(now_ns, intervals.reconnect),
        }

    def header(self, pid: int) -> Line:
        """The first line."""
        connection = self.connection
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
            "intervals_s": {name: getattr(self._intervals, name) for name in ("reading", "drain", "edge")},
        }

    @property
    def devices(self) -> tuple[DeviceIdentity, ...]:
        """The devices that can be read now: none while the driver does not answer or a device is lost."""
        return () if self._lost else tuple(device.identity for device in self._devices)

    @property
    def status(self) -> Status:
        """The driver's status; `error` while every call of a device's reading fails."""
        if not self._lost:
            return "error" if any(device.reading_failed for device in self._devices) else "ok"
        return "gpu_lost" if self.connection.status == "ok" else self.connection.status

    def next_due_ns(self) -> int:
        """When `tick` has something to do."""
        return min(due for name, due in self._due_ns.items() if (name == "reconnect") == self._lost)

    def tick(self) -> list[Line]:
        """Read what is due. A late reading is taken once; missed ones are not repeated."""
        now_ns = self._clock_ns()
        if self._lost:
            return self._reconnect(now_ns) if now_ns >= self._due_ns["reconnect"] else []
        lines: list[Line] = []
        for name, read in (("reading", self._read), ("drain", self._drain), ("edge", lambda: self._edge("periodic"))):
            if now_ns >= self._due_ns[name]:
                lines += read()
                self._due_ns[name] = self._later(self._due_ns[name], getattr(self._intervals, name))
        return lines

    def edge(self, label: str) -> list[Line]:
        """Read everything now; the last line is the edge itself."""
        return [*self._read(), *self._drain(), *self._edge(label)]

    def close(self) -> list[Line]:
        """Read once more, so that the last interval has an end, and release the library."""
        lines = [*self._read(), *self._drain()]
        self._reader.close()
        return lines

    def _later(self, due_ns: int, seconds: float) -> int:
        step = int(seconds * 1e9)
        behind = max(0, self._clock_ns() - due_ns)
        return due_ns + step * (1 + behind // step)

    def _readable(self) -> list[_Device]:
        return [] if self._lost else self._devices

    def _read(self) -> list[Line]:
        lines: list[Line] = []
        for device in self._readable():
            uuid = device.identity.uuid
            before_ns = self._clock_ns()
            reading = self._reader.reading(device.identity.index)
            at_ns = (before_ns + self._clock_ns()) // 2
            self._observe(device.identity, reading)
            if reading.values:
                failed = {"failed": dict(reading.failed)} if reading.failed else {}
                lines.append({"type": "reading", "at_ns": at_ns, "uuid": uuid, **reading.values, **failed})
            if reading.lost:
                lines += self._lose(at_ns, uuid, reading.failed)
                continue
            failed_before, device.reading_failed = device.reading_failed, not reading.values
            if device.reading_failed and not failed_before:
                lines.append(_event(at_ns, "nvml_error", uuid, reading.failed))
        return lines

    def _lose(self, at_ns: int, uuid: str, failed: Mapping[str, str]) -> list[Line]:
        if self._lost:
            return []
        self._lost = True
        self._due_ns["reconnect"] = self._later(at_ns, self._intervals.reconnect)
        return [_event(at_ns, "gpu_lost", uuid, failed)]

    def _drain(self) -> list[Line]:
        lines: list[Line] = [] if self._lost else self._check_clock()
        for device in self._readable():
            batch = self._reader.samples(device.identity.index, device.last_stamp_ns)
            now_ns = self._clock_ns()
            if batch.lost:
                self._observe(device.identity, batch)
                lines += self._lose(now_ns, device.identity.uuid, batch.failed)
                continue
            shift_ns = self._sample_shift_ns(batch.samples[-1][0], now_ns) if batch.samples else 0
            # A time stamp from before the wall clock was set back is in the future: an earlier drain had it already.
            fresh = [
                (at_ns, share)
                for stamp_ns, share in batch.samples
                if device.last_sample_ns < (at_ns := stamp_ns - shift_ns) <= now_ns + CLOCK_STEP_NS
            ]
            self._observe(device.identity, replace(batch, samples=tuple(fresh)))
            if fresh:
                device.last_sample_ns = fresh[-1][0]
                device.last_stamp_ns = device.last_sample_ns + shift_ns
                lines.append({"type": "samples", "at_ns": now_ns, "uuid": device.identity.uuid, "utilization": fresh})
        return lines

    def _check_clock(self) -> list[Line]:
        """A stepped wall clock shifts the driver's time stamps: read the whole buffer again with the new offset."""
        at_ns = self._clock_ns()
        offset_ns = self._wall_ns() - at_ns
        stepped = abs(offset_ns - self._offset_ns) > CLOCK_STEP_NS
        self._offset_ns = offset_ns
        if not stepped:
            return []
        for device in self._devices:
            device.last_stamp_ns = 0
        return [_event(at_ns, "clock_step")]

    def _sample_shift_ns(self, newest_ns: int, now_ns: int) -> int:
        """The driver's clock minus this one. Real drivers use wall time, else monotonic time, else the newest is now.

        The first drain with samples decides which.
        """
        if self._sample_clock is None:
            near = [
                name
                for name, shift_ns in (("wall", self._offset_ns), ("monotonic", 0))
                if abs(newest_ns - shift_ns - now_ns) < SAMPLE_CLOCK_RANGE_NS
            ]
            self._sample_clock = near[0] if near else "own"
        return {"wall": self._offset_ns, "monotonic": 0, "own": newest_ns - now_ns}[self._sample_clock]

    def _edge(self, label: str) -> list[Line]:
        lines: list[Line] = []
        devices: list[Line] = []
        for device in self._readable():
            found = self._reader.edge(device.identity.index)
            self._observe(device.identity, found)
            if found.lost:
                lines += self._lose(self._clock_ns(), device.identity.uuid, found.failed)
                break
            devices.append(
                {
                    "uuid": device.identity.uuid,
                    "processes": None if found.processes is None else [asdict(one) for one in found.processes],
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
            "driver_version": self.connection.driver_version,
            "devices": [] if self._lost else devices,
        }
        return [*lines, edge]

    def _reconnect(self, now_ns: int) -> list[Line]:
        self._due_ns["reconnect"] = self._later(now_ns, self._intervals.reconnect)
        connection = self._reader.connect()
        if connection.status != "ok":
            return []
        self.connection = connection
        self._devices = [_Device(identity, last_sample_ns=now_ns) for identity in connection.devices]
        self._lost = False
        self._due_ns |= {"reading": now_ns, "drain": now_ns, "edge": now_ns}
        return [_event(now_ns, "recovered")]


def boot_id() -> str | None:
    """Two monotonic times compare only within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _event(at_ns: int, event: str, uuid: str | None = None, failed: Mapping[str, str] | None = None) -> Line:
    call, code = next(iter((failed or {}).items()), (None, None))
    return {"type": "event", "at_ns": at_ns, "event": event, "uuid": uuid, "call": call, "code": code}
