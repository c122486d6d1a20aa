"""The working folder of a launch, and the fields of a config that only affect the speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from servers.engines.settings import EngineSettings
from servers.models.registry import get_specification, get_variant
from servers.models.sources.triton_repository import read_config
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.options.defaults import OptionError
from servers.triton.config import (
    BATCHING,
    onnxruntime_config,
    python_config,
    settings_from_parameters,
    tensorrt_config,
)
from servers.triton.installation import Interpreter
from servers.triton.repository import PlacedModel, Serving, apply_tuning, lay_out, merge_config, tuning_of
from servers.triton.settings import TritonSettings
from servers.triton.wheel import find_wheel
from tests.unit.triton.test_config import parse

ENGINE = EngineSettings(kind="onnxruntime", mode="session", device="cpu", threads=2, max_batch_size=8)


def laid_out(
    folder: Path, interpreter: Interpreter, specification: ModelSpecification, engine: EngineSettings = ENGINE
) -> Path:
    """The working folder."""
    model = PlacedModel(specification, Path("/artefacts/model.onnx"), {"sha256": "ab12"})
    lay_out(folder, find_wheel(interpreter), [model], Serving(TritonSettings(), engine, RandomWeights(0)))
    return folder


def test_everything_that_triton_reads(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    folder = laid_out(tmp_path / "work", interpreter, specification)
    model = folder / "models" / specification.name
    assert [path.name for path in (folder / "models").iterdir()] == [specification.name]
    assert "/artefacts" not in (model / "config.pbtxt").read_text()
    assert json.loads((model / "1" / "engine.json").read_text()) == {
        "model": "open_clip:ViT-B-32",
        "weights": "random:0",
        "artefact": "/artefacts/model.onnx",
    }
    compile((model / "1" / "model.py").read_text(), "model.py", "exec")
    assert {path.name for path in (folder / "backends" / "python").iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    assert all(path.is_symlink() and path.exists() for path in (folder / "backends" / "python").iterdir())
    assert [path.name for path in (folder / "lib").iterdir()] == ["libpython3.99.so.1.0"]


@pytest.mark.parametrize(
    ("changes", "policy", "spinning"),
    [
        ({}, "", "on"),
        ({}, "passive", "on"),
        ({"spinning": False}, "", "off"),
        ({"threads": 1}, "", "off"),
        ({"kind": "torch"}, "", "on"),
        ({"kind": "torch"}, "passive", "off"),
        ({"kind": "torch", "spinning": False}, "", "off"),
        ({"kind": "openvino"}, "", ""),
        ({"device": "cuda:0"}, "", ""),
    ],
)
def test_the_config_of_the_python_backend_says_whether_threads_spin(
    tmp_path: Path,
    interpreter: Interpreter,
    specification: ModelSpecification,
    changes: dict[str, Any],
    policy: str,
    spinning: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's OMP_WAIT_POLICY holds for torch, which the model's process inherits."""
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    engine = replace(ENGINE, **changes)
    models = laid_out(tmp_path / "work", interpreter, specification, engine) / "models"
    config = parse((models / specification.name / "config.pbtxt").read_text())
    parameters = {name: parameter.string_value for name, parameter in config.parameters.items()}
    assert parameters.get("spinning", "") == spinning
    asked = settings_from_parameters(parameters, 8).spinning
    assert asked is ({"on": True, "off": False}.get(spinning))


def test_only_sizes_to_pad_to_let_triton_merge_requests_of_different_sizes(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    bert = get_specification("transformers:distilbert-base-uncased")
    for pad_to, ragged in (((), 0), ((32, 64), len(bert.inputs))):
        folder = laid_out(tmp_path / "work", interpreter, bert, replace(ENGINE, pad_to=pad_to))
        config = (folder / "models" / bert.name / "config.pbtxt").read_text()
        assert config.count("allow_ragged_batch: true") == ragged


def test_a_former_launchs_models_are_gone(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    folder = laid_out(tmp_path / "work", interpreter, specification)
    (folder / "models" / "another" / "1").mkdir(parents=True)
    laid_out(tmp_path / "work", interpreter, specification)
    assert [path.name for path in (folder / "models").iterdir()] == [specification.name]


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"cannot write .*/file/work: Not a directory; .* --work-dir"):
        laid_out(tmp_path / "file" / "work", interpreter, specification)


def test_a_folder_with_other_files_is_refused_and_kept(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    precious = tmp_path / "work" / "models" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(OptionError, match="--work-dir"):
        laid_out(tmp_path / "work", interpreter, specification)
    assert precious.read_text() == "mine"


def native(folder: Path, interpreter: Interpreter, payload: str, backend: str, device: str) -> Path:
    specification = get_variant("open_clip:ViT-B-32", payload)
    engine = replace(ENGINE, kind=backend, device=device, precision="fp16")
    serving = Serving(TritonSettings(decode_threads=3), engine, RandomWeights(0), backend)
    model = PlacedModel(specification, Path("/artefacts/exported"), {"sha256": "ab12"})
    lay_out(folder, find_wheel(interpreter), [model], serving)
    return folder / "models"


@pytest.mark.parametrize(("backend", "ending"), [("onnxruntime", "onnx"), ("tensorrt", "plan")])
def test_a_native_backend_gets_the_exported_file(
    tmp_path: Path, interpreter: Interpreter, backend: str, ending: str
) -> None:
    models = native(tmp_path / "work", interpreter, "uint8", backend, "cuda:2")
    (folder,) = models.iterdir()
    config = parse((folder / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == (folder.name, backend, 8)
    assert (config.default_model_filename, list(config.instance_group[0].gpus)) == (f"model_uint8.{ending}", [2])
    assert (folder / "1" / config.default_model_filename).readlink() == Path("/artefacts/exported")
    told = {
        name: config.parameters[name].string_value for name in ("engine", "precision", "weights", "artefact_sha256")
    }
    assert told == {
        "engine": backend,
        "precision": "fp16",
        "weights": "random weights (seed 0)",
        "artefact_sha256": "ab12",
    }
    assert "/artefacts" not in (folder / "config.pbtxt").read_text()


def test_onnxruntime_on_the_cpu_says_so_and_has_its_threads(tmp_path: Path, interpreter: Interpreter) -> None:
    (folder,) = native(tmp_path / "work", interpreter, "fp32", "onnxruntime", "cpu").iterdir()
    config = parse((folder / "config.pbtxt").read_text())
    assert config.instance_group[0].kind == config.instance_group[0].KIND_CPU
    assert config.parameters["intra_op_thread_count"].string_value == "2"
    assert "spinning" not in config.parameters, "the backend's own threads spin"
    assert not config.HasField("optimization")


def test_jpeg_behind_a_native_backend_is_an_ensemble(tmp_path: Path, interpreter: Interpreter) -> None:
    models = native(tmp_path / "work", interpreter, "jpeg", "onnxruntime", "cuda:0")
    assert sorted(path.name for path in models.iterdir()) == [
        "openclip_vit_b32_jpeg_onnx",
        "openclip_vit_b32_preprocess",
        "openclip_vit_b32_uint8_onnx",
    ]
    configs = {path.name: parse((path / "config.pbtxt").read_text()) for path in models.iterdir()}
    assert {config.max_batch_size for config in configs.values()} == {8}
    assert configs["openclip_vit_b32_preprocess"].parameters["decode_threads"].string_value == "3"
    steps = configs["openclip_vit_b32_jpeg_onnx"].ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["openclip_vit_b32_preprocess", "openclip_vit_b32_uint8_onnx"]


SLOW = """
backend: "onnxruntime" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
dynamic_batching {
  max_queue_delay_microseconds: 5000 preserve_ordering: true preferred_batch_size: [ 4, 8 ]
  default_queue_policy { max_queue_size: 9 }
  priority_levels: 2 default_priority_level: 1
}
optimization {
  gather_kernel_buffer_threshold: 7 input_pinned_memory { enable: false }
  execution_accelerators { gpu_execution_accelerator: [ { name: "cuda" parameters { key: "use_tf32" value: "0" } } ] }
}
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
parameters { key: "execution_mode" value: { string_value: "1" } }
response_cache { enable: true }
"""
FIELDS = {
    "dynamic_batching.max_queue_delay_microseconds": "5000",
    "dynamic_batching.preserve_ordering": "true",
    "dynamic_batching.preferred_batch_size": "[4, 8]",
    "dynamic_batching.default_queue_policy": "{ max_queue_size: 9 }",
    "dynamic_batching.priority_levels": "2",
    "optimization.gather_kernel_buffer_threshold": "7",
    "optimization.input_pinned_memory": "{ enable: false }",
    "parameters.execution_mode": "1",
    "response_cache": "{ enable: true }",
}


def add(models: Path, name: str, text: str) -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(text)
    (models / name / "1" / "model.onnx").write_bytes(b"weights")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    add(tmp_path / "models", "slow", SLOW)
    return tmp_path / "models"


def test_generated_configs_have_nothing_that_could_make_them_slow() -> None:
    specification = get_specification("openclip_vit_b32")
    assert tuning_of(text_format.Parse(python_config(specification, BATCHING, "cpu", {}), pb.ModelConfig())) == {}
    on_cpu = onnxruntime_config(specification, device="cpu", parameters={"threads": "1"})
    assert tuning_of(text_format.Parse(on_cpu, pb.ModelConfig())) == {}


def test_what_the_gpu_configs_add_is_compared_with_the_servers_defaults() -> None:
    specification = get_specification("openclip_vit_b32")
    onnx = text_format.Parse(onnxruntime_config(specification), pb.ModelConfig())
    plan = text_format.Parse(tensorrt_config(specification), pb.ModelConfig())
    assert tuning_of(onnx) == {"parameters.cudnn_conv_algo_search": "1", "dynamic_batching": "{ }"}
    assert list(tuning_of(plan)) == ["optimization.cuda"]


def test_without_tuning_only_what_the_model_needs_is_left(models: Path, tmp_path: Path) -> None:
    before = (models / "slow" / "config.pbtxt").read_bytes()
    assert apply_tuning(models, ["slow"], "all", models) == FIELDS
    assert apply_tuning(models, ["slow"], "none", tmp_path / "plain") == {}
    config = read_config(tmp_path / "plain" / "slow")
    assert tuning_of(config) == {}
    assert config.HasField("dynamic_batching")
    assert not config.dynamic_batching.ListFields()
    assert (config.max_batch_size, config.instance_group[0].count) == (8, 2)
    assert set(config.parameters) == {"intra_op_thread_count"}, "as many threads as before"
    assert config.optimization.execution_accelerators.gpu_execution_accelerator[0].parameters["use_tf32"] == "0"
    assert (tmp_path / "plain" / "slow" / "1" / "model.onnx").read_bytes() == b"weights"
    assert (models / "slow" / "config.pbtxt").read_bytes() == before, "the user's repository stays as it is"


@pytest.mark.parametrize("field", FIELDS)
def test_each_setting_can_be_put_back_alone(models: Path, tmp_path: Path, field: str) -> None:
    assert apply_tuning(models, ["slow"], field, tmp_path / "one") == {field: FIELDS[field]}
    assert tuning_of(read_config(tmp_path / "one" / "slow")) == {field: FIELDS[field]}


def test_the_steps_of_an_ensemble_are_tuned_with_it(models: Path, tmp_path: Path) -> None:
    for outer, steps in (
        ("inner", '{ model_name: "slow" }'),
        ("outer", '{ model_name: "inner" }, { model_name: "bare" }'),
    ):
        add(models, outer, f'platform: "ensemble" max_batch_size: 8 ensemble_scheduling {{ step [ {steps} ] }}')
    add(models, "beside", SLOW)
    add(models, "bare", "")
    (models / "bare" / "config.pbtxt").unlink()  # Triton completes it from the file
    assert apply_tuning(models, ["outer"], "all", models) == FIELDS
    assert apply_tuning(models, ["outer"], "none", tmp_path / "plain") == {}
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["bare", "inner", "outer", "slow"]
    assert not read_config(tmp_path / "plain" / "outer").HasField("dynamic_batching")


def test_a_model_that_could_batch_and_does_not_is_given_a_batcher(models: Path, tmp_path: Path) -> None:
    add(models, "serial", 'backend: "onnxruntime" max_batch_size: 8')
    assert apply_tuning(models, ["serial"], "all", models) == {"dynamic_batching": "absent"}
    assert apply_tuning(models, ["serial"], "none", tmp_path / "plain") == {}
    assert read_config(tmp_path / "plain" / "serial").HasField("dynamic_batching")
    add(models, "alone", 'backend: "onnxruntime" max_batch_size: 0')
    assert apply_tuning(models, ["alone"], "all", models) == {}


def test_a_batcher_of_onnxruntime_on_a_gpu_is_compared_with_none(models: Path, tmp_path: Path) -> None:
    add(models, "gpu", 'backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }')
    assert apply_tuning(models, ["gpu"], "all", models) == {"dynamic_batching": "{ }"}
    assert apply_tuning(models, ["gpu"], "none", tmp_path / "plain") == {}
    assert not read_config(tmp_path / "plain" / "gpu").HasField("dynamic_batching")


def test_text_is_merged_into_a_config(models: Path) -> None:
    merge_config(models, "slow", "dynamic_batching { preferred_batch_size: 2 } instance_group [ { count: 3 } ]")
    config = read_config(models / "slow")
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8, 2]
    assert [group.count for group in config.instance_group] == [2, 3]
    with pytest.raises(OptionError, match="no field named"):
        merge_config(models, "slow", "dynamic_batching { speed: 9 }")


def test_a_setting_that_is_not_in_effect_is_refused_with_those_that_are(models: Path) -> None:
    with pytest.raises(OptionError, match=r"not a setting in effect; set here: dynamic_batching\.default_queue_policy"):
        apply_tuning(models, ["slow"], "optimization.cuda", models)
