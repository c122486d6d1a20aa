"""GPU metrics for Prometheus, prefix `nvml_`: families built fresh from one immutable snapshot at each scrape.

What could not be read is absent, never 0; without a GPU there is `nvml_up 0` and nothing that looks like one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servers.gpu.polling import DeviceState, GpuPolling, GpuState
from servers.gpu.series import CLOCK_EVENTS

DEFAULT_PORT = 9445
POLL_SECONDS = 1.0


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
_CLOCKS = ("graphics", "sm", "memory")
_TIMED_EVENTS = ("software_power_cap", "software_thermal", "hardware_thermal", "power_brake")
_DIRECTIONS = {"transmit": "pcie_transmit_bytes", "receive": "pcie_receive_bytes"}

Point = tuple[tuple[str, ...], float]


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
