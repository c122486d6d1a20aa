"""Which machine a stored measurement belongs to, and where such measurements are kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadgen.documents import write_atomically

MACHINE = ("cpu_model", "cpu_count", "kernel", "architecture", "python", "virtualisation")
"""Fields of `Environment.host` that affect speed and do not change by themselves."""
DEVICE = ("name", "uuid")


def fingerprint(
    host: Mapping[str, Any], packages: Mapping[str, str] | None = None, gpu: Mapping[str, Any] | None = None
) -> str:
    """12 hexadecimal digits of SHA-256 over the MACHINE fields of `host` (an `Environment.host`), the given versions
    of packages, and the driver and devices of `gpu` (a `/gpu-info` document)."""
    known: dict[str, Any] = {"host": {name: host.get(name) for name in MACHINE}}
    if packages is not None:
        known["packages"] = dict(sorted(packages.items()))
    devices = [device for device in (gpu or {}).get("devices") or [] if isinstance(device, Mapping)]
    if devices:
        nvml = (gpu or {}).get("nvml")
        known["driver"] = nvml.get("driver_version") if isinstance(nvml, Mapping) else None
        known["devices"] = [{name: device.get(name) for name in DEVICE} for device in devices]
    return hashlib.sha256(msgspec.json.encode(known, order="sorted")).hexdigest()[:12]


def cache_path(kind: str, digest: str) -> Path:
    """`$XDG_CACHE_HOME/abserve/KIND-FINGERPRINT.json`, under `~/.cache` without that variable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "abserve" / f"{kind}-{digest}.json"


def store_record(path: Path, record: object) -> None:
    """Write a record as indented JSON, with the folder it needs. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
