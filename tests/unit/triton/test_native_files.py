"""The file that `abserve serve triton` gives the native backends of an installed tritonserver on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

from servers.commands import triton as command
from servers.engines import settings as engine_settings
from servers.export.manifest import ExportError
from servers.options.defaults import OptionError
from servers.triton.settings import TritonSettings
from tests.scripted_trtexec import ScriptedTrtexec


@pytest.fixture
def plan(tmp_path: Path, trtexec: ScriptedTrtexec, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Path]]:
    """Plans a launch on a machine with a GPU, trtexec 10.13.3 and libnvinfer; returns the title and the plan."""
    file, folder = tmp_path / "mine.onnx", tmp_path / "opt"
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "mine", shapes[:1], shapes[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), file)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tritonserver").touch(0o755)
    for backend in ("tensorrt", "onnxruntime"):
        (folder / "backends" / backend).mkdir(parents=True)
        (folder / "backends" / backend / f"libtriton_{backend}.so").touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvinfer.so.10.13.3").touch()
    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: True)
    monkeypatch.setattr(command, "assert_ready", lambda _settings: None)

    def plan(**options: Any) -> tuple[str, Path]:
        given: dict[str, Any] = {"precision": "fp32", "artefacts": tmp_path / "artefacts", **options}
        settings = TritonSettings(tritonserver=folder, model=str(file), **given)
        launch = command._plan(settings, Console(stderr=True))
        (linked,) = (settings.folder / "models").glob("*/1/model.*")
        return launch.title, linked.resolve()

    return plan


def test_the_plan_is_built_for_the_largest_batch_and_then_chosen(
    plan: Callable[..., tuple[str, Path]], trtexec: ScriptedTrtexec
) -> None:
    assert plan(max_batch_size=4)[0] == "Triton, onnxruntime backend, fp32"
    title, file = plan(max_batch_size=4, backend="tensorrt")
    assert title == "Triton, tensorrt backend, fp32"
    assert "-tensorrt-10.13.3-" in file.name
    assert "--maxShapes=x:4x3" in file.read_text()
    assert plan(max_batch_size=4) == (title, file)
    assert trtexec.built == 1
    assert plan(max_batch_size=5)[0] == "Triton, onnxruntime backend, fp32"


def test_onnxruntime_gets_an_fp16_file_and_the_execution_provider_of_cuda(
    plan: Callable[..., tuple[str, Path]], tmp_path: Path
) -> None:
    title, file = plan(precision="auto", backend="onnxruntime")
    assert (title, file.name) == ("Triton, onnxruntime backend, fp16", "model_fp16.onnx")
    (config,) = (tmp_path / "artefacts").glob("triton/8000/models/*/config.pbtxt")
    assert 'gpu_execution_accelerator: [ { name: "cuda"' in config.read_text()


def test_a_library_of_another_release_or_none_is_refused(
    plan: Callable[..., tuple[str, Path]], trtexec: ScriptedTrtexec, tmp_path: Path
) -> None:
    trtexec.install("10.9.0")
    with pytest.raises(ExportError, match=r"TensorRT 10\.13\.3 executes only .* has trtexec 10\.9\.0"):
        plan(backend="tensorrt")
    (tmp_path / "lib" / "libnvinfer.so.10.13.3").unlink()
    with pytest.raises(OptionError, match="libnvinfer, which the tensorrt backend loads, was not found"):
        plan(backend="tensorrt")
    assert trtexec.built == 0
