"""OpenVINO executes any ONNX file on the CPU in the precision that was asked for, and proves its answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from servers.engines import openvino as engine_module
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.openvino import KIND, OpenVINOEngine
from servers.engines.settings import EngineSettings, engine_kind
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Axis, TensorSpec

openvino = pytest.importorskip("openvino")
WIDTH = 16


@pytest.fixture
def product(tmp_path: Path) -> ModelSpecification:
    """A user's file: x [n, length, 16] times a constant matrix, and the lengths of the rows of x."""
    path = tmp_path / "product.onnx"
    matrix = np.random.default_rng(0).standard_normal((WIDTH, 8)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "matrix"], ["y"]),
        helper.make_node("ReduceL2", ["x"], ["size"], axes=[2], keepdims=0),
    ]
    shapes: dict[str, list[str | int]] = {"x": ["n", "length", WIDTH], "y": ["n", "length", 8], "size": ["n", "length"]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(
        nodes, "product", [values["x"]], [values["y"], values["size"]], [numpy_helper.from_array(matrix, "matrix")]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return ModelSpecification(
        name="product",
        title="product",
        version="1",
        inputs=(TensorSpec("x", "FP32", (-1, -1, WIDTH)),),
        outputs=(TensorSpec("y", "FP32", (-1, -1, 8)), TensorSpec("size", "FP32", (-1, -1))),
        axes=(Axis("length", 3, 9, {"x": 1, "y": 1, "size": 1}),),
        max_batch_size=4,
        load_module=lambda _: pytest.fail("the file is executed"),
        file=path,
    )


def engine_of(specification: ModelSpecification, precision: str = "fp32", threads: int = 1) -> Engine:
    settings = EngineSettings("openvino", precision, device="cpu", threads=threads)
    return OpenVINOEngine(specification, settings, RandomWeights(0), specification.file)


@pytest.fixture
def engine(product: ModelSpecification) -> Iterator[Engine]:
    made = engine_of(product)
    made.load()
    yield made
    made.close()
    made.close()


def expected(specification: ModelSpecification, x: np.ndarray) -> dict[str, np.ndarray]:
    assert specification.file is not None
    matrix = numpy_helper.to_array(onnx.load(specification.file).graph.initializer[0])
    return {"y": x @ matrix, "size": np.linalg.norm(x, axis=2)}


def test_the_kind_is_registered() -> None:
    assert engine_kind("openvino") == KIND
    assert EngineSettings("openvino").precision == "fp32"  # also where there is a GPU, which it does not use
    with pytest.raises(EngineError, match="does not run on cuda; use --device cpu"):
        EngineSettings("openvino", device="cuda:0").mode_on("cuda")


def test_every_batch_and_size_is_answered_in_arrays_of_the_caller(engine: Engine, product: ModelSpecification) -> None:
    generator = np.random.default_rng(1)
    kept = []
    for rows, length in ((1, 3), (5, 1), (2, 9)):
        x = generator.standard_normal((rows, length, WIDTH), np.float32)
        x.flags.writeable = False  # as received from a socket
        kept.append((expected(product, x), engine.infer({"x": x})))
    for wanted, answers in kept:  # later batches have not written to earlier answers
        assert list(answers) == ["y", "size"]
        for name, array in answers.items():
            assert array.flags.owndata
            np.testing.assert_allclose(np.asarray(array, np.float32), wanted[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="length 10, more than the largest, 9"):
        engine.infer({"x": np.zeros((1, 10, WIDTH), np.float32)})
    with pytest.raises(EngineError, match="OpenVINO failed to execute the batch"):
        engine.infer({"x": np.zeros((1, 2, WIDTH + 1), np.float32)})


def test_what_is_in_effect_is_read_back(engine: Engine) -> None:
    described = engine.describe()
    assert (described.kind, described.precision, described.mode) == ("openvino", "fp32", "latency")
    assert (described.device, described.threads, described.version) == ("cpu", 1, openvino.__version__.split("-")[0])
    details = described.details
    assert details["execution_devices"] == ["CPU"]
    assert (details["streams"], details["performance_hint"]) == (1, "LATENCY")
    assert (details["inference_precision"], details["executed_products"]) == ("f32", {"f32": 1})
    assert details["relative_error_to_onnxruntime"] is not None


def test_bf16_is_taken_only_where_the_processor_has_it(
    product: ModelSpecification, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    engine = engine_of(product, "bf16")
    if has:
        engine.load()
        described = engine.describe()
        assert (described.precision, described.details["executed_products"]) == ("bf16", {"bf16": 1})
        engine.close()
        monkeypatch.setitem(engine_module.HINTS, "bf16", "f32")  # a hint that is not honoured
        with pytest.raises(EngineError, match=r"executes no product of product in bf16 \(1 in f32\)"):
            engine_of(product, "bf16").load()
        monkeypatch.setitem(engine_module.HINTS, "fp32", "bf16")
        with pytest.raises(EngineError, match=r"in fp32 \(1 in bf16\); use --precision bf16"):
            engine_of(product).load()
    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "INT8"])
    with pytest.raises(EngineError, match="this processor has no BF16 instructions"):
        engine_of(product, "bf16").load()


def test_threads_that_are_not_there_are_refused(product: ModelSpecification) -> None:
    with pytest.raises(EngineError, match=r"OpenVINO uses \d+ threads here instead of 4096; use --threads \d+"):
        engine_of(product, threads=4096).load()


def test_wrong_answers_are_not_served(product: ModelSpecification, monkeypatch: pytest.MonkeyPatch) -> None:
    original = OpenVINOEngine.infer

    def wrong(self: OpenVINOEngine, inputs: Any) -> Any:
        answers = dict(original(self, inputs))
        answers["y"] = answers["y"][::-1].copy()
        return answers

    monkeypatch.setattr(OpenVINOEngine, "infer", wrong)
    with pytest.raises(EngineError, match=r"OpenVINO does not compute product\.onnx as ONNX Runtime does: y has"):
        engine_of(product).load()


def test_what_it_cannot_execute_is_one_sentence(product: ModelSpecification, tmp_path: Path) -> None:
    strings = replace(product, inputs=(TensorSpec("x", "BYTES", (-1, 2)),))
    with pytest.raises(EngineError, match="takes no strings; use the engine onnxruntime"):
        engine_of(strings).load()
    missing = build_engine(
        replace(product, file=None), RandomWeights(0), EngineSettings("openvino", device="cpu"), tmp_path / "no.onnx"
    )
    with pytest.raises(EngineError, match=r"no ONNX file for product at no\.onnx; run: abserve export"):
        missing.load()
    with pytest.raises(EngineError, match="holds fp32, but the precision is int8"):
        engine_of(product, "int8").load()
    with pytest.raises(EngineError, match="the openvino engine is not loaded"):
        engine_of(product).describe()
