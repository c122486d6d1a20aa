"""Servers that never end an answer, or say nothing for ever: both clients give up in time, and take little memory."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep

import pytest

from loadgen.client.connection import Address, ConnectionRefused, PreparedRequest
from loadgen.client.grpc import (
    CONTINUATION,
    DATA,
    HEADERS,
    PING,
    SETTINGS,
    WINDOW_UPDATE,
    GrpcConnection,
    frame_head,
    grpc_request,
)
from loadgen.client.http import HttpConnection, request_head

TIMEOUT_S = 0.5
PATIENT_S = 30.0
"""Where it is not the timeout that ends an answer."""
LATE_S = 3.0
"""Each of these took 4 to 19 times the timeout, or filled memory until it was over."""
MOST_BYTES = 2**20
DRIP_S = 0.4 * TIMEOUT_S

Script = Callable[[socket.socket], None]


@contextmanager
def serving(script: Script) -> Iterator[tuple[str, int]]:
    """A server of one connection; it ends when the client has closed it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(10)
            with connection:
                script(connection)
                while connection.recv(1 << 16):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()
    thread.join(60)
    assert not thread.is_alive()


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return frame_head(kind, flags, stream, len(content)) + content


def drip(connection: socket.socket, content: bytes) -> None:
    for byte in content:
        connection.sendall(bytes([byte]))
        sleep(DRIP_S)


def greeted(connection: socket.socket) -> None:
    """Up to the client's request, which ends in the word "question"."""
    connection.sendall(frame(SETTINGS, 0, 0))
    received = b""
    while not received.endswith(b"question"):
        received = received[-8:] + connection.recv(1 << 16)


def repeated(content: bytes) -> Script:
    def script(connection: socket.socket) -> None:
        greeted(connection)
        threading.Thread(target=drained, args=(connection,), daemon=True).start()
        while True:
            connection.sendall(content)

    return script


def drained(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass


def slow_greeting(connection: socket.socket) -> None:
    drip(connection, frame(SETTINGS, 0, 0, bytes(12)))


def slow_answer(connection: socket.socket) -> None:
    greeted(connection)
    drip(connection, frame(HEADERS, 4, 1, b"\x88") + frame(DATA, 0, 1, bytes(100)))


def slow_reader(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1)))
    connection.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**30)))
    for _ in range(8):
        connection.recv(2000)
        sleep(DRIP_S)
    raise ConnectionAbortedError  # the rest is not read: at this rate it would take minutes


def call(script: Script, message: bytes = b"question", timeout_s: float = TIMEOUT_S) -> tuple[str, float]:
    """What the gRPC client says, and after how long."""
    with serving(script) as (host, port):
        connection = GrpcConnection(f"{host}:{port}", timeout_s=timeout_s, most_bytes=MOST_BYTES)
        started = monotonic()
        try:
            failure = connection.send(grpc_request(message, len(message))).failure
        except ConnectionRefused as exc:
            failure = str(exc)
        finally:
            connection.close()
        assert failure is not None
        return failure, monotonic() - started


@pytest.mark.parametrize(
    ("script", "message", "failure"),
    [
        (slow_greeting, b"question", "does not speak gRPC"),
        (slow_answer, b"question", "gRPC DEADLINE_EXCEEDED"),
        (slow_reader, bytes(1 << 24), "gRPC DEADLINE_EXCEEDED"),
    ],
)
def test_a_slow_grpc_server_has_the_timeout_and_no_more(script: Script, message: bytes, failure: str) -> None:
    said, seconds = call(script, message)
    assert failure in said
    assert seconds < LATE_S


@pytest.mark.parametrize(
    ("content", "failure"),
    [
        (frame(DATA, 0, 1, bytes(16_000)), "larger than the limit of 1,048,576 bytes"),
        (frame(DATA, 0, 1, b"x") * 1000, "larger than the limit of 1,048,576 bytes"),
        (frame(DATA, 0, 1) * 1000, "that are not a response"),
        (frame(PING, 0, 0, bytes(8)) * 1000, "that are not a response"),
        (frame(SETTINGS, 0, 0) * 1000, "that are not a response"),
        (frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 1000, "that are not a response"),
        (frame(HEADERS, 4, 1, b"\x88") * 1000, "that are not a response"),
        (
            frame(HEADERS, 0, 1, b"\x88") + frame(CONTINUATION, 0, 1, bytes(9000)) * 9,
            "more than 65,536 bytes of headers",
        ),
    ],
    ids=["data", "small-data", "empty-data", "ping", "settings", "window", "headers", "continuation"],
)
def test_a_grpc_answer_without_end_is_cut(content: bytes, failure: str) -> None:
    assert failure in call(repeated(content), timeout_s=PATIENT_S)[0]


def test_a_flood_between_two_calls_ends_the_connection() -> None:
    """The client reads what a server has said meanwhile, but not for ever."""

    def script(connection: socket.socket) -> None:
        greeted(connection)
        connection.sendall(frame(HEADERS, 4, 1, b"\x88") + frame(HEADERS, 5, 1, b"\0\x0bgrpc-status\x013"))
        threading.Thread(target=drained, args=(connection,), daemon=True).start()
        while True:
            connection.sendall(frame(PING, 0, 0, bytes(8)) * 1000)

    with serving(script) as (host, port):
        connection = GrpcConnection(f"{host}:{port}", timeout_s=PATIENT_S)
        request = grpc_request(b"question", 8)
        assert connection.send(request).status == 1003
        started = monotonic()
        while connection._connection is not None and connection._connection.usable():
            assert monotonic() - started < PATIENT_S
        connection.close()


@pytest.mark.parametrize(
    ("settings", "failure"),
    [((4, 2**31), "a window that HTTP/2 does not allow"), ((5, 2**32 - 1), "a frame size that HTTP/2 does not allow")],
)
def test_impossible_settings_end_the_connection(settings: tuple[int, int], failure: str) -> None:
    said, _ = call(
        lambda connection: connection.sendall(frame(SETTINGS, 0, 0, struct.pack(">HI", *settings))), timeout_s=PATIENT_S
    )
    assert failure in said


@pytest.mark.parametrize("status", [b"\xff\xfe", b"9" * 5000, b"77777"])
def test_an_invalid_status_is_reported(status: bytes) -> None:
    length = (
        b"\x7f" + bytes([(len(status) - 127 & 0x7F) | 0x80, len(status) - 127 >> 7])
        if len(status) > 126
        else bytes([len(status)])
    )
    for name in (b"grpc-status", b":status"):

        def script(connection: socket.socket, name: bytes = name) -> None:
            greeted(connection)
            connection.sendall(frame(HEADERS, 5, 1, b"\0" + bytes([len(name)]) + name + length + status))

        assert call(script, timeout_s=PATIENT_S)[0].startswith("gRPC UNKNOWN: HTTP status")


def test_a_number_without_end_in_a_header_block() -> None:
    def script(connection: socket.socket) -> None:
        greeted(connection)
        connection.sendall(frame(HEADERS, 0, 1, b"\xff" * 16_000) + frame(CONTINUATION, 5, 1, b"\xff" * 16_000))

    assert "headers cannot be decoded" in call(script, timeout_s=PATIENT_S)[0]


def get(script: Script, timeout_s: float = TIMEOUT_S) -> tuple[str, float]:
    """What the HTTP client says, and after how long."""
    with serving(script) as (host, port):
        address = Address(host, port)
        connection = HttpConnection(address, timeout_s=timeout_s, most_bytes=MOST_BYTES)
        started = monotonic()
        failure = connection.send(PreparedRequest(request_head("GET", "/", address))).failure
        seconds = monotonic() - started
        connection.close()
        assert failure is not None
        return failure, seconds


def endless(head: bytes, content: bytes) -> Script:
    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(head)
        while True:
            connection.sendall(content)

    return script


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOO_LARGE = "larger than the limit of 1,048,576 bytes"


@pytest.mark.parametrize(
    ("head", "content", "failure"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 16), TOO_LARGE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1999999999\r\n\r\n", bytes(1 << 16), TOO_LARGE),
        (CHUNKED, b"4000\r\n" + bytes(0x4000) + b"\r\n", TOO_LARGE),
        (CHUNKED, b"1\r\nx\r\n" * 1000, TOO_LARGE),
        (CHUNKED + b"77777777\r\n", bytes(1 << 16), TOO_LARGE),
        (CHUNKED + b"1;", b"x" * 10_000, "more than 65536 bytes before a chunk"),
        (CHUNKED + b"0\r\n", b"a: b\r\n" * 1000, "more than 100 trailers"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000, "more than 65536 bytes of headers"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, "more than 100 interim responses"),
    ],
    ids=[
        "until-closed",
        "counted",
        "chunks",
        "small-chunks",
        "large-chunk",
        "chunk-line",
        "trailers",
        "headers",
        "interim",
    ],
)
def test_an_http_answer_without_end_is_cut(head: bytes, content: bytes, failure: str) -> None:
    assert failure in get(endless(head, content), PATIENT_S)[0]


@pytest.mark.parametrize(
    "head",
    [b"", CHUNKED, b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"],
    ids=["head", "chunk", "until-closed", "counted"],
)
def test_a_slow_http_server_has_the_timeout_and_no_more(head: bytes) -> None:
    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(head)
        drip(connection, b"0" * 100)

    said, seconds = get(script)
    assert said == "no complete response within 0.5 s"
    assert seconds < LATE_S


def test_an_impossible_content_length_fails_before_its_bytes_come() -> None:
    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1999999999\r\n\r\n")

    said, seconds = get(script, PATIENT_S)
    assert TOO_LARGE in said
    assert seconds < LATE_S


def test_memory_is_taken_as_bytes_arrive() -> None:
    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\nhello")

    with serving(script) as (host, port):
        address = Address(host, port)
        connection = HttpConnection(address, timeout_s=TIMEOUT_S)
        assert connection.send(PreparedRequest(request_head("GET", "/", address))).failure is not None
        assert len(connection._buffer) < 2**20
        connection.close()
