"""The plan of a server process names the file that its engine executes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from servers.models.registry import DEFAULT_MODEL
from servers.native.command import check


@pytest.mark.parametrize(("engine", "file"), [("onnxruntime", "/x/model.onnx"), ("tensorrt", "/x/model.plan")])
def test_an_engine_with_a_file_is_started_with_it(engine: str, file: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = check({"engine": engine, "http_port": port, "grpc_port": 0})
    (needed,) = launch.needs_artefacts
    plan = launch.plan({needed.name: (Path(file), None)})
    assert plan.argv[plan.argv.index("--artefact") + 1] == file
    assert (plan.model, plan.artefact) == (DEFAULT_MODEL, None)
