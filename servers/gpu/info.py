"""The `/gpu-info` document: this machine's GPUs and what the server really runs on, null where that is unknown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from servers.gpu.reader import SENTENCES, DeviceSnapshot, GpuReader, GpuSnapshot

SCHEMA = "abserve.gpu-info/1"
MAX_CPU_TIME_RATIO = 0.01
Document = dict[str, object]


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
        from servers.gpu.snapshot_reader import NvmlReader  # loads the driver's library: only when somebody asks

        reader = NvmlReader()
    try:
        snapshot = reader.read()
    finally:
        reader.close()
    return {
        "schema": SCHEMA,
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "status": snapshot.status,
        "message": SENTENCES[snapshot.status],
        "nvml": {
            "return_code": snapshot.return_code,
            "error": snapshot.error,
            "driver_version": snapshot.driver_version,
            "nvml_version": snapshot.nvml_version,
            "cuda_driver_version": snapshot.cuda_driver_version,
        },
        "host": _host(),
        "devices": [_device(device) for device in snapshot.devices],
        "runtime": _runtime(runtime, snapshot),
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


def _device(device: DeviceSnapshot) -> Document:
    document = asdict(device)
    document["pcie"] = {"gen": document.pop("pcie_gen"), "width": document.pop("pcie_width")}
    document["supports"] = {"gpm": document.pop("supports_gpm")}
    return document


def _runtime(runtime: Runtime | None, snapshot: GpuSnapshot) -> Document | None:
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
        "used_device_uuid": _used_uuid(runtime.device, details.get("device_uuid"), snapshot),
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


def _used_uuid(device: str, told: object, snapshot: GpuSnapshot) -> str | None:
    """What the runtime says, else the only GPU that the driver shows; CUDA's numbers are not the driver's."""
    if not device.startswith("cuda"):
        return None
    if isinstance(told, str) and told:
        return told if told.startswith(("GPU-", "MIG-")) else f"GPU-{told}"  # torch leaves the prefix out
    return snapshot.devices[0].uuid if len(snapshot.devices) == 1 else None
