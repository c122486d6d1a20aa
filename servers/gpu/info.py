"""The `/gpu-info` document: this machine's GPUs and what the server really runs on, null where that is unknown.

The native server offers it. For a Triton, which has no such route, it is put together from its metadata, the model's
configuration, its log (which names the execution provider of nodes, or our engine) and the GPUs as the driver or the
exporter on the server's machine shows them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from servers.gpu.readings import (
    CLOCK_EVENTS,
    SENTENCES,
    Connection,
    DeviceIdentity,
    EdgeReading,
    GpuReader,
    Reading,
    SampleBatch,
    Status,
)

SCHEMA = "abserve.gpu-info/1"
MAX_CPU_TIME_RATIO = 0.01
"""Share of node time on the CPU up to which ONNX Runtime on a GPU counts as a GPU engine."""
GPU_IS_LOST = 15
"""The driver's return code for it."""
Document = dict[str, object]

_QUANTITIES: Mapping[str, tuple[str, str]] = {
    "memory_total_bytes": ("memory_total_bytes", "memory"),
    "memory_used_bytes": ("memory_used_bytes", "memory"),
    "utilization_ratio": ("utilization_ratio", "utilization"),
    "power_watts": ("power_watts", "power"),
    "power_limit_watts": ("power_limit_watts", "power_limit"),
    "energy_joules_total": ("energy_joules", "energy"),
    "temperature_celsius": ("temperature_celsius", "temperature"),
    "sm_clock_hertz": ("sm_clock_hertz", "clocks"),
}
"""Fields of a device in the document: their names among `Reading.values`, and the call that reads them."""
_WHOLE = ("memory_total_bytes", "memory_used_bytes", "temperature_celsius", "sm_clock_hertz")

_ENGINE_READY = re.compile(r"engine ready: (?P<json>\{.*\})")
_PLACED = re.compile(r"(?:Node\(s\)|All nodes) placed on \[(?P<provider>\w+)\]\. Number of nodes: (?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the engine says of itself. Of `details` these are shown, where an engine has read them back:

    cuda_build, cuda_available, device_uuid, memory_allocated_bytes, parameters_by_device {device: count},
    nodes_by_provider {execution provider: count}, cpu_time_ratio (share of node time), cpu_non_shape_ops [operator],
    canary {wall_seconds, cuda_event_seconds, kernel_count, top_kernels} of one profiled inference.
    """

    kind: str
    version: str
    device: str
    details: Mapping[str, object] = field(default_factory=dict)


def gpu_info(runtime: Runtime | None, reader: GpuReader | None = None) -> Document:
    """The whole document, every key present. Reads the driver unless another reader is given; some milliseconds."""
    if reader is None:
        from servers.gpu.nvml import NvmlReader  # loads the driver's library: only when somebody asks

        reader = NvmlReader()
    try:
        connection = reader.connect()
        read = [(device, reader.reading(device.index), reader.edge(device.index)) for device in connection.devices]
    finally:
        reader.close()
    status, code = connection.status, connection.return_code
    if any(reading.lost or edge.lost for _, reading, edge in read):
        status, code = "gpu_lost", GPU_IS_LOST
    return {
        "schema": SCHEMA,
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "status": status,
        "message": SENTENCES[status],
        "nvml": {
            "return_code": code,
            "error": connection.error,
            "driver_version": connection.driver_version,
            "nvml_version": connection.nvml_version,
            "cuda_driver_version": connection.cuda_driver_version,
        },
        "host": _host(),
        "devices": [_device(*one) for one in read],
        "runtime": _runtime(runtime, connection),
    }


def _host() -> Document:
    proc = Path("/proc")
    return {
        "in_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "pid_namespace": _link(proc / "self/ns/pid"),
        "wsl": Path("/dev/dxg").exists(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except OSError:
        return None


def _device(identity: DeviceIdentity, reading: Reading, edge: EdgeReading) -> Document:
    """One GPU; `unavailable` has the driver's error code for each field that could not be read."""
    values = reading.values
    unavailable = dict(identity.failed)
    quantities: Document = {}
    for name, (quantity, call) in _QUANTITIES.items():
        value = values.get(quantity)
        quantities[name] = int(value) if value is not None and name in _WHOLE else value
        if value is None and call in reading.failed:
            unavailable[name] = reading.failed[call]
    mask = values.get("clock_event_reasons")
    if mask is None and "clock_events" in reading.failed:
        unavailable["clock_event_reasons"] = reading.failed["clock_events"]
    if edge.processes is None and "processes" in edge.failed:
        unavailable["processes"] = edge.failed["processes"]
    return {
        "index": identity.index,
        "uuid": identity.uuid,
        "name": identity.name,
        "pci_bus_id": identity.pci_bus_id,
        "compute_capability": identity.compute_capability,
        "mig_enabled": identity.mig_enabled,
        **quantities,
        "clock_event_reasons": None if mask is None else [n for bit, n in CLOCK_EVENTS.items() if int(mask) & bit],
        "processes": None if edge.processes is None else [asdict(process) for process in edge.processes],
        "unavailable": unavailable,
        "pcie": {"gen": identity.pcie_gen, "width": identity.pcie_width},
        "supports": {"gpm": identity.supports_gpm},
    }


def _runtime(runtime: Runtime | None, connection: Connection) -> Document | None:
    if runtime is None:
        return None
    details = runtime.details
    canary = details.get("canary")
    placement: Document = {
        "params_by_device": details.get("parameters_by_device"),
        "ep_nodes": details.get("nodes_by_provider"),
        "cpu_time_ratio": details.get("cpu_time_ratio"),
        "cpu_non_shape_ops": details.get("cpu_non_shape_ops"),
    }
    return {
        "kind": runtime.kind,
        "version": runtime.version,
        "device": runtime.device,
        "cuda_build": details.get("cuda_build"),
        "cuda_available": details.get("cuda_available"),
        "used_device_uuid": _used_uuid(runtime.device, details.get("device_uuid"), connection),
        "placement": {"result": _placement(runtime, placement, canary), **placement},
        "memory_allocated_bytes": details.get("memory_allocated_bytes"),
        "canary": canary,
    }


def _placement(runtime: Runtime, placement: Document, canary: object) -> str:
    """gpu, cpu, partial or unknown. A CUDA device that was asked for proves nothing: that takes kernels in a profile
    of what was executed, or a list of which nodes which execution provider took."""
    if runtime.device == "cpu":
        return "cpu"
    nodes = placement["ep_nodes"]
    if isinstance(nodes, Mapping) and nodes:
        on_cpu = int(nodes.get("CPUExecutionProvider", 0))
        if on_cpu == sum(nodes.values()):
            return "cpu"
        ratio = placement["cpu_time_ratio"]
        negligible = isinstance(ratio, float | int) and ratio <= MAX_CPU_TIME_RATIO
        return "gpu" if on_cpu == 0 or (negligible and not placement["cpu_non_shape_ops"]) else "partial"
    kernels = canary.get("kernel_count") if isinstance(canary, Mapping) else None
    parameters = placement["params_by_device"]
    if not kernels or not isinstance(parameters, Mapping) or not parameters:
        return "unknown"
    return "gpu" if all(str(device).startswith("cuda") for device in parameters) else "partial"


def _used_uuid(device: str, told: object, connection: Connection) -> str | None:
    """What the runtime says, else the only GPU that the driver shows; CUDA's numbers are not the driver's."""
    if not device.startswith("cuda"):
        return None
    if isinstance(told, str) and told:
        return told if told.startswith(("GPU-", "MIG-")) else f"GPU-{told}"  # torch leaves the prefix out
    return connection.devices[0].uuid if len(connection.devices) == connection.device_count == 1 else None


def triton_info(
    server: Mapping[str, Any], config: Mapping[str, Any], log: str | None, reader: GpuReader | None = None
) -> Document:
    """`server`: the answer of /v2; `config`: of /v2/models/M/config; `log`: the server's whole output, if it is at
    hand. `reader` None: the driver of this machine, which must then be the server's."""
    in_effect = engine_in_log(log or "") or {}
    details = dict(in_effect.get("details") or {})
    nodes = placed_nodes(log or "")
    if nodes and not details.get("nodes_by_provider"):
        details["nodes_by_provider"] = nodes
    runtime = Runtime(
        kind="triton",
        version=str(server.get("version") or ""),
        device=str(in_effect.get("device") or _configured_device(config, nodes)),
        details=details,
    )
    document = gpu_info(runtime, reader)
    shown = document["runtime"]
    assert isinstance(shown, dict)
    shown["backend"] = config.get("backend") or config.get("platform")
    shown["engine"] = in_effect.get("kind")
    shown["instance_kinds"] = sorted(_kinds(config))
    return document


def engine_in_log(log: str) -> Mapping[str, Any] | None:
    """The settings in effect that our python model logs when its engine is ready; the last one counts."""
    found: Mapping[str, Any] | None = None
    for line in log.splitlines():
        match = _ENGINE_READY.search(line)
        if match is None:
            continue
        text = match["json"]
        if '\\"' in text:  # Triton writes messages as JSON strings
            text = str(json.loads(f'"{text}"'))
        try:
            in_effect = json.loads(text).get("in_effect")
        except ValueError:
            continue
        if isinstance(in_effect, Mapping):
            found = in_effect
    return found


def placed_nodes(log: str) -> dict[str, int]:
    """Nodes by execution provider, as the onnxruntime backend logs them with --log-verbose=1."""
    return {match["provider"]: int(match["count"]) for match in _PLACED.finditer(log)}


def _kinds(config: Mapping[str, Any]) -> set[str]:
    groups = config.get("instance_group")
    return {str(g.get("kind")) for g in groups if isinstance(g, Mapping)} if isinstance(groups, list) else set()


def _configured_device(config: Mapping[str, Any], nodes: Mapping[str, int]) -> str:
    """Without a word in the log: CPU where every instance is, but for the python backend, which may lie."""
    backend = str(config.get("backend") or config.get("platform") or "")
    if backend.startswith("tensorrt") or any(name.startswith(("CUDA", "Tensorrt")) for name in nodes):
        return "cuda"
    if backend != "python" and _kinds(config) == {"KIND_CPU"}:
        return "cpu"
    return "unknown"


class ExporterReader:
    """A `GpuReader` over the text of one scrape of our exporter, for GPUs of another machine or container."""

    def __init__(self, metrics: str) -> None:
        self._metrics = metrics
        self._values: dict[int, dict[str, float]] = {}

    def connect(self) -> Connection:
        """What the exporter shows; the rest is None."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            samples = [sample for one in text_string_to_metric_families(self._metrics) for sample in one.samples]
        except (ValueError, IndexError):  # the second for a label without a name
            return Connection(status="error", error="the exporter's answer is not in Prometheus' text format")
        up = next((sample.value for sample in samples if sample.name == "nvml_up"), None)
        identities = [sample.labels for sample in samples if sample.name == "nvml_device_info"]
        values: dict[str, dict[str, float]] = {}
        for sample in samples:
            quantity, _ = _QUANTITIES.get(sample.name.removeprefix("nvml_device_"), ("", ""))
            if quantity and sample.name.startswith("nvml_device_"):
                values.setdefault(sample.labels["uuid"], {})[quantity] = sample.value
        devices = sorted(map(_exported_identity, identities), key=lambda device: device.index)
        self._values = {device.index: values.get(device.uuid, {}) for device in devices}
        known = identities[0] if identities else {}
        status: Status = "ok" if up == 1.0 else "error"
        return Connection(
            status=status,
            error=None if up == 1.0 else "the exporter reports nvml_up 0" if up == 0.0 else "no nvml_up in the scrape",
            driver_version=known.get("driver_version") or None,
            cuda_driver_version=known.get("cuda_version") or None,
            devices=tuple(devices),
            device_count=len(devices),
        )

    def reading(self, index: int) -> Reading:
        """The gauges of one GPU."""
        return Reading(values=self._values[index])

    def samples(self, _index: int, _since_us: int) -> SampleBatch:
        """The exporter keeps none."""
        return SampleBatch()

    def edge(self, _index: int) -> EdgeReading:
        """The exporter names no processes."""
        return EdgeReading()

    def call_costs(self, _index: int) -> Mapping[str, int]:
        """Nothing is called."""
        return {}

    def close(self) -> None:
        """Nothing to release."""


def _exported_identity(labels: Mapping[str, str]) -> DeviceIdentity:
    return DeviceIdentity(
        index=int(labels.get("index") or 0),
        uuid=labels["uuid"],
        name=labels.get("name") or None,
        pci_bus_id=labels.get("pci_bus_id") or None,
        mig_enabled={"true": True, "false": False}.get(labels.get("mig", "")),
    )
