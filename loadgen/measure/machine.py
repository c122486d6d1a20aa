"""This machine: its description, the fingerprint of stored measurements, and the calibration of the generator."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil

from loadgen.base.child_process import usable_cores
from loadgen.base.documents import DocumentError, indented, read_named, read_record, user_path, write_atomically
from loadgen.base.headers import without_secrets
from loadgen.records.machine import Calibration, own_devices
from loadgen.records.run import Environment

PACKAGES = (
    "abserve", "fastapi", "gevent", "jax", "jax2onnx", "jaxlib", "locust", "numpy", "nvidia-pytriton", "onnx",
    "onnxruntime", "onnxruntime-gpu", "open_clip_torch", "openvino", "tensorrt", "timm", "torch", "torchao", "torchax",
    "torchvision", "transformers", "tritonclient", "uvicorn",
)  # fmt: skip
"""Packages whose versions affect a result."""


def utc_now() -> str:
    """The current UTC time in ISO 8601, to the second: for labels, never for durations."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def read_environment(gpu: dict[str, object], inputs: dict[str, str | int]) -> Environment:
    """The environment of a run, with the GPU and the inputs that the caller gives."""
    return Environment(
        started_at=utc_now(),
        command=command_line(),
        git_commit=_git_commit(),
        host=read_host(),
        packages=installed_versions(PACKAGES),
        gpu={name: value for name, value in gpu.items() if name != "processes"},
        inputs=inputs,
    )


def command_line() -> str:
    """The command that runs, without the values of headers; bytes that are not UTF-8 become escapes."""
    name = Path(sys.argv[0]).name
    program = "abserve" if name in ("entry.py", "__main__.py") else name  # python -m loadgen.entry, or abserve
    command = shlex.join([program, *without_secrets(sys.argv[1:])])
    return command.encode("utf-8", "backslashreplace").decode()


def read_host() -> dict[str, str | int | float | None]:
    """The properties of this machine; None for those that cannot be read."""
    return {
        "cpu_model": _cpu_model(),
        "cpu_count": usable_cores(),
        "cpu_count_machine": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "glibc": platform.libc_ver()[1] or None,
        "os": _os_name(),
        "virtualisation": _virtualisation(),
        "python": platform.python_version(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str | None:
    text = _read("/proc/cpuinfo")
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text or "", re.MULTILINE)
    return match.group(1).strip() if match else None


def _os_name() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _virtualisation() -> str | None:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "container"
    if any(word in (_read("/proc/1/cgroup") or "") for word in ("docker", "kubepods", "containerd", "lxc")):
        return "container"
    if "hypervisor" in (_read("/proc/cpuinfo") or ""):
        return "virtual machine"
    return None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version by package, without packages that are not installed."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True, text=True, check=True, timeout=5,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


MACHINE = ("cpu_model", "cpu_count", "kernel", "architecture", "python", "virtualisation")
"""Fields of `Environment.host` that affect speed and do not change by themselves."""
DEVICE = ("name", "uuid")


def fingerprint(
    host: Mapping[str, Any], packages: Mapping[str, str] | None = None, gpu: Mapping[str, Any] | None = None
) -> str:
    """12 hexadecimal digits of SHA-256 over the MACHINE fields of `host` (an `Environment.host`), the given versions
    of packages, and the driver and devices of `gpu` (a `/gpu-info` document)."""
    properties: dict[str, Any] = {"host": {name: host.get(name) for name in MACHINE}}
    if packages is not None:
        properties["packages"] = dict(sorted(packages.items()))
    if devices := own_devices(gpu):
        nvml = (gpu or {}).get("nvml")
        properties["driver"] = nvml.get("driver_version") if isinstance(nvml, Mapping) else None
        properties["devices"] = [{name: device.get(name) for name in DEVICE} for device in devices]
    return hashlib.sha256(msgspec.json.encode(properties, order="sorted")).hexdigest()[:12]


def cache_path(kind: str, digest: str) -> Path:
    """`$XDG_CACHE_HOME/abserve/KIND-FINGERPRINT.json`, under `~/.cache` without that variable. Nothing can be written
    there for a user without a home, as in some containers."""
    cache = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.devnull if cache.parts[:1] == ("~",) else cache, "abserve", f"{kind}-{digest}.json")


class MachineRecordError(Exception):
    """A calibration or a noise floor cannot be made, stored or read; the message names the remedy."""


def store_record(path: Path, record: object, remedy: str) -> None:
    """Write a record as indented JSON, with the folder it needs. Raises `MachineRecordError`, which ends with the
    remedy."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, indented(record))
    except OSError as exc:
        raise MachineRecordError(f"cannot store {path}: {exc.strerror or exc}; {remedy}") from exc


GENERATOR_PACKAGES = ("abserve", "gevent", "greenlet", "grpcio", "locust", "msgspec", "numpy", "tritonclient")
"""Packages whose versions affect the generator's speed."""


def read_machine() -> tuple[dict[str, str | int | float | None], dict[str, str]]:
    return read_host(), installed_versions(GENERATOR_PACKAGES)


def read_calibration(path: Path) -> Calibration:
    """Raises `MachineRecordError` for a missing or unreadable file."""
    try:
        return cast("Calibration", read_record(read_named(path), Calibration))
    except (OSError, DocumentError) as exc:
        raise MachineRecordError(
            f"cannot read the calibration {path}: {exc}; make one with: abserve calibrate"
        ) from exc


def own_calibration() -> Calibration | None:
    """The calibration of this machine with the installed versions; None when it is missing or unreadable."""
    try:
        return read_calibration(cache_path("calibration", fingerprint(*read_machine())))
    except MachineRecordError:
        return None
