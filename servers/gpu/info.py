"""The `/gpu-info` document: this machine's GPUs and what the server really runs on, null where that is unknown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from servers.gpu.reader import SENTENCES, DeviceSnapshot, GpuReader, GpuSnapshot

SCHEMA = "abserve.gpu-info/1"
Document = dict[str, object]


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the engine says of itself; `details` are its own names for what it has read back."""

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
    return {
        "kind": runtime.kind,
        "version": runtime.version,
        "device": runtime.device,
        "cuda_build": details.get("cuda_build"),
        "cuda_available": details.get("cuda_available"),
        "used_device_uuid": _used_uuid(runtime.device, snapshot),
        "placement": {
            # A CUDA device that was asked for proves nothing; that takes a profile of what was executed.
            "result": "cpu" if runtime.device == "cpu" else "unknown",
            "params_by_device": details.get("parameters_by_device"),
            "ep_nodes": details.get("nodes_by_provider"),
            "cpu_time_ratio": None,
            "cpu_non_shape_ops": None,
        },
        "memory_allocated_bytes": None,
        "canary": None,
    }


def _used_uuid(device: str, snapshot: GpuSnapshot) -> str | None:
    """CUDA's number is the driver's number only while nothing renumbers the devices."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    same = [found for found in snapshot.devices if found.index == int(index or 0)]
    return same[0].uuid if same and len(snapshot.devices) == 1 else None
