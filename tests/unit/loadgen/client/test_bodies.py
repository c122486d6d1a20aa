"""Bodies as NVIDIA's encoder makes them, and answers as its decoder reads them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadgen.client.bodies import choose_items, find_variation, for_server, prepare_body, raw_tensors
from loadgen.client.connection import Address, Exchange, PreparedRequest, failure_message
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.http import HttpConnection, request_head
from loadgen.client.inputs import (
    NUMPY_TYPES,
    SAMPLE_TYPES,
    InputError,
    SampleInputs,
    read_inputs,
    write_given,
    write_synthetic,
)
from loadgen.client.outputs import AnswerError
from loadgen.client.transports import prepare, read_answer
from loadgen.records.run import body_count
from loadgen.records.targets import Transport
from tests.hostile_server import hostile_server

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
    assert (
        failure_message(answer(400, b'{"error": "\\u001b]0;title\\u0007\\u0000"}'))
        == "HTTP 400: \ufffd]0;title\ufffd\ufffd"
    )
    assert failure_message(answer(400, b'{"error": "\xe4"}')) == 'HTTP 400: {"error": "\ufffd"}'
    with pytest.raises(AnswerError, match="cannot be read"):
        read_answer(CONNECTION, answer(200, b"not json"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no such model", "param": "model", "code": 404}}', "no such model"),
        (b'{"error": {"message": "Unknown argument", "param": "ignore_eos"}}', "ignore_eos: Unknown argument"),
        (b'{"object": "error", "message": "bad request", "type": "BadRequestError", "param": null}', "bad request"),
        (b'{"detail": "Not authenticated"}', "Not authenticated"),
        (
            b'{"detail": [{"loc": ["body", "cache_salt"], "msg": "Extra"}, {"loc": ["body", "n", 1], "msg": "?"}]}',
            "cache_salt: Extra; n.1: ?",
        ),
        (b'{"status": 400, "error": "Bad Request", "message": "field x"}', "Bad Request: field x"),
        (b'{"title": "Unauthorized", "detail": "no key", "errors": []}', "Unauthorized: no key"),
        (b'{"Message": "Missing Authentication Token"}', "Missing Authentication Token"),
        (b'[{"error": {"message": "API key not valid"}}]', "API key not valid"),
        (b'event: error\ndata: {"error": {"message": "in a stream"}}\n\n', "in a stream"),
        (b'{"code": 7}', '{"code": 7}'),
        (b"upstream connect error", "upstream connect error"),
        (b"x" * 1000, "x" * 299 + "\u2026"),
        (b"<!DOCTYPE html>\n<html><title>\nBad &amp; ugly</title>", "a web page with the title Bad & ugly"),
        (b"<html>bad gateway", "a web page"),
        (b"", "Bad Gateway"),
        (bytes(range(128, 256)), "128 bytes that are no text (without a content type)"),
    ],
)  # fmt: skip
def test_the_servers_own_words_are_found_in_any_form(body: bytes, words: str) -> None:
    assert failure_message(answer(502, body)) == f"HTTP 502: {words}"
    packed = answer(502, gzip.compress(body), b"content-encoding: gzip")
    assert failure_message(packed) == f"HTTP 502: {words}"


def test_a_body_in_an_unknown_coding_is_named() -> None:
    assert failure_message(answer(400, b"\x1b\x03", b"content-encoding: br")).startswith(
        "HTTP 400: a body in the coding br"
    )


def test_a_redirect_names_its_target_as_it_was_sent() -> None:
    with hostile_server() as server:
        server.answers["/v1/models"] = (307, {"location": "https://Other.example/API?Key=A"}, b"<html>moved")
        connection = HttpConnection(Address.parse(server.url))
        exchange = connection.send(PreparedRequest(request_head("GET", "/v1/models", connection.address)))
        assert failure_message(exchange) == "HTTP 307: redirects to https://Other.example/API?Key=A"
        connection.close()


@pytest.mark.parametrize("transport", ["http", "grpc", "shm"])
@pytest.mark.parametrize("datatype", [*SAMPLE_TYPES])
def test_an_empty_input_is_no_bytes_of_every_request(datatype: str, transport: Transport, tmp_path: Path) -> None:
    """Written by the user in each of the forms, beside an input that varies, and alone."""
    dtype = np.dtype("S1" if datatype == "BYTES" else SAMPLE_TYPES[datatype])
    for sizes in ((2, 0), (0, 2), (0,)):
        x = TensorSignature("x", datatype, (-1, *sizes))
        y = TensorSignature("y", "FP32", (-1, 4))
        np.savez(tmp_path / "x.npz", x=np.empty((3, *sizes), dtype), y=np.ones((3, 4), "f4"))
        item = {"x": {"content": [], "shape": list(sizes)}, "y": [1, 2, 3, 4]}
        (tmp_path / "x.json").write_text(json.dumps({"data": [item] * 3}))
        for name in ("x.npz", "x.json"):
            signature = Signature("m", (x, y), (y,))
            write_given(tmp_path / name, signature, tmp_path / "out", "tensors")
            given = read_inputs(tmp_path / "out", "tensors")
            variation = find_variation(given, signature)
            assert variation is not None
            assert variation.name == "y"
            request = prepare(transport, given, signature, (0, 1), variation)
            assert request.payload_bytes == 2 * 4 * 4
            (raw, _) = raw_tensors(given, signature, (0, 1))
            assert (raw.shape, raw.data) == ((2, *sizes), b"")
            alone = SampleInputs({"x": given.arrays["x"]}, "given")
            assert find_variation(alone, Signature("m", (x,), (y,))) is None
            assert prepare(transport, alone, Signature("m", (x,), (y,)), (0, 1)).payload_bytes == 0
            assert alone.describe()["count"] == 3


@pytest.mark.parametrize("datatype", [*NUMPY_TYPES])
def test_values_for_an_empty_input_are_generated(datatype: str, tmp_path: Path) -> None:
    tensor = TensorSignature("x", datatype, (-1, 2, 0))
    write_synthetic(Signature("m", (tensor,), (tensor,)), tmp_path, "tensors", 0)
    assert read_inputs(tmp_path, "tensors").take("x", (0, 1)).shape == (2, 2, 0)


@pytest.mark.parametrize("coding", ["gzip", "br"])
def test_a_compressed_answer_is_named_as_that(coding: str) -> None:
    """Not as malformed JSON: no request asks for compression, but a proxy may compress all the same."""
    with pytest.raises(AnswerError, match=rf"it is compressed \({coding}\), which was not asked for; turn compression"):
        read_answer(CONNECTION, answer(200, gzip.compress(b"{}"), f"content-encoding: {coding}".encode()))
