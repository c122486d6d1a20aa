"""`abserve compose init` writes a folder that Docker Compose can start from."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from typer.testing import CliRunner

from loadgen.entry import build


def init(folder: Path):
    return CliRunner().invoke(build(), ["compose", "init", str(folder)])


def test_every_file_that_the_stack_mounts_or_builds_from_is_there(tmp_path: Path) -> None:
    assert init(tmp_path / "stack").exit_code == 0
    compose = yaml.safe_load((tmp_path / "stack/docker-compose.yml").read_text())
    mounted = re.findall(r"\./([^:'\"]+):/", (tmp_path / "stack/docker-compose.yml").read_text())
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (tmp_path / "stack/docker/Dockerfile").read_text(), re.MULTILINE)
    needed = {name for line in copied for name in line.split()} | set(mounted) - {"results"}
    assert compose["services"]
    assert [name for name in needed if not (tmp_path / "stack" / name).exists()] == []


def test_no_setting_is_chosen_for_the_user(tmp_path: Path) -> None:
    done = init(tmp_path / "stack")
    assert not (tmp_path / "stack/.env").exists()
    assert (tmp_path / "stack/.env.example").is_file()
    assert "docker compose up" in done.output
    assert "docker compose --profile cpu up" in done.output


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    done = init(tmp_path)
    assert done.exit_code == 2
    assert "empty" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
