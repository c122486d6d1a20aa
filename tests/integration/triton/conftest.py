"""A real tritonserver with the real model, started once; and how a test starts one of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from servers.cli.launch import LaunchPlan
from servers.export.artefacts import Artefact
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.triton.launch import prepare
from servers.triton.process import TritonProcess, region_prefixes
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings

READY_SECONDS = 120


@dataclass(frozen=True)
class Running:
    """A ready server and what a test looks at."""

    plan: LaunchPlan
    process: TritonProcess
    log_file: Path

    @property
    def url(self) -> str:
        """As tritonclient wants it."""
        return self.plan.http_url.removeprefix("http://")

    def processes(self) -> list[psutil.Process]:
        """tritonserver and the process that executes the model."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def stub(self) -> psutil.Process:
        (stub,) = self.processes()[1:]
        return stub

    def regions(self) -> list[Path]:
        (prefix,) = region_prefixes(self.plan.argv)
        return list(Path("/dev/shm").glob(f"{prefix}*"))


def free_ports() -> tuple[int, int, int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        http, grpc, metrics = (probe.getsockname()[1] for probe in probes)
    return http, grpc, metrics


def settings(folder: Path, **options: Any) -> TritonSettings:
    http, grpc, metrics = free_ports()
    return TritonSettings(http_port=http, grpc_port=grpc, metrics_port=metrics, work_dir=folder / "work", **options)


@pytest.fixture
def own_settings(tmp_path: Path) -> TritonSettings:
    """For a server whose model costs nothing: it is ready in a second."""
    return settings(tmp_path, engine="null", max_batch_size=8)


@pytest.fixture
def own_plan(own_settings: TritonSettings, specification: ModelSpecification) -> LaunchPlan:
    """A prepared launch for one test, whose repository it may change."""
    return prepare(own_settings, [PlacedModel(specification)], RandomWeights(0))


@pytest.fixture(scope="session")
def triton(
    specification: ModelSpecification, artefact: Artefact, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("triton")
    plan = prepare(
        settings(folder, engine="onnxruntime", device="cpu", threads=2),
        [PlacedModel(specification, artefact.path, artefact.manifest.to_dict())],
        RandomWeights(0),
    )
    log_file = folder / "log"
    with TritonProcess(plan, log_file) as process:
        assert process.wait_ready(READY_SECONDS)
        yield Running(plan, process, log_file)


@pytest.fixture
def own_triton(own_plan: LaunchPlan, tmp_path: Path) -> Iterator[Running]:
    """A running server for one test, which may do it harm."""
    with TritonProcess(own_plan, tmp_path / "log") as process:
        assert process.wait_ready(READY_SECONDS)
        yield Running(own_plan, process, tmp_path / "log")
