"""The file that `abserve serve triton` gives the native backends of an installed tritonserver on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from rich.console import Console

from loadgen.records.tuning import Space
from loadgen.tune.space import canonical
from servers.commands import triton as command
from servers.engines import settings as engine_settings
from servers.export.manifest import ExportError
from servers.models.batch_multiple import fill_batches
from servers.models.sources.triton_repository import read_config
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
        linked = min((settings.folder / "models").glob("*/1/model.*"))  # the weights of a filled one are beside it
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


def test_a_file_with_a_batch_multiple_executes_only_such_batches(tmp_path: Path) -> None:
    """Each value gets the number of rows added that the graph inside a node has seen."""
    batch: list[str | int | None] = ["batch", 3]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, batch) for name in ("x", "y")]
    branch = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Gather", ["shape", "zero"], ["rows"]),
            helper.make_node("Cast", ["rows"], ["number"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["x", "number"], ["sum"]),
        ],
        "branch",
        [],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, batch)],
    )
    constants = [
        helper.make_tensor("zero", TensorProto.INT64, [], [0]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
    ]
    node = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    graph = helper.make_graph([node], "counting", values[:1], values[1:], constants)
    file, filled = tmp_path / "model.onnx", tmp_path / "filled" / "model.onnx"
    filled.parent.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), file)
    fill_batches(file, filled, 4)
    session = onnxruntime.InferenceSession(filled, providers=["CPUExecutionProvider"])
    for rows, seen in ((1, 4), (4, 4), (5, 8)):
        x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
        np.testing.assert_array_equal(session.run(["y"], {"x": x})[0], x + seen)


def test_onnxruntime_can_fill_batches_and_execute_requests_alone(
    plan: Callable[..., tuple[str, Path]], tmp_path: Path
) -> None:
    _, file = plan(backend="onnxruntime", batch_multiple=3, max_batch_size=8, cudnn_conv_algo_search=2)
    assert file.is_relative_to(tmp_path / "artefacts" / "triton"), "not the exported file"
    config = read_config(file.parents[1])
    assert [warm.batch_size for warm in config.model_warmup] == [3, 6, 8]
    shown = {name: parameter.string_value for name, parameter in config.parameters.items()}
    assert (shown["batch_multiple"], shown["cudnn_conv_algo_search"]) == ("3", "2")
    assert config.HasField("dynamic_batching")
    _, file = plan(backend="onnxruntime", batching="none")
    (folder,) = (tmp_path / "artefacts" / "triton" / "8000" / "models").iterdir()
    assert not read_config(folder).HasField("dynamic_batching")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "tensorrt", "batch_multiple": 8}, "--batch-multiple is of the onnxruntime backend"),
        ({"backend": "tensorrt", "cudnn_conv_algo_search": 0}, "--cudnn-conv-algo-search is of the onnxruntime"),
        ({"device": "cpu", "cudnn_conv_algo_search": 0}, "no effect on a CPU"),
        ({"batch_multiple": 16, "max_batch_size": 8}, "more than the largest batch, 8"),
        ({"batching": "none", "queue_size": 5}, "--queue-size has no effect with --batching none"),
        ({"slots": 8}, "--slots is for language models"),
        ({"graphs": False}, "--graphs is for language models"),
    ],
)
def test_an_option_of_batches_without_effect_is_refused(
    plan: Callable[..., tuple[str, Path]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        plan(**{"backend": "onnxruntime", **options})


def test_a_search_varies_what_applies_to_a_backend(plan: Callable[..., tuple[str, Path]], tmp_path: Path) -> None:
    """On a GPU; the fixture makes the machine one."""
    plan(backend="onnxruntime")
    chosen = TritonSettings(tritonserver=tmp_path / "opt", model=str(tmp_path / "mine.onnx"), precision="fp32")
    space = msgspec.json.decode(command._space(chosen, (), Console(stderr=True)), type=Space)
    (of_onnxruntime, *_), changed = space.settings, {"cudnn-conv-algo-search": "2", "max-batch-size": "64"}
    assert (of_onnxruntime.name, set(of_onnxruntime.values)) == ("backend", {"onnxruntime", "tensorrt"})
    assert canonical(space, changed | {"batching": "none", "batch-multiple": "16"}) == changed | {"batching": "none"}
    assert canonical(space, changed | {"batch-multiple": "16"}) == changed | {"batch-multiple": "16"}
    plans = {"backend": "tensorrt", "max-batch-size": "64"}
    assert canonical(space, plans | changed | {"batching": "none"}) == plans
