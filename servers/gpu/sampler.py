"""The sampler process: `python -m servers.gpu.sampler --out FILE` writes GPU readings until it is stopped.

FILE gets one JSON object per line (docs/gpu-proof.md lists the fields), flushed at least every second. If standard
input is a pipe, it takes one command per line: `edge LABEL` or `stop`. Each gets one JSON object on standard output
once its readings are in the file. SIGTERM, SIGINT and the end of standard input stop it.
Exit status 0 when stopped, also without a GPU; 1 if FILE cannot be written.

`Recording` has the schedule and opens no file. Per device there is a reading every second, the driver's utilisation
samples every 2 s, process list and ECC counters every 10 s and at each edge. The driver keeps about 16 s of samples, so
a late drain loses none.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import TextIO

from servers.gpu.nvml import NvmlReader
from servers.gpu.readings import (
    ALL,
    SENTENCES,
    DeviceIdentity,
    EdgeReading,
    GpuReader,
    NvmlConnection,
    Reading,
    SampleBatch,
    Status,
    visible,
)

SCHEMA = "abserve.gpu-readings/1"
IDENTITY_FIELDS = ("uuid", "index", "name", "pci_bus_id", "mig_enabled", "supports_gpm")
Line = dict[str, object]
Clock = Callable[[], int]
Observer = Callable[[DeviceIdentity, Reading | SampleBatch | EdgeReading], None]
"""Receives every answer of the reader; only new samples, with their time in ns on the recording's clock."""

CLOCK_STEP_NS = 50_000_000
"""A larger change between wall clock and monotonic clock is a step; a slewing NTP daemon stays below it for hours."""
SAMPLE_CLOCK_RANGE_NS = 60_000_000_000
"""The newest sample's time stamp must be this close to now on the clock that it is assumed to use."""


INTERVALS_S: Mapping[str, float] = {"reading": 1.0, "drain": 2.0, "edge": 10.0, "reconnect": 5.0}
"""Seconds between two readings of a kind."""


@dataclass(slots=True)
class _RecordedDevice:
    identity: DeviceIdentity
    last_stamp_ns: int = 0  # of the newest sample, on the driver's clock
    last_sample_ns: int = 0  # the same on the recording's clock
    reading_failed: bool = False


class Recording:
    """The work of one sampler: `header` once, then `tick` whenever `next_due_ns` has come, `edge` on demand. `clock_ns`
    is CLOCK_MONOTONIC (on Linux `time.monotonic_ns` and `time.perf_counter_ns`). `wall_ns` only converts the driver's
    time stamps."""

    def __init__(
        self,
        reader: GpuReader,
        intervals_s: Mapping[str, float],
        clock_ns: Clock,
        wall_ns: Clock,
        observe: Observer = lambda _device, _answer: None,
    ) -> None:
        self._reader = reader
        self._observe = observe
        self._intervals_s = intervals_s
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._offset_ns = wall_ns() - clock_ns()
        self._sample_clock: str | None = None
        self.connection: NvmlConnection = reader.connect()
        self._devices = [_RecordedDevice(identity) for identity in self.connection.devices]
        self._lost = self.connection.status != "ok"
        now_ns = clock_ns()
        self._due_ns = {
            "reading": now_ns,
            "drain": now_ns,
            "edge": now_ns + int(intervals_s["edge"] * 1e9),
            "reconnect": self._later(now_ns, intervals_s["reconnect"]),
        }

    def header(self, pid: int) -> Line:
        """The first line of the file."""
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
            "intervals_s": {name: self._intervals_s[name] for name in ("reading", "drain", "edge")},
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
        """When the next reading is due."""
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
                self._due_ns[name] = self._later(self._due_ns[name], self._intervals_s[name])
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

    def _readable(self) -> list[_RecordedDevice]:
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
        self._due_ns["reconnect"] = self._later(at_ns, self._intervals_s["reconnect"])
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
        The first drain with samples decides which."""
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
            reading = self._reader.edge(device.identity.index)
            self._observe(device.identity, reading)
            if reading.lost:
                lines += self._lose(self._clock_ns(), device.identity.uuid, reading.failed)
                break
            devices.append(
                {
                    "uuid": device.identity.uuid,
                    "processes": None if reading.processes is None else list(map(asdict, reading.processes)),
                    "ecc_errors": None if reading.ecc_errors is None else dict(reading.ecc_errors),
                    "failed": dict(reading.failed),
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
        self._due_ns["reconnect"] = self._later(now_ns, self._intervals_s["reconnect"])
        connection = self._reader.connect()
        if connection.status != "ok":
            return []
        self.connection = connection
        self._devices = [_RecordedDevice(identity, last_sample_ns=now_ns) for identity in connection.devices]
        self._lost = False
        self._due_ns |= {"reading": now_ns, "drain": now_ns, "edge": now_ns}
        return [_event(now_ns, "recovered")]


def boot_id() -> str | None:
    """The ID of this boot: monotonic times of different boots cannot be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _event(at_ns: int, event: str, uuid: str | None = None, failed: Mapping[str, str] | None = None) -> Line:
    call, code = next(iter((failed or {}).items()), (None, None))
    return {"type": "event", "at_ns": at_ns, "event": event, "uuid": uuid, "call": call, "code": code}


class SamplerProcess:
    """Waits for the next due reading, a command or a signal."""

    def __init__(self, recording: Recording, file: TextIO, answers: TextIO) -> None:
        self._recording = recording
        self._file = file
        self._answers = answers
        self._stop_reason: str | None = None
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def run(self, commands: int | None) -> None:
        """Run until stopped. `commands` is a file descriptor. Raises `OSError` if the file cannot be written."""
        header = self._recording.header(os.getpid())
        self._write([header])
        self._answer({"ready": True, "status": header["status"], "message": header["message"]})
        pending = b""
        while self._stop_reason is None:
            self._write(self._recording.tick())
            wait_s = max(0.0, (self._recording.next_due_ns() - monotonic_ns()) / 1e9)
            watched = [self._wake_read] if commands is None else [self._wake_read, commands]
            readable, _, _ = select.select(watched, [], [], wait_s)
            if self._wake_read in readable:
                self._stop_reason = signal.Signals(os.read(self._wake_read, 64)[-1]).name
            if commands is not None and commands in readable:
                received = os.read(commands, 4096)
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._command(line.decode("utf-8", "replace").strip())
                if not received:
                    self._stop_reason = self._stop_reason or "end of input"
        self._write(self._recording.close())
        self._write([{"type": "end", "at_ns": monotonic_ns(), "reason": self._stop_reason}])
        self._answer({"stopped": self._stop_reason})

    def _command(self, text: str) -> None:
        verb, _, label = text.partition(" ")
        if verb == "edge" and label:
            self._edge(label)
        elif verb == "stop":
            self._stop_reason = "stop"
        elif text:
            self._answer({"error": f"unknown command {text!r}; use edge LABEL or stop"})

    def _edge(self, label: str) -> None:
        lines = self._recording.edge(label)
        self._write(lines)
        self._answer({"edge": label, "at_ns": lines[-1]["at_ns"], "status": lines[-1]["status"]})

    def _write(self, lines: Sequence[Line]) -> None:
        if lines:
            self._file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            self._file.flush()

    def _answer(self, document: Line) -> None:
        try:
            self._answers.write(json.dumps(document) + "\n")
            self._answers.flush()
        except OSError:  # no process reads the answers any more; keep recording until the input ends
            self._answers = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sampler; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m servers.gpu.sampler", description="Record GPU readings.")
    parser.add_argument("--out", type=Path, required=True, help="file to write, one JSON object per line")
    parser.add_argument(
        "--gpu", action="append", metavar="UUID|INDEX|all",
        help="GPU to read, can be repeated; default: those in CUDA_VISIBLE_DEVICES, else all",
    )  # fmt: skip
    for name, seconds in INTERVALS_S.items():
        parser.add_argument(f"--{name}-seconds", type=float, default=seconds, dest=name)
    options = parser.parse_args(arguments)
    intervals_s = {name: getattr(options, name) for name in INTERVALS_S}
    if min(intervals_s.values()) <= 0:
        parser.error("every interval must be longer than 0 seconds")
    names = visible(os.environ)
    if options.gpu:
        names = None if ALL in options.gpu else tuple(options.gpu)
    try:
        with options.out.open("w", encoding="utf-8") as file:
            recording = Recording(NvmlReader(names), intervals_s, monotonic_ns, time_ns)
            SamplerProcess(recording, file, sys.stdout).run(_command_input())
    except OSError as exc:
        sys.stderr.write(f"cannot write {options.out}: {exc.strerror or exc}; free some space or choose another file\n")
        return 1
    return 0


def _command_input() -> int | None:
    """Standard input if it is a pipe or a socket; a terminal or /dev/null gives no commands."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return 0 if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


if __name__ == "__main__":
    sys.exit(main())
