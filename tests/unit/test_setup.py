"""What .ci/setup says before it installs anything; the installation itself is run by whoever calls make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[2] / ".ci" / "setup"
PIP = """#!/bin/sh
[ "$1 $2 $3" = "-m pip install" ] && echo "$@" >> "{seen}" && echo "$TMPDIR" >> "{seen}"
exit 1
"""


def setup(
    tmp_path: Path, free_gib: int, python: str = sys.executable, script: Path = SETUP, uv_status: int = 1
) -> subprocess.CompletedProcess[str]:
    """With a disk of so many free GiB, and with a uv and a pip that only note how they were called; pip fails the
    rest."""
    tools, venv = tmp_path / "tools", tmp_path / "venv"
    for path, text in (
        (tools / "df", f"#!/bin/sh\necho header\necho disk 0 0 {free_gib * 2**20} 0% /\n"),
        (tools / "uv", f"#!/bin/sh\necho $@ > {tmp_path}/uv\nexit {uv_status}\n"),
        (venv / "bin" / "python", PIP.format(seen=tmp_path / "pip")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": python, "VENV": str(venv)}
    return subprocess.run(
        ["sh", str(script)], env=environment, cwd=SETUP.parents[1], capture_output=True, text=True, check=False
    )


def test_too_small_a_disk_is_told_what_needs_how_much(tmp_path: Path) -> None:
    done = setup(tmp_path, free_gib=10)
    assert done.returncode == 1
    assert "10 GiB are free here, and 11 are needed: the installation takes" in done.stderr
    assert "remedy: free some space" in done.stderr
    assert not (tmp_path / "pip").exists()


@pytest.mark.parametrize(("free_gib", "cached"), [(11, False), (14, False), (15, True)])
def test_downloads_go_beside_the_environment_and_into_pips_cache_where_there_is_room(
    tmp_path: Path, free_gib: int, cached: bool
) -> None:
    setup(tmp_path, free_gib)
    arguments, temporary = (tmp_path / "pip").read_text().splitlines()
    assert ("--no-cache-dir" not in arguments) == cached
    assert temporary == str(tmp_path / "venv" / "tmp")
    assert not Path(temporary).exists()


def test_uv_installs_where_there_is_one_and_pip_what_it_cannot(tmp_path: Path) -> None:
    for uv_status, free_gib, cached in ((0, 11, False), (1, 99, True)):
        folder = tmp_path / str(uv_status)
        setup(folder, free_gib, uv_status=uv_status)
        asked = (folder / "uv").read_text()
        assert asked.startswith(f"pip install --python {folder}/venv/bin/python")
        assert "-c docker/constraints.txt -e .[servers," in asked
        assert ("--no-cache" not in asked) == cached
        assert (folder / "pip").exists() == bool(uv_status)


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    done = setup(tmp_path, free_gib=99, python="no-such-python")
    assert (done.returncode, "no-such-python was not found" in done.stderr) == (1, True)


def test_the_second_environment_has_an_older_torch_and_else_the_versions_of_the_first(tmp_path: Path) -> None:
    done = setup(tmp_path, free_gib=99, script=SETUP.with_name("engines"))
    assert "run make engines again" in done.stderr  # this pip installs nothing
    arguments, _, without_dependencies, *_ = (tmp_path / "pip").read_text().splitlines()
    assert without_dependencies.endswith(" jax2onnx")
    assert "jax2onnx" not in arguments
    assert "-e .[servers,jax,openvino] torchao" in arguments
    assert f"-c {tmp_path}/venv/constraints.txt" in arguments
    first = (SETUP.parents[1] / "docker" / "constraints.txt").read_text().split()
    versions = dict(
        line.lower().split("==") for line in (tmp_path / "venv" / "constraints.txt").read_text().split() if "==" in line
    )
    own = {line.lower() for line in SETUP.with_name("engines.txt").read_text().split() if "==" in line}
    assert {f"{name}=={version}" for name, version in versions.items()} >= own
    assert versions["torch"] == "2.11.0"
    assert [line for line in first if line.startswith("transformers==")] == [
        f"transformers=={versions['transformers']}"
    ]
    assert len(versions) == sum("==" in line for line in (tmp_path / "venv" / "constraints.txt").read_text().split())


def test_a_second_environment_needs_its_own_space(tmp_path: Path) -> None:
    done = setup(tmp_path, free_gib=10, script=SETUP.with_name("engines"))
    assert done.returncode == 1
    assert "10 GiB are free here, and 11 are needed: the installation takes about as much" in done.stderr
