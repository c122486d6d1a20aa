"""A model whose outputs are texts: they are equal, or the answers are wrong."""

from __future__ import annotations

import json

import numpy as np

from loadgen.checks.run import parity_figures
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.inputs import SampleInputs
from loadgen.client.transports import InferenceTarget
from loadgen.measure.answers import ParityTarget, check_parity
from loadgen.stats.agreement import tolerance_of
from tests.hostile_server import hostile_server


def test_texts_are_compared_as_they_are() -> None:
    output = {"name": "y", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    text = json.dumps({"outputs": [output]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    signature = Signature("m", (TensorSignature("x", "FP32", (-1, 2)),), (TensorSignature("y", "BYTES", (-1,)),))
    inputs = SampleInputs({"x": np.zeros((1, 2), "<f4")}, "synthetic")
    with hostile_server() as first, hostile_server() as other:
        first.answers["/v2/models/m/infer"] = (200, headers, text + b"\x01\0\0\0a")
        other.answers["/v2/models/m/infer"] = (200, headers, text + b"\x01\0\0\0b")
        a, b = (ParityTarget(InferenceTarget("http", server.url, "m"), signature, inputs) for server in (first, other))
        same = check_parity({"a": a, "b": a}, [1], tolerance_of(["fp32"]))
        different = check_parity({"a": a, "b": b}, [1], tolerance_of(["fp32"]))
    assert (same.ok, same.error, same.kinds) == (True, None, {"y": "labels"})
    assert (different.ok, different.error) == (False, None)
    assert different.cases[0].fault == "is b'b' instead of b'a'"
    assert parity_figures(different) == "labels differ"
