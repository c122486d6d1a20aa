"""What users of Triton report: folders with any letters, names, models that no load fits. Real servers of the wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from servers.options.launch import LaunchPlan
from servers.triton.process import TritonProcess
from tests.integration.triton.conftest import READY_SECONDS, Serve, infer, plan_of
from tests.integration.triton.test_installed import OWN_CONFIG, OWN_MODEL

pytestmark = pytest.mark.triton
FOLDERS = ("größe", "two words", 'quo\'te "$HOME" ;', "入力/ÄÖ", "x" * 200 + "/" + "y" * 200)
HARDEST = FOLDERS[2:4]
"""What the default run serves from; the other folders are for `make test-slow`."""
FILES = ("m1.onnx", "modül.onnx", "m2.onnx", "größe.onnx", "m3.onnx")
"""Of different names, since a process reads a model once by its reference."""


def answer_of(plan: LaunchPlan, log: Path, name: str, output: str) -> Any:
    with TritonProcess(plan, log) as server:
        assert server.wait_ready(READY_SECONDS), log.read_text()
        return infer(plan, {name: np.array([[1, -2, 3]], np.float32)}).as_numpy(output).tolist()


def write_repository(folder: Path, name: str = "doubles", config: str = OWN_CONFIG) -> Path:
    version = folder / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(OWN_MODEL)
    (version.parent / "config.pbtxt").write_text(config)
    return folder


def write_relu(path: Path) -> None:
    """relu(x + bias), with the bias in a file beside it."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    nodes = [helper.make_node("Add", ["x", "bias"], ["sum"]), helper.make_node("Relu", ["sum"], ["y"])]
    bias = helper.make_tensor("bias", TensorProto.FLOAT, [3], np.ones(3, "f4").tobytes(), raw=True)
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [bias])
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, path, save_as_external_data=True, location="b.data", size_threshold=0)


def each(*cases: tuple[str, ...]) -> list[Any]:
    return [pytest.param(*case, marks=() if case[0] in HARDEST else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "file"), each(*zip(FOLDERS, FILES, strict=True)))
def test_a_users_file_is_served_from_any_folder(serve: Serve, tmp_path: Path, name: str, file: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    write_relu(folder / file)
    options = ("--device", "cpu", "--threads", "1", "--max-batch-size", "2", "--print-launch")
    plan = plan_of(serve("--model", file, *options, folder=folder))
    assert answer_of(plan, tmp_path / "log", "x", "y") == [[2, 0, 4]]


@pytest.mark.parametrize("name", each(*zip(FOLDERS, strict=True)))
def test_a_users_repository_is_served_from_any_folder(serve: Serve, tmp_path: Path, name: str) -> None:
    folder = write_repository(tmp_path / name)
    plan = plan_of(serve("--triton-repository", ".", "--model", "doubles", "--print-launch", folder=folder))
    assert answer_of(plan, tmp_path / "log", "values", "doubled") == [[2, -4, 6]]


@pytest.mark.parametrize("model", ["a b", "half50%", "größe", "what?", "a#b"])
def test_a_name_that_tritonserver_cannot_decode_is_refused(serve: Serve, tmp_path: Path, model: str) -> None:
    write_repository(tmp_path / "mine", model)
    done = serve("--triton-repository", "mine", "--model", model, folder=tmp_path)
    assert done.returncode == 2
    assert "tritonserver does not decode names in URLs" in done.stderr


def test_models_that_no_load_fits_are_refused_before_the_start(serve: Serve, tmp_path: Path) -> None:
    plain = "\n".join(line for line in OWN_CONFIG.splitlines() if "dynamic_batching" not in line)
    write_repository(tmp_path / "mine", "stateful", f"{plain}\nsequence_batching {{ }}\n")
    write_repository(tmp_path / "mine", config=f"{plain}\nmodel_transaction_policy {{ decoupled: true }}\n")
    for model, words in (
        (
            "stateful",
            "stateful is stateful (sequence_batching in its config.pbtxt), and abserve sends no correlation ids",
        ),
        (
            "doubles",
            "doubles is decoupled (model_transaction_policy in its config.pbtxt), and abserve measures models with one "
            "answer per request",
        ),
    ):
        options = ("--triton-repository", "mine", "--model", model, "--print-launch")
        assert plan_of(serve(*options, folder=tmp_path)).cannot_measure == words
    done = subprocess.run(
        [
            *(sys.executable, "-m", "loadgen.entry", "compare", "--a", "triton", "--b", "triton", "--inputs", "random"),
            *("--triton-repository", "mine", "--model", "doubles", "--out", "run"),
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "run").exists()
