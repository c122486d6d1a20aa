"""A model whose outputs are texts, which parity cannot compare."""

from __future__ import annotations

import json

import numpy as np

from loadgen.bench.answers import ParityTarget, check_parity
from loadgen.statistics.agreement import tolerance_of
from loadgen.transport.endpoint import Signature, TensorSignature
from loadgen.transport.inputs import SampleInputs
from loadgen.transport.transports import Target
from tests.hostile_server import hostile_server


def test_texts_are_not_compared_as_numbers() -> None:
    output = {"name": "y", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    text = json.dumps({"outputs": [output]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    signature = Signature("m", (TensorSignature("x", "FP32", (-1, 2)),), (TensorSignature("y", "BYTES", (-1,)),))
    inputs = SampleInputs({"x": np.zeros((1, 2), "<f4")}, "synthetic")
    with hostile_server() as server:
        server.answers["/v2/models/m/infer"] = (200, headers, text + b"\x01\0\0\0a")
        arm = ParityTarget(Target("http", server.url, "m"), signature, inputs)
        assert "y holds texts" in (check_parity({"a": arm, "b": arm}, [1], tolerance_of(["fp32"])).error or "")
