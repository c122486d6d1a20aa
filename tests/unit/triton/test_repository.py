"""What lies in a working folder, and what is never removed from one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from servers.engines.settings import EngineSettings
from servers.export.triton_config import BatchingSettings
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.triton.errors import TritonOptionError
from servers.triton.interpreter import Interpreter
from servers.triton.repository import PlacedModel, Repository, Serving, lay_out
from servers.triton.wheel import find_wheel

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
