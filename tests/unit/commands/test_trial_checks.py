"""What doctor finds on a rented box, with scripted files."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.commands import doctor
from servers.export import tensorrt
from servers.gpu import info
from servers.triton.installation import STUB, Installation, current_interpreter, libpython_remedy, read_installation
from servers.triton.trial import ServerTrial
from tests.scripted_reader import NullReader

HERE = current_interpreter()
THREE_ARMS = "abserve compare --a native --b triton --b-option backend=onnxruntime"
TENSORRT_ARM = " --c triton --c-option backend=tensorrt"


def server(folder: Path, *backends: str, python: str = "") -> Installation:
    """An installed tritonserver; `python` is that of its stub."""
    for name in backends:
        (folder / "backends" / name).mkdir(parents=True)
        (folder / "backends" / name / f"libtriton_{name}.so").touch()
    (folder / "TRITON_VERSION").write_text("2.61.0\n")
    if python:
        stub = folder / "backends" / "python" / STUB
        stub.parent.mkdir(parents=True)
        (stub.parent / "libtriton_python.so").touch()
        stub.write_bytes(f"libpython{python}.so.1.0".encode())
    return read_installation(folder, HERE)


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libnvinfer 10.13.3 without a tool."""
    (tmp_path / "libnvinfer.so.10.13.3").touch()
    (tmp_path / "libnvinfer.so.10").symlink_to("libnvinfer.so.10.13.3")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(tensorrt, "TRTEXEC_FOLDERS", ())
    monkeypatch.setattr(tensorrt, "LIBRARY_FOLDERS", (tmp_path,))


def trtexec(folder: Path, release: str) -> None:
    tool = folder / "trtexec"
    tool.write_text(f"#!/bin/sh\necho '&&&& RUNNING TensorRT.trtexec [TensorRT {release}]'\n")
    tool.chmod(0o755)


def tried(*working: str, failure: str | None = None, **faults: str) -> ServerTrial:
    return ServerTrial(0.4, failure, dict.fromkeys(working) | faults)


@pytest.mark.parametrize(("built", "ok"), [("v101303", True), ("v100300", False)])
def test_a_tool_must_have_the_version_of_the_library(built: str, ok: bool, tmp_path: Path) -> None:
    trtexec(tmp_path, built)
    (tensorrt,) = doctor.tensorrt_checks(tried("tensorrt"))
    assert tensorrt.ok is ok
    assert "libnvinfer 10.13.3" in tensorrt.detail
    assert doctor.tensorrt_checks(tried("onnxruntime")) == []


def test_a_wrong_tool_is_a_note_where_another_backend_works(tmp_path: Path) -> None:
    trtexec(tmp_path, "v100300")
    (tensorrt,) = doctor.tensorrt_checks(tried("onnxruntime", "tensorrt"))
    assert tensorrt.ok
    assert "no plan can be built here, so use --backend onnxruntime" in tensorrt.detail


def test_what_ran_is_ticked_and_a_stub_for_another_python_is_a_note(tmp_path: Path) -> None:
    installed = server(tmp_path, "onnxruntime", "tensorrt", python="3.9")
    (found,) = doctor.trial_checks(installed, HERE, tried("onnxruntime", "tensorrt"))
    assert found.ok
    told = "started in 0.4 s; a model of each of these backends answered: onnxruntime; tensorrt loads; "
    assert found.detail.startswith(f"Triton 2.61 in {tmp_path} {told}")
    told = f"its python backend is for Python 3.9; this is {HERE.minor}: use --backend onnxruntime or tensorrt"
    assert found.detail.endswith(told)


def test_a_stub_for_another_python_alone_is_a_failure(tmp_path: Path) -> None:
    (found,) = doctor.trial_checks(server(tmp_path, python="3.9"), HERE, tried())
    assert (found.ok, found.remedy) == (False, "install abserve with Python 3.9")


def test_a_server_that_does_not_start_is_one_failure(tmp_path: Path) -> None:
    trial = tried(failure="libcudart.so.12 is missing", python="that, too")
    (found,) = doctor.trial_checks(server(tmp_path, python=HERE.minor), HERE, trial)
    assert not found.ok
    assert found.detail == f"Triton 2.61 in {tmp_path} does not start: libcudart.so.12 is missing"


def test_a_backend_that_does_not_work_is_a_failure_beside_those_that_do(tmp_path: Path) -> None:
    missing = f"its process does not start: {HERE.libpython_name}: cannot open shared object file"
    trial = tried("onnxruntime", python=missing, tensorrt="no library")
    works, python, tensorrt = doctor.trial_checks(server(tmp_path, "onnxruntime", python=HERE.minor), HERE, trial)
    assert works.ok
    assert works.detail.endswith("answered: onnxruntime")
    assert (python.name, python.ok, python.detail) == ("triton python", False, missing)
    assert python.remedy == libpython_remedy(HERE)
    assert (tensorrt.name, tensorrt.detail) == ("triton tensorrt", "no library")
    assert "backends/tensorrt from its release" in (tensorrt.remedy or "")


def test_a_container_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setattr(info, "CONTAINER_MARKS", (tmp_path / "mark",))
    assert not info.in_container()
    (tmp_path / "mark").touch()
    assert info.in_container()
    (tmp_path / "mark").unlink()
    monkeypatch.setenv("container", "lxc")
    assert info.gpu_info(None, NullReader())["host"]["in_container"] is True  # type: ignore[index]  # a document


def test_the_next_command_has_an_arm_per_backend_that_can_run(tmp_path: Path) -> None:
    installed = tried("onnxruntime", "tensorrt")
    assert doctor.next_command(installed, True, False).detail == THREE_ARMS
    trtexec(tmp_path, "v101303")
    assert doctor.next_command(installed, True, False).detail == THREE_ARMS + TENSORRT_ARM
    assert doctor.next_command(installed, False, False).detail == "abserve compare"
    assert doctor.next_command(tried("onnxruntime", tensorrt="broken"), True, False).detail == THREE_ARMS


def test_the_next_command_without_an_installed_triton() -> None:
    compose = doctor.next_command(None, True, True).detail
    assert compose.startswith(
        "docker compose up --detach --wait && abserve compare --deployment compose --a native --b"
    )
    assert doctor.next_command(None, True, False).detail.startswith("abserve compare (with the python backend; ")
    assert doctor.next_command(None, False, True).detail == "abserve compare"
