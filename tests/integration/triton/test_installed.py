"""A tritonserver that is installed somewhere: the wheel's, arranged as in NVIDIA's images.

Its backend onnxruntime is a stand-in in Python, since NVIDIA's binary is not to be had here: what it executes, and how
it is configured, is what the real one gets.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest
import simplejpeg

from loadgen.launch.deployment import RemoteDeployment
from loadgen.measure.arms import Arm
from loadgen.records.run import ArmRequest
from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.models.registry import get_variant
from servers.models.weights import RandomWeights
from servers.options.launch import LaunchPlan
from servers.triton.installation import STUB
from servers.triton.process import TritonProcess
from servers.triton.wheel import find_wheel
from tests.integration.loadgen.conftest import UNWATCHED_ABSERVE
from tests.integration.native.conftest import free_ports
from tests.integration.triton.conftest import READY_SECONDS, Serve, config_of, embedding, infer, plan_of
from tests.tiny_bert import write_tiny_bert

pytestmark = pytest.mark.triton
STAND_IN = """
import json, os
import numpy
import onnxruntime
import triton_python_backend_utils as pb_utils

from servers.triton.python_backend import array_of, tensor_of

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        file = os.path.join(args["model_repository"], args["model_version"], config["default_model_filename"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(config["parameters"]["intra_op_thread_count"]["string_value"])
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.outputs = [output["name"] for output in config["output"]]
        self.inputs = [one["name"] for one in config["input"]]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {name: array_of(pb_utils.get_input_tensor_by_name(request, name)) for name in self.inputs}
        arrays = self.session.run(self.outputs, given)
        tensors = [tensor_of(*named) for named in zip(self.outputs, arrays)]
        return pb_utils.InferenceResponse(tensors)
"""
OWN_MODEL = """
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            doubled = 2 * numpy.from_dlpack(pb_utils.get_input_tensor_by_name(request, "values"))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("doubled", doubled)]))
        return answers
"""
OWN_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "values" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "doubled" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [
  { model_name: "STEP" model_version: -1
    input_map { key: "values" value: "values" } output_map { key: "doubled" value: "once" } },
  { model_name: "STEP" model_version: -1
    input_map { key: "values" value: "once" } output_map { key: "doubled" value: "doubled" } }
] }
"""
OWN_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "values" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "doubled" data_type: TYPE_FP32 dims: [ 3 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
dynamic_batching { max_queue_delay_microseconds: 700 }
"""


def arranged(folder: Path) -> Path:
    """Links to the wheel's files, as in NVIDIA's images; the backend onnxruntime is a stand-in in Python."""
    wheel = find_wheel()
    assert wheel.stub is not None
    assert wheel.libraries is not None
    (folder / "bin").mkdir(parents=True)
    shutil.copy2(wheel.binary, folder / "bin")  # a link would find its libraries beside the wheel's binary
    (folder / "lib").symlink_to(wheel.libraries)
    shutil.copytree(wheel.backend_folder / "python", folder / "backends" / "python")
    (folder / "backends" / "python" / STUB).symlink_to(wheel.stub)
    (folder / "backends" / "onnxruntime").mkdir()
    (folder / "backends" / "onnxruntime" / "model.py").write_text(STAND_IN)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = arranged(tmp_path_factory.mktemp("opt") / "tritonserver")
    (folder / "TRITON_VERSION").write_text(f"{find_wheel().version}.0\n")
    return folder


@pytest.fixture(scope="module")
def start(
    installed: Path, artefact_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., LaunchPlan]]:
    """Starts what `abserve serve triton` plans with these options."""
    with ExitStack() as servers:

        def start(*options: str) -> LaunchPlan:
            folder = tmp_path_factory.mktemp("triton")
            ports = zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
            command = [
                *(sys.executable, "-P", "-m", "loadgen.entry", "serve", "triton", "--print-launch"),
                *(
                    "--tritonserver",
                    str(installed),
                    "--work-dir",
                    str(folder / "work"),
                    "--artefacts",
                    str(artefact_dir),
                ),
                *(f"--{name}-port={port}" for name, port in ports),
                *options,
            ]
            plan = plan_of(subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True))
            process = servers.enter_context(TritonProcess(plan, folder / "log"))
            assert process.wait_ready(READY_SECONDS), (folder / "log").read_text()
            return plan

        yield start


def doubled(plan: LaunchPlan) -> Any:
    return infer(plan, {"values": np.array([[1, 2, 3]], np.float32)}).as_numpy("doubled").tolist()


def test_a_native_backend_executes_the_exported_file(start: Callable[..., LaunchPlan], artefact: Any) -> None:
    plan = start("--device", "cpu", "--threads", "1", "--max-batch-size", "4")
    assert plan.title == "Triton 2.51, onnxruntime backend, fp32"
    config = config_of(plan)
    assert config["backend"] == "onnxruntime"
    assert config["parameters"]["artefact_sha256"]["string_value"] == artefact.manifest.sha256
    specification = get_variant("open_clip:ViT-B-32", "fp32")
    engine = build_engine(
        specification, RandomWeights(0), EngineSettings(kind="onnxruntime", device="cpu", threads=1), artefact.path
    )
    engine.load()
    with closing(engine):
        pixels = np.random.default_rng(3).standard_normal((3, 3, 224, 224), np.float32)
        expected: Any = engine.infer({"pixel_values": pixels})["embedding"]
    np.testing.assert_allclose(embedding(plan, pixels), expected, atol=1e-5)


def test_jpeg_goes_through_the_decoding_model(start: Callable[..., LaunchPlan]) -> None:
    plan = start("--device", "cpu", "--max-batch-size", "2", "--payloads", "jpeg,uint8")
    assert plan.model == "openclip_vit_b32_jpeg_onnx"
    rows, columns = np.mgrid[0:224, 0:224].astype(np.uint8)
    picture = np.ascontiguousarray(np.stack([rows, columns, rows ^ columns], axis=-1))
    file = simplejpeg.encode_jpeg(picture, quality=100, colorsubsampling="444")
    answer = infer(plan, {"image": np.array([[file]], dtype=object)}).as_numpy("embedding")
    assert answer.shape == (1, 512)
    assert np.isfinite(answer).all()
    assert answer.any()
    record = Arm(ArmRequest(label="b", target=plan.http_url), RemoteDeployment(plan.http_url), plan.model).record()
    assert record.title == plan.title, "by its URL it is called as by the command that starts it"
    assert {step.config and step.config["max_batch_size"] for step in record.steps} == {2}


@pytest.mark.slow  # by default its decoding model answers, and the steps of ensembles are read, below and above
@pytest.mark.timeout(600)  # a minute on two busy cores
def test_a_jpeg_ensemble_is_compared_by_its_steps(installed: Path, tmp_path: Path) -> None:
    """Native PyTorch against the ensemble, as a user asks for it: valid, merged, with decoding and queues."""
    out = tmp_path / "run"
    command = [
        *(*UNWATCHED_ABSERVE, "compare", "--payload", "jpeg", "--tritonserver", str(installed), "--out", str(out)),
        *("--model", "torchvision:mobilenet_v3_small", "--b-option", f"artefacts={tmp_path}", "--threads", "1"),
        "--no-handicap-check",
        *("--scenarios", "concurrent", "--concurrency", "6", "--requests", "24", "--rounds", "2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert (out / "result.json").exists(), done.stderr
    result = json.loads((out / "result.json").read_bytes())
    assert result["verdict"]["valid"], result["verdict"]["failed"]
    states = {check["name"]: check["state"] for check in result["checks"]}
    same = [name for name in states if name.startswith("same_")]
    assert {name: states[name] for name in (*same, "batching_formed")} == dict.fromkeys(
        (*same, "batching_formed"), "passed"
    )
    summaries = {one["label"]: one for one in result["summaries"]}
    assert summaries["b"]["executed_batch_mean"] > 1.1
    (breakdown,) = result["stages"]
    stages = breakdown["arm_stages"]["stages_ms"]
    assert breakdown["arm_stages"]["contradictions"] == []
    assert breakdown["differences"]
    assert min(stages["decode"], stages["queue"], stages["compute_infer"]) > 0
    for path in (out / "blocks").glob("*.json"):
        block = json.loads(path.read_bytes())
        if block["label"] == "b":
            counted = [step["totals"]["requests"] for step in block["stages"]["steps"]]
            assert counted == [block["requests"] + block["cool_down"]] * 2
    names = {arm["label"]: arm["title"] for arm in result["arms"]}
    assert names["b"] == "Triton 2.51, ensemble of the python and onnxruntime backends, fp32"
    assert all(server in result["verdict"]["sentence"] for server in ("PyTorch (native)", "Triton"))
    summary = (out / "summary.md").read_text()
    assert not re.search(r"\b[AB] (,|·|\.|;)", summary)
    assert "did not merge" not in summary
    assert "no dynamic batcher" not in summary


@pytest.fixture(scope="module")
def own_repository(start: Callable[..., LaunchPlan], tmp_path_factory: pytest.TempPathFactory) -> LaunchPlan:
    """A user's ensemble of ensembles of a Python model, beside a folder that is no model."""
    configs = {
        "doubles": OWN_CONFIG,
        "fourfold": OWN_ENSEMBLE.replace("STEP", "doubles"),
        "sixteenfold": OWN_ENSEMBLE.replace("STEP", "fourfold"),
    }
    mine = tmp_path_factory.mktemp("mine")
    for name, config in configs.items():
        (mine / name / "1").mkdir(parents=True)
        (mine / name / "config.pbtxt").write_text(config)
    (mine / "doubles" / "1" / "model.py").write_text(OWN_MODEL)
    (mine / "broken").mkdir()
    plan = start("--triton-repository", str(mine), "--model", "sixteenfold")
    assert plan.title == "Triton 2.51, ensemble, your sixteenfold"
    return plan


@pytest.mark.parametrize(("model", "calls"), [("fourfold", 2), ("sixteenfold", 4)])
def test_your_own_ensembles_are_read_to_their_models(own_repository: LaunchPlan, model: str, calls: int) -> None:
    """Also an ensemble of ensembles, and a model that is called more than once."""
    plan = msgspec.structs.replace(own_repository, model=model)
    arm = Arm(ArmRequest(label="b", target=plan.http_url), RemoteDeployment(plan.http_url), plan.model)
    record, source = arm.record(), arm.statistics()
    assert record.title == "Triton 2.51, ensemble of the python backend"
    assert [(step.model, step.calls) for step in record.steps] == [("doubles", calls)]
    effect = {name: record.in_effect.get(name) for name in ("backend", "instances", "max_queue_delay_us")}
    assert effect == {"backend": "python", "instances": 2, "max_queue_delay_us": 700 * calls}
    before = source.read()
    assert before is not None
    for _ in range(3):
        assert doubled(plan) == [[2**calls * value for value in (1, 2, 3)]]
    deadline = monotonic() + 60
    while (after := source.read()) is None or not source.settled(before, after, 3):
        assert monotonic() < deadline
    totals = source.totals(before, after)
    assert totals is not None
    (step,) = totals.steps
    assert step.totals is not None
    assert (totals.requests, step.totals.requests, totals.executions) == (3, 3 * calls, 3 * calls)
    assert (totals.queue_ns or 0) >= 3 * calls * 700_000, "a lone request waits for the delay in each step"
    assert totals.queue_ns == step.totals.queue_ns


def test_your_own_python_model_runs_with_your_config(own_repository: LaunchPlan) -> None:
    plan = msgspec.structs.replace(own_repository, model="doubles")
    assert doubled(plan) == [[2, 4, 6]]
    config = config_of(plan)
    assert config["instance_group"][0]["count"] == 2
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 700


@pytest.mark.skipif(np.__version__ < "2", reason="only NumPy 2 is unknown to this stub")
def test_your_own_python_model_that_would_answer_with_empty_tensors_is_refused(
    serve: Serve, installed: Path, tmp_path: Path
) -> None:
    version = tmp_path / "mine" / "doubles" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text('tensor = pb_utils.Tensor("doubled", array)')
    (version.parent / "config.pbtxt").write_text(OWN_CONFIG)
    mine = ("--triton-repository", str(tmp_path / "mine"), "--model", "doubles")
    done = serve("--tritonserver", str(installed), "--work-dir", str(tmp_path / "work"), *mine)
    assert done.returncode == 2
    assert "model.py uses as_numpy or pb_utils.Tensor" in done.stderr


@pytest.mark.slow  # by default the refusal below, and tests/unit/loadgen/experiment/test_padding.py
def test_a_text_model_is_compared_without_options(installed: Path, tmp_path: Path) -> None:
    """A native backend does not pad, so no arm does, and the arms do not differ."""
    write_tiny_bert(tmp_path)
    load = ("--scenarios", "single,concurrent", "--concurrency", "4", "--rounds", "2", "--threads", "1")
    options = ("--model", "tiny", "--tritonserver", str(installed), *load)
    command = [*UNWATCHED_ABSERVE, "compare", "--out", "run", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    before_start = done.stdout.partition("starting the servers")[0]
    assert "cannot make Triton (Triton's onnxruntime backend does not pad) do so" in before_start
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert result["verdict"]["valid"], result["verdict"]["failed"]
    assert [arm["in_effect"]["pad_to"] for arm in result["arms"]] == ["none", "none"]
    assert result["arms"][1]["in_effect"]["backend"] == "onnxruntime"
    states = {check["name"]: check["state"] for check in result["checks"]}
    assert (states["same_pad_to"], states["padding_held_back"]) == ("passed", "failed")
    assert any("--a-option pad-to=" in caveat for caveat in result["verdict"]["caveats"])


def test_padding_that_a_native_backend_cannot_do_is_refused(serve: Serve, installed: Path, tmp_path: Path) -> None:
    write_tiny_bert(tmp_path)
    options = ("--device", "cpu", "--pad-to", "32,64", "--print-launch")
    done = serve("--model", "tiny", "--tritonserver", str(installed), *options, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--pad-to: Triton's onnxruntime backend does not pad" in done.stderr
