"""Responses of good status that do not match the model's metadata."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from loadgen.client.connection import GRPC_STATUS, Exchange
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.outputs import ExpectedOutputs

SIGNATURE = Signature(
    "m",
    (TensorSignature("x", "FP32", (-1, 4)),),
    (TensorSignature("y", "FP32", (-1, 8)), TensorSignature("ids", "INT64", (-1, 2))),
)
FREE = Signature("m", SIGNATURE.inputs, (TensorSignature("boxes", "FP32", (-1, -1, 4)),))
Y, IDS = np.ones((3, 8), "<f4"), np.ones((3, 2), "<i8")
TYPES = {"f": "FP32", "i": "INT64"}


def http(outputs: dict[str, np.ndarray], *, said: dict[str, Any] | None = None, extra: bytes = b"") -> Exchange:
    described = [
        {"name": name, "datatype": TYPES[array.dtype.kind], "shape": array.shape,
         "parameters": {"binary_data_size": array.nbytes}} | (said or {})
        for name, array in outputs.items()
    ]  # fmt: skip
    text = json.dumps({"model_name": "m", "outputs": described}).encode()
    exchange = Exchange()
    exchange.status, exchange.head = 200, b"http/1.1 200 ok\r\ninference-header-content-length: %d\r\n\r\n" % len(text)
    exchange.body = memoryview(text + b"".join(array.tobytes() for array in outputs.values()) + extra)
    return exchange


def grpc(outputs: dict[str, np.ndarray], *, raw: bool = True, request_id: str = "") -> Exchange:
    message = service_pb2.ModelInferResponse(model_name="m", id=request_id)
    for name, array in outputs.items():
        message.outputs.add(name=name, datatype=TYPES[array.dtype.kind], shape=array.shape)
        if raw:
            message.raw_output_contents.append(array.tobytes())
    exchange = Exchange()
    exchange.status, exchange.body = GRPC_STATUS, memoryview(message.SerializeToString())
    return exchange


GOOD = {"y": Y, "ids": IDS}
WRONG = [
    ({"y": Y[:, :6], "ids": IDS}, "output y is FP32 [3, 6] instead of FP32 [3, 8]"),
    ({"y": Y[:2], "ids": IDS[:2]}, "output y is FP32 [2, 8] instead of FP32 [3, 8]"),
    ({"y": Y.reshape(-1), "ids": IDS}, "output y is FP32 [24]"),
    ({"y": IDS, "ids": IDS}, "output y is INT64"),
    ({"y": Y}, "its outputs are ['y'] instead of ['ids', 'y']"),
    ({}, "its outputs are []"),
    ({"y": Y, "ids": IDS, "z": Y}, "its outputs are ['ids', 'y', 'z']"),
]


@pytest.mark.parametrize("make", [http, grpc])
def test_answers_are_held_to_the_metadata(make: Any) -> None:
    expected = ExpectedOutputs("http" if make is http else "grpc", SIGNATURE, 3)
    for _ in range(2):  # the second one is known
        assert expected.fault(make(GOOD)) is None
        for outputs, words in WRONG:
            assert words in (expected.fault(make(outputs)) or "")
    assert expected.fault(make(dict(reversed(GOOD.items())))) is None, "in any order"


def test_sizes_that_contradict_the_shape_are_found_though_the_description_is_right() -> None:
    expected = ExpectedOutputs("http", SIGNATURE, 3)
    assert expected.fault(http(GOOD)) is None
    assert "its outputs end 4 bytes before the body does" in (expected.fault(http(GOOD, extra=b"1234")) or "")
    cut = http(GOOD)
    cut.body = cut.body[:-8]
    assert "its outputs end 8 bytes after the body does" in (expected.fault(cut) or "")
    assert "bytes instead of 96" in (expected.fault(http(GOOD, said={"parameters": {"binary_data_size": 72}})) or "")
    assert "is not binary" in (expected.fault(http(GOOD, said={"parameters": {}})) or "")
    whole = grpc(GOOD)
    expected = ExpectedOutputs("grpc", SIGNATURE, 3)
    assert expected.fault(whole) is None
    message = service_pb2.ModelInferResponse.FromString(bytes(whole.body))
    message.raw_output_contents[0] = bytes(72)
    whole.body = memoryview(message.SerializeToString())
    assert "output y has 72 bytes instead of 96" in (expected.fault(whole) or "")
    message.raw_output_contents[1] = bytes(72)
    whole.body = memoryview(message.SerializeToString())
    assert "output y has 72 bytes instead of 96" in (expected.fault(whole) or ""), "the total is right"
    assert "0 elements, but its shape needs 24" in (expected.fault(grpc(GOOD, raw=False)) or "")
    assert expected.fault(grpc(GOOD, request_id="42")) is None


@pytest.mark.parametrize("body", [b"{}", b"", b"[]", b"[" * 100_000, b'{"outputs": 3}', b"\xff\xfe"])
def test_tiny_and_malformed_answers_are_failures(body: bytes) -> None:
    exchange = Exchange()
    exchange.body = memoryview(body)
    for transport in ("http", "grpc", "shm"):
        exchange.status = GRPC_STATUS if transport == "grpc" else 200
        fault = ExpectedOutputs(transport, SIGNATURE, 3).fault(exchange)
        assert fault is not None
        assert fault.startswith("the response does not match the model's metadata: ")
        assert len(fault) < 500


def test_free_dimensions_may_be_any() -> None:
    for make, transport in ((http, "http"), (grpc, "grpc")):
        expected = ExpectedOutputs(transport, FREE, 1)  # type: ignore[arg-type]
        for count in (0, 1, 7):
            assert expected.fault(make({"boxes": np.ones((1, count, 4), "<f4")})) is None
        assert "[1, 7, 3]" in (expected.fault(make({"boxes": np.ones((1, 7, 3), "<f4")})) or "")


def test_through_shared_memory_the_description_is_checked() -> None:
    expected = ExpectedOutputs("shm", SIGNATURE, 3)
    exchange = http(GOOD)
    length = int(exchange.header("inference-header-content-length") or 0)
    exchange.head, exchange.body = b"http/1.1 200 ok\r\n\r\n", exchange.body[:length]
    assert expected.fault(exchange) is None
    assert expected.fault(exchange) is None
    exchange.body = memoryview(bytes(exchange.body).replace(b"[3, 8]", b"[3, 6]"))
    assert "output y is FP32 [3, 6]" in (expected.fault(exchange) or "")
