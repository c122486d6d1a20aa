"""Which of the GPUs in a server's `/gpu-info` document are its own; the others are other people's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def used_gpu(document: Mapping[str, Any] | None) -> str | None:
    """The UUID of the GPU that the server executes on; None where it tells none, as on the CPU."""
    runtime = (document or {}).get("runtime")
    uuid = runtime.get("used_device_uuid") if isinstance(runtime, Mapping) else None
    return uuid if isinstance(uuid, str) else None


def own_devices(document: Mapping[str, Any] | None, used: Collection[str]) -> list[Mapping[str, Any]]:
    """The document's devices with one of these UUIDs; all of them where none has."""
    found = (document or {}).get("devices")
    devices = [device for device in found if isinstance(device, Mapping)] if isinstance(found, list) else []
    return [device for device in devices if device.get("uuid") in used] or devices
