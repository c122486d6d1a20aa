"""What can be said of the TensorRT engine without TensorRT: refusals with their remedy."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from servers.engines.factory import build_engine
from servers.engines.interface import EngineError
from servers.engines.settings import EngineSettings
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
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "eager"}, "has no mode 'eager'; use one of: auto, graph"),
        ({"precision": "bf16"}, "has no precision 'bf16'; did you mean"),
        ({"precision": "fp16", "device": "cpu"}, "does not run on cpu; use --device cuda"),
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


def test_a_model_without_buckets_is_refused_before_any_library_is_loaded(tmp_path: Path) -> None:
    bert = get_specification("transformers:bert-base-uncased")
    (tmp_path / "model.plan").touch()
    unpadded = replace(bert, axes=(replace(bert.axes[0], padding={}),))
    with pytest.raises(EngineError, match=r"cannot be padded, .*; use the engine torch or onnxruntime"):
        build_engine(unpadded, WEIGHTS, EngineSettings(kind="tensorrt"), tmp_path / "model.plan").load()
