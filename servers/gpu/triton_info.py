"""The `/gpu-info` document for a Triton server, which has no such endpoint: assembled from what can be had of it.

From its metadata, the model's configuration, its log (where the execution provider of nodes, or our engine, is named)
and the GPUs as the driver or the exporter on the server's machine shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from servers.gpu.info import Document, Runtime, gpu_info
from servers.gpu.reader import DeviceSnapshot, GpuReader, GpuSnapshot, Status

_ENGINE_READY = re.compile(r"engine ready: (?P<json>\{.*\})")
_PLACED = re.compile(r"(?:Node\(s\)|All nodes) placed on \[(?P<provider>\w+)\]\. Number of nodes: (?P<count>\d+)")
_METRIC = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_FIELDS = {
    "nvml_device_memory_total_bytes": "memory_total_bytes",
    "nvml_device_memory_used_bytes": "memory_used_bytes",
    "nvml_device_utilization_ratio": "utilization_ratio",
    "nvml_device_power_watts": "power_watts",
    "nvml_device_power_limit_watts": "power_limit_watts",
    "nvml_device_energy_joules_total": "energy_joules_total",
    "nvml_device_temperature_celsius": "temperature_celsius",
}
_WHOLE = ("memory_total_bytes", "memory_used_bytes", "temperature_celsius")


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
        device=str(in_effect.get("device") or _device(config, nodes)),
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


def _device(config: Mapping[str, Any], nodes: Mapping[str, int]) -> str:
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

    def read(self) -> GpuSnapshot:
        """What the exporter shows; the rest is None."""
        identities: dict[str, dict[str, str]] = {}
        values: dict[str, dict[str, float]] = {}
        up: float | None = None
        for match in _METRIC.finditer(self._metrics):
            name, value = match["name"], float(match["value"])
            labels = {
                found["name"]: _ESCAPED.sub(r"\1", found["value"]) for found in _LABEL.finditer(match["labels"] or "")
            }
            if name == "nvml_up":
                up = value
            elif name == "nvml_device_info":
                identities[labels["uuid"]] = labels
            elif name in _FIELDS:
                values.setdefault(labels["uuid"], {})[_FIELDS[name]] = value
        devices = tuple(
            _snapshot(labels, values.get(uuid, {})) for uuid, labels in sorted(identities.items(), key=_by_index)
        )
        status: Status = "ok" if up == 1.0 else "error"
        known = next(iter(identities.values()), {})
        return GpuSnapshot(
            status=status,
            error=None if up == 1.0 else "the exporter reports nvml_up 0" if up == 0.0 else "no nvml_up in the scrape",
            driver_version=known.get("driver_version") or None,
            cuda_driver_version=known.get("cuda_version") or None,
            devices=devices,
        )

    def close(self) -> None:
        """Nothing to release."""


def _by_index(item: tuple[str, Mapping[str, str]]) -> int:
    return int(item[1].get("index") or 0)


def _snapshot(labels: Mapping[str, str], values: Mapping[str, float]) -> DeviceSnapshot:
    fields: dict[str, Any] = {name: int(value) if name in _WHOLE else value for name, value in values.items()}
    return DeviceSnapshot(
        index=int(labels.get("index") or 0),
        uuid=labels["uuid"],
        name=labels.get("name") or None,
        pci_bus_id=labels.get("pci_bus_id") or None,
        mig_enabled={"true": True, "false": False}.get(labels.get("mig", "")),
        **fields,
    )
