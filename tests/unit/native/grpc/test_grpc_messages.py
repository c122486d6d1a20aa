"""Cutting raw inputs out of a serialised message gives what protobuf would have given, and never more than an error."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from servers.native.grpc.messages import (
    INLINE_BYTES,
    INLINE_FIELDS,
    MAX_FIELDS,
    MAX_REST_BYTES,
    PIECE_VALUES,
    decode_message,
    is_short,
    parse_message,
)
from servers.protocol.errors import ContractError, InvalidRequestError, NotFoundError
from servers.protocol.records import ModelSignature
from servers.protocol.tensors import TensorSpec
from servers.protocol.values import MAX_BYTES_ELEMENTS

MIB = 2**20


def no_region(_reference):
    raise NotFoundError("no region is registered")


texts = st.text(max_size=20)


@st.composite
def messages(draw):
    message = service_pb2.ModelInferRequest(
        model_name=draw(texts),
        model_version=draw(texts),
        id=draw(texts),
        raw_input_contents=draw(st.lists(st.binary())),
    )
    for name, value in draw(st.dictionaries(texts, st.integers(-(2**63), 2**63 - 1), max_size=3)).items():
        message.parameters[name].int64_param = value
    for name in draw(st.lists(texts, max_size=3)):
        message.inputs.add(name=name, datatype="FP32", shape=draw(st.lists(st.integers(-1, 2**62), max_size=4)))
    return message


@given(messages())
def test_the_parts_are_those_of_protobuf(message):
    rest, raw, _ = parse_message(message.SerializeToString())
    assert [bytes(part.data) for part in raw] == list(message.raw_input_contents)
    message.ClearField("raw_input_contents")
    assert rest == message


@given(messages(), st.data())
def test_raw_inputs_may_stand_anywhere(message, data):
    """Protobuf lets a sender write fields in any order."""
    raw = list(message.raw_input_contents)
    message.ClearField("raw_input_contents")
    before = data.draw(st.integers(0, len(raw)))
    parts = [service_pb2.ModelInferRequest(raw_input_contents=[part]).SerializeToString() for part in raw]
    serialised = b"".join([*parts[:before], message.SerializeToString(), *parts[before:]])
    rest, raw_inputs, _ = parse_message(serialised)
    assert [bytes(part.data) for part in raw_inputs] == raw
    assert rest == message


@given(st.binary(max_size=200) | messages().map(lambda message: message.SerializeToString()), st.integers(0, 200))
def test_any_bytes_give_a_request_or_an_error(serialised, end):
    with contextlib.suppress(ContractError):
        decode_message(parse_message(serialised[:end]), no_region)


def test_raw_inputs_are_views_over_what_was_received():
    values = np.arange(6, dtype=np.float32)
    message = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[values.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    serialised = message.SerializeToString()
    data = decode_message(parse_message(serialised), no_region).inputs[0].data
    assert np.shares_memory(data, np.frombuffer(serialised, np.uint8))
    np.testing.assert_array_equal(data, values.reshape(2, 3))


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-32768, 32767]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, float("inf")]),
        ("FP64", "fp64_contents", [0.1, -1e300]),
        ("BYTES", "bytes_contents", [b"", b"\xff\x00"]),
    ],
)
def test_typed_contents_of_every_datatype(datatype, field, values):
    message = service_pb2.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="x", datatype=datatype, shape=[2])
    getattr(item.contents, field).extend(values)
    tensor = decode_message(parse_message(message.SerializeToString()), no_region).inputs[0]
    assert tensor.data.tolist() == values


@pytest.mark.parametrize(
    ("datatype", "field", "values", "message"),
    [
        ("INT8", "int_contents", [0, 128], "outside the range of INT8"),
        ("UINT8", "uint_contents", [0, 256], "outside the range of UINT8"),
        ("FP16", "fp32_contents", [0.0, 1.0], "only raw_input_contents"),
        ("FP32", "fp64_contents", [0.0, 1.0], "'fp32_contents' has 0"),
        ("FP32", "fp32_contents", [0.0], "needs 2 elements"),
        ("FLOAT", "fp32_contents", [0.0, 1.0], "must have a 'datatype'"),
    ],
)
def test_typed_contents_that_do_not_fit(datatype, field, values, message):
    request = service_pb2.ModelInferRequest(model_name="m")
    item = request.inputs.add(name="x", datatype=datatype, shape=[2])
    getattr(item.contents, field).extend(values)
    with pytest.raises(InvalidRequestError, match=message):
        decode_message(parse_message(request.SerializeToString()), no_region)


FIELDS = {  # by number: its name, how protobuf encodes one value, and the datatype
    1: ("bool_contents", 0, "BOOL"),
    2: ("int_contents", 0, "INT32"),
    3: ("int64_contents", 0, "INT64"),
    4: ("uint_contents", 0, "UINT32"),
    5: ("uint64_contents", 0, "UINT64"),
    6: ("fp32_contents", 5, "FP32"),
    7: ("fp64_contents", 1, "FP64"),
}


def varint(value: int) -> bytes:
    head = b""
    while value >= 0x80:
        head += bytes([value & 0x7F | 0x80])
        value >>= 7
    return head + bytes([value])


@st.composite
def encoded_contents(draw):
    """An InferTensorContents with its fields in any order and any number, each packed or not."""
    encoded = b""
    for number in draw(st.lists(st.sampled_from(list(FIELDS)), max_size=6)):
        kind = FIELDS[number][1]
        size = {5: 4, 1: 8}.get(kind)
        value = st.integers(0, 2**64 - 1).map(varint) if size is None else st.binary(min_size=size, max_size=size)
        values = draw(st.lists(value, max_size=5))
        if draw(st.booleans()):
            packed = b"".join(values)
            encoded += bytes([number << 3 | 2]) + varint(len(packed)) + packed
        else:
            encoded += b"".join(bytes([number << 3 | kind]) + value for value in values)
    return encoded


@given(st.lists(encoded_contents(), max_size=2), st.sampled_from(list(FIELDS.values())))
def test_typed_contents_are_those_of_protobuf(parts, field):
    """However a client encodes them; a value that has too many bits loses the upper ones."""
    title, _, datatype = field
    contents = service_pb2.InferTensorContents.FromString(b"".join(parts))
    expected = list(getattr(contents, title))
    item = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=[len(expected)])
    encoded = b"".join(bytes([5 << 3 | 2]) + varint(len(part)) + part for part in parts) + item.SerializeToString()
    parsed = parse_message(bytes([5 << 3 | 2]) + varint(len(encoded)) + encoded)
    np.testing.assert_array_equal(decode_message(parsed, no_region).inputs[0].data.tolist(), expected)


def test_long_typed_contents_are_read_in_pieces():
    request = service_pb2.ModelInferRequest(model_name="m")
    item = request.inputs.add(name="x", datatype="UINT8", shape=[PIECE_VALUES + 2])
    item.contents.uint_contents.extend([7] * PIECE_VALUES + [8, 255])
    data = decode_message(parse_message(request.SerializeToString()), no_region).inputs[0].data
    assert (data.dtype, data[:PIECE_VALUES].sum(), data[-2:].tolist()) == (
        np.dtype(np.uint8),
        7 * PIECE_VALUES,
        [8, 255],
    )
    item.contents.uint_contents[-1] = 256
    with pytest.raises(InvalidRequestError, match="outside the range of UINT8"):
        decode_message(parse_message(request.SerializeToString()), no_region)


@pytest.mark.parametrize("typed", [False, True])
def test_all_bytes_elements_of_a_request_together_are_limited(typed):
    def request(*counts):
        message = service_pb2.ModelInferRequest(model_name="m")
        for number, count in enumerate(counts):
            item = message.inputs.add(name=f"x{number}", datatype="BYTES", shape=[count])
            if typed:
                item.contents.bytes_contents.extend([b""] * count)
            else:
                message.raw_input_contents.append(bytes(4 * count))
        return message.SerializeToString()

    with pytest.raises(InvalidRequestError, match=f"at most {MAX_BYTES_ELEMENTS} BYTES elements, input 'x1'"):
        decode_message(parse_message(request(MAX_BYTES_ELEMENTS - 100, 101)), no_region)


def many_parameters(message):
    for number in range(MAX_FIELDS + 1):
        message.inputs[0].parameters[str(number)].bool_param = True


def many_elements(message):
    message.inputs[0].contents.bytes_contents.extend([b"abcd"] * (MAX_FIELDS + 1))


def many_output_parameters(message):
    for number in range(MAX_FIELDS + 1):
        message.outputs.add(name="y").parameters[str(number)].bool_param = True


@pytest.mark.parametrize("fill", [many_parameters, many_elements, many_output_parameters])
def test_what_takes_protobuf_long_is_refused_before_it_is_parsed(fill):
    """It holds the interpreter: three million parameters took a minute."""
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="BYTES", shape=[1])
    fill(message)
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_FIELDS} fields"):
        parse_message(message.SerializeToString())


def test_packed_values_are_one_field():
    message = service_pb2.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="x", datatype="FP32", shape=[10 * MAX_FIELDS])
    item.contents.fp32_contents.extend([0.5] * 10 * MAX_FIELDS)
    assert decode_message(parse_message(message.SerializeToString()), no_region).inputs[0].data.sum() == 5 * MAX_FIELDS


def zeros(count):
    """As many values in as many bytes."""
    message = service_pb2.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="x", datatype="INT64", shape=[count])
    item.contents.int64_contents.extend([0] * count)
    return message.SerializeToString()


def test_values_take_memory_only_once_the_model_has_accepted_them():
    """Protobuf made eight bytes and more of each byte before anybody had looked at the model."""
    taken = []

    def allocate(size):
        taken.append(size)
        return np.empty(size, np.uint8)

    content = zeros(MIB)
    tracemalloc.start()
    parsed = parse_message(content)
    for item in (TensorSpec("x", "FP32", (-1,)), TensorSpec("x", "INT64", (-1, 3)), TensorSpec("y", "INT64", (-1,))):
        with pytest.raises(InvalidRequestError):
            decode_message(parsed, no_region, ModelSignature("m", "1", (item,), (), 2 * MIB), allocate)
    assert tracemalloc.get_traced_memory()[1] < MIB // 2
    tracemalloc.stop()
    assert taken == []
    signature = ModelSignature("m", "1", (TensorSpec("x", "INT64", (-1,)),), (), 2 * MIB)
    assert decode_message(parsed, no_region, signature, allocate).inputs[0].data.tolist() == [0] * MIB
    assert taken == [8 * MIB]


def test_only_few_bytes_and_fields_are_parsed_on_the_event_loop():
    raw = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[bytes(MIB)]).SerializeToString()
    assert is_short(memoryview(raw))
    many = service_pb2.ModelInferRequest(raw_input_contents=[b""] * (INLINE_FIELDS + 1)).SerializeToString()
    for content in (zeros(INLINE_BYTES), many):
        assert not is_short(memoryview(content))


@pytest.mark.parametrize("field", ["model_name", "id"])
def test_what_surrounds_the_values_is_limited(field):
    content = service_pb2.ModelInferRequest(**{field: "x" * MAX_REST_BYTES}).SerializeToString()
    with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_REST_BYTES}"):
        parse_message(content)


@pytest.mark.parametrize("contents", [b"\x32\x03abc", b"\x1a\x01\xff", b"\x1a\x0b" + b"\xff" * 10 + b"\x01"])
def test_values_that_are_none_are_refused(contents):
    """A number cut off, a varint cut off, and one of more than 64 bits."""
    datatype, count = ("FP32", 0) if contents[0] == 0x32 else ("INT64", contents.count(1, 2))
    item = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=[count])
    encoded = item.SerializeToString() + bytes([5 << 3 | 2]) + varint(len(contents)) + contents
    with pytest.raises(InvalidRequestError, match=r"inside a value|64 bits"):
        decode_message(parse_message(bytes([5 << 3 | 2]) + varint(len(encoded)) + encoded), no_region)


def test_a_shape_of_any_length_is_named_with_its_length():
    message = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b""])
    message.inputs.add(name="x", datatype="FP32", shape=[1] * 100_000)
    with pytest.raises(InvalidRequestError, match="has 100000 dimensions, the limit is 32"):
        decode_message(parse_message(message.SerializeToString()), no_region)
