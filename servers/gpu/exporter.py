"""GPU metrics (prefix `nvml_`) and host metrics (prefix `host_`) for Prometheus.

A value that could not be read is absent, never 0. Without a GPU, and while the driver hangs or its answers cannot be
read, there is `nvml_up 0` and no series of a device.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns, time_ns
from typing import Any, Literal

import psutil
import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servers.gpu.info import gpu_info
from servers.gpu.readings import (
    CLOCK_EVENTS,
    DeviceIdentity,
    EdgeReading,
    GpuReader,
    NvmlConnection,
    Reading,
    SampleBatch,
    Status,
)
from servers.gpu.sampler import INTERVALS_S, Recording

log = structlog.get_logger("abserve.gpu")

POLL_SECONDS = 1.0
STALE_SECONDS = 10.0
"""Values that are older are not published: the poll that should have renewed them waits for the driver."""
PERMANENT_CODES = frozenset({"NOT_SUPPORTED", "FUNCTION_NOT_FOUND"})
"""Errors counted once per device and call: they describe the device and are not a new failure each time."""
LONGEST_SAMPLE_S = 1.0
"""A utilisation sample covers at most this time (nvmlDeviceGetUtilizationRates: 1/6 to 1 s)."""
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""These modes add up to all CPU time: the kernel counts guests as user time, too."""

Labels = tuple[str, ...]
_CLOCK_SETTINGS = ("applications_clocks", "sync_boost", "display_clocks")
"""Clock events that an administrator chose; they have no series."""
_PCIE_COUNTERS = frozenset({"pcie_transmit_bytes", "pcie_receive_bytes"})


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A family of metrics. `quantities` maps the labels after `uuid` to the value of a device that they show."""

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
            family.add_metric(labels, value)  # type: ignore[attr-defined]  # both kinds have it, their base does not
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


class _DeviceValues:
    """The newest values of one GPU. The counters outlast the loss of the GPU."""

    def __init__(self) -> None:
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.forget_readings()

    def forget_readings(self) -> None:
        """Call it after the library was opened again: a reloaded driver counts from 0, which is not a counter wrap."""
        self._reading: dict[str, float] = {}
        self._edge: dict[str, float] = {}
        self._last_sample_ns: int | None = None
        self._last_pcie: dict[str, float] = {}

    @property
    def values(self) -> dict[str, float]:
        """Every value by its quantity."""
        return {**self._reading, **self._edge, **self.counters}

    def take(self, answer: Reading | SampleBatch | EdgeReading) -> None:
        """Store an answer of the reader."""
        match answer:
            case Reading(values):
                self._reading = dict(values)
                for name, value in values.items():
                    if name.endswith("_ns"):
                        self._reading[f"{name.removesuffix('_ns')}_seconds"] = value / 1e9
                if "clock_event_reasons" in values:
                    mask = int(values["clock_event_reasons"])
                    self._reading |= {
                        f"clock_event_{name}": float(bool(mask & bit)) for bit, name in CLOCK_EVENTS.items()
                    }
                for name in _PCIE_COUNTERS & values.keys():
                    before = self._last_pcie.get(name, values[name])
                    wrapped = (2.0**32 if before < 2**32 else 2.0**64) if values[name] < before else 0.0
                    self.counters[name] += values[name] - before + wrapped
                    self._last_pcie[name] = values[name]
            case SampleBatch(samples):  # each is a share that ends at a time in ns
                for at_ns, share in samples:
                    length_s = min((at_ns - (self._last_sample_ns or at_ns)) / 1e9, LONGEST_SAMPLE_S)
                    self.counters["busy_seconds"] += share * length_s
                    self.counters["observed_seconds"] += length_s
                    self._last_sample_ns = at_ns
            case EdgeReading(processes, ecc_errors):
                self._edge = {f"ecc_{kind}": count for kind, count in (ecc_errors or {}).items()}
                if processes is not None:
                    self._edge["compute_processes"] = len(processes)


class GpuPolling:
    """Reads the GPUs for Prometheus: call `poll` about once per second from one thread; `collect` works from any. Keeps
    the counters that the driver does not: busy and observed seconds, PCIe bytes (the driver's wrap) and errors."""

    def __init__(
        self, reader: GpuReader, clock_ns: Callable[[], int] = monotonic_ns, wall_ns: Callable[[], int] = time_ns
    ) -> None:
        self._reader = reader
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._recording: Recording | None = None
        self._connection: NvmlConnection | None = None
        self._permanent: set[tuple[str, str]] = set()
        self._errors: Counter[tuple[str, ...]] = Counter()
        self._devices: defaultdict[str, _DeviceValues] = defaultdict(_DeviceValues)  # by UUID
        self._last_success: dict[Labels, float] = {}
        self._polled_ns = clock_ns()
        self.status: Status = "error"
        self.points: Mapping[str, Mapping[Labels, float]] = {}
        """Values by family and labels; each poll replaces all of them."""

    def poll(self) -> None:
        """Read what is due and publish it. After the loss of a GPU, or an exception, try to open the library again."""
        start_ns = self._clock_ns()
        devices: Mapping[str, Labels] = {}  # by UUID
        try:
            recording = self._read()
            self.status = recording.status
            devices = {device.uuid: _identity(device, recording.connection) for device in recording.devices}
        except Exception as error:
            call = "poll", type(error).__name__
            if not self._errors[call]:  # once for each kind: it may come every second
                log.exception("the GPUs could not be read and have no values until they can be")
            self._errors[call] += 1
            self._recording, self.status = None, "error"
        if self.status == "ok":
            self._last_success = {(): self._wall_ns() / 1e9}
        points: dict[str, Mapping[Labels, float]] = {
            "nvml_up": {(): float(self.status == "ok")},
            "nvml_last_success_timestamp_seconds": self._last_success,
            "nvml_collect_duration_seconds": {(): (self._clock_ns() - start_ns) / 1e9},
            "nvml_errors_total": dict(sorted(self._errors.items())),
            "nvml_device_info": dict.fromkeys(devices.values(), 1.0),
        }
        values = {uuid: self._devices[uuid].values for uuid in devices}
        for definition in DEFINITIONS:
            if definition.quantities:
                points[definition.name] = {
                    (uuid, *labels): quantities[quantity]
                    for uuid, quantities in values.items()
                    for labels, quantity in definition.quantities.items()
                    if quantity in quantities
                }
        self.points, self._polled_ns = points, self._clock_ns()

    def _read(self) -> Recording:
        """Read what is due, all of it after the library was opened."""
        if self._recording is None:
            intervals_s = {**INTERVALS_S, "reconnect": POLL_SECONDS}
            recording = Recording(self._reader, intervals_s, self._clock_ns, self._wall_ns, self._observe)
            self._forget_readings()
            recording.edge("first")
            self._recording = recording
        else:
            recording = self._recording
            recording.tick()
            if recording.connection is not self._connection:
                self._forget_readings()
                recording.tick()
        self._connection = recording.connection
        return recording

    def _forget_readings(self) -> None:
        for device in self._devices.values():
            device.forget_readings()

    def collect(self) -> Iterator[Metric]:
        """Every GPU family that has a value."""
        points = self.points
        if self._clock_ns() - self._polled_ns > STALE_SECONDS * 1e9:
            still_true = ("nvml_last_success_timestamp_seconds", "nvml_errors_total")
            points = {"nvml_up": {(): 0.0}, **{name: points[name] for name in still_true if name in points}}
        for definition in DEFINITIONS:
            if points.get(definition.name):
                yield definition.family(points[definition.name])

    def close(self) -> None:
        """Release the library."""
        self._reader.close()

    def _observe(self, identity: DeviceIdentity, answer: Reading | SampleBatch | EdgeReading) -> None:
        for call, code in answer.failed.items():
            if code in PERMANENT_CODES:
                if (identity.uuid, call) in self._permanent:
                    continue
                self._permanent.add((identity.uuid, call))
            self._errors[call, code] += 1
        self._devices[identity.uuid].take(answer)


def _identity(identity: DeviceIdentity, connection: NvmlConnection) -> Labels:
    mig = {None: "", True: "true", False: "false"}[identity.mig_enabled]
    texts = (identity.name, connection.driver_version, connection.cuda_driver_version, identity.pci_bus_id)
    return (identity.uuid, str(identity.index), *(text or "" for text in texts), mig)


class GpuExporter(Collector):
    """Polls in its own thread and answers scrapes until `close`."""

    def __init__(self, polling: GpuPolling, host: str, port: int) -> None:
        """Listens at once; port 0 takes a free one. Raises `OSError`."""
        self._polling = polling
        registry = CollectorRegistry()
        registry.register(self)
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

    def collect(self) -> Iterator[Metric]:
        """Every GPU family that has a value, then CPU time and memory of the machine as they are now. A mode that the
        kernel does not report is absent."""
        yield from self._polling.collect()
        cpu, memory = psutil.cpu_times(), psutil.virtual_memory()
        points: tuple[dict[Labels, float], ...] = (
            {(mode,): getattr(cpu, mode) for mode in CPU_MODES if hasattr(cpu, mode)},
            {(): memory.total},
            {(): memory.available},
        )
        for definition, values in zip(HOST_DEFINITIONS, points, strict=True):
            yield definition.family(values)

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
