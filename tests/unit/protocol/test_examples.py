"""The commands that a server is started and answers with."""

from __future__ import annotations

import json
import shlex

import pytest

from servers.protocol.examples import infer_commands
from servers.protocol.tensors import TensorSpec

URL = "http://127.0.0.1:8100"


def test_a_small_request_is_written_out_and_a_large_one_is_made() -> None:
    ids = TensorSpec("input ids'", "INT64", (-1, -1))
    as_bytes, as_json = infer_commands(URL, "m", [ids])
    words = shlex.split(as_json)
    (tensor,) = json.loads(words[words.index("-d") + 1])["inputs"]
    assert tensor == {"name": "input ids'", "shape": [1, 8], "datatype": "INT64", "data": [0] * 8}
    assert f"{URL}/v2/models/m/infer" in words
    assert "head -c 64 /dev/zero" in as_bytes
    assert "python3 -c" in infer_commands(URL, "m", [TensorSpec("x", "FP32", (-1, 3, 224, 224))])[1]


@pytest.mark.parametrize(
    ("specs", "count"),
    [
        ([("x", "FP16", (-1, 4))], 1),
        ([("photo", "BYTES", (-1, 1))], 1),
        ([("photo", "BYTES", (-1, 1)), ("x", "FP32", (-1, 4))], 0),
        ([("x", "BOOL", (4,)), ("y", "FP32", (2,))], 2),
    ],
)
def test_what_cannot_be_written_is_left_out(specs: list[tuple[str, str, tuple[int, ...]]], count: int) -> None:
    assert len(infer_commands(URL, "m", [TensorSpec(*spec) for spec in specs])) == count
