"""The raw HTTP client against servers that say exactly what a test wants, byte for byte."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.client.connection import Address, ConnectionRefused, PreparedRequest
from loadgen.client.http import HttpConnection, request_head

Handler = Callable[[socket.socket], None]
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nInference-Header-Content-Length: 3\r\n\r\nhello"


def read_request(connection: socket.socket) -> bytes:
    """One request, to the last byte of its body; empty when the client has closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(1 << 20)
    return head + b"\r\n\r\n" + body


@contextmanager
def serving(*handlers: Handler) -> Iterator[Address]:
    """Each handler gets one accepted connection, in order."""
    listener = socket.create_server(("127.0.0.1", 0))
    failures: list[BaseException] = []

    def accept() -> None:
        for handler in handlers:
            connection, _ = listener.accept()
            with connection:
                try:
                    handler(connection)
                except Exception as exc:  # noqa: BLE001 (re-raised in the test's thread)
                    failures.append(exc)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield Address("127.0.0.1", listener.getsockname()[1])
        thread.join(60)
        assert not thread.is_alive(), "the server still waits for a connection or a request"
    finally:
        listener.close()
    assert not failures, failures


def answering(*answers: bytes) -> Handler:
    """One request is read before each answer is sent."""

    def handle(connection: socket.socket) -> None:
        for answer in answers:
            assert read_request(connection)
            connection.sendall(answer)

    return handle


def get(address: Address) -> PreparedRequest:
    return PreparedRequest(request_head("GET", "/v2", address))


def test_a_counted_answer_is_read_without_joining_head_and_body() -> None:
    with serving(answering(GOOD)) as address:
        connection = HttpConnection(address)
        exchange = connection.send(get(address))
        assert (exchange.status, bytes(exchange.body), exchange.failure) == (200, b"hello", None)
        assert exchange.header("inference-header-content-length") == "3"
        assert exchange.response_bytes == len(GOOD)
        assert exchange.send_ns <= exchange.first_byte_ns <= exchange.end_ns
        connection.close()


def test_the_content_length_of_the_inference_header_is_not_taken_for_the_bodys() -> None:
    answer = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 3\r\nContent-Length: 5\r\n\r\nhello"
    with serving(answering(answer)) as address:
        connection = HttpConnection(address, timeout_s=2)
        assert bytes(connection.send(get(address)).body) == b"hello"
        connection.close()


def test_a_large_body_arrives_as_it_was_sent() -> None:
    received: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        received.append(read_request(connection))
        connection.sendall(GOOD)

    body = bytes(range(256)) * 80_000
    with serving(handle) as address:
        connection = HttpConnection(address)
        head = request_head("POST", "/x", address, content_length=len(body))
        assert connection.send(PreparedRequest(head, body)).status == 200
        connection.close()
    assert received == [head + body]
    assert b"Accept-Encoding: identity" in head


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=200_000), st.lists(st.integers(1, 70_000), min_size=1, max_size=4), st.booleans())
def test_any_split_and_either_framing_give_the_same_body(body: bytes, cuts: list[int], chunked: bool) -> None:
    if chunked:
        pieces = [body[i : i + cuts[0]] for i in range(0, len(body), cuts[0])]
        framed = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: x\r\n\r\n"
        answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed
    else:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def handle(connection: socket.socket) -> None:
        assert read_request(connection)
        rest = answer
        for cut in cuts:
            connection.sendall(rest[:cut])
            rest = rest[cut:]
        connection.sendall(rest)
        assert read_request(connection)
        connection.sendall(GOOD)

    with serving(handle) as address:
        connection = HttpConnection(address, timeout_s=5)
        exchange = connection.send(get(address))
        assert (exchange.failure, bytes(exchange.body), exchange.response_bytes) == (None, body, len(answer))
        assert bytes(connection.send(get(address)).body) == b"hello"
        connection.close()


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000)) as address:
        assert len(HttpConnection(address).send(get(address)).body) == 100_000


def test_interim_answers_are_skipped() -> None:
    with serving(answering(b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD)) as address:
        connection = HttpConnection(address)
        exchange = connection.send(get(address))
        assert (exchange.status, bytes(exchange.body)) == (200, b"hello")
        connection.close()


def test_a_connection_closed_while_idle_is_made_again_before_sending() -> None:
    closed = threading.Event()

    def close_after_one(connection: socket.socket) -> None:
        answering(GOOD)(connection)
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    with serving(close_after_one, answering(GOOD)) as address:
        connection = HttpConnection(address)
        assert connection.send(get(address)).status == 200
        assert closed.wait(60)
        assert connection.send(get(address)).status == 200
        assert connection.reconnects == 1
        connection.close()


def test_a_connection_that_ends_with_its_answer_is_counted_when_it_is_made_again() -> None:
    closing = answering(GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    with serving(closing, closing, answering(GOOD)) as address:
        connection = HttpConnection(address)
        for expected in (0, 1, 2):
            assert connection.send(get(address)).status == 200
            assert connection.reconnects == expected
        connection.close()


def test_a_request_that_got_no_answer_is_not_sent_again() -> None:
    requests: list[bytes] = []

    def drop(connection: socket.socket) -> None:
        requests.append(read_request(connection))

    with serving(drop) as address:
        exchange = HttpConnection(address).send(get(address))
    assert exchange.failure == "connection closed by the server without a response"
    assert (exchange.status, exchange.first_byte_ns, len(requests)) == (0, 0, 1)
    assert exchange.end_ns >= exchange.send_ns


def test_an_answer_cut_in_the_middle_is_a_failure() -> None:
    with serving(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")) as address:
        exchange = HttpConnection(address).send(get(address))
    assert (exchange.status, exchange.failure) == (0, "connection closed by the server in the middle of a response")
    assert exchange.first_byte_ns > 0


def test_a_reset_is_a_failure() -> None:
    def reset(connection: socket.socket) -> None:
        read_request(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with serving(reset) as address:
        assert HttpConnection(address).send(get(address)).failure == "connection reset by the server"


def test_an_early_answer_to_a_body_that_was_not_read_is_used() -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass

    body = bytes(30_000_000)
    with serving(refuse) as address:
        connection = HttpConnection(address)
        request = PreparedRequest(request_head("POST", "/x", address, content_length=len(body)), body)
        assert connection.send(request).status == 413


def test_a_silent_server_is_a_timeout() -> None:
    done = threading.Event()

    def silence(connection: socket.socket) -> None:
        read_request(connection)
        done.wait(10)

    with serving(silence) as address:
        exchange = HttpConnection(address, timeout_s=0.2).send(get(address))
        done.set()
    assert (exchange.status, exchange.failure) == (0, "no complete response within 0.2 s")


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999999\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_are_a_malformed_response(answer: bytes) -> None:
    def handle(connection: socket.socket) -> None:
        read_request(connection)
        with suppress(ConnectionError):  # the client gives up in the middle, as it should
            connection.sendall(answer)

    with serving(handle) as address:
        exchange = HttpConnection(address, timeout_s=5).send(get(address))
    assert exchange.failure is not None
    assert exchange.failure.startswith("malformed response")
    assert exchange.status == 0


def test_a_closed_port_is_refused_before_anything_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ConnectionRefused, match="Connection refused"):
        HttpConnection(address).send(get(address))


OTHER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nInference-Header-Content-Length: 2\r\n\r\nworld"
SHORT = b"HTTP/1.1 204 No Content\r\n\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nlate"


def test_a_response_like_the_one_before_is_still_read_as_what_it_is() -> None:
    """The client remembers a response's head, and its buffer still holds the bytes of the response before."""
    answers = [GOOD, GOOD, OTHER, SHORT, GOOD, BUSY, BUSY, GOOD.replace(b"hello", b"again")]

    def answer(connection: socket.socket) -> None:
        for number, content in enumerate(answers):
            read_request(connection)
            place = (7, 60, len(content))[number % 3]  # in the middle of the status line, of the head, or whole
            connection.sendall(content[:place])
            threading.Event().wait(0.01)
            connection.sendall(content[place:])

    with serving(answer) as address:
        connection = HttpConnection(address)
        outcomes = []
        for _ in answers:
            exchange = connection.send(PreparedRequest(request_head("GET", "/", address)))
            length = exchange.header("inference-header-content-length")
            outcomes.append((exchange.status, bytes(exchange.body), length, exchange.response_bytes, exchange.failure))
        connection.close()
    hello, late = (200, b"hello", "3", len(GOOD), None), (503, b"late", None, len(BUSY), None)
    assert outcomes == [
        hello, hello, (200, b"world", "2", len(OTHER), None), (204, b"", None, len(SHORT), None), hello, late, late,
        (200, b"again", "3", len(GOOD), None),
    ]  # fmt: skip
