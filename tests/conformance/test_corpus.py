"""The cases themselves: every number has one, and each sends what its title says."""

from __future__ import annotations

import io
import json
import socket

import pytest
from PIL import Image

from loadgen.client.endpoint import TensorSignature
from loadgen.conformance.cases import CASES, select
from loadgen.conformance.cases.http import gzip_of_blanks
from loadgen.conformance.cases.queueing import wait_for
from loadgen.conformance.model import ServedModel, claiming_jpeg, flat_jpeg, flat_png
from loadgen.conformance.records import SkippedError
from loadgen.conformance.servers import SMALL_BODIES, SMALL_QUEUES, is_loopback
from loadgen.conformance.wire import RawConnection, all_read, parse_response

FUZZ = 16
MODEL = ServedModel("m", (TensorSignature("x", "FP32", (-1, 3)),), (TensorSignature("y", "FP32", (-1, 3)),), 4)


def test_every_row_has_a_case_and_no_number_is_given_twice() -> None:
    assert {case.order[0] for case in CASES} == set(range(1, 35)) - {FUZZ}
    assert len({case.number for case in CASES}) == len(CASES)


def test_both_protocols_are_covered() -> None:
    grpc = {case.order[0] for case in CASES if case.protocol == "grpc"}
    assert {1, 3, 6, 7, 15, 17, 18, 19, 20, 21, 23, 24, 28, 29, 30, 31, 32, 33, 34} <= grpc


def test_every_case_expects_something() -> None:
    assert [case.number for case in CASES if not case.describe()] == []


def test_cases_are_chosen_by_number_and_letter() -> None:
    assert {case.number for case in select("5, 1a")} == {"1a", "5a", "5b", "5c", "5d"}
    assert select(None) == CASES
    with pytest.raises(ValueError, match="no case 99"):
        select("99")


@pytest.mark.parametrize(("components", "mode"), [(1, "L"), (3, "RGB"), (4, "CMYK")])
def test_pictures_are_what_they_claim(components: int, mode: str) -> None:
    with Image.open(io.BytesIO(flat_jpeg(100, 51, components))) as image:
        image.load()
        assert (image.size, image.mode) == ((100, 51), mode)
    with Image.open(io.BytesIO(flat_png(7, 5))) as image:
        image.load()
        assert image.size == (7, 5)


def test_the_lying_picture_is_small_and_claims_much() -> None:
    lying = claiming_jpeg(65_500, 65_500, 692)
    assert len(lying) == 692
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(lying))


def test_the_gzip_bomb_is_small() -> None:
    import gzip

    bomb = gzip_of_blanks(8)
    assert len(bomb) < 2**16
    assert gzip.decompress(bomb) == b" " * 8 * 2**20


def test_bodies_are_the_protocols() -> None:
    request = MODEL.request(2)
    request.document["id"] = "7"
    body = request.body()
    length = int(body.headers["Inference-Header-Content-Length"])
    document = json.loads(body.content[:length])
    assert document["id"] == "7"
    assert document["inputs"][0]["shape"] == [2, 3]
    assert document["inputs"][0]["parameters"]["binary_data_size"] == len(body.content) - length == 24
    assert MODEL.rows(100) == 4


def test_settings_become_options_or_a_reason() -> None:
    assert SMALL_QUEUES.options("triton") == {"queue-size": "2"}
    with pytest.raises(SkippedError, match="serve triton has no option for a small body limit"):
        SMALL_BODIES.options("triton")


@pytest.mark.parametrize(
    ("data", "ended", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", False, "200", b"hi"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n", False, "400", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n", False, "200", b"hi!"),
        (b"HTTP/1.1 500 No\r\n\r\nuntil the end", True, "500", b"until the end"),
    ],
)
def test_responses_are_read(data: bytes, ended: bool, status: str, body: bytes) -> None:
    response = parse_response(data, ended)
    assert response is not None
    assert (response.status, response.body) == (status, body)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi"])
def test_half_a_response_is_none(data: bytes) -> None:
    assert parse_response(data, False) is None


@pytest.mark.parametrize(
    ("url", "mine"),
    [("http://127.0.0.1:8000", True), ("http://[::1]:8000", True), ("localhost:1", True), ("http://192.0.2.1", False)],
)
def test_loopback(url: str, mine: bool) -> None:
    assert is_loopback(url) is mine


def test_what_a_server_has_not_read_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, RawConnection(*listener.getsockname()) as connection:
        assert all_read([connection])
        connection.send(b"x" * 1000)
        assert not all_read([connection])
        accepted, _ = listener.accept()
        with accepted:
            assert len(accepted.recv(2000)) == 1000
            assert wait_for(lambda: all_read([connection]), 5.0)
