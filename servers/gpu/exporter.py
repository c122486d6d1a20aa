"""GPU metrics (prefix `nvml_`) and host metrics (prefix `host_`) for Prometheus.

A value that could not be read is absent, never 0. Without a GPU there is `nvml_up 0` and no series of a device.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns, time_ns
from typing import Any, Literal

import psutil
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servers.gpu.info import gpu_info
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
"""Counted once per device and call: they describe the device and are not a new failure each time."""
LONGEST_SAMPLE_S = 1.0
"""A utilisation sample covers at most this time (nvmlDeviceGetUtilizationRates: 1/6 to 1 s)."""
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Together all CPU time: the kernel counts guests as user time, too."""

Labels = tuple[str, ...]
_CLOCK_SETTINGS = ("applications_clocks", "sync_boost", "display_clocks")
"""Clock events that an administrator chose; they have no series."""
_PCIE_COUNTERS = ("pcie_transmit_bytes", "pcie_receive_bytes")


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One family. `quantities` maps the labels after `uuid` to the value of a device that they show."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: Labels
    help: str
    quantities: Mapping[Labels, str] = field(default_factory=dict)

    def family(self, points: Mapping[Labels, float]) -> Metric:
        """The family with a value for each set of labels."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family: Metric = kind(self.name, self.help, labels=self.labels)
        for labels, value in points.items():
            family.add_metric(labels, value)  # type: ignore[attr-defined]  # both kinds have it, their base has not
        return family


def _gauge(name: str, quantity: str, text: str) -> MetricDefinition:
    return MetricDefinition(name, "gauge", ("uuid",), text, {(): quantity})


def _counter(name: str, quantity: str, text: str) -> MetricDefinition:
    return MetricDefinition(name, "counter", ("uuid",), text, {(): quantity})


DEFINITIONS = (
    MetricDefinition("nvml_up", "gauge", (), "1 if the NVIDIA driver answers for every GPU."),
    MetricDefinition("nvml_last_success_timestamp_seconds", "gauge", (), "When every GPU was last read."),
    MetricDefinition("nvml_collect_duration_seconds", "gauge", (), "Duration of the last reading."),
    MetricDefinition("nvml_errors_total", "counter", ("call", "code"), "Failed calls; unsupported ones count once."),
    MetricDefinition(
        "nvml_device_info", "gauge",
        ("uuid", "index", "name", "driver_version", "cuda_version", "pci_bus_id", "mig"), "Identity; always 1.",
    ),
    _gauge("nvml_device_utilization_ratio", "utilization_ratio", "Share of time with a kernel running."),
    _gauge(
        "nvml_device_memory_utilization_ratio", "memory_utilization_ratio", "Share of time with memory traffic."
    ),
    _counter("nvml_device_busy_seconds_total", "busy_seconds", "Integral of the utilisation samples."),
    _counter("nvml_device_observed_seconds_total", "observed_seconds", "Time that the samples cover."),
    _counter("nvml_device_energy_joules_total", "energy_joules", "Energy since the driver was loaded."),
    _gauge("nvml_device_power_watts", "power_watts", "Power; from Ampere on the mean of the last second."),
    _gauge("nvml_device_power_limit_watts", "power_limit_watts", "Enforced power limit."),
    _gauge("nvml_device_memory_used_bytes", "memory_used_bytes", "Memory used by all processes and the driver."),
    _gauge("nvml_device_memory_total_bytes", "memory_total_bytes", "Memory of the device."),
    MetricDefinition(
        "nvml_device_clock_hertz", "gauge", ("uuid", "clock"), "Current clock.",
        {(clock,): f"{clock}_clock_hertz" for clock in ("graphics", "sm", "memory")},
    ),
    MetricDefinition(
        "nvml_device_clock_event_active", "gauge", ("uuid", "reason"), "1 if this reason lowers the clocks now.",
        {(reason,): f"clock_event_{reason}" for reason in CLOCK_EVENTS.values() if reason not in _CLOCK_SETTINGS},
    ),
    MetricDefinition(
        "nvml_device_clock_event_seconds_total", "counter", ("uuid", "reason"), "Time with clocks lowered for this.",
        {
            (reason,): f"{reason}_seconds"
            for reason in ("software_power_cap", "software_thermal", "hardware_thermal", "power_brake")
        },
    ),
    _gauge("nvml_device_temperature_celsius", "temperature_celsius", "Temperature of the die."),
    MetricDefinition(
        "nvml_device_pcie_bytes_total", "counter", ("uuid", "direction"), "PCIe traffic since the exporter started.",
        {("transmit",): "pcie_transmit_bytes", ("receive",): "pcie_receive_bytes"},
    ),
    MetricDefinition(
        "nvml_device_ecc_errors_total", "counter", ("uuid", "type"), "ECC errors since the driver was loaded.",
        {("corrected",): "ecc_corrected", ("uncorrected",): "ecc_uncorrected"},
    ),
    _gauge("nvml_device_compute_processes", "compute_processes", "Processes with a context that the driver shows."),
    _gauge("nvml_gpm_sm_active_ratio", "sm_active_ratio", "Share of time in which the SMs had work."),
    _gauge("nvml_gpm_tensor_active_ratio", "tensor_active_ratio", "Share of time with tensor operations."),
    _gauge("nvml_gpm_dram_active_ratio", "dram_active_ratio", "Share of the memory bandwidth that was used."),
)  # fmt: skip
"""Every GPU family, in the order of the scrape."""

HOST_DEFINITIONS = (
    MetricDefinition("host_cpu_seconds_total", "counter", ("mode",), "CPU time of all cores since the boot."),
    MetricDefinition("host_memory_total_bytes", "gauge", (), "Memory of the machine."),
    MetricDefinition("host_memory_available_bytes", "gauge", (), "Memory that programs can get without swapping."),
)
"""Every host family. In a container they show the whole machine."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One published snapshot: the readable devices with their values, and the failed calls by (call, code)."""

    status: Status
    connection: Connection | None = None
    devices: tuple[tuple[DeviceIdentity, Mapping[str, float]], ...] = ()
    last_success_s: float | None = None
    collect_s: float = 0.0
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Device:
    """The newest values of one GPU. The counters outlast the loss of the GPU."""

    reading: dict[str, float] = field(default_factory=dict)
    edge: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    last_sample_ns: int | None = None
    last_pcie: dict[str, float] = field(default_factory=dict)

    def forget_readings(self) -> None:
        """After the library was opened again: a reloaded driver counts from 0, which is not a counter wrap."""
        self.reading, self.edge, self.last_sample_ns, self.last_pcie = {}, {}, None, {}

    def take_reading(self, values: Mapping[str, float]) -> None:
        self.reading = dict(values)
        if "clock_event_reasons" in values:
            mask = int(values["clock_event_reasons"])
            self.reading |= {f"clock_event_{reason}": float(bool(mask & bit)) for bit, reason in CLOCK_EVENTS.items()}
        self.reading |= {
            f"{name.removesuffix('_ns')}_seconds": value / 1e9 for name, value in values.items() if name.endswith("_ns")
        }
        for name in _PCIE_COUNTERS:
            if name in values:
                grown, before = 0.0, self.last_pcie.get(name)
                if before is not None:
                    grown = values[name] - before
                    if grown < 0:
                        grown += 2.0**32 if before < 2**32 else 2.0**64
                self.counters[name] = self.counters.get(name, 0.0) + grown
                self.last_pcie[name] = values[name]

    def take_samples(self, batch: SampleBatch) -> None:
        """Integrate new samples, each a share that ends at a time in ns."""
        for at_ns, share in batch.samples:
            length_s = 0.0
            if self.last_sample_ns is not None:
                length_s = min((at_ns - self.last_sample_ns) / 1e9, LONGEST_SAMPLE_S)
            self.counters["busy_seconds"] = self.counters.get("busy_seconds", 0.0) + share * length_s
            self.counters["observed_seconds"] = self.counters.get("observed_seconds", 0.0) + length_s
            self.last_sample_ns = at_ns

    def take_edge(self, edge: EdgeReading) -> None:
        self.edge = {f"ecc_{kind}": count for kind, count in (edge.ecc_errors or {}).items()}
        if edge.processes is not None:
            self.edge["compute_processes"] = len(edge.processes)


class GpuPolling(Collector):
    """Call `poll` about once per second from one thread; `state` and `collect` work from any thread.

    Keeps the counters that the driver does not: busy and observed seconds, PCIe bytes (the driver's wrap) and errors.
    """

    def __init__(
        self, reader: GpuReader, clock_ns: Callable[[], int] = monotonic_ns, wall_ns: Callable[[], int] = time_ns
    ) -> None:
        self._reader = reader
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._recording: Recording | None = None
        self._permanent: set[tuple[str, str]] = set()
        self._errors: dict[tuple[str, str], int] = {}
        self._devices: dict[str, _Device] = {}  # by UUID
        self.state = GpuState("error")

    def poll(self) -> None:
        """Read what is due and publish it. After the loss of a GPU, try to open the library again."""
        start_ns = self._clock_ns()
        if self._recording is None:
            intervals = Intervals(reconnect=POLL_SECONDS)
            self._recording = Recording(self._reader, intervals, self._clock_ns, self._wall_ns, self._observe)
            self._recording.edge("first")
        else:
            self._recording.tick()
            if self._recording.connection is not self.state.connection:
                for device in self._devices.values():
                    device.forget_readings()
                self._recording.tick()
        status = self._recording.status
        known = [(identity, self._devices[identity.uuid]) for identity in self._recording.devices]
        self.state = GpuState(
            status=status,
            connection=self._recording.connection,
            devices=tuple((identity, {**one.reading, **one.edge, **one.counters}) for identity, one in known),
            last_success_s=self._wall_ns() / 1e9 if status == "ok" else self.state.last_success_s,
            collect_s=(self._clock_ns() - start_ns) / 1e9,
            errors=dict(self._errors),
        )

    def collect(self) -> Iterator[Metric]:
        """Every GPU family that has a value."""
        state = self.state
        points: dict[str, dict[Labels, float]] = {
            "nvml_up": {(): float(state.status == "ok")},
            "nvml_last_success_timestamp_seconds": {} if state.last_success_s is None else {(): state.last_success_s},
            "nvml_collect_duration_seconds": {(): state.collect_s},
            "nvml_errors_total": dict(sorted(state.errors.items())),
            "nvml_device_info": {_identity_labels(one, state.connection): 1.0 for one, _ in state.devices},
        }
        for definition in DEFINITIONS:
            found = points.get(definition.name) or {
                (identity.uuid, *labels): values[quantity]
                for identity, values in state.devices
                for labels, quantity in definition.quantities.items()
                if quantity in values
            }
            if found:
                yield definition.family(found)

    def close(self) -> None:
        """Release the library."""
        self._reader.close()

    def _observe(self, identity: DeviceIdentity, answer: Reading | SampleBatch | EdgeReading) -> None:
        device = self._devices.setdefault(identity.uuid, _Device())
        for call, code in answer.failed.items():
            if code in PERMANENT_CODES:
                if (identity.uuid, call) in self._permanent:
                    continue
                self._permanent.add((identity.uuid, call))
            self._errors[call, code] = self._errors.get((call, code), 0) + 1
        match answer:
            case Reading():
                device.take_reading(answer.values)
            case SampleBatch():
                device.take_samples(answer)
            case EdgeReading():
                device.take_edge(answer)


def _identity_labels(identity: DeviceIdentity, connection: Connection | None) -> Labels:
    driver, cuda = (connection.driver_version, connection.cuda_driver_version) if connection else (None, None)
    mig = {None: "", True: "true", False: "false"}[identity.mig_enabled]
    name, driver, cuda, bus = (text or "" for text in (identity.name, driver, cuda, identity.pci_bus_id))
    return (identity.uuid, str(identity.index), name, driver, cuda, bus, mig)


class HostCollector(Collector):
    """CPU time and memory of the machine, read at each scrape."""

    def collect(self) -> Iterator[Metric]:
        """Every host family. A mode that the kernel does not report is absent."""
        cpu, memory = psutil.cpu_times(), psutil.virtual_memory()
        points: tuple[dict[Labels, float], ...] = (
            {(mode,): getattr(cpu, mode) for mode in CPU_MODES if hasattr(cpu, mode)},
            {(): memory.total},
            {(): memory.available},
        )
        for definition, found in zip(HOST_DEFINITIONS, points, strict=True):
            yield definition.family(found)


class GpuExporter:
    """Polls in its own thread and answers scrapes until `close`."""

    def __init__(self, polling: GpuPolling, host: str, port: int) -> None:
        """Listens at once; port 0 takes a free one. Raises `OSError`."""
        self._polling = polling
        registry = CollectorRegistry()
        registry.register(polling)
        registry.register(HostCollector())
        polling.poll()
        self._server, self._server_thread = start_http_server(port, host, registry)
        metrics = self._server.get_app()
        assert metrics is not None  # `start_http_server` has set it

        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            """The metrics, and at /gpu-info the document for a Triton on this machine, which does not offer one."""
            if environ["PATH_INFO"] != "/gpu-info":
                return metrics(environ, start_response)
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(gpu_info(None)).encode()]

        self._server.set_app(answer)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="gpu-polling", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that it listens on."""
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
