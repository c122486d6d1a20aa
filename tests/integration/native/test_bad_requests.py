"""What hostile clients send, byte by byte over raw sockets: an answer of the protocol for each, nobody is harmed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.native.raw_client import (
    LIVE,
    MIB,
    PIXELS,
    check_well,
    connected,
    head,
    is_closed,
    read_answer,
    send_all,
)


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (head("Content-Length: 2", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n", {400}),
        (head("Content-Length: abc"), {400}),
        (head("Content-Length: 18446744073709551616"), {400}),
        (head("Content-Length: 1099511627776") + b"{", {413}),
        (head("Transfer-Encoding: chunked") + b"zz\r\n", {400}),
        (head("Transfer-Encoding: chunked") + b"1\r\n \r\n" * 65_537 + b"0\r\n\r\n", {400}),
        (head("Transfer-Encoding: chunked") + b"fffffffff\r\n", {413}),
        (head("X: " + "a" * 8 * MIB), {431}),
        (head(*(f"X-{index}: a" for index in range(20_000))), {431}),
        (head("bad header line"), {400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),
        (b"GET /v2 HTTP/9.9\r\nHost: x\r\n\r\n", {400, 505}),
        (b"GET /v2/health/live HTTP/1.1\nHost: x\n\n\r\n\r\n", {400}),
        (head("Content-Encoding: br", "Content-Length: 2") + b"{}", {400}),
        (head("Content-Length: 100000", path="/v2/repository/index"), {413}),
        (head(method="GET"), {405}),
        (head("Content-Length: 2", method="PUT") + b"{}", {405}),
        (head(path="/no/such", method="GET"), {404}),
        (head(path="/v2/", method="GET"), {404}),
        (head("Content-Length: 2", path="/v2/models/no/infer") + b"{}", {404}),
        (head("Expect: 100-continue", "Content-Length: 9", path="/v2/models/no/infer"), {404}),
        (head("Content-Length: 0"), {400}),
        (head(), {400}),
    ],
    ids=range(23),
)
def test_each_is_refused_in_json_and_nobody_is_harmed(null_server, data, statuses) -> None:
    with connected(null_server) as connection:
        send_all(connection, data)
        status, headers, body = read_answer(connection)
        assert status in statuses
        assert headers["content-type"] == "application/json"
        assert list(json.loads(body)) == ["error"]
        if headers.get("connection") == "close":
            assert is_closed(connection)
        else:
            connection.sendall(LIVE)
            assert read_answer(connection)[0] == 200
    check_well(null_server)


def test_an_answer_to_head_has_no_body(null_server) -> None:
    with connected(null_server) as connection:
        connection.sendall(head(method="HEAD", path="/no/such") + LIVE)
        received = b""
        while received.count(b"\r\n\r\n") < 2:
            received += connection.recv(65536)
    first, second, rest = received.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 404")
    assert second.startswith(b"HTTP/1.1 200")
    assert rest == b""


@pytest.mark.parametrize("request_id", ["i" * MIB, "a\r\nX-Forged: 1\r\n\r\nFORGED", "\u2028\x1b[2J"])
def test_an_id_forges_neither_a_header_nor_a_log_line(null_server, request_id) -> None:
    tensor: dict[str, Any] = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224]}
    tensor["parameters"] = {"binary_data_size": PIXELS.nbytes}
    document = {"id": request_id, "inputs": [tensor], "parameters": {"binary_data_output": True}}
    header = json.dumps(document).encode()
    lines = (f"Content-Length: {len(header) + PIXELS.nbytes}", f"Inference-Header-Content-Length: {len(header)}")
    for _ in range(2):  # decoded, then by its plan
        with connected(null_server) as connection:
            send_all(connection, head(*lines) + header + PIXELS.tobytes())
            status, headers, body = read_answer(connection)
        assert "x-forged" not in headers
        if status == 200:
            assert json.loads(body[: int(headers["inference-header-content-length"])])["id"] == request_id
        else:
            assert status == 400
    log = (null_server.folder / f"log-{null_server.port}").read_text()
    assert not any(line.startswith(("FORGED", "X-Forged")) for line in log.splitlines())
