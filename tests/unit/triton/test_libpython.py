"""Where libpython is looked for, and how a missing one is fetched; apt is a script here, its commands are real runs."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from servers.triton.installation import (
    Interpreter,
    TritonUnavailableError,
    cache_folder,
    find_libpython,
    libpython_remedy,
    provide_libpython,
)

NAME = "libpython3.99.so.1.0"
UNPACK = f'mkdir -p "$3/usr/lib/x86_64-linux-gnu" && cp "$2" "$3/usr/lib/x86_64-linux-gnu/{NAME}"'


@pytest.fixture
def debian(interpreter: Interpreter, tmp_path: Path) -> Interpreter:
    """A distribution's Python without the library."""
    shutil.rmtree(tmp_path / "lib")
    return replace(interpreter, base_prefix=Path("/usr"))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def script(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_this_pythons_own_folders_come_before_the_cache(interpreter: Interpreter, tmp_path: Path) -> None:
    cache_folder(interpreter).mkdir(parents=True)
    (cache_folder(interpreter) / NAME).touch()
    assert find_libpython(interpreter) == tmp_path / "lib" / NAME
    (tmp_path / "lib" / NAME).unlink()
    assert find_libpython(interpreter) == cache_folder(interpreter) / NAME


def test_fetched_with_apt_into_the_environment(debian: Interpreter, tools: Path) -> None:
    script(tools, "apt-get", '[ "$*" = "download libpython3.99" ] && echo library > libpython3.99_1_amd64.deb')
    script(tools, "dpkg-deb", UNPACK)
    said: list[str] = []
    path = provide_libpython(debian, said.append)
    assert path == debian.prefix / "share" / "abserve" / "libpython" / NAME
    assert path.read_text() == "library\n"
    assert len(said) == 1
    assert provide_libpython(debian, said.append) == path
    assert len(said) == 1, "it was there the second time"


def test_private_package_lists_where_the_system_has_none(debian: Interpreter, tools: Path) -> None:
    script(
        tools,
        "apt-get",
        'for last; do :; done; case "$*" in\n'
        '  "download "*) echo "E: Unable to locate package libpython3.99" >&2; exit 100;;\n'
        '  *Dir::State::Lists=*" update") touch updated;;\n'
        '  *Dir::State::Lists=*" download libpython3.99") [ -e updated ] && echo x > l.deb;;\n'
        "esac",
    )
    script(tools, "dpkg-deb", UNPACK)
    assert provide_libpython(debian, lambda _message: None).is_file()


def test_a_failed_fetch_says_why_and_what_to_do(debian: Interpreter, tools: Path) -> None:
    script(tools, "apt-get", 'echo "E: Could not resolve deb.debian.org" >&2; exit 100')
    with pytest.raises(TritonUnavailableError) as error:
        provide_libpython(debian, lambda _message: None)
    assert "Could not resolve deb.debian.org" in str(error.value)
    assert "sudo apt-get install libpython3.99" in str(error.value)
    assert not cache_folder(debian).exists()


def test_another_builds_library_is_never_fetched(interpreter: Interpreter, tmp_path: Path, tools: Path) -> None:
    shutil.rmtree(tmp_path / "lib")
    script(tools, "apt-get", "echo called > called; exit 1")
    said: list[str] = []
    with pytest.raises(TritonUnavailableError, match="--enable-shared"):
        provide_libpython(interpreter, said.append)
    assert said == []


def test_pyenv_has_its_own_remedy(interpreter: Interpreter) -> None:
    pyenv = replace(interpreter, base_prefix=Path("/home/me/.pyenv/versions/3.11.7"))
    assert libpython_remedy(pyenv) == "run PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force 3.11.7"
