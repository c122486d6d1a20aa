"""What a running stack cannot honour is refused before anything happens, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.entry import build


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--a-option", "max-batch-size=1"], "set it in .env, then run docker compose up"),
        (["--b-option", "instances=2"], "--b-option has no effect with --deployment compose"),
        (["--weights", "random:7"], "set WEIGHTS in .env"),
        (["--threads", "2"], "set THREADS in .env"),
        (["--transport", "shm"], "use --transport http or grpc"),
        (["--transport", "grpc"], "leave cold-start out of --scenarios"),
        (["--a", "http://127.0.0.1:8100"], "for a URL leave --deployment out"),
        (["--b", "native"], "compares native with triton"),
        (["--c", "native"], "compares native with triton"),
        (["--c", "triton"], "models of that triton by their option backend=onnxruntime or tensorrt"),
        (["--b-option", "backend=tensorrt", "--c", "triton"], "each once"),
        (["--b-option", "backend=tensorrt", "--c", "triton", "--c-option", "backend=tensorrt"], "each once"),
        (["--b-option", "backend=tensort"], "unknown backend tensort; did you mean tensorrt?"),
        (["--a-option", "backend=tensorrt"], "--a-option has no effect with --deployment compose"),
    ],
)
def test_compose_refuses(tmp_path: Path, options: list[str], said: str) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(build(), ["compare", "--deployment", "compose", *options, "--out", str(out)])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not out.exists()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--b-option", "backend=tensorrt"],
        ["--b-option", "backend=onnxruntime", "--c", "triton", "--c-option", "backend=tensorrt"],
        ["--a", "triton", "--a-option", "backend=onnxruntime", "--b-option", "--backend=tensorrt"],
    ],
)
def test_arms_of_a_stack_are_its_servers_or_models_of_its_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """They are planned, and then no engine answers."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    command = ["compare", "--deployment", "compose", *options, "--out", str(tmp_path / "run")]
    assert "no Docker engine answers" in " ".join(CliRunner().invoke(build(), command).output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--deployment", "swarm"], "choose from embedded, compose"),
        (["--compose-project", "mine"], "no effect without --deployment compose"),
        (["--tls", "--deployment", "compose"], "--tls is for servers that abserve starts"),
        (["--tls", "--transport", "http,grpc"], "Triton has no TLS over HTTP; use --transport grpc"),
    ],
)
def test_a_wrong_deployment_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(build(), ["compare", *options, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
