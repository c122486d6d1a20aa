"""`abserve compare` on real servers with models other than the default: a text model, and a file against a module."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http
from onnx import TensorProto, helper

from tests.integration.loadgen.conftest import abserve
from tests.recording import recorder
from tests.tiny_bert import write_tiny_bert

pytestmark = pytest.mark.usefixtures("no_process_left")

FEW = ("--rounds", "1", "--requests", "8", "--concurrency", "4", "--batch-sizes", "4", "--threads", "1")
MODULE = """
import torch
from servers.models import Input, Output, UserModel


def scores():
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).eval()
    return UserModel(
        module, [Input("x", "FP32", ["batch", 16])], [Output("y", "FP32", ["batch", 10], "logits")], item="sequence"
    )
"""
EXPORT = """
import torch
from mine import scores

inputs, batch = (torch.zeros(2, 16),), ({0: torch.export.Dim("batch")},)
torch.onnx.export(
    scores().module, inputs, "mine.onnx", input_names=["x"], output_names=["y"], dynamic_shapes=batch, dynamo=True,
    verbose=False,
)
"""


def compare(out: Path, *options: str) -> dict[str, Any]:
    """The result of a run that finished, with equal answers before and under load, and no error in any block."""
    with contextlib.chdir(out.parent):
        status, said = abserve("compare", "--out", str(out), *FEW, *options)
    assert status in (0, 1), said
    assert json.loads((out / "run.json").read_bytes())["state"] == "finished", said
    result: dict[str, Any] = json.loads((out / "result.json").read_bytes())
    assert result["parity"]["ok"], result["parity"]
    under_load = [check for check in result["checks"] if check["name"] == "answers_under_load"]
    assert {check["state"] for check in under_load} == {"passed"}, under_load
    assert not any(summary["errors"] for summary in result["summaries"])
    return result


def check(result: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [check for check in result["checks"] if check["name"] == name]
    return dict(found)


@pytest.mark.slow  # by default the user's ONNX file below is what two real servers are compared on
@pytest.mark.triton
def test_a_text_model_on_both_real_servers(tmp_path: Path) -> None:
    """PyTorch behind the native server against ONNX Runtime behind a real tritonserver, with texts of any length."""
    out = tmp_path / "run"
    write_tiny_bert(tmp_path)
    scenarios = ("single", "batched", "concurrent")
    options = ("--b-option", "artefacts=artefacts", "--scenarios", ",".join(scenarios))
    result = compare(out, "--model", "tiny", *options)
    effect = {arm["label"]: arm["in_effect"] for arm in result["arms"]}
    assert {label: (one["engine"], one["pad_to"]) for label, one in effect.items()} == {
        "a": ("torch", "32,64,128"), "b": ("onnxruntime", "32,64,128"),
    }  # fmt: skip
    assert check(result, "same_pad_to")["state"] == "passed"
    summaries = {(one["workload"].partition("(")[0], one["label"]) for one in result["summaries"]}
    assert summaries == {(scenario, label) for scenario in scenarios for label in "ab"}
    for path in (out / "blocks").glob("*.json"):
        block = json.loads(path.read_bytes())
        assert block["complete"]
        counted = block["requests"] + block["cool_down"]
        assert block["stages"]["requests"] == counted, "the server counted what the client counted"
        assert (block["stages"]["receive_ns"] is not None) == (block["label"] == "a")
    summary = (out / "summary.md").read_text()
    assert "sequences/s" in summary
    assert "images/s" not in summary


@pytest.mark.slow  # by default the ONNX file with a variable axis below
def test_a_users_onnx_file_against_the_module_that_it_was_exported_from(tmp_path: Path) -> None:
    """ONNX Runtime behind the native server against PyTorch behind FastAPI."""
    (tmp_path / "mine.py").write_text(MODULE)
    subprocess.run([sys.executable, "-c", EXPORT], cwd=tmp_path, check=True, capture_output=True)
    arms = ("--a", "native", "--a-model", "mine.onnx", "--a-option", "engine=onnxruntime", "--b", "fastapi")
    result = compare(tmp_path / "run", *arms, "--model", "mine.py:scores", "--scenarios", "single,concurrent")
    effect = {arm["label"]: arm["in_effect"] for arm in result["arms"]}
    assert {label: (one["engine"], one["model"]) for label, one in effect.items()} == {
        "a": ("onnxruntime", "mine.onnx"), "b": ("torch", "mine.py:scores"),
    }  # fmt: skip
    assert [arm["target"] for arm in result["arms"]] == ["native", "fastapi"]
    assert "logits" in result["parity"]["kinds"].values()


def refused(folder: Path, *options: str) -> str:
    """What a comparison says that ends with status 2 before it writes anything."""
    with contextlib.chdir(folder):
        status, said = abserve("compare", "--out", str(folder / "run"), *options)
    assert (status, (folder / "run").exists()) == (2, False), said
    return said


@pytest.mark.slow  # by default the inputs that are refused below
def test_sizes_that_an_arm_cannot_pad_to_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path)
    null = ("--a-option", "engine=null")
    plain = ("--model", "tiny", "--a", "native", *null, "--b", "fastapi")
    words = "FastAPI cannot pad batches, because the FastAPI server does not pad"
    assert words in refused(tmp_path, *plain, "--pad-to", "32,64")
    native = ("--model", "tiny", "--a", "native", *null, "--b", "native", "--b-option", "engine=null")
    assert "the largest sequence of tiny is 128" in refused(tmp_path, *native, "--pad-to", "32,256")


def write_relu(folder: Path) -> None:
    """The model a.onnx of x [batch, length]."""
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "length"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "axis", shapes[:1], shapes[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "a.onnx")


def test_a_file_with_a_variable_axis_is_compared_without_options_of_padding(tmp_path: Path) -> None:
    """Its items cannot be padded, so no server is asked to."""
    write_relu(tmp_path)
    result = compare(tmp_path / "run", "--model", "a.onnx", "--a", "native", "--b", "native", "--scenarios", "single")
    assert not [one for one in result["checks"] if one["name"] in ("same_pad_to", "padding_held_back")]
    assert result["experiment"]["pad_to"] == []


def test_inputs_that_the_model_cannot_take_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    """A server describes the lengths that its model takes without being started."""
    write_tiny_bert(tmp_path)
    names = ("input_ids", "attention_mask", "token_type_ids")
    tensors: dict[str, Any] = {name: np.ones((4, 200), "i8") for name in names}
    np.savez(tmp_path / "long.npz", **tensors)
    null = ("--a", "native", "--a-option", "engine=null", "--b", "native", "--b-option", "engine=null")
    words = "item 1 has the length 200, and the model takes at most 128"
    assert words in refused(tmp_path, "--model", "tiny", *null, "--inputs", "long.npz")


def test_what_was_recorded_is_replayed_against_servers_that_abserve_starts(tmp_path: Path) -> None:
    """A server with another name of the model was recorded; requests have different numbers of items."""
    write_relu(tmp_path)
    planted = [sys.executable, str(Path(__file__).parents[2] / "truth/planted_server.py"), "--no-spin", "--sequences"]
    with subprocess.Popen(planted, stdout=subprocess.PIPE, text=True) as server, ExitStack() as ending:
        ending.callback(server.kill)
        assert server.stdout is not None
        with recorder(tmp_path / "traffic", to=f"http://127.0.0.1:{server.stdout.readline().split()[0]}") as recording:
            with tritonclient.http.InferenceServerClient(recording.url.removeprefix("http://")) as client:
                for rows in (1, 3, 2) * 4:
                    array = np.full((rows, 8), rows, np.float32)
                    tensor = tritonclient.http.InferInput("x", list(array.shape), "FP32")
                    tensor.set_data_from_numpy(array)
                    client.infer("planted", [tensor])
            recorded = recording.end().requests
    assert len(recorded) == 12
    result = compare(
        tmp_path / "run", "--model", "a.onnx", "--a", "native", "--b", "native", "--traffic", "traffic",
        "--scenarios", "traffic", "--open-seconds", "1", "--speed", "0.5",
    )  # fmt: skip
    blocks = {block["label"]: (block["requests"], block["items"]) for block in result["blocks"]}
    assert blocks["a"] == blocks["b"]
    requests, items = blocks["a"]
    assert items > requests >= 2
