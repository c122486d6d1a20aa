"""Routes, verbs, headers and bodies as a plain HTTP client sees them."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

MODEL = "/v2/models/openclip_vit_b32"
PIXELS = np.arange(3 * 224 * 224, dtype="<f4")


def binary_body(rows: int = 1) -> tuple[bytes, int]:
    tensor = {
        "name": "pixel_values",
        "datatype": "FP32",
        "shape": [rows, 3, 224, 224],
        "parameters": {"binary_data_size": PIXELS.nbytes * rows},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + PIXELS.tobytes() * rows, len(header)


def check_answer(status: int, headers: dict[str, str], body: bytes) -> None:
    assert status == 200
    length = int(headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(body[length:], "<f4"), PIXELS[:512])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v2/models/nope", 404),
        ("GET", "/v2/models/nope/ready", 404),
        ("GET", "/v2/models/nope/stats", 404),
        ("GET", "/v2/models/nope/config", 404),
        ("GET", f"{MODEL}/versions/9", 404),
        ("GET", f"{MODEL}/versions/9/ready", 404),
        ("POST", f"{MODEL}/versions/9/infer", 404),
        ("POST", "/v2/models/nope/infer", 404),
        ("GET", f"{MODEL}/infer", 405),
        ("POST", "/v2", 405),
        ("DELETE", "/v2/health/ready", 405),
        ("POST", f"{MODEL}/infer", 400),
        ("POST", "/v2/repository/index", 200),
        ("GET", "/v2", 200),
        ("GET", MODEL, 200),
        ("GET", f"{MODEL}/versions/1", 200),
        ("GET", f"{MODEL}/versions/1/config", 200),
        ("GET", f"{MODEL}/versions/1/stats", 200),
        ("GET", f"{MODEL}/ready", 200),
        ("GET", "/v2/models/stats", 200),
    ],
)
def test_status_and_error_body(null_server, method, path, status):
    answer = null_server.request(method, path)
    assert answer.status == status
    if status >= 400:
        error = json.loads(answer.body)
        assert list(error) == ["error"]
        assert error["error"]
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("value", ["abc", "-1", "99999999999", "999999999999999999999999"])
def test_a_bad_header_length_is_named(null_server, value):
    body, _ = binary_body()
    answer = null_server.request("POST", f"{MODEL}/infer", body, {"Inference-Header-Content-Length": value})
    assert answer.status == 400
    assert "Inference-Header-Content-Length" in json.loads(answer.body)["error"]


def test_a_raw_body_and_a_chunked_body_are_answered_like_any_other(null_server):
    raw = null_server.request("POST", f"{MODEL}/infer", PIXELS.tobytes(), {"Inference-Header-Content-Length": "0"})
    check_answer(raw.status, raw.headers, raw.body)
    body, length = binary_body()
    chunks = (body[start : start + 50_000] for start in range(0, len(body), 50_000))
    chunked = null_server.request("POST", f"{MODEL}/infer", chunks, {"Inference-Header-Content-Length": str(length)})
    check_answer(chunked.status, chunked.headers, chunked.body)


def test_gzip_is_neither_needed_nor_sent(null_server):
    body, length = binary_body()
    headers = {"Inference-Header-Content-Length": str(length)}
    for accepted in ("identity", "gzip"):
        answer = null_server.request("POST", f"{MODEL}/infer", body, {**headers, "Accept-Encoding": accepted})
        assert "content-encoding" not in answer.headers
        check_answer(answer.status, answer.headers, answer.body)
    packed = null_server.request(
        "POST", f"{MODEL}/infer", gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"}
    )
    check_answer(packed.status, packed.headers, packed.body)
    broken = null_server.request("POST", f"{MODEL}/infer", b"nothing", {**headers, "Content-Encoding": "gzip"})
    assert broken.status == 400


def test_bodies_above_the_limit_get_413_whichever_way_they_come(native):
    body, length = binary_body()
    server = native("--max-body-bytes", str(len(body)))
    server.wait_ready()
    headers = {"Inference-Header-Content-Length": str(length)}
    assert server.request("POST", f"{MODEL}/infer", body, headers).status == 200
    longer = body + b"x"
    chunks = (longer[start : start + 50_000] for start in range(0, len(longer), 50_000))
    bomb = {**headers, "Content-Encoding": "gzip"}
    for sent, sent_headers in ((longer, headers), (chunks, headers), (gzip.compress(bytes(2**24)), bomb)):
        answer = server.request("POST", f"{MODEL}/infer", sent, sent_headers)
        assert answer.status == 413
        assert str(len(body)) in json.loads(answer.body)["error"]
    assert server.request("POST", f"{MODEL}/infer", body, headers).status == 200


def test_every_cut_of_a_pipelined_stream_gives_the_same_answers(null_server):
    """Two inference requests and a GET in one stream, cut at places where the receive buffers change hands."""
    body, length = binary_body()
    head = (
        f"POST {MODEL}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {length}\r\n\r\n"
    ).encode()
    stream = (head + body) * 2 + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    size = len(head) + len(body)
    for cuts in (
        [],
        [10],
        [len(head)],
        [len(head) + 1, size - 1],
        [size],
        [size + 5, size + len(head) + 7],
        [16384, 16385],
    ):
        with socket.create_connection(("127.0.0.1", null_server.port), timeout=60) as connection:
            start = 0
            for cut in [*cuts, len(stream)]:
                connection.sendall(stream[start:cut])
                start = cut
            received = b""
            while part := connection.recv(65536):
                received += part
        assert received.count(b"HTTP/1.1 200 OK") == 3, cuts
        assert received.count(PIXELS[:512].tobytes()) == 2, cuts


def test_small_pipelined_requests_in_one_read_are_answered_in_order(null_server):
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    stream = b""
    for name in ("pixel_values", "wrong", "pixel_values"):
        body = json.dumps({"inputs": [{**tensor, "name": name}]}).encode()
        stream += f"POST {MODEL}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    stream += b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for step in (len(stream), 7):
        with socket.create_connection(("127.0.0.1", null_server.port), timeout=60) as connection:
            for start in range(0, len(stream), step):
                connection.sendall(stream[start : start + step])
            received = b""
            while part := connection.recv(65536):
                received += part
        answers = received.split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"400", b"400", b"400", b"200"]
        expected = (b"unexpected shape", b"unexpected inference input 'wrong'", b"unexpected shape", b"abserve-native")
        for answer, text in zip(answers, expected, strict=True):
            assert text in answer


def test_a_client_that_expects_100_continue_gets_it(null_server):
    body, length = binary_body()
    with socket.create_connection(("127.0.0.1", null_server.port), timeout=60) as connection:
        connection.sendall(
            f"POST {MODEL}/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {length}\r\n\r\n".encode()
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 200 OK")


def test_metrics_tell_what_happened(null_server):
    body, length = binary_body(2)
    for _ in range(3):
        null_server.request("POST", f"{MODEL}/infer", body, {"Inference-Header-Content-Length": str(length)})
    null_server.request("POST", f"{MODEL}/infer", b"{")
    answer = null_server.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            key = sample.labels.get("reason") or sample.labels.get("le") or sample.labels.get("stage") or ""
            samples[f"{sample.name}{key}"] = sample.value
    assert samples["abserve_native_requests_success_total"] >= 3
    assert samples["abserve_native_requests_failure_totalinvalid_request"] >= 1
    assert samples["abserve_native_items_total"] >= 6
    assert samples["abserve_native_ready"] == 1
    assert samples["abserve_native_pending_requests"] == 0
    assert (
        samples["abserve_native_request_duration_seconds_bucket+Inf"]
        == samples["abserve_native_requests_success_total"]
    )
    assert samples["abserve_native_request_duration_seconds_count"] == samples["abserve_native_requests_success_total"]
    assert samples["abserve_native_executed_batch_size_sum"] == samples["abserve_native_items_total"]
    assert 0 < samples["abserve_native_stage_seconds_totalreceive"] < 60


def test_gpu_info_is_complete_without_a_gpu(null_server):
    document = json.loads(null_server.request("GET", "/gpu-info").body)
    assert set(document) == {"schema", "timestamp", "status", "message", "nvml", "host", "devices", "runtime"}
    assert document["message"]
    assert document["runtime"]["kind"] == "null"
    assert document["runtime"]["placement"]["result"] == "cpu"
    if document["status"] != "ok":
        assert document["devices"] == []


def test_more_clients_can_connect_than_the_usual_limit_of_descriptors_allows(native):
    server = native(ulimit="-S -n 128")
    server.wait_ready()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            stack.callback(connection.close)
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().read() == b""
