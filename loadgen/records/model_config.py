"""Reads Triton's model configuration as JSON, which the native server returns in the same shape.

Missing parts are empty: another server may return anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.records.run import ArmRecord


def accelerators(arm: ArmRecord) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and parameters of each execution accelerator for a GPU."""
    optimization = mapping((arm.model_config or {}).get("optimization"))
    entries = listed(mapping(optimization.get("execution_accelerators")).get("gpu_execution_accelerator"))
    return [(str(entry.get("name")), mapping(entry.get("parameters"))) for entry in entries]


def groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The instance groups."""
    return [group for group in listed(config.get("instance_group")) if isinstance(group, Mapping)]


def kind_of(arm: ArmRecord) -> str:
    """KIND_CPU, KIND_GPU or empty."""
    return next((str(group.get("kind", "")) for group in groups(arm.model_config or {})), "")


def backend_of(arm: ArmRecord) -> str:
    """The backend in the configuration, or `platform` in older ones (onnxruntime_onnx, tensorrt_plan)."""
    config = arm.model_config or {}
    return str(config.get("backend") or str(config.get("platform") or "").partition("_")[0])


def whole(value: object) -> int | None:
    """Read a number from 0, also from text, as in protobuf's JSON for 64 bits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
