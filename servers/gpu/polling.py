"""Keeps the newest state of all GPUs, read on the sampler's schedule, for whoever scrapes: one immutable snapshot.

Counters that the driver does not keep are kept here: busy and observed seconds (the integral of its sample buffer),
bytes over PCIe (its counters wrap) and failed calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic_ns, time

from servers.gpu.reader import Status
from servers.gpu.series import Connection, DeviceIdentity, SeriesReader

PERMANENT_CODES = frozenset({"NOT_SUPPORTED", "FUNCTION_NOT_FOUND"})
"""Counted once a device and call: they say what a device is, not that something went wrong again."""
LONGEST_SAMPLE_S = 1.0
"""A utilisation sample stands for at most so long (nvmlDeviceGetUtilizationRates: 1/6 to 1 s)."""
DRAIN_EVERY_S = 2.0
EDGE_EVERY_S = 10.0
PCIE = ("pcie_transmit_bytes", "pcie_receive_bytes")


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One GPU. `values` as `servers.gpu.series.QUANTITIES`; only what could be read last time."""

    identity: DeviceIdentity
    values: Mapping[str, float] = field(default_factory=dict)
    busy_s: float | None = None
    observed_s: float | None = None
    pcie_bytes: Mapping[str, float] = field(default_factory=dict)
    ecc_errors: Mapping[str, int] | None = None
    compute_processes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuState:
    """Everything that a scrape shows. `errors`: (call, code) → times."""

    status: Status
    driver_version: str | None = None
    cuda_version: str | None = None
    devices: tuple[DeviceState, ...] = ()
    last_success_s: float | None = None
    collect_s: float = 0.0
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)


class GpuPolling:
    """`poll` at about 1 Hz from one thread; `state` from any."""

    def __init__(
        self,
        reader: SeriesReader,
        clock_ns: Callable[[], int] = monotonic_ns,
        wall_s: Callable[[], float] = time,
    ) -> None:
        self._reader = reader
        self._clock_ns = clock_ns
        self._wall_s = wall_s
        self._connection: Connection = Connection(status="error")
        self._next_ns = {"drain": 0, "edge": 0}
        self._last_sample_us: dict[str, int] = {}
        self._last_pcie: dict[tuple[str, str], float] = {}
        self._permanent: set[tuple[str, str]] = set()
        self._known: dict[str, DeviceState] = {}  # by UUID; its counters outlast a loss
        self.state = GpuState(status="error")

    def poll(self) -> None:
        """Read what is due and publish it; after a loss try to open the library again."""
        start_ns = self._clock_ns()
        if self._connection.status != "ok":
            self._connect()
        devices = self.state.devices if self._connection.status == "ok" else ()
        if devices:
            due = {name: start_ns >= at_ns for name, at_ns in self._next_ns.items()}
            devices = tuple(self._update(device, due) for device in devices)
            for name, seconds in (("drain", DRAIN_EVERY_S), ("edge", EDGE_EVERY_S)):
                if due[name]:
                    self._next_ns[name] = start_ns + int(seconds * 1e9)
            self._known = {device.identity.uuid: device for device in devices}
        good = self._connection.status == "ok" and bool(devices) and all(device.values for device in devices)
        status = self._connection.status if self._connection.status != "ok" or good else "error"
        self.state = replace(
            self.state,
            status=status,
            driver_version=self._connection.driver_version,
            cuda_version=self._connection.cuda_driver_version,
            devices=devices if self._connection.status == "ok" else (),
            last_success_s=self._wall_s() if good else self.state.last_success_s,
            collect_s=(self._clock_ns() - start_ns) / 1e9,
        )

    def close(self) -> None:
        """Release the library."""
        self._reader.close()

    def _connect(self) -> None:
        self._connection = self._reader.connect()
        self._next_ns = dict.fromkeys(self._next_ns, 0)
        self._last_sample_us.clear()
        self._last_pcie.clear()  # a driver that was loaded again counts from 0: that is no wrap
        devices = tuple(
            replace(self._known.get(identity.uuid, DeviceState(identity)), identity=identity)
            for identity in self._connection.devices
        )
        self.state = replace(self.state, devices=devices)

    def _update(self, device: DeviceState, due: Mapping[str, bool]) -> DeviceState:
        index, uuid = device.identity.index, device.identity.uuid
        reading = self._reader.reading(index)
        self._note(uuid, reading.failed, lost=reading.lost)
        device = replace(device, values=reading.values, pcie_bytes=self._pcie(device, reading.values))
        if due["drain"]:
            device = self._drain(device)
        if due["edge"]:
            edge = self._reader.edge(index)
            self._note(uuid, edge.failed, lost=edge.lost)
            count = None if edge.processes is None else len(edge.processes)
            device = replace(device, ecc_errors=edge.ecc_errors, compute_processes=count)
        return device

    def _drain(self, device: DeviceState) -> DeviceState:
        uuid = device.identity.uuid
        last_us = self._last_sample_us.get(uuid, 0)
        batch = self._reader.samples(device.identity.index, last_us)
        self._note(uuid, batch.failed, lost=batch.lost)
        busy_s, observed_s = device.busy_s or 0.0, device.observed_s or 0.0
        for at_us, share in batch.samples:
            length_s = min((at_us - last_us) / 1e6, LONGEST_SAMPLE_S) if last_us else 0.0
            busy_s += share * length_s
            observed_s += length_s
            last_us = at_us
        if not batch.samples:
            return device
        self._last_sample_us[uuid] = last_us
        return replace(device, busy_s=busy_s, observed_s=observed_s)

    def _pcie(self, device: DeviceState, values: Mapping[str, float]) -> dict[str, float]:
        totals = dict(device.pcie_bytes)
        for name in PCIE:
            if name not in values:
                continue
            key = (device.identity.uuid, name)
            now, before = values[name], self._last_pcie.get(key)
            self._last_pcie[key] = now
            if before is None:
                totals.setdefault(name, 0.0)
            else:
                wrapped = 2.0**32 if before < 2**32 else 2.0**64
                totals[name] = totals.get(name, 0.0) + (now - before if now >= before else now - before + wrapped)
        return totals

    def _note(self, uuid: str, failed: Mapping[str, str], *, lost: bool) -> None:
        errors = dict(self.state.errors)
        for call, code in failed.items():
            if code in PERMANENT_CODES:
                if (uuid, call) in self._permanent:
                    continue
                self._permanent.add((uuid, call))
            errors[call, code] = errors.get((call, code), 0) + 1
        self.state = replace(self.state, errors=errors)
        if lost:
            self._connection = replace(self._connection, status="gpu_lost")
