"""Which machine a stored measurement belongs to: a digest of what bears on speed, and where such things are kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

MACHINE = ("cpu_model", "cpu_count", "kernel", "architecture", "python", "virtualisation")
"""Fields of `Environment.host` that bear on speed and do not change by themselves."""
DEVICE = ("name", "uuid")


def fingerprint(
    host: Mapping[str, Any],
    packages: Mapping[str, str] | None = None,
    gpu: Mapping[str, Any] | None = None,
) -> str:
    """12 hexadecimal digits of SHA-256 over the MACHINE fields of `host` (an `Environment.host`), the given versions
    of packages, and the driver and devices of `gpu` (a `/gpu-info` document) where there are any."""
    known: dict[str, Any] = {"host": {name: host.get(name) for name in MACHINE}}
    if packages is not None:
        known["packages"] = dict(sorted(packages.items()))
    devices = [device for device in (gpu or {}).get("devices") or [] if isinstance(device, Mapping)]
    if devices:
        nvml = (gpu or {}).get("nvml")
        known["driver"] = nvml.get("driver_version") if isinstance(nvml, Mapping) else None
        known["devices"] = [{name: device.get(name) for name in DEVICE} for device in devices]
    return hashlib.sha256(msgspec.json.encode(known, order="sorted")).hexdigest()[:12]


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/abserve`, under `~/.cache` where the variable is not set; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "abserve"
