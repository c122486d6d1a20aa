"""When a plan is built, with which tool, and what is refused; see tests/scripted_trtexec.py."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from servers.export import tensorrt
from servers.export.manifest import ExportError
from servers.export.tensorrt import (
    TENSORRT_IMAGE,
    TENSORRT_RELEASE,
    PlanRequest,
    bindings_version,
    container_command,
    ensure_plan,
    gpu_kind,
    library_version,
    profile_shapes,
    trtexec_version,
)
from servers.gpu import nvml
from servers.gpu.readings import DeviceIdentity, NvmlConnection, select_devices
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from tests.scripted_trtexec import ScriptedTrtexec


@pytest.fixture
def wanted(specification: ModelSpecification, tmp_path: Path) -> PlanRequest:
    onnx = tmp_path / "with space" / "model_fp16.onnx"
    onnx.parent.mkdir()
    onnx.touch()
    shapes = profile_shapes(specification, 16)
    return PlanRequest(onnx, "ab12", tmp_path / "plans", "fp16", shapes, "10.13.3", "NVIDIA H200 sm9.0")


def build(request: PlanRequest, *, force: bool = False) -> float | None:
    return ensure_plan(request, lambda _step: None, force=force)


def test_trtexec_gets_the_file_the_shapes_and_the_precision(trtexec: ScriptedTrtexec, wanted: PlanRequest) -> None:
    assert build(wanted) is not None
    arguments = wanted.path.read_text().splitlines()
    assert arguments[0] == f"--onnx={wanted.onnx}"
    assert arguments[2:] == [
        "--minShapes=pixel_values:1x3x224x224",
        "--optShapes=pixel_values:16x3x224x224",
        "--maxShapes=pixel_values:16x3x224x224",
        "--stronglyTyped",
        "--noTF32",
        f"--timingCacheFile={wanted.folder}/nvidia-h200-sm9.0-tensorrt-10.13.3.cache",
        "--skipInference",
    ]
    tf32 = replace(wanted, precision="tf32")
    build(tf32)
    assert "--noTF32" not in tf32.path.read_text()
    trtexec.install("11.2.1")
    build(newer := replace(wanted, release="11.2.1"))
    assert "--stronglyTyped" not in newer.path.read_text()


def test_a_plan_is_kept_until_something_that_determines_it_differs(
    trtexec: ScriptedTrtexec, wanted: PlanRequest, specification: ModelSpecification
) -> None:
    assert build(wanted) is not None
    assert build(wanted) is None
    assert build(wanted, force=True) is not None
    trtexec.install("10.14.1")
    others = [
        replace(wanted, release="10.14.1", **change)
        for change in (
            {},
            {"gpu": "NVIDIA L4 sm8.9"},
            {"onnx_sha256": "cd34"},
            {"precision": "fp32"},
            {"precision": "tf32"},
            {"profile": profile_shapes(specification, 8)},
        )
    ]
    assert all(build(other) is not None for other in others)
    assert [build(other) for other in (wanted, *others)] == [None] * 7
    assert trtexec.built == 8
    assert not list(wanted.folder.glob("*.partial"))


def test_a_tool_of_another_version_is_refused(trtexec: ScriptedTrtexec, wanted: PlanRequest) -> None:
    trtexec.install("10.9.0")
    with pytest.raises(ExportError, match=r"TensorRT 10\.13\.3 executes only .* has trtexec 10\.9\.0; install"):
        build(wanted)
    assert trtexec.built == 0
    with pytest.raises(ExportError, match=r"; run the container command of abserve export --to tensorrt, install"):
        build(replace(wanted, release=TENSORRT_RELEASE))


def test_without_a_tool_the_remedy_is_named(
    trtexec: ScriptedTrtexec, wanted: PlanRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ExportError, match=r"no tool that builds them; install trtexec 10\.13\.3, or run: pip install 'tensorrt==10"
    ):
        build(wanted)
    assert trtexec.built == 0


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            "echo '[12:00:01] [E] no kernel'; echo '[12:00:02] [I] bye'; exit 1",
            r"model_fp16\.onnx: \[12:.*\] no kernel$",
        ),
        ("echo 'error while loading shared libraries' >&2; exit 127", "error while loading shared libraries$"),
        ("exit 0", r"RUNNING TensorRT\.trtexec"),  # and no plan
    ],
)
def test_trtexecs_own_words_are_shown(
    failure: str, message: str, trtexec: ScriptedTrtexec, wanted: PlanRequest
) -> None:
    trtexec.install("10.13.3", failure)
    with pytest.raises(ExportError, match=message):
        build(wanted)
    assert not wanted.path.exists()


def test_a_disk_that_is_full_is_told(
    trtexec: ScriptedTrtexec, wanted: PlanRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_request: PlanRequest, _plan: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensorrt, "_build_with_trtexec", write)
    with pytest.raises(ExportError, match=r"cannot write .*\.plan: No space left on device"):
        build(wanted)


def test_trtexec_may_not_build_for_ever(
    trtexec: ScriptedTrtexec, wanted: PlanRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "BUILD_SECONDS", 0.1)
    trtexec.install("10.13.3", "exec sleep 60")
    with pytest.raises(ExportError, match="trtexec did not build"):
        build(wanted)


def test_the_python_package_is_preferred_if_it_has_the_version(
    trtexec: ScriptedTrtexec, wanted: PlanRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "site" / "tensorrt_cu12-10.13.3.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Name: tensorrt_cu12\nVersion: 10.13.3.9\n")
    monkeypatch.syspath_prepend(information.parent)
    monkeypatch.setattr(tensorrt, "PACKAGES", ("tensorrt", "tensorrt-cu12"))
    monkeypatch.setattr(tensorrt, "_build_with_bindings", lambda _request, plan: plan.write_text("bindings"))
    assert bindings_version() == "10.13.3"
    build(wanted)
    assert wanted.path.read_text() == "bindings"
    trtexec.install("10.14.1")
    build(other := replace(wanted, release="10.14.1"))
    assert "--onnx" in other.path.read_text()


def test_versions_are_those_of_the_program_and_of_the_library_that_the_loader_finds(
    trtexec: ScriptedTrtexec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trtexec_version() == "10.13.3"
    for folder, release in (("cached", "10.9.0"), ("lib", "10.13.3")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"libnvinfer.so.{release}").touch()
        (tmp_path / folder / "libnvinfer.so.10").symlink_to(f"libnvinfer.so.{release}")
    loader = tmp_path / "bin" / "ldconfig"
    loader.write_text(
        f"#!/bin/sh\nprintf '\\tlibnvinfer.so.10 (libc6,x86-64) => {tmp_path}/cached/libnvinfer.so.10\\n'\n"
    )
    loader.chmod(0o755)
    assert library_version() == "10.13.3"
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert library_version() == "10.9.0"
    monkeypatch.setattr(tensorrt, "LIBRARY_FOLDERS", (tmp_path / "lib",))
    loader.write_text("#!/bin/sh\nexit 1\n")
    assert library_version() == "10.13.3"


@pytest.mark.parametrize(
    ("visible", "kind"),
    [("1", "NVIDIA L4 sm8.9"), ("0,1", "NVIDIA H200 sm9.0"), ("", "unknown GPU"), ("7", "unknown GPU")],
)
def test_the_gpu_is_the_first_that_cuda_sees(visible: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [("NVIDIA H200", "9.0"), ("NVIDIA L4", "8.9")]

    class Reader:
        def __init__(self, names: Sequence[str] | None) -> None:
            self._names = names

        def connect(self) -> NvmlConnection:
            devices = tuple(
                DeviceIdentity(index, f"GPU-{index}", name, compute_capability=capability)
                for index, (name, capability) in enumerate(cards)
            )
            return select_devices(
                NvmlConnection("ok", devices=devices, device_count=2), self._names, lambda _name: None
            )

        def close(self) -> None:
            pass

    monkeypatch.setattr(nvml, "NvmlReader", Reader)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_kind() == kind


def test_the_container_command_builds_that_plan(wanted: PlanRequest) -> None:
    request = replace(wanted, release=TENSORRT_RELEASE)
    words = shlex.split(container_command(request))
    assert words[:3] == ["docker", "run", "--rm"]
    assert f"{request.onnx.parent}:/onnx:ro" in words
    assert f"{request.folder}:/plan" in words
    assert words[words.index("trtexec") - 1] == TENSORRT_IMAGE
    assert "--onnx=/onnx/model_fp16.onnx" in words
    assert f"--saveEngine=/plan/{request.path.name}" in words
    assert "--maxShapes=pixel_values:16x3x224x224" in words
    assert not any(word.startswith("--fp16") for word in words)
    assert "--stronglyTyped" not in words


def test_the_profile_of_a_model_with_an_axis_reaches_from_one_item_to_the_largest_batch(wanted: PlanRequest) -> None:
    bert = get_specification("transformers:bert-base-uncased")
    words = shlex.split(container_command(replace(wanted, profile=profile_shapes(bert, 16))))
    for option, shape in (("minShapes", "1x1"), ("optShapes", "16x128"), ("maxShapes", "16x512")):
        assert f"--{option}=input_ids:{shape},attention_mask:{shape},token_type_ids:{shape}" in words
