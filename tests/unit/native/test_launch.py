"""The plan of a server process names the file that its engine executes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from servers.commands.native import check, launch_plan
from servers.engines import settings as engine_settings
from servers.engines.factory import check_engine
from servers.engines.interface import EngineError
from servers.engines.settings import EngineSettings
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.models.specification import ModelSpecification, UnknownModelError
from servers.native.server import imported_first
from servers.native.shared.settings import NativeSettings
from servers.options.launch import LaunchPlan
from servers.triton.settings import TritonSettings


def no_file(model: ModelSpecification) -> Any:
    pytest.fail(f"a file of {model.name} was asked for")


def planned(options: dict[str, str]) -> LaunchPlan:
    settings, models, tuning = check(options)
    return launch_plan(settings, models, no_file, tuning)


@pytest.mark.parametrize(("engine", "file"), [("onnxruntime", "/x/model.onnx"), ("tensorrt", "/x/model.plan")])
def test_an_engine_with_a_file_is_started_with_it(engine: str, file: str) -> None:
    model = get_specification(DEFAULT_MODEL)
    plan = launch_plan(NativeSettings(engine=engine), (model,), lambda _: (Path(file), None))
    assert json.loads(plan.argv[-1])["artefact"] == file
    assert (plan.model, plan.artefact) == (get_specification(DEFAULT_MODEL).name, None)


@pytest.mark.parametrize(
    ("engine", "model", "libraries"),
    [
        ("torch", DEFAULT_MODEL, ("torch", "open_clip")),
        ("torch", "transformers:bert-base-uncased", ("torch", "transformers")),
        ("onnxruntime", DEFAULT_MODEL, ("onnxruntime",)),
        ("null", DEFAULT_MODEL, ()),
    ],
)
def test_a_server_imports_the_libraries_of_its_engine_and_its_model_only(
    engine: str, model: str, libraries: tuple[str, ...]
) -> None:
    assert imported_first(engine, get_specification(model)) == libraries


@pytest.mark.parametrize(
    "serve", ["serve_language(settings, 'm', 'm', None, None)", "serve(settings, [], None)"], ids=["tokens", "tensors"]
)
def test_a_server_forks_before_it_imports_what_one_of_its_processes_needs(serve: str) -> None:
    """An engine's process would wait for the imports of front ends, and keep them in memory."""
    program = (
        "import sys; from servers.native import server; from servers.native.shared.settings import NativeSettings;"
        "server.serve_by = lambda *_: print(*sorted(sys.modules)); settings = NativeSettings(fronts=1);"
        f"server.{serve}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"uvicorn", "fastapi", "torch", "servers.native.engine.batcher"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": "onnxruntime", "precision": "bf16"}, "has no precision 'bf16'"),
        ({"engine": "torch", "mode": "session"}, "has no mode 'session'"),
        ({"engine": "torch", "precision": "fp16", "device": "cpu"}, "does not offer precision fp16 on cpu"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"engine": "tensorrt", "device": "cpu,cpu"}, "does not run on cpu"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_before_a_model_is_exported(
    options: dict[str, str], problem: str
) -> None:
    with pytest.raises(EngineError, match=problem):
        check(options)


@pytest.mark.parametrize(
    ("present", "device", "precision", "in_effect"),
    [
        (True, "auto", "auto", "fp16"),
        (True, "cpu", "auto", "fp32"),
        (True, "auto", "tf32", "tf32"),
        (False, "auto", "auto", "fp32"),
        (False, "cuda:1", "auto", "fp16"),
        (False, "auto", "fp16", "fp16"),
    ],
)
def test_every_server_computes_in_the_precision_of_its_device_unless_told_another(
    monkeypatch: pytest.MonkeyPatch, present: bool, device: str, precision: str, in_effect: str
) -> None:
    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: present)
    options: dict[str, Any] = {"device": device, "precision": precision}
    native = NativeSettings(**options).resolved(get_specification(DEFAULT_MODEL))
    triton = TritonSettings(**options).resolved_engine()
    assert (native.precision, native.engine_settings().precision, triton.precision) == (in_effect,) * 3
    argument = launch_plan(native, (get_specification(DEFAULT_MODEL),), no_file).argv[-1]
    assert json.loads(argument)["precision"] == in_effect, "the process is told, and so are clients"


def test_triton_executes_with_the_faster_engine_of_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def chosen(**options: Any) -> tuple[str, str]:
        engine = TritonSettings(**options).resolved_engine()
        return engine.kind, engine.precision

    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: True)
    assert chosen() == ("torch", "fp16")
    assert chosen(device="cpu") == ("onnxruntime", "fp32")
    assert chosen(engine="onnxruntime") == ("onnxruntime", "fp16")
    assert TritonSettings().resolved_engine("onnxruntime").kind == "onnxruntime", "a native backend is its own engine"
    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: False)
    assert chosen() == ("onnxruntime", "fp32")
    file = replace(get_specification(DEFAULT_MODEL), file=tmp_path / "model.onnx")
    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: True)
    monkeypatch.setattr("servers.triton.settings.get_variants", lambda *_: (file,))
    assert chosen() == ("onnxruntime", "fp16"), "torch executes no ONNX file"


def test_triton_takes_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: True)
    engine = TritonSettings(device="cuda:0,cuda:1").resolved_engine()
    assert (engine.kind, engine.device, engine.precision) == ("torch", "cuda:0,cuda:1", "fp16")
    engine.on_first().check_here()
    assert engine.on_first().device == "cuda:0"
    assert TritonSettings(device="cuda:0,cuda:1").resolved_engine("onnxruntime").device == "cuda:0,cuda:1"
    assert TritonSettings(device="cuda:0,cuda:1", engine="null").resolved_engine().device == "cpu", "it uses no GPU"
    for device, sentence in (
        ("cuda:0,cuda:0", "list different GPUs"),
        ("cuda:0,cpu", "list different GPUs"),
        ("cpu,cpu", "several instances on the CPU are --instances"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            TritonSettings(device=device)
    with pytest.raises(EngineError, match="runs on one device"):
        TritonSettings(model="language:demo", device="cuda:0,cuda:1").resolved_generation()


def test_an_engine_without_a_processor_to_choose_has_one_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: True)
    assert EngineSettings("null").precision == "fp32", "it never uses a GPU"
    monkeypatch.setattr(engine_settings, "nvidia_device_present", lambda: False)
    assert EngineSettings("tensorrt").precision == "fp16", "it never uses a CPU"


def test_the_model_chooses_engine_and_weights_that_the_user_did_not(tmp_path: Path) -> None:
    plan = planned({"model": "transformers:distilbert-base-uncased", "pad_to": "64,32"})
    chosen = json.loads(plan.argv[-1])
    assert {name: chosen[name] for name in ("engine", "weights", "pad_to", "model")} == {
        "engine": "torch",
        "weights": "random:0",
        "pad_to": "32,64",
        "model": "transformers:distilbert-base-uncased",
    }
    assert plan.cannot_pad is None
    assert planned({}).cannot_pad == "items of openclip_vit_b32 cannot be padded"
    file = replace(get_specification(DEFAULT_MODEL), file=tmp_path / "model.onnx")
    assert NativeSettings().resolved(file).engine == "onnxruntime"
    assert NativeSettings(engine="tensorrt", weights="random:7").resolved(file).engine == "tensorrt"
    assert NativeSettings(weights="random:7").resolved(file).weights == "random:7"
    small = replace(file, max_batch_size=8)
    assert NativeSettings().resolved(small).max_batch_size == 8, "as on Triton"
    assert NativeSettings(max_batch_size=32).resolved(small).max_batch_size == 32
    with pytest.raises(EngineError, match="is an ONNX file, which the torch engine does not execute"):
        check_engine(file, EngineSettings("torch"))


def test_a_model_in_a_file_is_started_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "distilbert", "vocab_size": 99}')
    monkeypatch.chdir(tmp_path)
    plan = planned({"model": "./tiny"})
    assert json.loads(plan.argv[-1])["model"] == str(tmp_path / "tiny")
    assert plan.model == "tiny"


def test_a_users_module_that_is_not_as_described_is_refused_at_the_start(tmp_path: Path) -> None:
    text = """
import torch
from servers.models import Input, Output, UserModel
def f():
    return UserModel(torch.nn.Identity(), [Input("x", "FP32", ("batch", 3))], [Output("y", "FP32", ("batch", 4))])
"""
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(UnknownModelError, match=r"wrong\.py:f: the module's y is float32 \[2, 3\]"):
        check({"model": f"{tmp_path}/wrong.py:f"})


@pytest.mark.parametrize(
    ("model", "problem"), [(DEFAULT_MODEL, "cannot be padded"), ("transformers:bert-base-uncased", "is 512")]
)
def test_sizes_that_the_model_does_not_have_are_refused_at_the_start(model: str, problem: str) -> None:
    with pytest.raises(EngineError, match=f"--pad-to.*{problem}"):
        check({"model": model, "pad_to": "32,1024"})
