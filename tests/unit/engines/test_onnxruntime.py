"""ONNX Runtime executes any signature: datatypes, strings, dimensions of any name, several inputs and outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from servers.engines.batches import executed_mode
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.onnxruntime import ELEMENT_TYPES, ort_reason, stored_precision
from servers.engines.processors import openmp_spinning, wait_policy
from servers.engines.settings import EngineSettings
from servers.measuring.measurement import references_of
from servers.models.registry import get_base
from servers.models.specification import ModelSpecification
from servers.models.weights import CheckpointWeights, RandomWeights
from servers.protocol.tensors import DATATYPES, Array, Axis, TensorSpec

ONNX_TYPES = {
    **{name: getattr(TensorProto, name) for name in DATATYPES if "INT" in name or name == "BOOL"},
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
EVERY = tuple(ELEMENT_TYPES)


def copying(path: Path, batch: str | int = "N", datatypes: tuple[str, ...] = EVERY) -> ModelSpecification:
    """A user's file that copies one input of each datatype, [batch, length, 2], to an output."""
    shape = [batch, "length", 2]
    nodes, inputs, outputs = [], [], []
    axis: dict[str, int] = {}
    for datatype in datatypes:
        source, target = f"in_{datatype}", f"out_{datatype}"
        nodes.append(helper.make_node("Identity", [source], [target]))
        inputs.append(helper.make_tensor_value_info(source, ONNX_TYPES[datatype], shape))
        outputs.append(helper.make_tensor_value_info(target, ONNX_TYPES[datatype], shape))
        axis |= {source: 1, target: 1}
    graph = helper.make_graph(nodes, "copying", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return ModelSpecification(
        name="copying",
        title="copying",
        version="1",
        inputs=tuple(TensorSpec(f"in_{datatype}", datatype, (-1, -1, 2)) for datatype in datatypes),
        outputs=tuple(TensorSpec(f"out_{datatype}", datatype, (-1, -1, 2)) for datatype in datatypes),
        axes=(Axis("length", 3, 9, axis),),
        max_batch_size=4,
        load_module=lambda _: pytest.fail("the file is executed"),
        file=path,
    )


def engine_of(specification: ModelSpecification, **settings: str) -> Engine:
    given = EngineSettings(kind="onnxruntime", device="cpu", threads=1, **settings)  # type: ignore[arg-type]
    return build_engine(specification, RandomWeights(0), given, specification.file)


def values(datatype: str, shape: tuple[int, ...]) -> Array:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    if datatype == "BYTES":
        return np.vectorize(lambda n: f"é{n}".encode(), otypes=[object])(numbers)
    return (numbers % 2 if datatype == "BOOL" else numbers).astype(DATATYPES[datatype])


def test_every_datatype_goes_in_and_out_at_every_size(tmp_path: Path) -> None:
    assert set(EVERY) == {*DATATYPES, "BYTES"}
    specification = copying(tmp_path / "copying.onnx")
    engine = engine_of(specification)
    engine.load()
    for rows, length in ((1, 3), (4, 1), (2, 9)):
        batch = {f"in_{datatype}": values(datatype, (rows, length, 2)) for datatype in EVERY}
        answers = engine.infer(batch)
        assert list(answers) == [tensor.name for tensor in specification.outputs]
        for datatype in EVERY:
            answer = answers[f"out_{datatype}"]
            assert answer.dtype == batch[f"in_{datatype}"].dtype
            np.testing.assert_array_equal(answer, batch[f"in_{datatype}"])
    assert isinstance(engine.infer(batch)["out_BYTES"][0, 0, 0], bytes)
    engine.close()


@pytest.mark.parametrize(
    ("asked", "threads", "in_effect"), [(None, 2, "on"), (False, 2, "off"), (True, 2, "on"), (True, 1, "off")]
)
def test_spinning_is_read_back(tmp_path: Path, asked: bool | None, threads: int, in_effect: str) -> None:
    specification = copying(tmp_path / "copying.onnx", datatypes=("FP32",))
    settings = EngineSettings(kind="onnxruntime", device="cpu", threads=threads, spinning=asked)
    settings.check()
    engine = build_engine(specification, RandomWeights(0), settings, specification.file)
    engine.load()
    assert engine.describe().spinning == in_effect
    engine.close()


@pytest.mark.parametrize("spinning", [True, False])
@pytest.mark.parametrize(("kind", "device"), [("openvino", "cpu"), ("torch", "cuda:0"), ("onnxruntime", "cuda:0")])
def test_spinning_is_refused_where_it_has_no_effect(kind: str, device: str, spinning: bool) -> None:
    EngineSettings(kind=kind, device=device).check()
    with pytest.raises(EngineError, match="only torch and onnxruntime on the CPU have a choice of spinning"):
        EngineSettings(kind=kind, device=device, spinning=spinning).check()


@pytest.mark.parametrize(
    ("environment", "threads", "spinning"),
    [
        ({}, 2, "on"),
        ({}, 1, "off"),
        (wait_policy(True), 2, "on"),
        (wait_policy(False), 2, "off"),
        ({"OMP_WAIT_POLICY": "passive"}, 2, "off"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, "on"),
        ({"GOMP_SPINCOUNT": "0"}, 2, "off"),
    ],
)
def test_openmps_threads_spin_unless_they_are_told_not_to(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], threads: int, spinning: str
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert openmp_spinning(threads) == spinning


def test_strings_that_are_no_text_are_refused_with_the_reason(tmp_path: Path) -> None:
    engine = engine_of(copying(tmp_path / "copying.onnx", datatypes=("BYTES",)))
    engine.load()
    with pytest.raises(EngineError, match="must be UTF-8 text"):
        engine.infer({"in_BYTES": np.full((1, 3, 2), b"\xff", object)})


def test_a_file_with_a_fixed_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="fixes the batch size of in_FP32"):
        engine_of(copying(tmp_path / "copying.onnx", batch=4, datatypes=("FP32",))).load()


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        (TensorSpec("in_FP32", "FP32", (-1, 7, 2)), True),  # a named dimension has any size
        (TensorSpec("in_FP32", "FP32", (-1, -1, 3)), False),
        (TensorSpec("in_FP32", "FP32", (-1, 2)), False),
        (TensorSpec("in_FP32", "FP16", (-1, -1, 2)), False),
        (TensorSpec("other", "FP32", (-1, -1, 2)), False),
    ],
)
def test_the_signature_is_the_models_or_refused(tensor: TensorSpec, fits: bool, tmp_path: Path) -> None:
    engine = engine_of(replace(copying(tmp_path / "copying.onnx", datatypes=("FP32",)), inputs=(tensor,)))
    if fits:
        engine.load()
    else:
        with pytest.raises(EngineError, match=r"the ONNX file's inputs are .*in_FP32"):
            engine.load()


def test_graphs_need_shapes_that_follow_from_batch_and_padding(tmp_path: Path) -> None:
    unpadded = copying(tmp_path / "copying.onnx")

    def mode(specification: ModelSpecification, requested: str) -> str:
        return executed_mode(specification, EngineSettings(kind="onnxruntime", mode=requested), "cuda")[0]

    assert mode(unpadded, "auto") == mode(unpadded, "session") == "session"
    with pytest.raises(EngineError, match=r"cannot be padded, .*; use mode session"):
        mode(unpadded, "graph")
    (axis,) = unpadded.axes
    padded = replace(unpadded, axes=(replace(axis, padding={tensor.name: 0 for tensor in unpadded.inputs}),))
    assert mode(padded, "auto") == "graph"


@pytest.mark.parametrize(("halves", "marked", "precision"), [(5, "", "fp16"), (1, "", "fp32"), (1, "fp16", "fp16")])
def test_a_users_file_has_the_precision_of_most_of_its_weights(halves: int, marked: str, precision: str) -> None:
    weights = [
        numpy_helper.from_array(np.zeros(halves, np.float16), "half"),
        numpy_helper.from_array(np.zeros(3, np.float32), "full"),
    ]
    model = helper.make_model(helper.make_graph([], "weights", [], [], weights))
    if marked:
        helper.set_model_props(model, {"abserve.precision": marked})
    assert stored_precision(model) == precision


def relu(path: Path, ir: int = 9, opset: int = 17, ml: int = 3) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", ml)]
    path.write_bytes(helper.make_model(graph, ir_version=ir, opset_imports=imports).SerializeToString())
    return path


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            {"ir": 99},
            r"IR version 99, ONNX Runtime \S+ takes at most \d+; save it with model.ir_version",
        ),
        (
            {"opset": 99},
            r"opset 99 of ai.onnx, ONNX Runtime \S+ takes at most \d+; export it with opset_version=",
        ),
        (
            {"ml": 77},
            r"opset 77 of ai.onnx.ml, ONNX Runtime \S+ takes at most \d+; export it with opset ",
        ),
    ],
)
def test_a_file_beyond_the_runtime_is_one_short_sentence(tmp_path: Path, made: dict[str, int], words: str) -> None:
    path = relu(tmp_path / "new.onnx", **made)
    specification, settings = get_base(str(path)), EngineSettings(kind="onnxruntime", device="cpu")
    engine = build_engine(specification, CheckpointWeights(path), settings, path)
    with pytest.raises(EngineError, match=f"^new.onnx has {words}") as refused:
        engine.load()
    assert len(str(refused.value)) < 200
    (reference,) = references_of(specification, CheckpointWeights(path), [{}])
    assert reference.answers is None, "another engine may execute the file"


def test_what_onnxruntime_says_has_no_signature_of_its_sources() -> None:
    text = (
        "[ONNXRuntimeError] : 1 : FAIL : Load model from a.onnx failed:/onnxruntime_src/core/graph/model.cc:256 "
        "onnxruntime::Model::Model(onnx::ModelProto&&, const std::function<void(int)>&) const Unknown (a, b)\nmore"
    )
    assert ort_reason(RuntimeError(text)) == "Load model from a.onnx failed:Unknown (a, b)"


def test_the_answers_of_a_users_file_are_what_it_answers_as_it_is(tmp_path: Path) -> None:
    path = relu(tmp_path / "m.onnx")
    (reference,) = references_of(get_base(str(path)), CheckpointWeights(path), [{}])
    assert reference.answers is not None
    np.testing.assert_array_equal(reference.answers["y"], np.maximum(reference.inputs["x"], 0))
