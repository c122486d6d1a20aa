"""Long JSON gives what short JSON gives, and is refused like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from servers.protocol import values as tensor_values
from servers.protocol.codec import decode_request
from servers.protocol.errors import ContractError, InvalidRequestError
from servers.protocol.records import ModelSignature
from servers.protocol.tensors import TensorSpec
from servers.protocol.values import LONG_BYTES, MAX_SPECIAL_BYTES

SIGNATURE = ModelSignature("m", "1", (TensorSpec("x", "FP32", (-1, -1)),), (), max_batch_size=8)
COUNT = 100_000


def request(data: object, datatype: str = "FP32", shape: tuple[int, ...] = (1, COUNT), **changes: object) -> memoryview:
    tensor = {"name": "x", "datatype": datatype, "shape": list(shape), "data": data}
    return memoryview(json.dumps({"id": "7", "inputs": [tensor], **changes}).encode())


def values(datatype: str) -> list[object]:
    random = np.random.default_rng(0)
    if datatype == "BOOL":
        return [bool(value) for value in random.integers(0, 2, COUNT)]
    if datatype.startswith("FP"):
        return [float(value) for value in random.normal(size=COUNT)]
    return [int(value) for value in random.integers(0, 127, COUNT)]


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT64", "UINT8", "BOOL"])
@pytest.mark.parametrize("nested", [False, True])
def test_long_data_gives_the_same_array(datatype: str, nested: bool) -> None:
    flat = values(datatype)
    data: object = [[flat[:50_000], flat[50_000:]]] if nested else flat
    body = request(data, datatype)
    if datatype in ("FP32", "FP64", "BOOL"):
        assert body.nbytes > LONG_BYTES
    decoded = decode_request(body, None, SIGNATURE)
    assert decoded.id == "7"
    expected = np.array(flat).astype(decoded.inputs[0].data.dtype)
    np.testing.assert_array_equal(decoded.inputs[0].data, expected[None, :])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: request([*range(COUNT - 1), "text"]), "must hold only values"),
        (lambda: request([*range(COUNT - 1), None]), "must hold only values"),
        (lambda: request([*range(COUNT - 1), {}]), "must hold only values"),
        (lambda: request([*range(COUNT - 1), True]), "must hold only values"),
        (lambda: request([*range(COUNT + 1)]), "needs 100000 elements"),
        (lambda: request([*range(COUNT - 1)]), "got 99999"),
        (lambda: request([[]] * COUNT), "got 0"),
        (lambda: request([300] * COUNT, "UINT8"), "outside the range"),
        (lambda: request([1.5] * COUNT, "INT32"), "must hold only values"),
        (lambda: request(values("FP32"), "FP16"), "FP16"),
        (lambda: request(values("FP32"), parameters={str(i): 0 for i in range(COUNT)}), "'parameters'"),
        (lambda: request([1], shape=(1,) * COUNT), "'shape'"),
        (lambda: request(values("FP32"), outputs=[{"name": "y"}] * COUNT), "'outputs'"),
        (lambda: memoryview(b'{"inputs": [{"data": [' + b"1," * COUNT * 2), "failed to parse"),
        (lambda: memoryview(b'{"inputs": 7, "x": "' + b"a" * LONG_BYTES + b'"}'), ""),
        (lambda: memoryview(b"[" + b"1," * LONG_BYTES + b"1]"), "Expected `object`"),
        (lambda: memoryview(b'{"inputs":[{"data":' + b"[" * LONG_BYTES + b"]" * LONG_BYTES + b"}]}"),
         "failed to parse"),
        (lambda: memoryview(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":' + b"[" * 65
                            + b"1," * LONG_BYTES + b"1" + b"]" * 65 + b"}]}"), "nested"),
        (lambda: memoryview(b'{"inputs":[{"data":[NaN' + b",1" * MAX_SPECIAL_BYTES + b"]}]}"), "NaN"),
        (lambda: request(["a"] * MAX_SPECIAL_BYTES, "BYTES", (1, MAX_SPECIAL_BYTES)), "binary"),
    ],
)  # fmt: skip
def test_long_json_is_refused_in_one_sentence(make: Callable[[], memoryview], text: str) -> None:
    with pytest.raises(ContractError) as caught:
        decode_request(make(), None, SIGNATURE)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 300


def test_special_values_and_strings_are_read() -> None:
    data = [float("nan"), float("inf"), *range(COUNT - 2)]
    array = decode_request(request(data), None, SIGNATURE).inputs[0].data
    assert np.isnan(array[0, 0])
    assert np.isposinf(array[0, 1])
    strings = decode_request(request(['[\\"a'] * COUNT, "BYTES"), None, SIGNATURE).inputs[0].data
    assert strings[0, -1] == b'[\\\\"a'.replace(b"\\\\", b"\\")


def test_long_data_are_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser holds the interpreter, and with it every other thread, for the whole text that it is given."""
    lengths: list[int] = []

    def loads(text: bytes) -> Any:
        lengths.append(len(text))
        return orjson.loads(text)

    monkeypatch.setattr(tensor_values, "orjson", SimpleNamespace(loads=loads, JSONDecodeError=orjson.JSONDecodeError))
    body = request(values("FP32"))
    decode_request(body, None, SIGNATURE)
    longest_value = 32
    assert sum(lengths) > 0.9 * body.nbytes - 2 * COUNT  # less the separators
    assert max(lengths) <= tensor_values.PIECE_BYTES + longest_value


def test_a_document_without_inputs_is_told_so() -> None:
    with pytest.raises(InvalidRequestError, match="`inputs`"):
        decode_request(memoryview(b'{"a": "' + b" " * 100_000 + b'", "b": "' + b" " * 200_000 + b'"}'), None, SIGNATURE)
