"""The plan of a server process names the file that its engine executes."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.engines.interface import EngineError
from servers.models.registry import DEFAULT_MODEL, get_specification
from servers.models.weights import RandomWeights
from servers.native.command import Launch, check
from servers.native.settings import NativeSettings


@pytest.mark.parametrize(("engine", "file"), [("onnxruntime", "/x/model.onnx"), ("tensorrt", "/x/model.plan")])
def test_an_engine_with_a_file_is_started_with_it(engine: str, file: str) -> None:
    launch = Launch(NativeSettings(engine=engine), (get_specification(DEFAULT_MODEL),), RandomWeights(0))
    (needed,) = launch.needs_artefacts
    plan = launch.plan({needed.name: (Path(file), None)})
    assert plan.argv[plan.argv.index("--artefact") + 1] == file
    assert (plan.model, plan.artefact) == (get_specification(DEFAULT_MODEL).name, None)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": "onnxruntime", "precision": "bf16"}, "has no precision 'bf16'"),
        ({"engine": "torch", "mode": "session"}, "has no mode 'session'"),
        ({"engine": "torch", "precision": "fp16", "device": "cpu"}, "does not offer precision fp16 on cpu"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_before_a_model_is_exported(
    options: dict[str, str], problem: str
) -> None:
    with pytest.raises(EngineError, match=problem):
        check(options)
