"""Buckets and fixed buffers on a real ONNX Runtime session; without a GPU no graph is captured, the rest is real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from servers.engines.interface import EngineError
from servers.engines.onnxruntime import (
    RECORD_PLACEMENT,
    GraphExecution,
    NodePlacement,
    assert_on_gpu,
    measure_cpu_time_ratio,
    read_placement,
)
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Axis, TensorSpec


def specification_of(*inputs: TensorSpec, output: TensorSpec, axes: tuple[Axis, ...] = ()) -> ModelSpecification:
    return ModelSpecification(
        name="small",
        title="small",
        version="1",
        inputs=inputs,
        outputs=(output,),
        axes=axes,
        max_batch_size=8,
        load_module=lambda _: pytest.fail("the file is executed"),
    )


DOUBLE = specification_of(TensorSpec("x", "FP32", (-1, 3)), output=TensorSpec("y", "FP32", (-1, 3)))
LENGTH = Axis("length", 4, 16, {"x": 1, "weight": 1, "y": 1}, {"x": 7, "weight": 0})
WEIGHTED = specification_of(
    TensorSpec("x", "INT64", (-1, -1)),
    TensorSpec("weight", "INT64", (-1, -1)),
    TensorSpec("bias", "INT64", (-1, 1)),
    output=TensorSpec("y", "INT64", (-1, -1)),
    axes=(LENGTH,),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = 2x, row by row."""
    path = tmp_path_factory.mktemp("onnx") / "double.onnx"
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def session_of(model: Path, **options: object) -> ort.InferenceSession:
    session_options = ort.SessionOptions()
    session_options.add_session_config_entry(RECORD_PLACEMENT, "1")
    for name, value in options.items():
        setattr(session_options, name, value)
    return ort.InferenceSession(str(model), session_options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def execution(model: Path) -> GraphExecution:
    return GraphExecution(session_of(model), DOUBLE, ("cpu", 0), (1, 2, 5, 8))


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = x · weight + bias + the sum of the item's weights, which an old value in the padding would change."""
    path = tmp_path_factory.mktemp("onnx") / "weighted.onnx"
    x, weight, y = (helper.make_tensor_value_info(n, TensorProto.INT64, ["n", "length"]) for n in ("x", "weight", "y"))
    bias = helper.make_tensor_value_info("bias", TensorProto.INT64, ["n", 1])
    nodes = [
        helper.make_node("Mul", ["x", "weight"], ["scaled"]),
        helper.make_node("ReduceSum", ["weight", "last"], ["sum"], keepdims=1),
        helper.make_node("Add", ["scaled", "sum"], ["summed"]),
        helper.make_node("Add", ["summed", "bias"], ["y"]),
    ]
    last = helper.make_tensor("last", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "weighted", [x, weight, bias], [y], [last])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def along_an_axis(weighted: Path) -> GraphExecution:
    return GraphExecution(session_of(weighted), WEIGHTED, ("cpu", 0), (1, 4, 8), (6, 16))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_padding_never_leaks(execution: GraphExecution, sizes: list[int], seed: int) -> None:
    """Whatever sizes follow each other, each answer is that batch's own rows, and stays so."""
    generator = np.random.default_rng(seed)
    batches = [generator.standard_normal((size, 3), np.float32) for size in sizes]
    answers = [execution.infer({"x": batch})["y"] for batch in batches]
    for batch, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer, 2 * batch)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 16)), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_padding_along_an_axis_never_leaks(
    along_an_axis: GraphExecution, shapes: list[tuple[int, int]], seed: int
) -> None:
    """Whatever shapes follow each other, each answer has its batch's own shape and values."""
    generator = np.random.default_rng(seed)
    batches = [
        {
            "x": generator.integers(0, 100, shape),
            "weight": generator.integers(0, 100, shape),
            "bias": generator.integers(0, 100, (shape[0], 1)),
        }
        for shape in shapes
    ]
    answers = [along_an_axis.infer(batch)["y"] for batch in batches]
    for batch, answer in zip(batches, answers, strict=True):
        sums = batch["weight"].sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(answer, batch["x"] * batch["weight"] + sums + batch["bias"])


def test_a_size_beyond_the_largest_of_the_axis_is_refused(along_an_axis: GraphExecution) -> None:
    batch = {
        "x": np.zeros((1, 17), np.int64),
        "weight": np.zeros((1, 17), np.int64),
        "bias": np.zeros((1, 1), np.int64),
    }
    with pytest.raises(ValueError, match="length 17, more than the largest, 16"):
        along_an_axis.infer(batch)


def test_a_batch_that_is_not_contiguous_is_copied(execution: GraphExecution) -> None:
    wide = np.arange(48, dtype=np.float32).reshape(8, 6)
    np.testing.assert_array_equal(execution.infer({"x": wide[:, ::2]})["y"], 2 * wide[:, ::2])


def test_a_batch_beyond_the_largest_bucket_is_refused(execution: GraphExecution) -> None:
    with pytest.raises(ValueError, match="largest bucket, 8"):
        execution.infer({"x": np.zeros((9, 3), np.float32)})


def test_buffers_that_answer_otherwise_than_the_session_are_refused(model: Path) -> None:
    class Stale:
        """Replays what it was captured on, as a graph does whose input was bound anew."""

        def __init__(self) -> None:
            self._real = session_of(model)
            self.io_binding, self.run = self._real.io_binding, self._real.run
            self._seen: set[int] = set()

        def run_with_iobinding(self, binding: object, options: object) -> None:
            if id(binding) not in self._seen:
                self._seen.add(id(binding))
                self._real.run_with_iobinding(binding, options)

    with pytest.raises(EngineError, match="use mode session"):
        GraphExecution(Stale(), DOUBLE, ("cpu", 0), (1, 2, 4))


def test_placement_is_read_from_the_session(model: Path) -> None:
    placement = read_placement(session_of(model))
    assert placement.nodes_by_provider == {"CPUExecutionProvider": 1}
    assert placement.cpu_operators == {"Add": 1}
    with pytest.raises(EngineError, match="1 of 1 nodes on the CPU, with all of the model"):
        assert_on_gpu(placement)


@pytest.mark.parametrize(("rows", "share"), [(200, 1.0), (4, 0.0)])
def test_a_profile_gives_the_share_of_the_cpu_without_small_shapes(model: Path, rows: int, share: float) -> None:
    def profiled(folder: Path) -> Path:
        session = session_of(model, enable_profiling=True, profile_file_prefix=str(folder / "p"))
        session.run(None, {"x": np.zeros((rows, 3), np.float32)})
        return Path(session.end_profiling())

    assert measure_cpu_time_ratio(profiled) == share


@pytest.mark.parametrize(
    ("operators", "ratio", "message"),
    [
        ({"Shape": 3, "Gather": 2}, None, None),
        ({"Shape": 3}, 0.01, None),
        ({"Shape": 3}, 0.02, "spends 2.0% of its node time in 5 nodes on the CPU, more than 1%"),
        ({"Shape": 1, "MatMul": 1, "Softmax": 1}, 0.0, "placed 5 of 605 nodes on the CPU, with MatMul, Softmax among"),
    ],
)
def test_what_counts_as_a_gpu_engine(operators: dict[str, int], ratio: float | None, message: str | None) -> None:
    placement = NodePlacement({"CUDAExecutionProvider": 600, "CPUExecutionProvider": 5}, operators, ratio)
    if message is None:
        assert_on_gpu(placement)
    else:
        with pytest.raises(EngineError, match=message):
            assert_on_gpu(placement)
