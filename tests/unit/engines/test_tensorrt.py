"""What can be said of TensorRT without it: refusals with their remedy, and the command that builds a plan elsewhere."""

from __future__ import annotations

import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from servers.engines.factory import build_engine
from servers.engines.interface import EngineError
from servers.engines.settings import EngineSettings
from servers.export.tensorrt_plan import TENSORRT_IMAGE, build_plan, container_command, plan_path
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

WEIGHTS = RandomWeights(0)
without_tensorrt = pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is installed here")


@without_tensorrt
def test_without_tensorrt_the_remedy_is_named(specification: ModelSpecification, tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"plan")
    engine = build_engine(specification, WEIGHTS, EngineSettings(kind="tensorrt", precision="fp16"), plan)
    with pytest.raises(EngineError, match="TensorRT is not installed; run: pip install tensorrt"):
        engine.load()
    with pytest.raises(EngineError, match="not loaded"):
        engine.describe()
    with pytest.raises(EngineError, match="TensorRT is not installed"):
        build_plan(specification, tmp_path / "model.onnx", plan, 8)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "eager"}, "has no mode 'eager'; use one of: auto, graph"),
        ({"precision": "bf16"}, "has no precision 'bf16'; did you mean"),
        ({"precision": "fp16", "device": "cpu"}, "no TensorRT plan at missing.plan"),
        (
            {"precision": "fp16"},
            "missing.plan; run: abserve export --model open_clip:ViT-B-32 --to tensorrt",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    settings: dict[str, Any], message: str, specification: ModelSpecification, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=message):
        build_engine(
            specification, WEIGHTS, EngineSettings(kind="tensorrt", **settings), tmp_path / "missing.plan"
        ).load()


def test_a_plan_must_be_given(specification: ModelSpecification) -> None:
    with pytest.raises(EngineError, match="run: abserve export --model open_clip:ViT-B-32 --to tensorrt"):
        build_engine(specification, WEIGHTS, EngineSettings(kind="tensorrt"), None)


def test_the_container_command_builds_that_plan(specification: ModelSpecification, tmp_path: Path) -> None:
    onnx = tmp_path / "with space" / "random-0-fp16" / "model_fp16.onnx"
    plan = plan_path(onnx)
    assert plan == tmp_path / "with space" / "random-0-fp16-tensorrt" / "model_fp16.plan"
    words = shlex.split(container_command(specification, onnx, plan, 16))
    assert words[:3] == ["docker", "run", "--rm"]
    assert f"{onnx.parent}:/onnx:ro" in words
    assert f"{plan.parent}:/plan" in words
    assert TENSORRT_IMAGE in words
    assert "--onnx=/onnx/model_fp16.onnx" in words
    assert "--saveEngine=/plan/model_fp16.plan" in words
    assert "--minShapes=pixel_values:1x3x224x224" in words
    assert "--maxShapes=pixel_values:16x3x224x224" in words
    assert not any("fp16" in word and word.startswith("--fp16") for word in words)


def test_the_profile_of_a_model_with_an_axis_reaches_from_one_item_to_the_largest_batch(tmp_path: Path) -> None:
    bert = get_specification("transformers:bert-base-uncased")
    words = shlex.split(container_command(bert, tmp_path / "a" / "model.onnx", tmp_path / "b" / "model.plan", 16))
    for option, shape in (("minShapes", "1x1"), ("optShapes", "16x128"), ("maxShapes", "16x512")):
        assert f"--{option}=input_ids:{shape},attention_mask:{shape},token_type_ids:{shape}" in words


def test_a_model_without_buckets_is_refused_before_any_library_is_loaded(tmp_path: Path) -> None:
    bert = get_specification("transformers:bert-base-uncased")
    (tmp_path / "model.plan").touch()
    unpadded = replace(bert, axes=(replace(bert.axes[0], padding={}),))
    with pytest.raises(EngineError, match="cannot be padded; use the engine torch or onnxruntime"):
        build_engine(unpadded, WEIGHTS, EngineSettings(kind="tensorrt"), tmp_path / "model.plan").load()
