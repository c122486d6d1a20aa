"""The checks of `abserve doctor` for docker compose: driver, engine, Compose, NVIDIA toolkit, age of the images.

A machine without Docker passes: `make compare` needs no Docker.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from servers.finding import Finding, finding
from servers.triton.box import in_container

LEAST_DRIVER = 580
"""The images in docker-compose.yml use CUDA 13."""
LEAST_COMPOSE = (2, 20)
"""The first release with `depends_on: … required: false`."""
OLDEST_IMAGE_DAYS = 90
"""An older base image lacks important fixes."""
IMAGES = ("abserve/servers:0.1.0", "abserve/load:0.1.0")
_SECONDS = 10.0

Command = Callable[[Sequence[str]], str | None]


def container_findings(gpu: Mapping[str, Any], run: Command | None = None) -> list[Finding]:
    """`gpu` is the /gpu-info document; `run` returns a command's standard output, None if it fails."""
    run = run or _output
    has_gpu = gpu.get("status") == "ok" and bool(gpu.get("devices"))
    found = [_driver(gpu)] if has_gpu else []
    engine = _engine(run)
    if engine is None and in_container():
        return [*found, Finding("docker", True, "not needed: this is a container; use abserve compare")]
    if engine is None:
        detail = "installed, but no engine answers" if shutil.which("docker") else "not installed"
        return [*found, Finding("docker", True, f"{detail}: use make compare instead of docker compose")]
    found += [Finding("docker", True, f"engine {engine.get('ServerVersion')}"), _compose(run)]
    if has_gpu:
        found.append(_toolkit(engine))
    return [*found, *_images(run, _newest_source(), datetime.now(UTC))]


def _driver(gpu: Mapping[str, Any]) -> Finding:
    version = str((gpu.get("nvml") or {}).get("driver_version") or "")
    major = version.partition(".")[0]
    if not major.isdecimal():
        return Finding("driver", False, "its version cannot be read", "run nvidia-smi and follow its message")
    remedy = f"docker compose needs NVIDIA driver r{LEAST_DRIVER} or newer: install it, or use make compare"
    return finding("driver", int(major) >= LEAST_DRIVER, f"NVIDIA driver {version}", remedy)


def _engine(run: Command) -> Mapping[str, Any] | None:
    """`docker info`; None if no engine answers."""
    try:
        document = json.loads(run(["docker", "info", "--format", "{{json .}}"]) or "")
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.get("ServerVersion") else None


def _compose(run: Command) -> Finding:
    text = (run(["docker", "compose", "version", "--short"]) or "").strip().lstrip("v")
    numbers = tuple(int(part) for part in text.split("-")[0].split(".")[:2] if part.isdecimal())
    remedy = "install Docker Compose 2.20 or newer: sudo apt-get install docker-compose-plugin"
    return finding("docker compose", numbers >= LEAST_COMPOSE, f"version {text}" if text else "not installed", remedy)


def _toolkit(engine: Mapping[str, Any]) -> Finding:
    """Whether the engine has NVIDIA's runtime, or finds devices by the container device interface (CDI)."""
    if "nvidia" in (engine.get("Runtimes") or {}):
        return Finding("container toolkit", True, "the engine has the runtime nvidia")
    if any("nvidia.com/gpu" in str(device) for device in engine.get("DiscoveredDevices") or ()):
        return Finding("container toolkit", True, "the engine finds the GPU through CDI")
    if shutil.which("nvidia-ctk"):
        detail = "installed, but the engine does not use it"
        remedy = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    else:
        detail = "not installed: containers get no GPU"
        remedy = "install nvidia-container-toolkit from NVIDIA's repository, then run nvidia-ctk runtime configure"
    return Finding("container toolkit", False, detail, remedy)


def _images(run: Command, newest_source: datetime | None, now: datetime) -> list[Finding]:
    """One finding per image that was built here."""
    found = []
    for image in IMAGES:
        text = run(["docker", "image", "inspect", "--format", "{{.Created}}", image]) or ""
        try:
            created = datetime.fromisoformat(text.strip()[:19]).replace(tzinfo=UTC)  # without nanoseconds
        except ValueError:
            continue
        days = (now - created).days
        if newest_source is not None and created < newest_source:
            found.append(Finding(image, False, "older than the code here", "docker compose build"))
        elif days > OLDEST_IMAGE_DAYS:
            remedy = "make pin-images, then docker compose build --no-cache"
            found.append(Finding(image, False, f"built {days} days ago, without later fixes", remedy))
        else:
            compared = "" if newest_source is None else ", newer than the code here"
            found.append(Finding(image, True, f"built {days} days ago{compared}"))
    return found


def _newest_source() -> datetime | None:
    """When the code here last changed; None outside a checkout."""
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
