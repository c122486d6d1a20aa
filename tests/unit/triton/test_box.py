"""What doctor finds on a rented box, with scripted files."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.export import tensorrt_tools
from servers.triton import box
from servers.triton.installation import STUB, Installation, read_installation
from servers.triton.interpreter import current_interpreter

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
    monkeypatch.setattr(tensorrt_tools, "TRTEXEC_FOLDERS", ())
    monkeypatch.setattr(tensorrt_tools, "LIBRARY_FOLDERS", (tmp_path,))


def trtexec(folder: Path, release: str) -> None:
    tool = folder / "trtexec"
    tool.write_text(f"#!/bin/sh\necho '&&&& RUNNING TensorRT.trtexec [TensorRT {release}]'\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(("built", "ok"), [("v101303", True), ("v100300", False)])
def test_a_tool_must_have_the_version_of_the_library(built: str, ok: bool, tmp_path: Path) -> None:
    trtexec(tmp_path, built)
    _, tensorrt = box.installed_findings(server(tmp_path, "tensorrt"), HERE)
    assert tensorrt.ok is ok
    assert "libnvinfer 10.13.3" in tensorrt.detail


def test_a_wrong_tool_is_a_note_where_another_backend_works(tmp_path: Path) -> None:
    trtexec(tmp_path, "v100300")
    _, tensorrt = box.installed_findings(server(tmp_path, "onnxruntime", "tensorrt"), HERE)
    assert tensorrt.ok
    assert "no plan can be built here, so use --backend onnxruntime" in tensorrt.detail


def test_a_stub_for_another_python_names_the_backends_that_work(tmp_path: Path) -> None:
    found, _ = box.installed_findings(server(tmp_path, "onnxruntime", "tensorrt", python="3.9"), HERE)
    assert found.ok
    assert found.detail.startswith(f"Triton 2.61 in {tmp_path}, backends: onnxruntime, python, tensorrt; ")
    told = f"its python backend is for Python 3.9; this is {HERE.minor}: use --backend onnxruntime or tensorrt"
    assert found.detail.endswith(told)


def test_a_stub_for_another_python_alone_is_a_failure(tmp_path: Path) -> None:
    (found,) = box.installed_findings(server(tmp_path, python="3.9"), HERE)
    assert (found.ok, found.remedy) == (False, "install abserve with Python 3.9")


def test_a_stub_for_this_python_needs_no_word(tmp_path: Path) -> None:
    (found,) = box.installed_findings(server(tmp_path, python=HERE.minor), HERE)
    assert found.ok
    assert found.detail.endswith("backends: python")


def test_a_container_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setattr(box, "CONTAINER_MARKS", (tmp_path / "mark",))
    assert not box.in_container()
    (tmp_path / "mark").touch()
    assert box.in_container()


def test_the_next_command_has_an_arm_per_backend_that_can_run(tmp_path: Path) -> None:
    installed = server(tmp_path, "onnxruntime", "tensorrt")
    assert box.next_command(installed, True, False).detail == THREE_ARMS
    trtexec(tmp_path, "v101303")
    assert box.next_command(installed, True, False).detail == THREE_ARMS + TENSORRT_ARM
    assert box.next_command(installed, False, False).detail == "abserve compare"


def test_the_next_command_without_an_installed_triton() -> None:
    compose = box.next_command(None, True, True).detail
    assert compose.startswith(
        "docker compose up --detach --wait && abserve compare --deployment compose --a native --b"
    )
    assert box.next_command(None, True, False).detail.startswith("abserve compare (with the python backend; ")
    assert box.next_command(None, False, True).detail == "abserve compare"
