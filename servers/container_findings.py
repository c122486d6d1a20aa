"""What `abserve doctor` looks at for docker compose: driver, engine, Compose, the NVIDIA toolkit, the images' age.

A machine without Docker lacks nothing that `make compare` needs, so that alone is no fault.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from servers.finding import Finding

LEAST_DRIVER = 580
"""The images in docker-compose.yml are of CUDA 13."""
LEAST_COMPOSE = (2, 20)
"""The first with `depends_on: … required: false`."""
OLDEST_IMAGE_DAYS = 90
"""After so long a base image lacks fixes that matter."""
IMAGES = ("abserve/servers:0.1.0", "abserve/load:0.1.0")
_SECONDS = 10.0

Command = Callable[[Sequence[str]], str | None]


def container_findings(gpu: Mapping[str, Any], run: Command | None = None) -> list[Finding]:
    """`gpu` is the /gpu-info document; `run` gives a command's standard output, None where it fails."""
    run = run or _output
    has_gpu = gpu.get("status") == "ok" and bool(gpu.get("devices"))
    found = [_driver(gpu)] if has_gpu else []
    engine = _engine(run)
    if engine is None:
        installed = shutil.which("docker") is not None
        detail = "installed, but no engine answers" if installed else "not installed"
        return [*found, Finding("docker", True, f"{detail}: docker compose cannot be used here, make compare can")]
    found += [Finding("docker", True, f"engine {engine.get('ServerVersion')}"), _compose(run)]
    if has_gpu:
        found.append(_toolkit(engine))
    return [*found, *_images(run, _newest_source(), datetime.now(UTC))]


def _driver(gpu: Mapping[str, Any]) -> Finding:
    version = str((gpu.get("nvml") or {}).get("driver_version") or "")
    major = version.partition(".")[0]
    if not major.isdecimal():
        return Finding("driver", False, "its version cannot be read", "run nvidia-smi and follow what it says")
    ok = int(major) >= LEAST_DRIVER
    remedy = None if ok else f"install NVIDIA driver r{LEAST_DRIVER} or newer for docker compose; make compare may do"
    return Finding("driver", ok, f"NVIDIA driver {version}", remedy)


def _engine(run: Command) -> Mapping[str, Any] | None:
    """`docker info`, None where no engine answers."""
    text = run(["docker", "info", "--format", "{{json .}}"])
    try:
        document = json.loads(text or "")
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.get("ServerVersion") else None


def _compose(run: Command) -> Finding:
    text = (run(["docker", "compose", "version", "--short"]) or "").strip().lstrip("v")
    numbers = tuple(int(part) for part in text.split("-")[0].split(".")[:2] if part.isdecimal())
    ok = numbers >= LEAST_COMPOSE
    remedy = None if ok else "install Docker Compose 2.20 or newer: sudo apt-get install docker-compose-plugin"
    return Finding("docker compose", ok, f"version {text}" if text else "not installed", remedy)


def _toolkit(engine: Mapping[str, Any]) -> Finding:
    """The engine knows NVIDIA's runtime, or devices by the container device interface."""
    if "nvidia" in (engine.get("Runtimes") or {}):
        return Finding("container toolkit", True, "the engine has the runtime nvidia")
    if any("nvidia.com/gpu" in str(device) for device in engine.get("DiscoveredDevices") or ()):
        return Finding("container toolkit", True, "the engine finds the GPU through CDI")
    if shutil.which("nvidia-ctk"):
        remedy = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
        return Finding("container toolkit", False, "installed, but the engine does not use it", remedy)
    remedy = (
        "sudo apt-get install nvidia-container-toolkit (from NVIDIA's repository), then nvidia-ctk runtime configure"
    )
    return Finding("container toolkit", False, "not installed: containers get no GPU", remedy)


def _images(run: Command, newest_source: datetime | None, now: datetime) -> list[Finding]:
    """One finding an image that was built here; none for those that were not."""
    found = []
    for image in IMAGES:
        text = run(["docker", "image", "inspect", "--format", "{{.Created}}", image])
        created = _moment(text)
        if created is None:
            continue
        days = (now - created).days
        if newest_source is not None and created < newest_source:
            remedy = "docker compose build"
            found.append(Finding(image, False, "older than the code here", remedy))
        elif days > OLDEST_IMAGE_DAYS:
            remedy = "make pin-images, then docker compose build --no-cache"
            found.append(Finding(image, False, f"built {days} days ago, without the fixes since", remedy))
        else:
            found.append(Finding(image, True, f"built {days} days ago, newer than the code here"))
    return found


def _moment(text: str | None) -> datetime | None:
    """Docker's time in UTC, without its nanoseconds."""
    try:
        return datetime.fromisoformat((text or "").strip()[:19]).replace(tzinfo=UTC)
    except ValueError:
        return None


def _newest_source() -> datetime | None:
    """When our code was last written, in a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "docker-compose.yml").exists():
        return None
    times = [path.stat().st_mtime for name in ("servers", "loadgen") for path in (root / name).rglob("*.py")]
    return datetime.fromtimestamp(int(max(times)), UTC)


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
