"""`make pin-images` with a `docker` that only prints; tests/compose asks a real registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "docker/pin_images.py"
OLD, NEW, PULLED = (f"sha256:{digit * 64}" for digit in "123")
# The registry has two of the images, the engine has pulled a third one under two names, the fourth is nowhere.
DOCKER = f"""#!/bin/sh
case "$*" in
    *imagetools*known:1 | *imagetools*example.org:5000/team/known:2) echo {NEW} ;;
    "image inspect "*pulled:3) printf 'other@{OLD}\\nteam/pulled@{PULLED}\\n' ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    docker = tmp_path / "tools/docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    return {**os.environ, "PATH": f"{docker.parent}:{os.environ['PATH']}"}


def pin(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_defaults_of_the_compose_file_get_their_digests_and_nothing_else_changes(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    text = """port: "${PORT:-8000}" # A_IMAGE=known:1
a: "${A_IMAGE:-known:1A}"
b: {image: "${B_IMAGE:-example.org:5000/team/known:2B}"}
c: ${A_IMAGE}
"""
    (tmp_path / "docker-compose.yml").write_text(text.replace("1A", f"1@{OLD}").replace("2B", "2"))
    copy = tmp_path / "docker/kubernetes/gpu/triton.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text(f"image: known:1@{OLD}\nimage: unknown:1@{OLD}\nother: known:1\n")
    done = pin(tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docker-compose.yml").read_text() == text.replace("1A", f"1@{NEW}").replace("2B", f"2@{NEW}")
    assert copy.read_text() == f"image: known:1@{NEW}\nimage: unknown:1@{OLD}\nother: known:1\n"
    assert f"A_IMAGE: known:1 is {NEW}, it was {OLD}" in done.stdout


def test_every_line_of_a_settings_file_gets_its_digest_and_nothing_else_changes(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    kept = "# A_IMAGE=known:1\nMODEL=known:1\nGRAFANA_ADMIN_PASSWORD=a@b\n"
    lines = f"A_IMAGE=known:1@{OLD}\nB_IMAGE=example.org:5000/team/known:2\nC_IMAGE=team/pulled:3\n"
    (tmp_path / ".env").write_text(kept + lines)
    done = pin(tmp_path, environment, ".env")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".env").read_text() == (
        f"{kept}A_IMAGE=known:1@{NEW}\nB_IMAGE=example.org:5000/team/known:2@{NEW}\nC_IMAGE=team/pulled:3@{PULLED}\n"
    )
    assert done.stdout.splitlines() == [
        f"A_IMAGE: known:1 is {NEW}, it was {OLD}",
        f"B_IMAGE: example.org:5000/team/known:2 is {NEW}, it was not pinned",
        f"C_IMAGE: team/pulled:3 is {PULLED}, it was not pinned",
    ]
    assert f"A_IMAGE: known:1 is {NEW}, as before" in pin(tmp_path, environment, ".env").stdout


def test_an_image_that_nobody_knows_keeps_its_line(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "other").write_text(f"A_IMAGE=known:1\nD_IMAGE=nowhere:4@{OLD}\n")
    done = pin(tmp_path, environment, "other")
    assert done.returncode == 1
    assert (tmp_path / "other").read_text() == f"A_IMAGE=known:1@{NEW}\nD_IMAGE=nowhere:4@{OLD}\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("D_IMAGE: ")
    assert "docker pull nowhere:4" in done.stderr


def test_settings_that_are_not_there_are_named(tmp_path: Path, environment: dict[str, str]) -> None:
    done = pin(tmp_path, environment)
    assert done.returncode == 1
    assert "docker-compose.yml does not exist" in done.stderr
