"""The machine and the software of a run."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from loadgen.headers import without_secrets
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
    given = shlex.join([Path(sys.argv[0]).name, *without_secrets(sys.argv[1:])])
    return given.encode("utf-8", "backslashreplace").decode()


def read_host() -> dict[str, str | int | float | None]:
    """The properties of this machine; None for those that cannot be read."""
    return {
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
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
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text or "", re.MULTILINE)
    return found.group(1).strip() if found else None


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
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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
