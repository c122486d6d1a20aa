"""GPU metrics for Prometheus, prefix `nvml_`: families built fresh from one immutable snapshot at each scrape.

What could not be read is absent, never 0; without a GPU there is `nvml_up 0` and nothing that looks like one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic_ns, time_ns
from typing import Literal

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servers.gpu.readings import (
    CLOCK_EVENTS,
    Connection,
    DeviceIdentity,
    EdgeReading,
    GpuReader,
    Reading,
    SampleBatch,
    Status,
)
from servers.gpu.recording import Intervals, Recording

POLL_SECONDS = 1.0
PERMANENT_CODES = frozenset({"NOT_SUPPORTED", "FUNCTION_NOT_FOUND"})
"""Counted once per device and call: they say what a device is, not that something went wrong again."""
LONGEST_SAMPLE_S = 1.0
"""A utilisation sample stands for at most so long (nvmlDeviceGetUtilizationRates: 1/6 to 1 s)."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One family; a counter's name ends in `_total`."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    help: str


_UUID = ("uuid",)
DEFINITIONS = (
    MetricDefinition("nvml_up", "gauge", (), "1 when the NVIDIA driver answers for every GPU."),
    MetricDefinition("nvml_last_success_timestamp_seconds", "gauge", (), "When every GPU was last read."),
    MetricDefinition("nvml_collect_duration_seconds", "gauge", (), "What the last reading took."),
    MetricDefinition("nvml_errors_total", "counter", ("call", "code"), "Failed calls; unsupported ones count once."),
    MetricDefinition(
        "nvml_device_info", "gauge",
        ("uuid", "index", "name", "driver_version", "cuda_version", "pci_bus_id", "mig"), "Identity; always 1.",
    ),
    MetricDefinition("nvml_device_utilization_ratio", "gauge", _UUID, "Share of time with a kernel running."),
    MetricDefinition("nvml_device_memory_utilization_ratio", "gauge", _UUID, "Share of time with memory traffic."),
    MetricDefinition("nvml_device_busy_seconds_total", "counter", _UUID, "Integral of the utilisation samples."),
    MetricDefinition("nvml_device_observed_seconds_total", "counter", _UUID, "Time that those samples cover."),
    MetricDefinition("nvml_device_energy_joules_total", "counter", _UUID, "Since the driver was loaded."),
    MetricDefinition("nvml_device_power_watts", "gauge", _UUID, "On Ampere and later the mean of the last second."),
    MetricDefinition("nvml_device_power_limit_watts", "gauge", _UUID, "The enforced limit."),
    MetricDefinition("nvml_device_memory_used_bytes", "gauge", _UUID, "By all processes and the driver."),
    MetricDefinition("nvml_device_memory_total_bytes", "gauge", _UUID, "Of the device."),
    MetricDefinition("nvml_device_clock_hertz", "gauge", ("uuid", "clock"), "Of graphics, sm and memory."),
    MetricDefinition("nvml_device_clock_event_active", "gauge", ("uuid", "reason"), "1: it holds the clocks down now."),
    MetricDefinition(
        "nvml_device_clock_event_seconds_total", "counter", ("uuid", "reason"), "Clocks held down so long by it."
    ),
    MetricDefinition("nvml_device_temperature_celsius", "gauge", _UUID, "Of the die."),
    MetricDefinition("nvml_device_pcie_bytes_total", "counter", ("uuid", "direction"), "Since the exporter started."),
    MetricDefinition("nvml_device_ecc_errors_total", "counter", ("uuid", "type"), "Since the driver was loaded."),
    MetricDefinition("nvml_device_compute_processes", "gauge", _UUID, "With a context; a container may hide them."),
    MetricDefinition("nvml_gpm_sm_active_ratio", "gauge", _UUID, "Share of the SMs' time with work."),
    MetricDefinition("nvml_gpm_tensor_active_ratio", "gauge", _UUID, "Share of it with tensor operations."),
    MetricDefinition("nvml_gpm_dram_active_ratio", "gauge", _UUID, "Share of the memory's bandwidth."),
)  # fmt: skip
"""Every family that there is, in the order of the scrape."""

_QUANTITIES = {
    "nvml_device_utilization_ratio": "utilization_ratio",
    "nvml_device_memory_utilization_ratio": "memory_utilization_ratio",
    "nvml_device_energy_joules_total": "energy_joules",
    "nvml_device_power_watts": "power_watts",
    "nvml_device_power_limit_watts": "power_limit_watts",
    "nvml_device_memory_used_bytes": "memory_used_bytes",
    "nvml_device_memory_total_bytes": "memory_total_bytes",
    "nvml_device_temperature_celsius": "temperature_celsius",
    "nvml_gpm_sm_active_ratio": "sm_active_ratio",
    "nvml_gpm_tensor_active_ratio": "tensor_active_ratio",
    "nvml_gpm_dram_active_ratio": "dram_active_ratio",
}
_CLOCK_SETTINGS = ("applications_clocks", "sync_boost", "display_clocks")
"""Clock events that are choices of whoever runs the machine; they have no series."""
_CLOCKS = ("graphics", "sm", "memory")
_TIMED_EVENTS = ("software_power_cap", "software_thermal", "hardware_thermal", "power_brake")
_DIRECTIONS = {"transmit": "pcie_transmit_bytes", "receive": "pcie_receive_bytes"}

Point = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One GPU. `values` as `Reading.values`; only what could be read last time."""

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
    """`poll` at about 1 Hz from one thread; `state` from any: the newest reading of all GPUs, as one immutable record.

    Counters that the driver does not keep are kept here: busy and observed seconds (the integral of its sample buffer),
    bytes over PCIe (its counters wrap) and failed calls. They outlast the loss of a GPU.
    """

    def __init__(
        self, reader: GpuReader, clock_ns: Callable[[], int] = monotonic_ns, wall_ns: Callable[[], int] = time_ns
    ) -> None:
        self._reader = reader
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._recording: Recording | None = None
        self._connection: Connection | None = None
        self._last_sample_ns: dict[str, int] = {}
        self._last_pcie: dict[tuple[str, str], float] = {}
        self._permanent: set[tuple[str, str]] = set()
        self._errors: dict[tuple[str, str], int] = {}
        self._devices: dict[str, DeviceState] = {}  # by UUID
        self.state = GpuState(status="error")

    def poll(self) -> None:
        """Read what is due and publish it; after a loss try to open the library again."""
        start_ns = self._clock_ns()
        if self._recording is None:
            intervals = Intervals(reconnect=POLL_SECONDS)
            self._recording = Recording(self._reader, intervals, self._clock_ns, self._wall_ns, self._observe)
            self._connection = self._recording.connection
            self._recording.edge("first")
        else:
            self._recording.tick()
        if self._recording.connection is not self._connection:
            self._connection = self._recording.connection
            self._forget_readings()
            self._recording.tick()
        connection, status = self._recording.connection, self._recording.status
        self.state = GpuState(
            status=status,
            driver_version=connection.driver_version,
            cuda_version=connection.cuda_driver_version,
            devices=tuple(self._devices[identity.uuid] for identity in self._recording.devices),
            last_success_s=self._wall_ns() / 1e9 if status == "ok" else self.state.last_success_s,
            collect_s=(self._clock_ns() - start_ns) / 1e9,
            errors=dict(self._errors),
        )

    def close(self) -> None:
        """Release the library."""
        self._reader.close()

    def _forget_readings(self) -> None:
        """The library was opened again: a driver that was loaded again counts from 0, which is no wrap."""
        self._last_pcie.clear()
        self._last_sample_ns.clear()
        for uuid, device in self._devices.items():
            self._devices[uuid] = replace(device, values={}, ecc_errors=None, compute_processes=None)

    def _observe(self, identity: DeviceIdentity, answer: Reading | SampleBatch | EdgeReading) -> None:
        """Take over one answer of the reader."""
        device = replace(self._devices.get(identity.uuid, DeviceState(identity)), identity=identity)
        self._count_failures(identity.uuid, answer.failed)
        match answer:
            case Reading():
                device = replace(device, values=answer.values, pcie_bytes=self._pcie(device, answer.values))
            case SampleBatch():
                device = self._add_samples(device, answer.samples)
            case EdgeReading():
                count = None if answer.processes is None else len(answer.processes)
                device = replace(device, ecc_errors=answer.ecc_errors, compute_processes=count)
        self._devices[identity.uuid] = device

    def _add_samples(self, device: DeviceState, samples: Sequence[tuple[int, float]]) -> DeviceState:
        """`samples` are new and end at a time in ns."""
        if not samples:
            return device
        uuid = device.identity.uuid
        busy_s, observed_s, last_ns = device.busy_s or 0.0, device.observed_s or 0.0, self._last_sample_ns.get(uuid)
        for at_ns, share in samples:
            length_s = 0.0 if last_ns is None else min((at_ns - last_ns) / 1e9, LONGEST_SAMPLE_S)
            busy_s += share * length_s
            observed_s += length_s
            last_ns = at_ns
        self._last_sample_ns[uuid] = samples[-1][0]
        return replace(device, busy_s=busy_s, observed_s=observed_s)

    def _pcie(self, device: DeviceState, values: Mapping[str, float]) -> dict[str, float]:
        totals = dict(device.pcie_bytes)
        for name in _DIRECTIONS.values():
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

    def _count_failures(self, uuid: str, failed: Mapping[str, str]) -> None:
        for call, code in failed.items():
            if code in PERMANENT_CODES:
                if (uuid, call) in self._permanent:
                    continue
                self._permanent.add((uuid, call))
            self._errors[call, code] = self._errors.get((call, code), 0) + 1


class GpuCollector(Collector):
    """Shows a `GpuPolling`'s newest state."""

    def __init__(self, polling: GpuPolling) -> None:
        self._polling = polling

    def collect(self) -> Iterable[Metric]:
        """All families that have a value."""
        state = self._polling.state
        points: dict[str, list[Point]] = {}
        for name, labels, value in _points(state):
            points.setdefault(name, []).append((labels, value))
        for definition in DEFINITIONS:
            if definition.name in points:
                yield _family(definition, points[definition.name])


class GpuExporter:
    """Polls in a thread of its own and answers scrapes. Stop it with `close`."""

    def __init__(self, polling: GpuPolling, host: str, port: int) -> None:
        """Binds at once; raises `OSError`. Port 0 takes a free one."""
        self._polling = polling
        registry = CollectorRegistry()
        registry.register(GpuCollector(polling))
        polling.poll()
        self._server, self._server_thread = start_http_server(port, host, registry)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="gpu-polling", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop both threads and release the library."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._server_thread.join()
        self._thread.join()
        self._polling.close()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._polling.poll()


def _family(definition: MetricDefinition, points: Iterable[Point]) -> Metric:
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family: Metric = kind(definition.name, definition.help, labels=definition.labels)
    for labels, value in points:
        family.add_metric(labels, value)  # type: ignore[attr-defined]  # both kinds have it, their base has not
    return family


def _points(state: GpuState) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "nvml_up", (), float(state.status == "ok")
    if state.last_success_s is not None:
        yield "nvml_last_success_timestamp_seconds", (), state.last_success_s
    yield "nvml_collect_duration_seconds", (), state.collect_s
    for (call, code), count in sorted(state.errors.items()):
        yield "nvml_errors_total", (call, code), count
    for device in state.devices:
        yield "nvml_device_info", _identity(state, device), 1.0
        yield from _device_points(device)


def _device_points(device: DeviceState) -> Iterator[tuple[str, tuple[str, ...], float]]:
    uuid, values = device.identity.uuid, device.values
    for name, quantity in _QUANTITIES.items():
        if quantity in values:
            yield name, (uuid,), values[quantity]
    if device.busy_s is not None and device.observed_s is not None:
        yield "nvml_device_busy_seconds_total", (uuid,), device.busy_s
        yield "nvml_device_observed_seconds_total", (uuid,), device.observed_s
    for clock in _CLOCKS:
        if f"{clock}_clock_hertz" in values:
            yield "nvml_device_clock_hertz", (uuid, clock), values[f"{clock}_clock_hertz"]
    if "clock_event_reasons" in values:
        mask = int(values["clock_event_reasons"])
        for bit, reason in CLOCK_EVENTS.items():
            if reason not in _CLOCK_SETTINGS:
                yield "nvml_device_clock_event_active", (uuid, reason), float(bool(mask & bit))
    for reason in _TIMED_EVENTS:
        if f"{reason}_ns" in values:
            yield "nvml_device_clock_event_seconds_total", (uuid, reason), values[f"{reason}_ns"] / 1e9
    for direction, quantity in _DIRECTIONS.items():
        if quantity in device.pcie_bytes:
            yield "nvml_device_pcie_bytes_total", (uuid, direction), device.pcie_bytes[quantity]
    for kind, count in (device.ecc_errors or {}).items():
        yield "nvml_device_ecc_errors_total", (uuid, kind), count
    if device.compute_processes is not None:
        yield "nvml_device_compute_processes", (uuid,), device.compute_processes


def _identity(state: GpuState, device: DeviceState) -> tuple[str, ...]:
    identity = device.identity
    mig = {None: "", True: "true", False: "false"}[identity.mig_enabled]
    known = (identity.name, state.driver_version, state.cuda_version, identity.pci_bus_id)
    name, driver, cuda, bus = (text or "" for text in known)
    return (identity.uuid, str(identity.index), name, driver, cuda, bus, mig)
