"""The graph of fused operators computes open_clip's function; what it does not cover is exported as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.export.artefacts import artefact_folder, ensure_artefact, find_artefact
from servers.export.manifest import ExportError, FileForm, executed_form
from servers.export.tower_graph import tower_graph
from servers.models.images import UInt8Array, normalise
from servers.models.registry import payload_variants
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights, WeightsSource
from servers.protocol.tensors import Array, TensorSpec
from tests.cosines import row_cosines
from tests.small_tower import LAYERS, small_tower, with_small_tower

WEIGHTS = RandomWeights(0)
FUSED_FP16 = FileForm("fp16", "fused")
SHAPE_OPERATORS = {"Shape", "Gather", "Concat", "Expand", "ConstantOfShape", "Range"}


@pytest.fixture(scope="module")
def variants(specification: ModelSpecification) -> tuple[ModelSpecification, ...]:
    return payload_variants(with_small_tower(specification))


@pytest.fixture(scope="module")
def pixels() -> UInt8Array:
    return np.random.default_rng(1).integers(0, 256, (5, 224, 224, 3), np.uint8)


def executed(model: onnx.ModelProto, given: Array) -> npt.NDArray[np.float32]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    answer: npt.NDArray[np.float32] = session.run(None, {"pixel_values": given})[0]
    return answer


@pytest.mark.parametrize("payload", ["fp32", "uint8"])
@pytest.mark.parametrize("quick_gelu", [False, True])
def test_it_computes_open_clips_function(
    payload: str,
    quick_gelu: bool,
    variants: tuple[ModelSpecification, ...],
    pixels: UInt8Array,
) -> None:
    model, tower = variants[payload == "uint8"], small_tower(quick_gelu=quick_gelu)
    images = normalise(pixels, model.preprocessing)
    given = pixels if payload == "uint8" else images
    with torch.inference_mode():
        expected = tower(torch.from_numpy(images)).numpy()
    exact = tower_graph(model, tower, "fp32")
    for rows in (1, 2, 5):
        np.testing.assert_allclose(executed(exact, given[:rows]), expected[:rows], atol=2e-5, rtol=0)
    half = executed(tower_graph(model, tower, "fp16"), given)
    assert half.dtype == np.float32
    assert row_cosines(expected, half).min() > 0.9999
    # The tolerance discriminates: the tower of other weights is another function.
    other = tower_graph(model, small_tower(quick_gelu=quick_gelu, seed=1), "fp32")
    assert row_cosines(expected, executed(other, given)).min() < 0.9


def test_no_node_computes_a_shape_and_a_block_is_seven(variants: tuple[ModelSpecification, ...]) -> None:
    operators = [node.op_type for node in tower_graph(variants[1], small_tower(), "fp16").graph.node]
    assert not SHAPE_OPERATORS.intersection(operators)
    assert operators.count("Attention") == LAYERS
    assert operators.count("SkipLayerNormalization") == 2 * LAYERS
    assert operators.count("MatMul") == 3 * LAYERS + 2


@pytest.mark.parametrize("payload", ["fp32", "uint8"])
def test_the_file_of_fused_operators_is_made_once_and_executed(
    payload: str, variants: tuple[ModelSpecification, ...], tmp_path: Path, pixels: UInt8Array
) -> None:
    model = variants[payload == "uint8"]
    made = ensure_artefact(model, WEIGHTS, tmp_path, form=FUSED_FP16)
    assert (made.manifest.operators, made.manifest.precision, made.manifest.opset) == ("fused", "fp16", 19)
    assert not ensure_artefact(model, WEIGHTS, tmp_path, form=FUSED_FP16).made_now
    assert find_artefact(tmp_path, model, WEIGHTS, FileForm("fp16")) is None
    engine = build_engine(model, WEIGHTS, EngineSettings("onnxruntime", "fp16", device="cpu", threads=1), made.path)
    engine.load()
    images = normalise(pixels, model.preprocessing)
    answer = engine.infer({"pixel_values": pixels if payload == "uint8" else images})["embedding"]
    with torch.inference_mode():
        assert row_cosines(small_tower()(torch.from_numpy(images)).numpy(), answer).min() > 0.999
    assert engine.describe().precision == "fp16"
    engine.close()


def test_what_the_graph_does_not_cover_is_exported_by_torch(specification: ModelSpecification, tmp_path: Path) -> None:
    def load(_source: WeightsSource) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = (torch.nn.Conv2d(3, 4, 32, 32), torch.nn.Flatten(), torch.nn.Linear(196, 16))
            return torch.nn.Sequential(*layers).eval().requires_grad_(False)

    outputs = (TensorSpec("embedding", "FP32", (-1, 16)),)
    model = replace(specification, name="other", outputs=outputs, load_module=load)
    made = ensure_artefact(model, WEIGHTS, tmp_path, form=FUSED_FP16)
    assert (made.manifest.operators, made.manifest.opset) == ("standard", 18)
    assert made.path.parent == artefact_folder(tmp_path, model, WEIGHTS, FUSED_FP16)
    assert not ensure_artefact(model, WEIGHTS, tmp_path, form=FUSED_FP16).made_now


def test_engines_execute_the_form_that_is_theirs(variants: tuple[ModelSpecification, ...], tmp_path: Path) -> None:
    assert executed_form("onnxruntime", "fp16") == FUSED_FP16
    assert executed_form("tensorrt", "fp16") == FileForm("fp16")
    assert executed_form("onnxruntime", "tf32") == executed_form("onnxruntime", "fp32") == FileForm("fp32", "fused")
    with pytest.raises(ExportError, match="unknown operators 'best'; use one of: standard, fused"):
        ensure_artefact(variants[0], WEIGHTS, tmp_path, form=FileForm("fp16", "best"))
