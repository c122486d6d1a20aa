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
    ],
)
def test_compose_refuses(tmp_path: Path, options: list[str], said: str) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(build(), ["compare", "--deployment", "compose", *options, "--out", str(out)])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--deployment", "swarm"], "choose from embedded, compose"),
        (["--compose-project", "mine"], "no effect without --deployment compose"),
    ],
)
def test_a_wrong_deployment_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(build(), ["compare", *options, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
