"""Standard output contains only the result, every option has a group, and a taken port is one clear sentence."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from servers.commands.gpu import gpu_exporter, gpu_info
from servers.commands.triton import serve_triton
from servers.engines import settings as engine_settings
from servers.models.registry import get_variant
from servers.models.weights import RandomWeights
from servers.options.defaults import OptionError
from servers.triton import launch
from servers.triton.installation import Installation, TritonError
from servers.triton.launch import assert_free
from servers.triton.process import region_bytes
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings

CODE = """
import os
from servers.commands.triton import _stdout_for_results as stdout_for_results
with stdout_for_results() as results:
    print("an exporter's progress")
    os.write(1, b"a C library's warning\\n")
    results.write(b"the result\\n")
print("afterwards")
"""


def test_only_results_reach_stdout() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "the result\nafterwards\n"
    assert sorted(done.stderr.splitlines()) == ["a C library's warning", "an exporter's progress"]


@pytest.mark.parametrize("command", [serve_triton, gpu_exporter, gpu_info])
def test_every_option_has_a_group_and_a_sentence(command: Any) -> None:
    app = typer.Typer()
    app.command()(command)
    options: list[Any] = [one for one in typer.main.get_command(app).params if one.param_type_name == "option"]
    assert options
    for option in options:
        if option.name not in ("help", "install_completion", "show_completion"):
            assert option.rich_help_panel, option.name
            assert option.help.endswith("."), option.name


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("asked", "device", "backend", "instances"),
    [
        (None, "cpu", "python", 1),
        (None, "cuda:0", "python", 2),
        (None, "cuda:0,cuda:1", "python", 2),
        (None, "cuda:0", "onnxruntime", 1),
        (1, "cuda:0", "python", 1),
        (4, "cpu", "onnxruntime", 4),
    ],
)
def test_the_python_backend_has_two_instances_on_a_gpu(
    asked: int | None, device: str, backend: str, instances: int
) -> None:
    assert TritonSettings(instances=asked).instances_on(device, backend) == instances


@pytest.mark.parametrize(
    ("payload", "device", "backend", "regions"),
    [
        ("fp32", "cpu", "python", 1),
        ("fp32", "cuda:0", "python", 2),
        ("fp32", "cuda:0,cuda:1", "python", 4),
        ("fp32", "cuda:0,cuda:1", "onnxruntime", 0),
        ("jpeg", "cuda:0,cuda:1", "onnxruntime", 1),
    ],
)
def test_every_process_of_the_python_backend_needs_shared_memory_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: str, device: str, backend: str, regions: int
) -> None:
    needed: list[int] = []

    def assert_space(needed_bytes: int) -> None:
        needed.append(needed_bytes)
        raise TritonError("enough of this launch")

    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: True)
    monkeypatch.setattr(launch, "assert_ready", lambda _settings: None)
    monkeypatch.setattr(launch, "_clean_up", lambda: None)
    monkeypatch.setattr(launch, "assert_space", assert_space)
    settings = TritonSettings(payloads=payload, device=device, work_dir=tmp_path / "work")
    specification = get_variant(settings.model, payload)
    installation = Installation("here", "2.61", tmp_path / "tritonserver", tmp_path / "backends")
    with pytest.raises(TritonError, match="enough"):
        launch.prepare(settings, [PlacedModel(specification)], RandomWeights(0), installation, backend)
    assert needed == [regions * region_bytes(specification, specification.max_batch_size)]


def test_a_taken_port_names_its_option(taken: int) -> None:
    with pytest.raises(OptionError, match=rf"port {taken} on 127.0.0.1 .* --grpc-port"):
        assert_free("127.0.0.1", {"--grpc-port": taken})


def test_two_options_with_one_port() -> None:
    with pytest.raises(OptionError, match="--http-port and --grpc-port are both 4711"):
        assert_free("127.0.0.1", {"--http-port": 4711, "--grpc-port": 4711})


def test_a_free_port_and_one_just_given_back(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = listener.accept()
            connection.close()  # this side closes first and keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    assert_free("127.0.0.1", {"--http-port": port})


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(OptionError, match="--host"):
        assert_free("192.0.2.1", {"--http-port": 4711})
