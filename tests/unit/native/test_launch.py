"""The plan of a server process names the file that its engine executes."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.models.registry import DEFAULT_MODEL, SPECIFICATIONS
from servers.models.weights import RandomWeights
from servers.native.command import Launch
from servers.native.settings import NativeSettings


@pytest.mark.parametrize(("engine", "file"), [("onnxruntime", "/x/model.onnx"), ("tensorrt", "/x/model.plan")])
def test_an_engine_with_a_file_is_started_with_it(engine: str, file: str) -> None:
    launch = Launch(NativeSettings(engine=engine), (SPECIFICATIONS[DEFAULT_MODEL],), RandomWeights(0))
    (needed,) = launch.needs_artefacts
    plan = launch.plan({needed.name: (Path(file), None)})
    assert plan.argv[plan.argv.index("--artefact") + 1] == file
    assert (plan.model, plan.artefact) == (DEFAULT_MODEL, None)
