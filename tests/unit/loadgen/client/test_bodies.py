"""Bodies as NVIDIA's encoder makes them, and answers as its decoder reads them."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from loadgen.client.bodies import choose_items, for_server, prepare_body
from loadgen.client.connection import Address, Exchange, failure_message
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.http import HttpConnection
from loadgen.client.inputs import InputError, SampleInputs
from loadgen.client.outputs import AnswerError
from loadgen.client.transports import read_answer
from loadgen.records.run import body_count

SIGNATURE = Signature(
    "m",
    inputs=(TensorSignature("pixel_values", "FP32", (-1, 3, 4, 4)),),
    outputs=(TensorSignature("embedding", "FP32", (-1, 8)),),
)
PIXELS = np.random.default_rng(0).standard_normal((18, 3, 4, 4), dtype=np.float32)
INPUTS = SampleInputs({"pixel_values": PIXELS}, "photographs")
CONNECTION = HttpConnection(Address("127.0.0.1", 1))


def test_a_body_is_json_and_then_the_images_bytes() -> None:
    body = prepare_body(INPUTS, SIGNATURE, [3, 1])
    head = json.loads(body.body[: -body.payload_bytes])
    assert head["inputs"] == [
        {
            "name": "pixel_values",
            "shape": [2, 3, 4, 4],
            "datatype": "FP32",
            "parameters": {"binary_data_size": 2 * 48 * 4},
        }
    ]
    assert head["outputs"] == [{"name": "embedding", "parameters": {"binary_data": True}}]
    assert body.body[-body.payload_bytes :] == PIXELS[[3, 1]].tobytes()


def test_the_head_names_both_lengths_and_the_model() -> None:
    body = prepare_body(INPUTS, SIGNATURE, [0])
    request = for_server(body, Address("127.0.0.1", 8000), "m")
    assert request.head.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert f"Content-Length: {len(body.body)}\r\n".encode() in request.head
    assert f"Inference-Header-Content-Length: {len(body.body) - body.payload_bytes}\r\n".encode() in request.head
    assert request.body is body.body


@pytest.mark.parametrize("batch_size", [1, 4, 8, 16, 32])
def test_bodies_of_a_batch_size_differ_and_use_different_images(batch_size: int) -> None:
    chosen = choose_items(INPUTS, batch_size, seed=0)
    bodies = [prepare_body(INPUTS, SIGNATURE, items) for items in chosen]
    assert len(bodies) == body_count(batch_size) >= 4
    assert len({body.body for body in bodies}) >= min(len(bodies), 18)
    for items in chosen:
        assert len(set(items)) >= min(batch_size, 18) * 0.6, "a batch of few different images"
    used = Counter(item for items in chosen for item in items)
    assert max(used.values()) - min(used.values()) <= 2
    assert chosen == choose_items(INPUTS, batch_size, seed=0)


def test_missing_or_misfitting_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="has an input pixel_values; the samples have other"):
        prepare_body(SampleInputs({"other": PIXELS}, "photographs"), SIGNATURE, [0])
    with pytest.raises(InputError, match="do not fit"):
        prepare_body(SampleInputs({"pixel_values": PIXELS.astype(np.uint8)}, "photographs"), SIGNATURE, [0])


def answer(status: int, body: bytes, head: bytes = b"") -> Exchange:
    exchange = Exchange()
    exchange.status, exchange.body, exchange.head = status, memoryview(body), b"\r\n" + head + b"\r\n\r\n"
    return exchange


def test_a_binary_answer_is_parsed_into_arrays_of_its_own() -> None:
    embedding = np.arange(16, dtype=np.float32).reshape(2, 8)
    text = json.dumps(
        {
            "model_name": "m",
            "outputs": [
                {
                    "name": "embedding",
                    "datatype": "FP32",
                    "shape": [2, 8],
                    "parameters": {"binary_data_size": embedding.nbytes},
                }
            ],
        }
    ).encode()
    buffer = bytearray(text + embedding.tobytes())
    exchange = answer(200, b"", b"inference-header-content-length: %d" % len(text))
    exchange.body = memoryview(buffer)
    outputs = read_answer(CONNECTION, exchange)
    buffer[:] = bytes(len(buffer))
    np.testing.assert_array_equal(outputs["embedding"], embedding)


def test_a_failed_response_shows_the_servers_error() -> None:
    with pytest.raises(AnswerError, match=r"^HTTP 503: the queue is full$"):
        read_answer(CONNECTION, answer(503, b'{"error": "the  queue\\nis full"}'))
    assert failure_message(answer(502, b"<html>bad gateway")) == "HTTP 502: <html>bad gateway"
    assert (
        failure_message(answer(400, b'{"error": "\\u001b]0;title\\u0007\\u0000"}'))
        == "HTTP 400: \ufffd]0;title\ufffd\ufffd"
    )
    assert failure_message(answer(400, b'{"error": "\xe4"}')) == 'HTTP 400: {"error": "\ufffd"}'
    with pytest.raises(AnswerError, match="cannot be read"):
        read_answer(CONNECTION, answer(200, b"not json"))
