"""The `/gpu-info` document: the GPUs of this machine and the device that a server executes on. Null means unknown.

The native server offers the document. For Triton, which has no such route, it is assembled from the server's metadata,
the model's configuration, the log (only it names the execution provider of each node, or the python model's engine)
and the document of the exporter on the server's machine, or of this machine.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from servers.gpu.readings import CLOCK_EVENTS, SENTENCES, DeviceIdentity, EdgeReading, GpuReader, Reading

SCHEMA = "abserve.gpu-info/1"
MAX_CPU_TIME_RATIO = 0.01
"""Share of node time on the CPU up to which ONNX Runtime on a GPU counts as a GPU engine."""
GPU_IS_LOST = 15
"""The driver's return code for a lost GPU."""
_IDENTITY = ("index", "uuid", "name", "pci_bus_id", "compute_capability", "mig_enabled")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
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
"""Fields of a device in the document: the quantity in `Reading.values`, and the call that reads it."""
_WHOLE = ("memory_total_bytes", "memory_used_bytes", "temperature_celsius", "sm_clock_hertz")

_ENGINE_READY = re.compile(r"engine ready: (?P<json>\{.*\})")
_PLACED = re.compile(r"(?:Node\(s\)|All nodes) placed on \[(?P<provider>\w+)\]\. Number of nodes: (?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class Runtime:
    """The engine's own report. The document shows these `details`, where the engine has read them back:

    cuda_build, cuda_available, device_uuid, memory_allocated_bytes, parameters_by_device {device: count},
    nodes_by_provider {execution provider: count}, cpu_time_ratio (share of node time), cpu_non_shape_ops [operator],
    kernel_probe {wall_seconds, cuda_event_seconds, kernel_count, top_kernels}, the kernel probe of one inference.
    """

    kind: str
    version: str
    device: str
    details: Mapping[str, object] = field(default_factory=dict)


def gpu_info(runtime: Runtime | None, reader: GpuReader | None = None) -> Document:
    """The whole document, every key present. Without `reader` it asks the driver, which takes some milliseconds."""
    if reader is None:
        from servers.gpu.nvml import NvmlReader  # loads the driver's library only when this is called

        reader = NvmlReader()
    try:
        connection = reader.connect()
        read = [(device, reader.reading(device.index), reader.edge(device.index)) for device in connection.devices]
    finally:
        reader.close()
    status, code = connection.status, connection.return_code
    if any(reading.lost or edge.lost for _, reading, edge in read):
        status, code = "gpu_lost", GPU_IS_LOST
    document: Document = {
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
        "devices": [_device(*device) for device in read],
        "runtime": None,
    }
    return document if runtime is None else {**document, "runtime": _runtime(runtime, document)}


def in_container() -> bool:
    """Whether this process runs inside a container."""
    named = os.environ.get("container")  # noqa: SIM112 - systemd and Podman write it so
    return bool(named) or any(mark.exists() for mark in CONTAINER_MARKS)


def _host() -> Document:
    pid_namespace = None
    with suppress(OSError):
        pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    return {
        "in_container": in_container(),
        "pid_namespace": pid_namespace,
        "wsl": Path("/dev/dxg").exists(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _device(identity: DeviceIdentity, reading: Reading, edge: EdgeReading) -> Document:
    """One GPU; `unavailable` has the driver's error code for each field that could not be read."""
    values = reading.values
    mask = values.get("clock_event_reasons")
    document: Document = {name: getattr(identity, name) for name in _IDENTITY}
    for name, (quantity, _) in _QUANTITIES.items():
        value = values.get(quantity)
        document[name] = int(value) if value is not None and name in _WHOLE else value
    reasons = [name for bit, name in CLOCK_EVENTS.items() if mask is not None and int(mask) & bit]
    document["clock_event_reasons"] = None if mask is None else reasons
    document["processes"] = None if edge.processes is None else [asdict(process) for process in edge.processes]
    failed = {**reading.failed, **edge.failed}
    calls = {name: call for name, (_, call) in _QUANTITIES.items()}
    calls |= {"clock_event_reasons": "clock_events", "processes": "processes"}
    missing = {name: failed[call] for name, call in calls.items() if document[name] is None and call in failed}
    return {
        **document,
        "unavailable": {**identity.failed, **missing},
        "pcie": {"gen": identity.pcie_gen, "width": identity.pcie_width},
        "supports": {"gpm": identity.supports_gpm},
    }


def _runtime(runtime: Runtime, machine: Mapping[str, Any]) -> Document:
    details = runtime.details
    used = _used_uuids(runtime.device, details.get("device_uuid"), machine)
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
        "used_device_uuid": used[0] if len(used) == 1 else None,
        "used_device_uuids": used,
        "placement": {"result": _placement(runtime.device, placement, details.get("kernel_probe")), **placement},
        "memory_allocated_bytes": details.get("memory_allocated_bytes"),
        "kernel_probe": details.get("kernel_probe"),
    }


def _placement(device: str, placement: Document, kernel_probe: object) -> str:
    """gpu, cpu, partial or unknown. The CUDA device of the settings proves nothing: it takes kernels in a profile of
    an inference, or the execution provider of each node."""
    if device.startswith("cpu"):
        return "cpu"
    nodes = placement["ep_nodes"]
    if isinstance(nodes, Mapping) and nodes:
        on_cpu = int(nodes.get("CPUExecutionProvider", 0))
        if on_cpu == sum(nodes.values()):
            return "cpu"
        ratio = placement["cpu_time_ratio"]
        negligible = isinstance(ratio, float | int) and ratio <= MAX_CPU_TIME_RATIO
        return "gpu" if on_cpu == 0 or (negligible and not placement["cpu_non_shape_ops"]) else "partial"
    kernels = kernel_probe.get("kernel_count") if isinstance(kernel_probe, Mapping) else None
    parameters = placement["params_by_device"]
    if not kernels or not isinstance(parameters, Mapping) or not parameters:
        return "unknown"
    return "gpu" if all(str(device).startswith("cuda") for device in parameters) else "partial"


def _used_uuids(device: str, reported: object, machine: Mapping[str, Any]) -> list[str]:
    """The UUIDs that the runtime reports, separated by commas, one per device; else that of the only GPU: CUDA's device
    numbers are not the driver's."""
    if not device.startswith("cuda"):
        return []
    if isinstance(reported, str) and reported:  # torch leaves the prefix out
        uuids = [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in reported.split(",")]
        return uuids if len(uuids) == len(device.split(",")) else []
    devices = machine["devices"]
    only = len(devices) == 1 and machine.get("status") == "ok" and "," not in device
    return [str(devices[0]["uuid"])] if only else []


def details_on_all(all_details: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The first engine's details, with what proves where the model is on each device: all UUIDs, all parameters and
    nodes, and the kernel probe with the fewest kernels."""
    details: dict[str, object] = {**all_details[0]}
    if all(each.get("device_uuid") for each in all_details):
        details["device_uuid"] = ",".join(str(each["device_uuid"]) for each in all_details)
    for name in ("parameters_by_device", "nodes_by_provider"):
        if all(each.get(name) for each in all_details):
            details[name] = dict(sum((Counter(each[name]) for each in all_details), Counter()))
    if all(each.get("kernel_probe") for each in all_details):
        details["kernel_probe"] = min((each["kernel_probe"] for each in all_details), key=itemgetter("kernel_count"))
    else:
        details.pop("kernel_probe", None)
    return details


def triton_info(
    server: Mapping[str, Any], config: Mapping[str, Any], log: str | None, machine: Mapping[str, Any]
) -> Document:
    """The document of a Triton, from its answers to /v2 and /v2/models/M/config, its whole log if there is one, and its
    machine. `machine` is the /gpu-info document of the machine on which it runs."""
    listed = config.get("instance_group")
    groups = [group for group in listed if isinstance(group, Mapping)] if isinstance(listed, list) else []
    in_effect = engine_in_log(log or "", _devices_of(groups)) or {}
    details = dict(in_effect.get("details") or {})
    nodes = placed_nodes(log or "")
    if nodes and not details.get("nodes_by_provider"):
        details["nodes_by_provider"] = nodes
    backend = config.get("backend") or config.get("platform")
    kinds = {str(group.get("kind")) for group in groups}
    device = in_effect.get("device")
    if not device:
        # The log names no device. The backend and the instances do, except the python backend's, which may be wrong.
        on_gpu = str(backend).startswith("tensorrt") or any(name.startswith(("CUDA", "Tensorrt")) for name in nodes)
        device = "cuda" if on_gpu else "cpu" if backend != "python" and kinds == {"KIND_CPU"} else "unknown"
    runtime = _runtime(Runtime("triton", str(server.get("version") or ""), str(device), details), machine)
    shown = {"backend": backend, "engine": in_effect.get("kind"), "instance_kinds": sorted(kinds)}
    return {**machine, "runtime": {**runtime, **shown}}


def _devices_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The GPUs that have instances of a model."""
    listed = [group.get("gpus") for group in groups]
    numbers = {number for some in listed if isinstance(some, list) for number in some if isinstance(number, int)}
    return [f"cuda:{number}" for number in sorted(numbers)]


def engine_in_log(log: str, devices: Sequence[str] = ()) -> Mapping[str, Any] | None:
    """The settings in effect that the python model logs when its engine is ready; the last ones count. With several
    `devices`: those of each, as one; those of the last one that the log has, if it lacks one."""
    latest: Mapping[str, Any] | None = None
    by_device: dict[str, Mapping[str, Any]] = {}
    for match in _ENGINE_READY.finditer(log):
        text = match["json"]
        try:
            if '\\"' in text:  # Triton writes messages as JSON strings
                text = str(json.loads(f'"{text}"'))
            in_effect = json.loads(text).get("in_effect")
        except ValueError:
            continue
        if isinstance(in_effect, Mapping):
            latest = in_effect
            by_device[str(in_effect.get("device"))] = in_effect
    if len(devices) > 1 and all(device in by_device for device in devices):
        with suppress(TypeError, ValueError, KeyError):  # details that no engine of ours has
            details = details_on_all([dict(by_device[device]["details"]) for device in devices])
            return {**by_device[devices[0]], "device": ",".join(devices), "details": details}
    return latest


def placed_nodes(log: str) -> dict[str, int]:
    """Nodes by execution provider, as the onnxruntime backend logs them with --log-verbose=1."""
    return {match["provider"]: int(match["count"]) for match in _PLACED.finditer(log)}
