"""A real tritonserver with the real model, started once; and how a test starts one of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import typer
from tritonclient.utils import np_to_triton_dtype

from servers.commands.triton import serve_triton
from servers.export.artefacts import Artefact
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.options.launch import LaunchPlan
from servers.protocol.tensors import Array
from servers.triton.launch import prepare
from servers.triton.process import TritonProcess, region_prefixes
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings
from tests.integration.native.conftest import free_ports

READY_SECONDS = 120
Serve = Callable[..., subprocess.CompletedProcess[str]]


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


def settings(folder: Path, **options: Any) -> TritonSettings:
    http, grpc, metrics = free_ports(3)
    return TritonSettings(http_port=http, grpc_port=grpc, metrics_port=metrics, work_dir=folder / "work", **options)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Serve:
    """`abserve serve triton` with options and free ports, in this process: a new one takes seconds to import torch."""
    app = typer.Typer(add_completion=False)
    app.command()(serve_triton)
    command = typer.main.get_command(app)

    def serve(*options: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        if folder is not None:
            monkeypatch.chdir(folder)
        ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
        capfd.readouterr()
        status = command.main([*ports, *options], standalone_mode=False)
        return subprocess.CompletedProcess(options, status or 0, *capfd.readouterr())

    return serve


def infer(
    plan: LaunchPlan, inputs: Mapping[str, Array], outputs: Collection[str] = (), module: Any = http_client, **more: Any
) -> Any:
    """A client's answer over a connection of its own: tritonclient's HTTP client is not thread-safe."""
    tensors = []
    for name, array in inputs.items():
        tensors.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    wanted = [module.InferRequestedOutput(name) for name in outputs] or None
    url = plan.grpc_address if module is grpc_client else plan.http_url.removeprefix("http://")
    with closing(module.InferenceServerClient(url)) as client:
        return client.infer(plan.model, tensors, outputs=wanted, **more)


def embedding(plan: LaunchPlan, pixels: Array, **more: Any) -> Any:
    return infer(plan, {"pixel_values": pixels}, **more).as_numpy("embedding")


def config_of(plan: LaunchPlan) -> Any:
    return httpx.get(f"{plan.http_url}/v2/models/{plan.model}/config", trust_env=False).json()


def plan_of(done: subprocess.CompletedProcess[str]) -> LaunchPlan:
    """What `--print-launch` has printed."""
    assert done.returncode == 0, done.stderr
    return LaunchPlan(**{key: value for key, value in json.loads(done.stdout).items() if key != "schema"})


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
