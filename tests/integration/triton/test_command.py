"""`serve triton` as a person or a supervisor runs it: output, exit status, signals."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient

from servers.triton.settings import TritonSettings
from tests.integration.triton.conftest import Serve, plan_of

pytestmark = pytest.mark.triton
COMMAND = "import typer; from servers.commands.triton import serve_triton; typer.run(serve_triton)"


def command(settings: TritonSettings, *options: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        COMMAND,
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        f"--work-dir={settings.work_dir}",
        *options,
    ]


def start(settings: TritonSettings, *options: str, host: str = "127.0.0.1") -> subprocess.Popen[str]:
    """In the foreground, until it says ready at that host."""
    process = subprocess.Popen(
        command(settings, "--engine=null", "--max-batch-size=4", *options), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said, deadline = "", time.monotonic() + 60
    while "ready:" not in said:
        assert select.select([process.stderr], [], [], max(0, deadline - time.monotonic()))[0], said
        line = process.stderr.readline()
        assert line, f"ended: {said}"
        said += line
    assert f"http://{host}:{settings.http_port}" in said
    return process


def tritonserver_of(process: subprocess.Popen[str]) -> psutil.Process:
    (server,) = (c for c in psutil.Process(process.pid).children() if c.name() == "tritonserver")
    return server


def test_print_launch_prints_one_json_line_and_nothing_else(
    own_settings: TritonSettings, artefact: Any, artefact_dir: Path
) -> None:
    done = subprocess.run(
        command(own_settings, f"--artefacts={artefact_dir}", "--print-launch", "--device=cpu", "--threads=1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "ABSERVE_TRITON_MAX_BATCH_SIZE": "6"},
    )
    assert done.stdout.count("\n") == 1
    plan = json.loads(done.stdout)
    assert Path(plan["argv"][0]).name == "tritonserver"
    assert plan["title"] == "Triton 2.51, python backend, onnxruntime fp32"
    assert plan["artefact"]["sha256"] == artefact.manifest.sha256
    assert plan["http_url"] == f"http://127.0.0.1:{own_settings.http_port}"
    assert own_settings.work_dir is not None
    assert "max_batch_size: 6" in (own_settings.work_dir / "models/openclip_vit_b32/config.pbtxt").read_text()


def test_a_mode_of_the_engine_reaches_the_config(serve: Serve, tmp_path: Path) -> None:
    options = ("--engine=torch", "--mode=traced", "--device=cpu", "--threads=1", "--print-launch")
    assert serve(*options, f"--work-dir={tmp_path}").returncode == 0
    assert 'string_value: "traced"' in (tmp_path / "models/openclip_vit_b32/config.pbtxt").read_text()


def test_a_taken_port_is_one_sentence(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve("--print-launch", f"--http-port={port}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"port {port} on 127.0.0.1 " in done.stderr
    assert "--http-port" in done.stderr


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("localhost", False)])
def test_listening_beyond_this_machine_is_warned_about(serve: Serve, tmp_path: Path, host: str, warned: bool) -> None:
    done = serve(f"--host={host}", "--anyone", "--engine=null", "--print-launch", f"--work-dir={tmp_path}")
    assert ("warning: Triton 2.51" in done.stderr) is warned
    plan = plan_of(done)
    assert plan.http_url.startswith("http://127.0.0.1:")
    assert any(argument.startswith("--http-address=") and argument[15:][0].isdigit() for argument in plan.argv)


def ipv6_loopback() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not ipv6_loopback(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_it_serves_http_grpc_and_metrics_on_ipv6(own_settings: TritonSettings, host: str) -> None:
    process = start(own_settings, f"--host={host}", "--anyone", host="[::1]")
    try:
        for port, path in ((own_settings.http_port, "/v2/health/ready"), (own_settings.metrics_port, "/metrics")):
            assert httpx.get(f"http://[::1]:{port}{path}").status_code == 200
        with InferenceServerClient(f"[::1]:{own_settings.grpc_port}") as client:
            assert client.is_server_ready()
    finally:
        process.terminate()
        process.communicate()


def test_an_unknown_model_is_one_sentence(serve: Serve, tmp_path: Path) -> None:
    done = serve("--model=nothing", f"--work-dir={tmp_path / 'work'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown model 'nothing'" in done.stderr
    assert not (tmp_path / "work").exists()


def test_an_unknown_engine_gets_the_closest_one(serve: Serve) -> None:
    done = serve("--engine=onxruntime")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean onnxruntime?" in done.stderr


def test_a_folder_with_other_files_is_refused_before_anything_is_exported(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = serve(f"--work-dir={tmp_path}", f"--artefacts={tmp_path / 'new'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--work-dir" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_it_in_order(own_settings: TritonSettings, number: signal.Signals) -> None:
    with start(own_settings) as process:
        server = tritonserver_of(process)
        children = server.children()
        process.send_signal(number)
        assert process.wait(60) == 0
    assert not server.is_running()
    assert not any(child.is_running() for child in children)


def test_a_dying_server_ends_it_with_the_reason(own_settings: TritonSettings) -> None:
    with start(own_settings) as process:
        tritonserver_of(process).kill()
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "error: tritonserver ended by SIGKILL" in process.stderr.read()


def test_a_killed_supervisor_takes_its_server_with_it(own_settings: TritonSettings) -> None:
    with start(own_settings) as process:
        server = tritonserver_of(process)
        children = server.children()
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs([server, *children], timeout=60)
    for left in alive:
        left.kill()
    assert alive == []
