"""The codec against tritonclient's own encoder and decoder, and against bytes that nobody should send."""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from servers.protocol.codec import (
    decode_request,
    encode_pieces,
    encode_response,
    is_slow_to_encode,
    parse_header_length,
)
from servers.protocol.errors import ContractError, InvalidRequestError
from servers.protocol.records import InferResponse, ModelSignature, OutputTensor
from servers.protocol.tensors import DATATYPES, TensorSpec
from servers.protocol.values import MAX_BYTES_ELEMENTS, PIECE_VALUES

SIGNATURE = ModelSignature(
    "m", "1", (TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), max_batch_size=8
)
FIXED = sorted(DATATYPES)


def document(**changes: object) -> dict[str, object]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], **changes}]}


def decode(value: object) -> object:
    return decode_request(memoryview(json.dumps(value).encode()), None, SIGNATURE)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from([*FIXED, "BYTES"]))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=5))
    if datatype == "BYTES":
        flat = draw(st.lists(st.binary(max_size=9), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        array = np.empty(len(flat), dtype=object)
        array[:] = flat
        return datatype, array.reshape(shape)
    return datatype, draw(hnp.arrays(DATATYPES[datatype], shape))


@given(st.lists(tensors(), min_size=1, max_size=3), st.text(st.characters(codec="utf-8"), max_size=20))
def test_reads_what_tritonclient_writes(values: list[tuple[str, np.ndarray]], request_id: str) -> None:
    inputs = []
    for index, (datatype, array) in enumerate(values):
        item = InferInput(f"in{index}", list(array.shape), datatype)
        item.set_data_from_numpy(array, binary_data=True)
        inputs.append(item)
    outputs = [InferRequestedOutput("y", binary_data=True), InferRequestedOutput("z", binary_data=False)]
    body, length = InferenceServerClient.generate_request_body(inputs, outputs, request_id=request_id)
    request = decode_request(memoryview(body), length, SIGNATURE)
    assert request.id == request_id
    assert [(output.name, output.binary) for output in request.outputs or ()] == [("y", True), ("z", False)]
    for (datatype, array), got in zip(values, request.inputs, strict=True):
        assert got.datatype == datatype
        assert got.data.dtype == array.dtype
        assert got.data.shape == array.shape
        assert got.data.tobytes() == array.tobytes() if datatype != "BYTES" else (got.data == array).all()


@given(hnp.arrays(np.float32, (2, 4), elements=st.floats(width=32, allow_nan=True)))
def test_reads_json_tensors_that_tritonclient_writes(array: np.ndarray) -> None:
    item = InferInput("x", [2, 4], "FP32")
    item.set_data_from_numpy(array, binary_data=False)
    body, length = InferenceServerClient.generate_request_body([item])
    request = decode_request(memoryview(body), length, SIGNATURE)
    np.testing.assert_array_equal(request.inputs[0].data, array)


@given(st.lists(st.tuples(tensors(), st.booleans()), min_size=1, max_size=3))
def test_tritonclient_and_python_json_read_what_we_write(values: list[tuple[tuple[str, np.ndarray], bool]]) -> None:
    outputs = []
    for index, ((datatype, array), binary) in enumerate(values):
        outputs.append(OutputTensor(f"out{index}", datatype, array, binary or datatype in ("FP16", "BYTES")))
    body, length = encode_response(InferResponse("m", "1", "id", tuple(outputs)))
    json.loads(body[:length])
    result = InferenceServerClient.parse_response_body(body, header_length=length)
    for output in outputs:
        got = result.as_numpy(output.name)
        assert got.shape == output.data.shape
        if output.datatype == "BYTES":
            assert (got == output.data).all()
        else:
            np.testing.assert_array_equal(got, output.data)


def test_binary_inputs_are_views_of_the_body() -> None:
    item = InferInput("x", [1, 4], "FP32")
    item.set_data_from_numpy(np.arange(4, dtype=np.float32).reshape(1, 4))
    body, length = InferenceServerClient.generate_request_body([item])
    buffer: Any = np.frombuffer(body, np.uint8)
    request = decode_request(memoryview(buffer), length, SIGNATURE)
    assert np.shares_memory(request.inputs[0].data, buffer)


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 200)))
def test_any_bytes_give_a_request_or_a_contract_error(body: bytes, length: int | None) -> None:
    with suppress(ContractError):
        decode_request(memoryview(body), None if length is None else min(length, len(body)), SIGNATURE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("FP32") | st.just("x"),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["inputs", "outputs", "name", "datatype", "shape", "data", "parameters", "id", "binary_data_size"]
            ),
            children,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(JSON, st.binary(max_size=16))
def test_any_json_gives_a_request_or_a_contract_error(value: object, tail: bytes) -> None:
    header = json.dumps(value).encode()
    with suppress(ContractError):
        decode_request(memoryview(header + tail), len(header), SIGNATURE)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("name", "datatype", "shape", "data", "parameters"), JSON)))
def test_any_input_object_gives_a_request_or_a_contract_error(changes: dict[str, object]) -> None:
    with suppress(ContractError):
        decode(document(**changes))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "Expected `object`"),
        ({}, "`inputs`"),
        ({"inputs": [3]}, "Expected `object`"),
        (document(name=3), ".name"),
        (document(datatype="FP31"), "one of BOOL"),
        (document(shape=[1, -4]), "negative dimension -4"),
        (document(shape=[2**40, 2**40]), "overflows"),
        (document(shape=[1] * 40), "40 dimensions, the limit is 32"),
        (document(shape=[1, 5]), "needs 5 elements for its shape, got 4"),
        (document(data=None), "must be a JSON array"),
        (document(data=[1, 2, "3", 4]), "only values of datatype FP32"),
        (document(data=[1, 2, None, 4]), "only values of datatype FP32"),
        (document(data=[[1, 2], [3]]), "needs 4 elements for its shape, got 3"),
        (document(data=[10**400, 2, 3, 4]), "only values of datatype FP32"),
        (document(data=[10**400, float("nan"), 3, 4]), "too large for FP32"),
        (document(datatype="FP16"), "FP16, which JSON cannot carry"),
        (document(datatype="UINT8", data=[1, 2, 3, 256]), "outside the range of UINT8, 0 to 255"),
        (document(datatype="INT32", data=[1, 2, 3, 4.5]), "only values of datatype INT32"),
        (document(datatype="BYTES", data=["a", "b", "c", 4]), "only strings"),
        (document(parameters={"binary_data_size": 16}), "exactly one of 'data'"),
        (document(parameters={"a": []}), "'parameters' of input 'x'"),
        ({**document(), "id": 3}, "$.id"),
        ({**document(), "id": "x" * 2000}, "1024"),
        ({**document(), "outputs": [{}]}, "name"),
        ({**document(), "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "true or false"),
        ({**document(), "outputs": [{"name": "y", "parameters": {"classification": 1}}]}, "does not offer"),
        ({**document(data=[float("nan"), 2, 3, 4]), "id": "\ud800"}, "failed to parse"),
        ({**document(), "id": "\ud800"}, "failed to parse"),
        (document(data=json.loads("[" * 119 + "]" * 119)), "nested deeper than 32"),
    ],
)
def test_each_contradiction_is_named(value: object, message: str) -> None:
    with pytest.raises(ContractError, match=re.escape(message)):
        decode(value)


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.1, -3, 1e30]


@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=9), st.text('NaInfity\\"-[],', max_size=20))
def test_nan_and_infinity_are_read_and_texts_that_look_like_them_stay(numbers: list[float], text: str) -> None:
    nested = [numbers[:3], *([[value]] for value in numbers[3:])]  # the lists need not be those of the shape
    strings = [text, [[text + "NaN"]], "é"]
    tensors = [
        {"name": f"NaN {text}", "datatype": "FP32", "shape": [1, len(numbers)], "data": nested},
        {"name": "strings", "datatype": "BYTES", "shape": [3], "data": strings},
    ]
    header = json.dumps({"id": text, "inputs": tensors}).encode()
    request = decode_request(memoryview(header), None, SIGNATURE)
    assert (request.id, request.inputs[0].name) == (text, f"NaN {text}")
    np.testing.assert_array_equal(request.inputs[0].data, np.array([numbers], np.float32))
    assert request.inputs[1].data.tolist() == [text.encode(), f"{text}NaN".encode(), "é".encode()]


@pytest.mark.parametrize("data", [[], [[]], [[], []], [[[]], []]])
@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
def test_no_elements_in_any_lists_are_an_empty_tensor(data: list[object], datatype: str) -> None:
    tensor = {"name": "x", "datatype": datatype, "shape": [2, 0], "data": data}
    request = decode_request(memoryview(json.dumps({"inputs": [tensor]}).encode()), None, SIGNATURE)
    assert request.inputs[0].data.shape == (2, 0)


def test_unparsable_json_is_named_and_a_quarter_million_brackets_do_no_harm() -> None:
    for text in (b"", b"{", b"[" * 250_000, b"[" * 250_000 + b"NaN", b'{"a": NaNNaN}', b"\xff", b"nul"):
        with pytest.raises(InvalidRequestError, match="the request JSON"):
            decode_request(memoryview(text), None, SIGNATURE)


def test_sizes_that_disagree_name_both_numbers() -> None:
    header = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 12}}]}
    ).encode()
    with pytest.raises(InvalidRequestError, match=r"needs 16 bytes .* got 12"):
        decode_request(memoryview(header + bytes(12)), len(header), SIGNATURE)
    with pytest.raises(InvalidRequestError, match="is 12, but only 8 bytes"):
        decode_request(memoryview(header + bytes(8)), len(header), SIGNATURE)
    with pytest.raises(InvalidRequestError, match="must be a whole number"):  # true is 1 in Python
        decode_request(memoryview((one := header.replace(b": 12", b": true")) + bytes(1)), len(one), SIGNATURE)
    full = header.replace(b": 12", b": 16")
    with pytest.raises(InvalidRequestError, match="take 16 bytes, but 19 bytes follow"):
        decode_request(memoryview(full + bytes(19)), len(full), SIGNATURE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", 9) + b"ab", "9 bytes, but only 2 are left"),
        (b"\x01", "too few for 1 BYTES elements"),
        (struct.pack("<I", 1) + b"ab", "has 1 bytes after its 1 BYTES elements"),
    ],
)
def test_broken_bytes_elements_are_named(data: bytes, message: str) -> None:
    item = {"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [item]}).encode()
    with pytest.raises(InvalidRequestError, match=message):
        decode_request(memoryview(header + data), len(header), SIGNATURE)


def test_all_bytes_elements_of_a_request_together_are_limited() -> None:
    """Each is an object made in the event loop; a body of 64 MiB could hold 16 million, which took five seconds."""

    def request(*counts: int) -> tuple[memoryview, int]:
        items = [
            {"name": f"x{i}", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
            for i, count in enumerate(counts)
        ]
        header = json.dumps({"inputs": items}).encode()
        return memoryview(header + bytes(4 * sum(counts))), len(header)

    most = MAX_BYTES_ELEMENTS
    assert decode_request(*request(most - 1, 1), SIGNATURE).inputs[0].data.size == most - 1
    for counts, last in (((most + 1,), "x0"), ((most - 1, 1, 1), "x2")):
        with pytest.raises(InvalidRequestError, match=f"at most {most} BYTES elements, input '{last}'"):
            decode_request(*request(*counts), SIGNATURE)


@pytest.mark.parametrize("value", ["abc", "-1", "", "1.5", "+3", "99999999999999999999999", "11", "²"])
def test_a_bad_header_length_names_the_header(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="Inference-Header-Content-Length"):
        parse_header_length(value, 10)


def test_header_length_zero_is_the_one_inputs_bytes() -> None:
    request = decode_request(memoryview(np.arange(4, dtype="<f4").tobytes()), 0, SIGNATURE)
    assert request.inputs[0].data.tolist() == [[0, 1, 2, 3]]
    assert request.binary_output
    with pytest.raises(InvalidRequestError, match=r"needs 16 bytes .* got 15"):
        decode_request(memoryview(bytes(15)), 0, SIGNATURE)
    one, two = TensorSpec("a", "FP32", (-1, -1, -1)), TensorSpec("b", "FP32", (-1, 2))
    with pytest.raises(InvalidRequestError, match="2 inputs"):
        decode_request(memoryview(bytes(16)), 0, ModelSignature("m", "1", (one, two), (), 8))
    with pytest.raises(InvalidRequestError, match="needs a fixed shape"):
        decode_request(memoryview(bytes(16)), 0, ModelSignature("m", "1", (one,), (), 8))
    image = ModelSignature("m", "1", (TensorSpec("image", "BYTES", (-1, 1)),), (), 8)
    assert decode_request(memoryview(b"\xff\xd8jpeg"), 0, image).inputs[0].data.tolist() == [[b"\xff\xd8jpeg"]]


@pytest.mark.parametrize("count", [0, 1, PIECE_VALUES - 1, PIECE_VALUES, PIECE_VALUES + 1, 3 * PIECE_VALUES])
@pytest.mark.parametrize("first", [0.1, np.nan])
def test_long_outputs_in_json_are_whole(count: int, first: float) -> None:
    array = np.arange(count, dtype=np.float32) / 7
    array[:1] = first
    texts = np.array([f"é{value}".encode() for value in array.tolist()], object)
    tensors = OutputTensor("y", "FP32", array, False), OutputTensor("z", "BYTES", texts, False)
    held: list[int] = []
    response = InferResponse("m", "1", "", tensors)
    pieces, _ = encode_pieces(response, held.append)
    assert held == [len(piece) for piece in pieces]
    values, strings = (output["data"] for output in json.loads(b"".join(pieces))["outputs"])
    np.testing.assert_array_equal(np.array(values, np.float32), array)
    assert [string.encode() for string in strings] == texts.tolist()
    assert is_slow_to_encode(response) == (2 * count > PIECE_VALUES)


def test_nan_and_infinity_stay_parsable() -> None:
    array = np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32)
    body, length = encode_response(InferResponse("m", "1", "", (OutputTensor("y", "FP32", array, False),)))
    assert length is None
    np.testing.assert_array_equal(json.loads(body)["outputs"][0]["data"], array[0])
