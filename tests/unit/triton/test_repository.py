"""What lies in a working folder, and what is never removed from one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servers.engines.settings import EngineSettings
from servers.models.images import DecodingSettings
from servers.models.registry import get_specification, get_variant
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.triton.config import BatchingSettings, settings_from_parameters
from servers.triton.installation import Interpreter, TritonOptionError
from servers.triton.repository import PlacedModel, Repository, Serving, lay_out
from servers.triton.wheel import find_wheel
from tests.unit.triton.test_model_config import parse

ENGINE = EngineSettings(kind="onnxruntime", mode="session", device="cpu", threads=2, max_batch_size=8)


def laid_out(
    folder: Path, interpreter: Interpreter, specification: ModelSpecification, engine: EngineSettings = ENGINE
) -> Repository:
    serving = Serving(engine, RandomWeights(0), BatchingSettings(max_batch_size=8))
    model = PlacedModel(specification, Path("/artefacts/model.onnx"), {"sha256": "ab12"})
    return lay_out(folder, find_wheel(interpreter), [model], serving)


def test_everything_that_triton_reads(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    repository = laid_out(tmp_path / "work", interpreter, specification)
    model = repository.models / specification.name
    assert [path.name for path in repository.models.iterdir()] == [specification.name]
    assert "/artefacts" not in (model / "config.pbtxt").read_text()
    assert json.loads((model / "1" / "engine.json").read_text()) == {
        "model": "open_clip:ViT-B-32",
        "weights": "random:0",
        "artefact": "/artefacts/model.onnx",
    }
    compile((model / "1" / "model.py").read_text(), "model.py", "exec")
    assert {path.name for path in (repository.backends / "python").iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    assert all(path.is_symlink() and path.exists() for path in (repository.backends / "python").iterdir())
    assert [path.name for path in repository.libraries.iterdir()] == ["libpython3.99.so.1.0"]


@pytest.mark.parametrize(
    ("changes", "spinning"),
    [
        ({}, "on"),
        ({"spinning": False}, "off"),
        ({"threads": 1}, "off"),
        ({"kind": "torch"}, "on"),
        ({"kind": "torch", "spinning": False}, "off"),
        ({"kind": "openvino"}, ""),
        ({"device": "cuda:0"}, ""),
    ],
)
def test_the_config_of_the_python_backend_says_whether_threads_spin(
    tmp_path: Path,
    interpreter: Interpreter,
    specification: ModelSpecification,
    changes: dict[str, Any],
    spinning: str,
) -> None:
    engine = replace(ENGINE, **changes)
    models = laid_out(tmp_path / "work", interpreter, specification, engine).models
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
        repository = laid_out(tmp_path / "work", interpreter, bert, replace(ENGINE, pad_to=pad_to))
        config = (repository.models / bert.name / "config.pbtxt").read_text()
        assert config.count("allow_ragged_batch: true") == ragged


def test_a_former_launchs_models_are_gone(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    repository = laid_out(tmp_path / "work", interpreter, specification)
    (repository.models / "another" / "1").mkdir(parents=True)
    laid_out(tmp_path / "work", interpreter, specification)
    assert [path.name for path in repository.models.iterdir()] == [specification.name]


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TritonOptionError, match=r"cannot write .*/file/work: Not a directory; .* --work-dir"):
        laid_out(tmp_path / "file" / "work", interpreter, specification)


def test_a_folder_with_other_files_is_refused_and_kept(
    tmp_path: Path, interpreter: Interpreter, specification: ModelSpecification
) -> None:
    precious = tmp_path / "work" / "models" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(TritonOptionError, match="--work-dir"):
        laid_out(tmp_path / "work", interpreter, specification)
    assert precious.read_text() == "mine"


def native(folder: Path, interpreter: Interpreter, payload: str, backend: str, device: str) -> Path:
    specification = get_variant("open_clip:ViT-B-32", payload)
    engine = replace(ENGINE, kind=backend, device=device, precision="fp16")
    serving = Serving(engine, RandomWeights(0), BatchingSettings(8), DecodingSettings(threads=3), backend)
    model = PlacedModel(specification, Path("/artefacts/exported"), {"sha256": "ab12"})
    return lay_out(folder, find_wheel(interpreter), [model], serving).models


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
