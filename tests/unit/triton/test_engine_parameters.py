"""What the config says about the engine, and that a model which is something else refuses to load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from servers.engines.interface import EngineDescription
from servers.engines.settings import EngineSettings
from servers.models.images import DecodingSettings
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.models.weights import CheckpointWeights, RandomWeights
from servers.triton.config import (
    contradictions,
    parameters_from_model,
    parameters_from_settings,
    settings_from_parameters,
)
from servers.triton.settings import resolve_engine

ON_CPU = EngineSettings(kind="onnxruntime", precision="fp32", mode="session", device="cpu", threads=2, max_batch_size=8)
PARAMETERS = parameters_from_settings(ON_CPU, RandomWeights(3), Path("/some/where/model.onnx"), "ab12")
IN_EFFECT = EngineDescription(
    kind="onnxruntime",
    version="1",
    precision="fp32",
    mode="session",
    device="cpu",
    threads=2,
    max_batch_size=8,
    weights="random weights (seed 3)",
)


def test_the_config_shows_what_executes_and_no_path() -> None:
    assert PARAMETERS == {
        "engine": "onnxruntime",
        "precision": "fp32",
        "mode": "session",
        "device": "cpu",
        "weights": "random weights (seed 3)",
        "threads": "2",
        "artefact": "model.onnx",
        "artefact_sha256": "ab12",
    }
    checkpoint = parameters_from_settings(ON_CPU, CheckpointWeights(Path("/home/me/secret/a.pt")), None, None)
    assert not any("/" in value for value in checkpoint.values())


@pytest.mark.parametrize("settings", [ON_CPU, replace(ON_CPU, device="cuda:1", threads=0, precision="tf32")])
def test_settings_come_back(settings: EngineSettings) -> None:
    assert settings_from_parameters(parameters_from_settings(settings, RandomWeights(0), None, None), 8) == settings


@pytest.mark.parametrize(("pad_to", "shown"), [((32, 64), "32,64"), ((), "none")])
def test_the_sizes_to_pad_to_come_back(pad_to: tuple[int, ...], shown: str) -> None:
    bert = get_specification("transformers:distilbert-base-uncased")
    parameters = {**PARAMETERS, **parameters_from_model(bert, pad_to, DecodingSettings())}
    assert parameters["pad_to"] == shown
    assert settings_from_parameters(parameters, 8).pad_to == pad_to
    assert "pad_to" not in parameters_from_model(get_specification(DEFAULT_MODEL), (), DecodingSettings())


def test_clients_get_a_models_name_and_no_folder() -> None:
    bert = replace(get_specification("transformers:distilbert-base-uncased"), reference="/home/me/secret/bert.py:make")
    parameters = parameters_from_model(bert, (), DecodingSettings())
    assert parameters["model"] == "bert.py:make"
    assert not any("secret" in value for value in parameters.values())


def test_another_file_under_the_same_name_is_told_and_refused() -> None:
    told, loaded = (CheckpointWeights(Path("/models/a.pt"), digit * 64) for digit in "12")
    parameters = parameters_from_settings(ON_CPU, told, None, None)
    assert parameters["weights"] == f"checkpoint a.pt, SHA-256 {'1' * 64}"
    assert contradictions(parameters, 8, replace(IN_EFFECT, weights=told.label)) == ()
    (wrong,) = contradictions(parameters, 8, replace(IN_EFFECT, weights=loaded.label))
    assert "2" * 64 in wrong


def test_an_engine_that_is_what_the_config_says() -> None:
    assert contradictions(PARAMETERS, 8, IN_EFFECT) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "torch"},
        {"precision": "tf32"},
        {"mode": "graph"},
        {"device": "cuda:0"},
        {"threads": 1},
        {"threads": None},
        {"max_batch_size": 4},
        {"weights": "random weights (seed 0)"},
    ],
    ids=str,
)
def test_every_difference_is_named(change: dict[str, object]) -> None:
    (phrase,) = contradictions(PARAMETERS, 8, replace(IN_EFFECT, **change))  # type: ignore[arg-type]  # it fits
    assert "config says" in phrase


def test_auto_leaves_the_engine_its_mode() -> None:
    assert contradictions({**PARAMETERS, "mode": "auto"}, 8, replace(IN_EFFECT, mode="compile")) == ()


def test_spinning_is_verified_where_the_config_says_it() -> None:
    spins = replace(IN_EFFECT, spinning="on")
    assert contradictions(PARAMETERS, 8, spins) == ()
    (phrase,) = contradictions({**PARAMETERS, "spinning": "off"}, 8, spins)
    assert phrase == "spinning is 'on', the config says 'off'"


def test_nothing_is_left_to_choose() -> None:
    engine = resolve_engine(EngineSettings(kind="onnxruntime", device="cpu"))
    assert engine.mode == "session"
    assert engine.threads >= 1
    assert resolve_engine(replace(ON_CPU, threads=5)).threads == 5
    assert resolve_engine(replace(ON_CPU, device="cuda:1", threads=0)).device == "cuda:1"
