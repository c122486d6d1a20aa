"""INT8 files: what is quantised, who executes it in INT8, what it costs, and that garbage is not kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from servers.engines.agreement import TOLERANCE, disagreement
from servers.engines.batches import random_inputs
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.settings import EngineSettings
from servers.engines.torch.forms import expected_answers
from servers.export import quantisation
from servers.export.artefacts import ensure_artefact, executed_file
from servers.export.manifest import ExportError, FileForm, executed_form
from servers.models.files import file_sha256
from servers.models.images import normalise
from servers.models.registry import get_specification, payload_variants
from servers.models.samples import corpus_pixels
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights, WeightsSource
from servers.protocol.tensors import Array, TensorSpec
from tests.tiny_bert import write_tiny_bert

WEIGHTS = RandomWeights(0)
INT8 = FileForm("int8")
EXECUTORS = ("onnxruntime", "openvino")


class Patches(torch.nn.Module):
    """A convolution and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 8, 32, 32)
        self.linear = torch.nn.Linear(392, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.patches(x).relu().flatten(1))
        return result


@pytest.fixture(scope="module")
def small(specification: ModelSpecification) -> tuple[ModelSpecification, ...]:
    """A model of images, with the payloads fp32 and uint8."""

    def load(_source: WeightsSource) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Patches().eval().requires_grad_(False)

    outputs = (TensorSpec("embedding", "FP32", (-1, 16)),)
    return payload_variants(replace(specification, name="small", outputs=outputs, load_module=load))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> ModelSpecification:
    return get_specification(str(write_tiny_bert(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artefacts")


def loaded(kind: str, precision: str, specification: ModelSpecification, path: Path) -> Engine:
    engine = build_engine(specification, WEIGHTS, EngineSettings(kind, precision, device="cpu", threads=1), path)
    engine.load()
    return engine


@pytest.mark.parametrize("payload", ["fp32", "uint8"])
def test_images_are_executed_in_int8_by_both_engines(
    payload: str, small: tuple[ModelSpecification, ...], root: Path
) -> None:
    model = small[payload == "uint8"]
    made = ensure_artefact(model, WEIGHTS, root, form=INT8)
    assert made.path.name == ("model_uint8_int8.onnx" if payload == "uint8" else "model_int8.onnx")
    assert made.manifest.parity_tolerance == TOLERANCE["int8"]
    assert made.manifest.quantisation is not None
    assert made.manifest.quantisation.startswith("static QDQ of 1 Conv, 1 Gemm: INT8 weights per channel")
    assert made.manifest.quantisation.endswith("from 8 photographs")
    # Rounding to 8 bits shows: the parity is measured, and is not that of the FP32 file.
    assert all(1e-3 < (measurement.relative_error or 0) < 0.3 for measurement in made.manifest.parity)
    assert not ensure_artefact(model, WEIGHTS, root, form=INT8).made_now
    weights = {
        tensor.data_type
        for tensor in onnx.load(made.path).graph.initializer
        if tensor.name.endswith("weight_quantized")
    }
    assert weights == {onnx.TensorProto.INT8}

    pixels = corpus_pixels(model, 3)
    images = normalise(pixels, model.preprocessing)
    expected = expected_answers(model, model.load_module(WEIGHTS), {"pixel_values": images})
    counts = {}
    for kind in EXECUTORS:
        assert executed_file(kind, "int8", model, WEIGHTS, root)[0] == made.path
        engine = loaded(kind, "int8", model, made.path)
        answers = engine.infer({"pixel_values": pixels if payload == "uint8" else images})
        assert disagreement(model, expected, answers, "int8").fault is None
        described = engine.describe()
        assert described.precision == "int8"
        counts[kind] = described.details["executed_products"]
        engine.close()
    assert counts == {"onnxruntime": {"QGemm": 1, "QLinearConv": 1}, "openvino": {"u8": 2}}


def test_text_of_any_length_is_executed_in_int8(bert: ModelSpecification, root: Path) -> None:
    made = ensure_artefact(bert, WEIGHTS, root, form=INT8)
    assert made.manifest.quantisation is not None
    assert "from 32 random items" in made.manifest.quantisation
    assert [measurement.padded for measurement in made.manifest.parity] == [False, False, False, True]
    module = bert.load_module(WEIGHTS)
    for kind in EXECUTORS:
        engine = loaded(kind, "int8", bert, made.path)
        for rows, length in ((1, 5), (3, 128), (2, 17)):
            given = random_inputs(bert, rows, 7, {"sequence": length})
            agreement = disagreement(bert, expected_answers(bert, module, given), engine.infer(given), "int8")
            assert agreement.fault is None
            assert agreement.cosine_min is not None
            assert agreement.cosine_min > 0.99
        products = engine.describe().details["executed_products"]
        assert isinstance(products, dict)
        in_int8 = {name: count for name, count in products.items() if name[0] == "Q" or name in ("u8", "i8")}
        assert sum(in_int8.values()) == 12  # of two layers; the attention's own four products stay in FP32
        assert sum(products.values()) == 16
        engine.close()


def test_an_answer_does_not_depend_on_the_rest_of_the_batch(bert: ModelSpecification, root: Path) -> None:
    """As it would with dynamic quantisation, which has one scale per batch."""
    engine = loaded("onnxruntime", "int8", bert, ensure_artefact(bert, WEIGHTS, root, form=INT8).path)
    given = random_inputs(bert, 4, 3, {"sequence": 9})
    together = engine.infer(given)
    alone = engine.infer({name: array[2:3].copy() for name, array in given.items()})
    for name, array in together.items():
        single, row = (np.asarray(answer, np.float64) for answer in (alone[name], array[2:3]))
        np.testing.assert_allclose(single, row, atol=1e-5)
    engine.close()


def test_a_users_file_is_quantised_as_a_copy_and_a_quantised_one_is_executed_unchanged(
    small: tuple[ModelSpecification, ...], root: Path, tmp_path: Path
) -> None:
    plain = ensure_artefact(small[0], WEIGHTS, root).path
    mine = tmp_path / "mine.onnx"
    mine.write_bytes(plain.read_bytes())

    def of(path: Path) -> ModelSpecification:
        return replace(
            small[0], name="mine", reference=str(path), file=path, definition_sha256=file_sha256(path),
            load_module=lambda _: pytest.fail("a file has no module"),
        )  # fmt: skip

    made = ensure_artefact(of(mine), WEIGHTS, tmp_path / "artefacts", form=INT8)
    assert made.path.is_relative_to(tmp_path / "artefacts")
    assert len(made.manifest.parity) == 3
    quantised = of(made.path)
    assert executed_file("openvino", "int8", quantised, WEIGHTS, tmp_path)[0] == made.path
    loaded("openvino", "int8", quantised, made.path).close()
    with pytest.raises(ExportError, match="holds int8; use --precision int8"):
        executed_file("onnxruntime", "fp32", quantised, WEIGHTS, tmp_path)
    with pytest.raises(EngineError, match=r"holds fp32, but the precision is int8; run: abserve export .*int8"):
        loaded("onnxruntime", "int8", small[0], plain)


def test_a_garbage_quantisation_is_not_kept(
    small: tuple[ModelSpecification, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = quantisation.calibration

    def narrow(specification: ModelSpecification) -> tuple[list[Mapping[str, Array]], str]:
        """Ranges so small that every activation saturates."""
        batches, described = original(specification)
        return [
            {name: np.asarray(array, np.float32) * np.float32(1e-3) for name, array in batch.items()}
            for batch in batches
        ], described

    monkeypatch.setattr(quantisation, "calibration", narrow)
    with pytest.raises(ExportError, match="no artefact was kept"):
        ensure_artefact(small[0], WEIGHTS, tmp_path, form=INT8)
    assert not list(tmp_path.rglob("*int8*.onnx"))


def test_a_file_that_multiplies_in_fp32_is_not_called_int8(
    small: tuple[ModelSpecification, ...], root: Path, tmp_path: Path
) -> None:
    """Its metadata may say so, and ONNX Runtime may have no kernel for what is quantised in it."""
    model = onnx.load(ensure_artefact(small[0], WEIGHTS, root).path)
    onnx.helper.set_model_props(model, {"abserve.precision": "int8"})
    path = tmp_path / "claims.onnx"
    onnx.save(model, path)
    with pytest.raises(EngineError, match=r"executes no product of claims\.onnx in INT8, only .*Conv"):
        loaded("onnxruntime", "int8", small[0], path)


def test_what_cannot_be_quantised_is_refused(specification: ModelSpecification, tmp_path: Path) -> None:
    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))

    outputs = (TensorSpec("embedding", "FP32", (-1, 3)),)
    flat = replace(specification, name="flat", fused_tower=False, outputs=outputs, load_module=lambda _: Mean().eval())
    with pytest.raises(ExportError, match=r"no convolution and no product with constant weights.*use --precision fp32"):
        ensure_artefact(flat, WEIGHTS, tmp_path, form=INT8)
    with pytest.raises(ExportError, match="an INT8 file has standard operators; leave --operators out"):
        ensure_artefact(specification, WEIGHTS, tmp_path, form=FileForm("int8", "fused"))
    assert executed_form("onnxruntime", "int8") == executed_form("openvino", "int8") == INT8
    with pytest.raises(
        EngineError, match=r"does not offer precision int8 on cuda: .*multiply in FP32; use one of: fp32"
    ):
        EngineSettings("onnxruntime", "int8", device="cuda:0").mode_on("cuda")
