"""Each condition of the embedded Triton, taken away once: found, named, with its remedy."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from servers.triton.errors import TritonUnavailableError
from servers.triton.interpreter import Interpreter, current_interpreter
from servers.triton.wheel import diagnose, find_wheel


def failing(interpreter: Interpreter) -> dict[str, tuple[str, str]]:
    findings = diagnose(interpreter)
    assert all(f.remedy for f in findings if not f.ok)
    assert not any(f.remedy for f in findings if f.ok)
    return {f.name: (f.detail, f.remedy or "") for f in findings if not f.ok}


def test_all_is_well(interpreter: Interpreter, tmp_path: Path) -> None:
    assert failing(interpreter) == {}
    wheel = find_wheel(interpreter)
    assert wheel.version == "2.51"
    assert wheel.libpython == tmp_path / "lib" / "libpython3.99.so.1.0"
    for path in (wheel.binary, wheel.backend_folder, wheel.stub, wheel.libraries):
        assert path is not None
        assert path.exists()


@pytest.mark.parametrize("numpy", ["2.0.0", "2.3.1", "3.0"])
def test_numpy_2_is_refused(interpreter: Interpreter, numpy: str) -> None:
    found = replace(interpreter, numpy=numpy)
    detail, remedy = failing(found)["triton-numpy"]
    assert numpy in detail
    assert "empty tensors" in detail
    assert "numpy>=1.26,<2" in remedy
    with pytest.raises(TritonUnavailableError, match="empty tensors"):
        find_wheel(found)


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        ({"glibc": (2, 31)}, "triton-glibc", "Debian 12"),
        ({"glibc": (1, 99)}, "triton-glibc", "Debian 12"),
        ({"glibc": None}, "triton-glibc", "Debian 12"),
        ({"machine": "riscv64"}, "triton-architecture", "another machine"),
        ({"numpy": None}, "triton-numpy", "pip install"),
        ({"wheel": None}, "triton-wheel", "pip install nvidia-pytriton==0.7.0"),
        ({"wheel": "0.5.9"}, "triton-wheel", "pip install nvidia-pytriton==0.7.0"),
        ({"python": (3, 98)}, "triton-stub", "Python 3.11 or 3.12"),
    ],
)
def test_one_condition_unmet(interpreter: Interpreter, change: dict[str, object], name: str, word: str) -> None:
    found = replace(interpreter, **change)  # type: ignore[arg-type]  # the parametrisation fits
    detail, remedy = failing(found)[name]
    assert word in remedy
    with pytest.raises(TritonUnavailableError) as error:
        find_wheel(found)
    assert detail in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("glibc", [(2, 35), (2, 41), (3, 0)])
def test_new_glibc_is_accepted(interpreter: Interpreter, glibc: tuple[int, int]) -> None:
    assert failing(replace(interpreter, glibc=glibc)) == {}


def test_an_incomplete_wheel_names_what_is_missing(interpreter: Interpreter) -> None:
    assert interpreter.package is not None
    (interpreter.package / "tritonserver/backends/python/libtriton_python.so").unlink()
    detail, remedy = failing(interpreter)["triton-wheel"]
    assert "libtriton_python.so" in detail
    assert "--force-reinstall" in remedy


def test_a_binary_that_cannot_be_executed(interpreter: Interpreter) -> None:
    assert interpreter.package is not None
    (interpreter.package / "tritonserver/bin/tritonserver").chmod(0o644)
    assert "chmod +x" in failing(interpreter)["triton-wheel"][1]


def test_missing_libpython_is_found_and_named(interpreter: Interpreter, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "lib")
    assert list(failing(interpreter)) == ["triton-libpython"]
    with pytest.raises(TritonUnavailableError, match=r"libpython3\.99\.so\.1\.0 is missing"):
        find_wheel(interpreter)


@pytest.mark.triton
def test_this_machine_can_run_it() -> None:
    assert failing(current_interpreter()) == {}
