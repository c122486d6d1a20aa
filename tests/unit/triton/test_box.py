"""What doctor finds on a rented box, with scripted files."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.triton import box


@pytest.mark.parametrize(("built", "ok"), [("v101303", True), ("v100300", False)])
def test_a_tool_must_have_the_version_of_the_library(
    built: str, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backends" / "tensorrt").mkdir(parents=True)
    (tmp_path / "libnvinfer.so.10.13.3").touch()
    (tmp_path / "libnvinfer.so.10").symlink_to("libnvinfer.so.10.13.3")
    tool = tmp_path / "trtexec"
    tool.write_text(f"#!/bin/sh\necho '&&&& RUNNING TensorRT.trtexec [TensorRT {built}]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(box, "LIBRARY_FOLDERS", (tmp_path,))
    server, tensorrt = box.installed_findings(tmp_path)
    assert "backends: tensorrt" in server.detail
    assert tensorrt.ok is ok
    assert "libnvinfer 10.13.3" in tensorrt.detail


def test_a_container_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setattr(box, "CONTAINER_MARKS", (tmp_path / "mark",))
    assert not box.in_container()
    (tmp_path / "mark").touch()
    assert box.in_container()


def test_the_next_command_names_a_native_backend_only_where_it_can_run(tmp_path: Path) -> None:
    (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
    assert box.next_command(tmp_path, True).detail == "abserve compare --b-option backend=onnxruntime"
    assert box.next_command(tmp_path, False).detail == box.next_command(None, True).detail == "abserve compare"
