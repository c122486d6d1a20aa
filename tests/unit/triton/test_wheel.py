"""Each condition of the embedded Triton, taken away once: found, named, with its remedy. How pip fetches the wheel."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from servers.triton import wheel
from servers.triton.installation import Interpreter, TritonError, current_interpreter
from servers.triton.wheel import diagnose, find_wheel


def failing(interpreter: Interpreter) -> dict[str, tuple[str, str]]:
    findings = diagnose(interpreter)
    assert all(f.remedy for f in findings if not f.ok)
    assert not any(f.remedy for f in findings if f.ok)
    return {f.name: (f.detail, f.remedy or "") for f in findings if not f.ok}


def test_all_is_well(interpreter: Interpreter, tmp_path: Path) -> None:
    assert failing(interpreter) == {}
    found = find_wheel(interpreter)
    assert found.version == "2.51"
    assert found.libpython == tmp_path / "lib" / "libpython3.99.so.1.0"
    for path in (found.binary, found.backend_folder / "python", found.stub, found.libraries):
        assert path is not None
        assert path.exists()


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        ({"glibc": (2, 31)}, "triton-glibc", "Debian 12"),
        ({"glibc": (1, 99)}, "triton-glibc", "Debian 12"),
        ({"glibc": None}, "triton-glibc", "Debian 12"),
        ({"machine": "riscv64"}, "triton-architecture", "another machine"),
        ({"python": (3, 98)}, "triton-stub", "Python 3.11, 3.12 or 3.13"),
    ],
)
def test_one_condition_unmet(interpreter: Interpreter, change: dict[str, object], name: str, word: str) -> None:
    found = replace(interpreter, **change)  # type: ignore[arg-type]  # the parametrisation fits
    detail, remedy = failing(found)[name]
    assert word in remedy
    with pytest.raises(TritonError) as error:
        find_wheel(found)
    assert detail in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("glibc", [(2, 35), (2, 41), (3, 0)])
def test_new_glibc_is_accepted(interpreter: Interpreter, glibc: tuple[int, int]) -> None:
    assert failing(replace(interpreter, glibc=glibc)) == {}


def test_missing_libpython_is_found_and_named(interpreter: Interpreter, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "lib")
    assert list(failing(interpreter)) == ["triton-libpython"]
    with pytest.raises(TritonError, match=r"libpython3\.99\.so\.1\.0 is missing"):
        find_wheel(interpreter)


def test_no_libpython_is_needed_where_the_wheel_brings_it(interpreter: Interpreter, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "lib")
    stub = find_file(interpreter, "triton_python_backend_stub")
    stub.write_text("#!/bin/sh\n# libpython3-419a3a08.99.so.1.0\n")
    assert failing(interpreter) == {}
    assert find_wheel(interpreter).libpython is None


def find_file(interpreter: Interpreter, name: str) -> Path:
    assert interpreter.package is not None
    return next(interpreter.package.rglob(name))


@pytest.fixture
def index(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Interpreter, Path]]:
    """An environment without the wheel, and a folder of packages, which pip asks instead of an index, with it."""
    assert interpreter.package is not None
    pytest.importorskip("pip")
    folder = tmp_path / "packages"
    folder.mkdir()
    file = folder / "nvidia_pytriton-0.7.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(interpreter.package.parent.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(interpreter.package.parent))
        archive.writestr("nvidia_pytriton.libs/libtritonserver.so", "")
        info = "nvidia_pytriton-0.7.0.dist-info"
        metadata = "Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\nRequires-Dist: numpy<2.0.0\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    requirements = tmp_path / "requirements.txt"
    monkeypatch.setattr(wheel, "REQUIREMENTS", requirements)

    def made(sha256: str = "") -> tuple[Interpreter, Path]:
        sha256 = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
        requirements.write_text(f"nvidia-pytriton==0.7.0 --hash=sha256:{sha256}\n")
        site = interpreter.prefix / "share" / "abserve" / "nvidia-pytriton"
        return replace(interpreter, package=None), site

    return made


def test_the_wheel_is_fetched_once_beside_the_environment(index: Callable[..., tuple[Interpreter, Path]]) -> None:
    interpreter, site = index()
    detail, remedy = failing(interpreter)["triton-wheel"]
    assert "is not here yet" in detail
    assert "python -m abserve -m servers.triton.wheel" in remedy
    said: list[str] = []
    assert find_wheel(interpreter, said.append).binary == site / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    assert failing(interpreter) == {}
    find_wheel(interpreter, said.append)
    assert len(said) == 1, "it was there the second time"
    assert str(site) in said[0]


@pytest.mark.parametrize("missing", ["pytriton/tritonserver/bin", "nvidia_pytriton-0.7.0.dist-info"])
def test_an_incomplete_or_another_installed_wheel_is_not_used(
    interpreter: Interpreter, index: Callable[..., tuple[Interpreter, Path]], missing: str
) -> None:
    _, site = index()
    assert interpreter.package is not None
    folder = interpreter.package.parent / missing
    folder.rename(folder.with_name("nvidia_pytriton-0.5.9.dist-info"))
    assert find_wheel(interpreter).binary.is_relative_to(site)


@pytest.mark.parametrize("name", ["bin/tritonserver", "backends/python/libtriton_python.so"])
def test_an_incomplete_own_copy_is_fetched_again(index: Callable[..., tuple[Interpreter, Path]], name: str) -> None:
    interpreter, site = index()
    find_wheel(interpreter)
    (site / "pytriton" / "tritonserver" / name).unlink()
    assert "triton-wheel" in failing(interpreter)
    find_wheel(interpreter)
    assert failing(interpreter) == {}


def test_a_file_with_another_hash_is_refused(index: Callable[..., tuple[Interpreter, Path]]) -> None:
    interpreter, site = index("0" * 64)
    with pytest.raises(TritonError, match="DO NOT MATCH THE HASHES"):
        find_wheel(interpreter)
    assert not site.exists()
    assert [path.name for path in site.parent.iterdir()] == [f".{site.name}.lock"]


def test_without_the_file_the_message_says_what_to_run(
    index: Callable[..., tuple[Interpreter, Path]], tmp_path: Path
) -> None:
    interpreter, _ = index()
    shutil.rmtree(tmp_path / "packages")
    with pytest.raises(TritonError, match=r"run pip install --no-deps nvidia-pytriton==0\.7\.0"):
        find_wheel(interpreter)


@pytest.mark.triton
def test_this_machine_can_run_it() -> None:
    done = subprocess.run([sys.executable, "-m", "servers.triton.wheel"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert failing(current_interpreter()) == {}
