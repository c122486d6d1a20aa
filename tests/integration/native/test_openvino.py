"""A server with an engine that a package registers: `abserve serve native --engine openvino` answers as torch does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from servers.engines.batches import random_inputs
from servers.engines.torch.forms import expected_answers
from servers.models.registry import get_specification
from servers.models.weights import RandomWeights
from tests.integration.native.conftest import Server, free_port, wait_until
from tests.tiny_bert import write_tiny_bert

pytest.importorskip("openvino")


@pytest.mark.slow  # by default tests/unit/engines/test_openvino.py
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-4), pytest.param("int8", 0.1, marks=pytest.mark.slow)]
)
def test_openvino_is_served(precision: str, tolerance: float, tmp_path: Path) -> None:
    model = write_tiny_bert(tmp_path)
    port = free_port()
    options = [f"--model={model}", "--engine=openvino", f"--precision={precision}", "--threads=1", "--device=cpu"]
    ports = [f"--http-port={port}", "--grpc-port=0", f"--artefacts={tmp_path / 'artefacts'}"]
    command = [sys.executable, "-P", "-m", "loadgen.entry", "serve", "native", *options, *ports]
    with (tmp_path / "log").open("wb") as log:
        server = Server(subprocess.Popen(command, stderr=log), port, tmp_path)
    try:
        wait_until(  # it first exports the model
            lambda: server.process.poll() is not None or server.status("/v2/health/ready") == 200, "ready", 150
        )
        assert server.process.poll() is None, (tmp_path / "log").read_text()
        bert = get_specification(str(model))
        parameters = json.loads(server.request("GET", f"/v2/models/{bert.name}/config").body)["parameters"]
        in_effect = [parameters[name]["string_value"] for name in ("engine", "precision", "threads")]
        assert in_effect == ["openvino", precision, "1"]
        given = random_inputs(bert, 3, 1, {"sequence": 11})
        tensors = [
            {"name": name, "datatype": "INT64", "shape": list(array.shape), "data": array.ravel().tolist()}
            for name, array in given.items()
        ]
        answer = server.request("POST", f"/v2/models/{bert.name}/infer", json.dumps({"inputs": tensors}).encode())
        assert answer.status == 200
        expected = expected_answers(bert, bert.load_module(RandomWeights(0)), given)
        for output in json.loads(answer.body)["outputs"]:
            wanted = expected[output["name"]]
            got = np.array(output["data"]).reshape(output["shape"])
            assert np.linalg.norm(got - wanted) < tolerance * np.linalg.norm(wanted)
    finally:
        server.process.kill()
        server.process.wait(60)
