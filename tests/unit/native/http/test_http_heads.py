"""Heads of requests: what is read from them, what is refused, and that two readings never differ."""

from __future__ import annotations

from typing import Any

import pytest

from servers.native.http.parser import HeadReader, infer_target
from servers.native.shared.errors import HttpError
from servers.native.shared.settings import NativeSettings

INFER = "/v2/models/m/infer"


def reader(**changes: Any) -> HeadReader:
    return HeadReader(NativeSettings(**changes))


def raw(*lines: str, start: str = f"POST {INFER} HTTP/1.1") -> bytes:
    return "\r\n".join([start, "Host: x", *lines, "", ""]).encode("latin-1")


def test_what_matters_is_read() -> None:
    head = reader().read(
        raw(
            "Content-Length: 12", "Inference-Header-Content-Length: 7", "Content-Encoding: GZip", "Expect: 100-Continue"
        )
    )
    assert (head.method, head.path, head.length, head.json_bytes) == (b"POST", INFER, 12, 7)
    assert (head.encoding, head.expects_continue, head.keep_alive, head.chunked) == ("gzip", True, True, False)
    assert head.target == ("m", None)
    assert head.infers


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [((), True), (("Connection: close",), False), (("Connection: keep-alive",), True)],
)
def test_keep_alive(lines: tuple[str, ...], keep_alive: bool) -> None:
    assert reader().read(raw(*lines)).keep_alive is keep_alive


def test_http_1_0_closes_unless_asked() -> None:
    assert not reader().read(raw(start="GET /v2 HTTP/1.0")).keep_alive
    assert reader().read(raw("Connection: keep-alive", start="GET /v2 HTTP/1.0")).keep_alive


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: abc",),
        ("Content-Length: -5",),
        ("Content-Length: +5",),
        ("Content-Length: 1e3",),
        ("Content-Length: 18446744073709551616",),
        ("Content-Length: 9999999999999999999",),
        ("Content-Length: 2", "Content-Length: 3"),
        ("Content-Length: 2, 3",),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 2"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding : chunked",),
        ("X: a\nTransfer-Encoding: chunked",),
        ("X: a\x00b",),
        (" folded: value",),
        ("no colon",),
        ("Inference-Header-Content-Length: 3", "Inference-Header-Content-Length: 4"),
    ],
)
def test_framing_that_two_servers_could_read_differently_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(HttpError) as caught:
        reader().read(raw(*lines))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("start", "status"),
    [
        ("GET", 400),
        ("GET /v2", 400),
        ("GET /v2 HTTP/9.9", 400),
        ("PRI * HTTP/2.0", 400),
        ("\x16\x03\x01", 400),
        ("NOVERB /v2 HTTP/1.1", 400),
        ("GET /v\xff HTTP/1.1", 400),
    ],
)
def test_what_is_no_request_line_is_refused(start: str, status: int) -> None:
    with pytest.raises(HttpError) as caught:
        reader().read(raw(start=start))
    assert caught.value.status in (status, 505)


def test_limits_are_the_settings() -> None:
    small = reader(max_header_bytes=1024, max_headers=10)
    assert small.read(raw(*(f"H{index}: a" for index in range(9)))).headers
    for head in (raw(*(f"H{index}: a" for index in range(10))), raw("Long: " + "a" * 1024)):
        with pytest.raises(HttpError) as caught:
            small.read(head)
        assert caught.value.status == 431
    with pytest.raises(HttpError):
        small.check_size(1025)


def test_the_same_bytes_are_parsed_once_and_others_do_not_collect() -> None:
    heads = reader()
    assert heads.read(raw()) is heads.read(raw())
    for index in range(2000):
        heads.read(raw(f"X: {index}"))
    assert len(heads._kept) <= 256
    long = raw("Long: " + "a" * 8000)
    assert heads.read(long) is not heads.read(long)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v2/models/m/infer", ("m", None)),
        ("/v2/models/m/versions/3/infer", ("m", "3")),
        ("/v2/models/m/infer/", None),
        ("/v2/models/infer", None),
        ("//v2/models/m/infer", None),
    ],
)
def test_inference_routes(path: str, target: tuple[str, str | None] | None) -> None:
    assert infer_target(path) == target
