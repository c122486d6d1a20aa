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

from servers.contract.tensors import TensorSpec
from servers.engines.interface import EngineError
from servers.engines.onnxruntime_cuda import (
    RECORD_PLACEMENT,
    GraphExecution,
    NodePlacement,
    assert_on_gpu,
    measure_cpu_time_ratio,
    read_placement,
)

INPUT = TensorSpec("x", "FP32", (-1, 3))
OUTPUT = TensorSpec("y", "FP32", (-1, 3))


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
    return GraphExecution(session_of(model), [INPUT], [OUTPUT], ("cpu", 0), (1, 2, 5, 8))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_padding_never_leaks(execution: GraphExecution, sizes: list[int], seed: int) -> None:
    """Whatever sizes follow each other, each answer is that batch's own rows, and stays so."""
    generator = np.random.default_rng(seed)
    batches = [generator.standard_normal((size, 3), np.float32) for size in sizes]
    answers = [execution.infer({"x": batch})["y"] for batch in batches]
    for batch, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer, 2 * batch)


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
        GraphExecution(Stale(), [INPUT], [OUTPUT], ("cpu", 0), (1, 2, 4))


def test_placement_is_read_from_the_session(model: Path) -> None:
    placement = read_placement(session_of(model))
    assert placement.nodes_by_provider == {"CPUExecutionProvider": 1}
    assert placement.cpu_operators == {"Add": 1}
    with pytest.raises(EngineError, match="1 of 1 nodes on the CPU, with all of the model"):
        assert_on_gpu(placement)


def test_a_profile_gives_the_share_of_the_cpu(model: Path) -> None:
    def profiled(folder: Path) -> Path:
        session = session_of(model, enable_profiling=True, profile_file_prefix=str(folder / "p"))
        session.run(None, {"x": np.zeros((4, 3), np.float32)})
        return Path(session.end_profiling())

    assert measure_cpu_time_ratio(profiled) == 1.0


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
