"""Whatever bytes a server sends as the response to an inference request: arrays, or one sentence."""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from loadgen.base.documents import DocumentError, read_json
from loadgen.client.bodies import RawTensor
from loadgen.client.connection import GRPC_STATUS, Address, Exchange, failure_message
from loadgen.client.grpc import GrpcConnection
from loadgen.client.http import HttpConnection
from loadgen.client.inputs import NUMPY_TYPES
from loadgen.client.outputs import AnswerError
from loadgen.client.shared_memory import (
    RequestSlot,
    SharedMemoryConnection,
    SharedMemoryRequest,
    SlotPool,
)
from loadgen.client.transports import read_answer

DATATYPES = (*NUMPY_TYPES, "BYTES", "BF16")
DEEP = b"[" * 100_000
HTTP = HttpConnection(Address("127.0.0.1", 1))

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
sizes = st.integers(0, 4) | st.integers(-(2**70), 2**70) | st.sampled_from([2**31 - 1, 2**32, 2**62]) | scalars
outputs = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["out", "other"]) | anything,
        "datatype": st.sampled_from(DATATYPES) | anything,
        "shape": st.lists(sizes, max_size=4) | anything,
        "parameters": st.fixed_dictionaries({"binary_data_size": sizes}) | anything,
        "data": st.lists(scalars, max_size=4) | anything,
    },
)
documents = st.fixed_dictionaries({"outputs": st.lists(outputs, max_size=3) | anything}) | anything


def http(body: bytes, header_length: str | None = None, status: int = 200) -> Exchange:
    exchange = Exchange()
    exchange.status, exchange.body = status, memoryview(body)
    length = b"" if header_length is None else f"inference-header-content-length: {header_length}\r\n".encode("latin-1")
    exchange.head = b"http/1.1 200 ok\r\n" + length + b"\r\n"
    return exchange


def outcome(exchange: Exchange, connection: Any = HTTP) -> Mapping[str, Any] | str:
    """The arrays, or the sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            outputs = read_answer(connection, exchange)
        except AnswerError as exc:
            said = str(exc)
        else:
            said = ""
    assert said.isprintable()
    assert len(said) < 500
    if said:
        return said
    assert all(isinstance(array, np.ndarray) for array in outputs.values())
    return outputs


OUT = {"name": "out", "datatype": "UINT32"}


@settings(deadline=None, max_examples=80)
@given(documents, st.binary(max_size=40), st.none() | st.integers(-3, 3))
@example({"outputs": [{**OUT, "shape": [0, 2**30 + 1, 2**31 - 1], "parameters": {"binary_data_size": 0}}]}, b"", 0)
@example({"outputs": [{**OUT, "shape": [0, 2**30 + 1, 2**31 - 1], "datatype": "BYTES", "data": []}]}, b"", None)
def test_any_json_over_http(document: object, binary: bytes, off: int | None) -> None:
    text = json.dumps(document).encode()
    outcome(http(text + binary, None if off is None else str(len(text) + off)))


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60), st.none() | st.text(max_size=4) | st.integers().map(str))
@example(DEEP, None)
@example(b'{"outputs": ' + DEEP, None)
def test_any_bytes_over_http(body: bytes, header_length: str | None) -> None:
    outcome(http(body, None if header_length is None else header_length.encode("ascii", "replace").decode()))
    assert failure_message(http(body, status=500)).isprintable()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.text(max_size=3), st.sampled_from(DATATYPES) | st.text(max_size=4),
                       st.lists(st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1), max_size=3)), max_size=3),
    st.lists(st.binary(max_size=20), max_size=3),
)  # fmt: skip
@example([("a", "BF16", [])], [b"ab"])
def test_any_outputs_over_grpc(outputs: list[tuple[str, str, list[int]]], raw: list[bytes]) -> None:
    message = service_pb2.ModelInferResponse(raw_output_contents=raw)
    for name, datatype, shape in outputs:
        tensor = message.outputs.add(name=name, datatype=datatype, shape=shape)
        tensor.contents.int_contents.extend([1, -300])
    grpc(message.SerializeToString())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_over_grpc(body: bytes) -> None:
    grpc(body)


def grpc(body: bytes) -> None:
    exchange = Exchange()
    exchange.status, exchange.body = GRPC_STATUS, memoryview(body)
    outcome(exchange, GrpcConnection("127.0.0.1:1"))


def test_any_json_over_shared_memory() -> None:
    request = SharedMemoryRequest((RawTensor("in", "FP32", (1,), bytes(4)),), {"out": 16})
    pool, memory = SlotPool(Address("127.0.0.1", 1), "model", (request,)), mmap.mmap(-1, 128)
    pool.give_back(RequestSlot("slots", memory, 0))
    connection = SharedMemoryConnection(pool)
    connection._slot = pool.take(request)

    @settings(deadline=None, max_examples=40)
    @given(documents)
    def check(document: object) -> None:
        outcome(http(json.dumps(document).encode()), connection)

    try:
        check()
        good = {"outputs": [{"name": "out", "datatype": "FP32", "shape": [2]}]}
        assert set(outcome(http(json.dumps(good).encode()), connection)) == {"out"}
    finally:
        memory.close()


def answer(*outputs: dict[str, Any], binary: bytes = b"") -> Mapping[str, Any] | str:
    text = json.dumps({"outputs": outputs}).encode()
    return outcome(http(text + binary, str(len(text))))


def entry(datatype: str, shape: list[int], size: int, name: str = "out") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


@pytest.mark.parametrize(
    ("outputs", "binary", "words"),
    [
        ((entry("FP32", [-1], 4),), bytes(4), ">= 0"),
        ((entry("FP32", [2**40], 4),), bytes(4), "Expected `int`"),
        ((entry("FP32", [0, 2**31 - 1], 4),), bytes(4), "4 bytes, but its shape needs 0"),
        ((entry("FP32", [2], 4),), bytes(4), "4 bytes, but its shape needs 8"),
        ((entry("FP32", [1], 8),), bytes(4), "declares 8 bytes, but 4 are left"),
        ((entry("FP32", [1], 4),), bytes(9), "5 bytes follow its outputs"),
        ((entry("FP32", [1], 4), entry("FP32", [1], 4)), bytes(8), "two outputs named out"),
        ((entry("FP33", [1], 4),), bytes(4), "a datatype that the protocol does not define"),
        ((entry("BYTES", [1], 5),), b"\x02\0\0\0a", "ends in the middle of an element"),
        ((entry("BYTES", [1], 3),), b"\x02\0\0", "ends in the middle of an element"),
        ((entry("BYTES", [2], 5),), b"\x01\0\0\0a", "has 1 elements, but its shape needs 2"),
        (({"datatype": "FP32", "shape": [1]},), b"", "missing required field `name`"),
        ((entry("FP32", [1], 4, name=7),), bytes(4), "Expected `str`"),  # type: ignore[arg-type]
        (({"name": "out", "datatype": "INT8", "shape": [1], "data": [3]},), b"", "is not binary"),
        (({"name": "out", "datatype": "FP32", "shape": [1]},), b"", "is not binary"),
        (({"name": "out\x1b[31m\n", "datatype": "FP32", "shape": [1]},), b"", "cannot be printed"),
    ],
)  # fmt: skip
def test_each_lie_is_named(outputs: tuple[dict[str, Any], ...], binary: bytes, words: str) -> None:
    said = answer(*outputs, binary=binary)
    assert isinstance(said, str)
    assert words in said


def test_good_answers_of_every_kind() -> None:
    outputs = answer(
        entry("BYTES", [2], 11, "bytes"), entry("BF16", [1], 2, "bf16"),
        entry("INT8", [2, 1], 2, "int8"),
        binary=b"\x01\0\0\0a\x02\0\0\0bc" + b"\x80\x3f" + b"\xff\x02",
    )  # fmt: skip
    assert not isinstance(outputs, str)
    assert list(outputs["bytes"]) == [b"a", b"bc"]
    assert outputs["bf16"].tolist() == [1.0]
    assert outputs["int8"].tolist() == [[-1], [2]]


@settings(deadline=None, max_examples=100)
@given(anything.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
@example(DEEP)
@example(b'{"a":' * 40 + b"1" + b"}" * 40)
@example(b"9" * 5000)
@example(b" " * 2**21)
def test_any_document(content: bytes) -> None:
    def check(value: object) -> None:
        if isinstance(value, dict):
            check(list(value))
            check(list(value.values()))
        elif isinstance(value, list):
            for element in value:
                check(element)
        else:
            assert not isinstance(value, str) or (value.isprintable() and len(value) <= 1000)

    said = ""
    try:
        check(read_json(content))
    except DocumentError as exc:
        said = str(exc)
    assert said.isprintable()
