"""The cpu profile of the real compose file, brought up once from images built here, and taken down again."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.compose import stand_ins

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PROJECT = "abserve-test"
PORTS = (
    "NATIVE_PORT", "NATIVE_GRPC_PORT", "TRITON_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT", "GPU_EXPORTER_PORT",
    "PROMETHEUS_PORT", "GRAFANA_PORT", "LOCUST_PORT",
)  # fmt: skip
BUILD_SECONDS = 1800
UP_SECONDS = 900


@dataclass
class Peak:
    """The most that `docker stats` has shown of one container; memory without the page cache."""

    memory_bytes: float = 0.0
    processes: int = 0


@dataclass
class Stack:
    """The running stack. `seconds` holds what was measured on the way: build, up; `peaks` grows by service."""

    folder: Path
    ports: dict[str, int]
    environment: dict[str, str]
    base_images: stand_ins.BaseImages
    project: str = PROJECT
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, Peak] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        """The runs' folder, as the results exporter sees it."""
        return self.folder / "results"

    def url(self, port: str) -> str:
        """Of a published port, by the name of its setting."""
        return f"http://127.0.0.1:{self.ports[port]}"

    def compose(self, *arguments: str, timeout: float = 300, **settings: str) -> subprocess.CompletedProcess[str]:
        """`docker compose …` with the real file, no .env, our override, and the profiles cpu and load."""
        environment = {**self.environment, **settings}
        return subprocess.run(
            ["docker", "compose", "-p", PROJECT, "--env-file", os.devnull, "-f", "docker-compose.yml",
             "-f", str(HERE / "override.yml"), "--profile", "cpu", "--profile", "load", *arguments],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip

    def containers(self) -> list[dict[str, Any]]:
        """`docker inspect` of all of them, by service."""
        listed = docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}").stdout.split()
        found: list[dict[str, Any]] = json.loads(docker("inspect", *listed).stdout)
        return sorted(found, key=lambda one: str(one["Config"]["Labels"]["com.docker.compose.service"]))

    def query(self, expression: str, *, seconds: float = 900) -> list[dict[str, Any]]:
        """Series that Prometheus has for an expression over the last `seconds`."""
        now = time.time()
        parameters = urllib.parse.urlencode({"query": expression, "start": now - seconds, "end": now, "step": 5})
        with urllib.request.urlopen(
            f"{self.url('PROMETHEUS_PORT')}/api/v1/query_range?{parameters}", timeout=30
        ) as got:
            found: list[dict[str, Any]] = json.loads(got.read())["data"]["result"]
        return found


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def watch_peaks(running: Stack) -> subprocess.Popen[str]:
    """Keep `running.peaks` up to date until the returned process is ended."""
    process = subprocess.Popen(
        ["docker", "stats", "--format", "{{json .}}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                document = re.search(r"\{.*\}", line)  # between codes for a terminal
                told = json.loads(document[0]) if document else {}
                used = re.match(r"([\d.]+)([KMG]?i?B)", told.get("MemUsage", ""))
                name = re.fullmatch(rf"{PROJECT}-(.+)-\d+", told.get("Name", ""))
                if used is None or name is None:
                    continue
                peak = running.peaks.setdefault(name[1], Peak())
                peak.memory_bytes = max(peak.memory_bytes, float(used[1]) * UNITS[used[2]])
                peak.processes = max(peak.processes, int(told["PIDs"]) if told["PIDs"].isdecimal() else 0)

    threading.Thread(target=read, daemon=True).start()
    return process


def docker(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=timeout)


def free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Skips where no engine answers; fails where one does and the stack does not come up."""
    if shutil.which("docker") is None or docker("info").returncode != 0:
        pytest.skip("no docker engine answers")
    if docker("compose", "version").returncode != 0:
        pytest.skip("docker compose is not installed")
    try:
        base_images = stand_ins.ensure_base_images(tmp_path_factory.mktemp("registry"))
    except stand_ins.StandInError as exc:
        pytest.skip(str(exc))
    folder = tmp_path_factory.mktemp("compose")
    folder.chmod(0o755)
    for parent in folder.parents[:2]:  # pytest's own folders are private, and the containers have a user of their own
        parent.chmod(0o755)
    (folder / "results").mkdir()
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    grafana = docker("image", "inspect", stand_ins.pinned_images()["GRAFANA_IMAGE"]).returncode == 0
    environment = {
        **os.environ,
        **{name: str(port) for name, port in ports.items()},
        **base_images.settings,
        "THREADS": "1",
        "ABSERVE_TEST_FILES": str(HERE),
        "ABSERVE_TEST_RESULTS": str(folder / "results"),
        "ABSERVE_TEST_GRAFANA_PROFILE": "cpu" if grafana else "left-out",
    }
    running = Stack(folder, ports, environment, base_images)
    watching = watch_peaks(running)
    try:
        _timed(running, "build", "build", "models-cpu", "locust-master", timeout=BUILD_SECONDS)
        _timed(running, "up", "up", "--detach", "--wait", "--no-build", "--quiet-pull", timeout=UP_SECONDS)
        yield running
    finally:
        if os.environ.get("ABSERVE_TEST_KEEP") != "1":
            running.compose("down", "--volumes", "--timeout", "20")
        watching.kill()
        watching.wait()
        if base_images.registry is not None:
            base_images.registry.close()


def _timed(running: Stack, name: str, *arguments: str, timeout: float) -> None:
    started = time.monotonic()
    done = running.compose(*arguments, timeout=timeout)
    running.seconds[name] = time.monotonic() - started
    if done.returncode != 0:
        logs = running.compose("logs", "--no-color", "--tail", "15").stdout
        pytest.fail(f"docker compose {' '.join(arguments)}:\n{done.stderr[-2000:]}\n{logs[-6000:]}")
