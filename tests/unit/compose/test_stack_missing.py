"""Where there is no stack to measure, one sentence says what to do."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import docker
import pytest
from typer.testing import CliRunner

from loadgen.entry import build
from loadgen.launch.compose import ComposeDeployment
from loadgen.launch.deployment import DeploymentError


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By TCP: on a Unix socket that is missing the SDK leaves its own socket open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.usefixtures("no_engine")
def test_without_an_engine_the_remedy_is_named_before_anything_is_prepared(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(build(), ["compare", "--deployment", "compose", "--out", str(out)])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "no Docker engine answers (Connection refused); start it" in said
    assert "docker compose up --detach --wait" in said
    assert "Traceback" not in said
    assert not out.exists()


def test_an_engine_that_this_user_may_not_use_is_not_to_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        below = PermissionError(13, "Permission denied")
        raise docker.errors.DockerException("Error while fetching server API version") from below

    monkeypatch.setattr(docker, "from_env", refused)
    with pytest.raises(DeploymentError, match=r"may not use the Docker engine; run: sudo usermod -aG docker \$USER"):
        ComposeDeployment("native")


def test_without_the_sdk_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(DeploymentError, match=r"pip install 'abserve\[compose\]'"):
        ComposeDeployment("native")
