"""Files with UINT8 input and with FP16 weights: what is in them, and that a wrong one is not kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.settings import EngineSettings
from servers.export.artefacts import artefact_folder, ensure_artefact, find_artefact
from servers.export.manifest import ExportError, FileForm
from servers.models.images import normalise
from servers.models.registry import payload_variants
from servers.models.samples import corpus_pixels
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import UInt8Images
from servers.models.weights import RandomWeights, WeightsSource
from servers.protocol.tensors import TensorSpec
from tests.cosines import row_cosines

WEIGHTS = RandomWeights(0)


class Patches(torch.nn.Module):
    """Patches as the real model cuts them, projected: small, with a convolution and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 4, 32, 32, bias=False)
        self.linear = torch.nn.Linear(196, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.conv1(x).flatten(1))
        return result


@pytest.fixture(scope="module")
def small(specification: ModelSpecification) -> tuple[ModelSpecification, ...]:
    def load(_source: WeightsSource) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Patches().eval().requires_grad_(False)

    outputs = (TensorSpec("embedding", "FP32", (-1, 16)),)
    return payload_variants(replace(specification, name="small", outputs=outputs, load_module=load))


def loaded(specification: ModelSpecification, kind: str, path: Path | None, precision: str) -> Engine:
    settings = EngineSettings(kind=kind, device="cpu", threads=1, precision=precision)
    engine = build_engine(specification, WEIGHTS, settings, path)
    engine.load()
    engine.warm_up((1, 3))
    return engine


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("payload", [pytest.param("fp32", marks=pytest.mark.slow), "uint8"])
def test_every_file_answers_as_torch_does(
    payload: str, precision: str, small: tuple[ModelSpecification, ...], tmp_path: Path
) -> None:
    model = small[payload == "uint8"]
    made = ensure_artefact(model, WEIGHTS, tmp_path, form=FileForm(precision))
    assert (
        made.path.name
        == {
            ("fp32", "fp32"): "model.onnx",
            ("uint8", "fp32"): "model_uint8.onnx",
            ("fp32", "fp16"): "model_fp16.onnx",
            ("uint8", "fp16"): "model_uint8_fp16.onnx",
        }[payload, precision]
    )
    assert (made.manifest.payload, made.manifest.precision, made.manifest.file) == (payload, precision, made.path.name)
    tolerance = {"fp32": 1e-3, "fp16": 0.03}[precision]
    assert made.manifest.parity_tolerance == tolerance
    assert all((measured.relative_error or 0) < tolerance for measured in made.manifest.parity)
    assert [measured.batch for measured in made.manifest.parity] == [1, 2, 7]
    assert not ensure_artefact(model, WEIGHTS, tmp_path, form=FileForm(precision)).made_now

    graph = onnx.load(made.path).graph
    wanted = onnx.TensorProto.FLOAT16 if precision == "fp16" else onnx.TensorProto.FLOAT
    assert {i.data_type for i in graph.initializer if i.name.endswith("weight")} == {wanted}
    assert [i.type.tensor_type.elem_type for i in graph.output] == [onnx.TensorProto.FLOAT]

    engine = loaded(model, "onnxruntime", made.path, precision)
    assert engine.describe().precision == precision
    pixels = corpus_pixels(model, 3)
    images = normalise(pixels, model.preprocessing)
    with torch.inference_mode():
        reference = model.load_module(WEIGHTS)(torch.from_numpy(images)).numpy()
    answer = engine.infer({"pixel_values": pixels if payload == "uint8" else images})["embedding"]
    assert row_cosines(reference, answer).min() > 1 - tolerance
    engine.close()


def test_bytes_stay_precise_on_their_way_to_fp16(small: tuple[ModelSpecification, ...], tmp_path: Path) -> None:
    graph = onnx.load(ensure_artefact(small[1], WEIGHTS, tmp_path, form=FileForm("fp16")).path).graph
    half = {i.name for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT16}
    before = [node for node in graph.node if node.op_type in ("Div", "Sub")]
    assert len(before) >= 2
    assert not half.intersection(name for node in before for name in node.input)


def test_torch_normalises_bytes_as_the_client_would(small: tuple[ModelSpecification, ...]) -> None:
    pixels = corpus_pixels(small[1], 5)
    fp32, uint8 = (loaded(model, "torch", None, "fp32") for model in small[:2])
    expected = fp32.infer({"pixel_values": normalise(pixels, small[0].preprocessing)})["embedding"]
    np.testing.assert_array_equal(uint8.infer({"pixel_values": pixels})["embedding"], expected)


def test_a_file_that_normalises_wrongly_is_not_kept(
    small: tuple[ModelSpecification, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: UInt8Images, pixel_values: torch.Tensor) -> torch.Tensor:
        scaled = pixel_values.permute(0, 3, 1, 2).flip(1).to(self.mean.dtype) / 255  # BGR instead of RGB
        result: torch.Tensor = self.tower((scaled - self.mean) / self.std)
        return result

    monkeypatch.setattr(UInt8Images, "forward", forward)
    with pytest.raises(ExportError, match="no artefact was kept"):
        ensure_artefact(small[1], WEIGHTS, tmp_path)
    assert find_artefact(tmp_path, small[1], WEIGHTS) is None


def test_the_wrong_file_for_a_precision_says_which_one_to_export(
    small: tuple[ModelSpecification, ...], tmp_path: Path
) -> None:
    full = ensure_artefact(small[0], WEIGHTS, tmp_path)
    half = ensure_artefact(small[0], WEIGHTS, tmp_path, form=FileForm("fp16"))
    with pytest.raises(EngineError, match=r"model\.onnx holds fp32, .*run: abserve export .*--precision fp16"):
        loaded(small[0], "onnxruntime", full.path, "fp16")
    with pytest.raises(EngineError, match=r"model_fp16\.onnx holds fp16, .*run: abserve export .*--precision fp32"):
        loaded(small[0], "onnxruntime", half.path, "fp32")
    with pytest.raises(EngineError, match="inputs are"):
        loaded(small[1], "onnxruntime", full.path, "fp32")


def test_there_is_no_file_that_takes_jpeg(small: tuple[ModelSpecification, ...], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="export the payload uint8"):
        ensure_artefact(small[2], WEIGHTS, tmp_path)
    assert not artefact_folder(tmp_path, small[2], WEIGHTS).exists()
    with pytest.raises(EngineError, match="use small_uint8 instead"):
        build_engine(small[2], WEIGHTS, EngineSettings(kind="torch"))
