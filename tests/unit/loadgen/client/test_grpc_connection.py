"""The gRPC client against a server of this process whose answers are scripted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from loadgen.client.connection import Address, AddressError, ConnectionRefused
from loadgen.client.grpc import SERVICE, GrpcConnection, grpc_request, parse_grpc_address

REQUEST = grpc_request(b"question", 5)


class Scripted(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Answers ModelInfer by a function that a test may replace; everything else with nothing."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.infer: Callable[[bytes, Any], bytes] = lambda message, _context: message + b"!"

    def service(self, details: Any) -> Any:
        if details.method == SERVICE + "ModelInfer":
            return grpc.unary_unary_rpc_method_handler(self._infer)
        return grpc.unary_unary_rpc_method_handler(lambda _message, _context: b"")

    def _infer(self, message: bytes, context: Any) -> bytes:
        self.seen.append(message)
        return self.infer(message, context)


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str, Any]]:
    handler = Scripted()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield handler, f"127.0.0.1:{port}", server
        server.stop(0).wait()


def test_bytes_are_sent_and_received_unchanged(scripted: tuple[Scripted, str, Any]) -> None:
    handler, address, _ = scripted
    connection = GrpcConnection(address, timeout_s=10)
    try:
        exchange = connection.send(REQUEST)
        assert bytes(exchange.body) == b"question!"
        assert handler.seen == [b"question"]
        assert (exchange.good, exchange.status, exchange.failure) == (True, 1000, None)
        assert (exchange.request_bytes, exchange.response_bytes) == (8 + 5, 9 + 5)
        assert exchange.send_ns < exchange.first_byte_ns <= exchange.end_ns
    finally:
        connection.close()


def test_an_error_is_reported_and_the_next_request_is_good(scripted: tuple[Scripted, str, Any]) -> None:
    handler, address, _ = scripted

    def refuse(message: bytes, context: Any) -> bytes:
        handler.infer = lambda _message, _context: b"fine"
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too\nlarge")
        raise AssertionError

    handler.infer = refuse
    connection = GrpcConnection(address, timeout_s=10)
    try:
        exchange = connection.send(REQUEST)
        assert (exchange.good, exchange.status) == (False, 1008)
        assert exchange.failure == "gRPC RESOURCE_EXHAUSTED: too large"
        assert (exchange.first_byte_ns, exchange.response_bytes, bytes(exchange.body)) == (0, 0, b"")
        exchange = connection.send(REQUEST)
        assert (exchange.good, exchange.failure, bytes(exchange.body)) == (True, None, b"fine")
    finally:
        connection.close()


def test_no_answer_in_time_is_a_deadline(scripted: tuple[Scripted, str, Any]) -> None:
    handler, address, _ = scripted

    def wait_for_the_end(message: bytes, context: Any) -> bytes:
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(60)
        return b""

    connection = GrpcConnection(address, timeout_s=0.5)
    try:
        handler.infer = wait_for_the_end
        exchange = connection.send(REQUEST)
        assert exchange.status == 1004
        assert exchange.end_ns - exchange.send_ns > 0.4e9
    finally:
        connection.close()


def test_a_server_that_sheds_load_is_asked_again_and_one_that_is_gone_is_not(
    scripted: tuple[Scripted, str, Any],
) -> None:
    handler, address, server = scripted

    def shed(message: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, "the queue is full")
        raise AssertionError

    handler.infer = shed
    connection = GrpcConnection(address, timeout_s=10)
    try:
        for _ in range(3):
            assert connection.send(REQUEST).status == 1014
        assert len(handler.seen) == 3, "every request once"
        server.stop(0).wait()
        with pytest.raises(ConnectionRefused, match="refused"):
            connection.send(REQUEST)
    finally:
        connection.close()


def test_refused_and_silent_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        silent = GrpcConnection(f"127.0.0.1:{port}", timeout_s=0.3)
        with pytest.raises(ConnectionRefused, match="does not speak gRPC"):
            silent.connect()
        silent.close()
    gone = GrpcConnection(f"127.0.0.1:{port}", timeout_s=1)
    with pytest.raises(ConnectionRefused, match="refused"):
        gone.send(REQUEST)
    gone.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "http://127.0.0.1:8001",
        ":8001",
        "host:port",
        "h" * 200 + ":1",
        "host:65536",
        "host:0",
        "host:²",
        "a..b:1",
    ],
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(AddressError, match="no gRPC address"):
        parse_grpc_address(text)


def test_good_addresses() -> None:
    assert parse_grpc_address("box:8001") == Address("box", 8001)
    assert parse_grpc_address("[::1]:8001") == Address("::1", 8001)
    assert parse_grpc_address("grpc://box:8001/a/b/") == Address("box", 8001, "/a/b")
    assert parse_grpc_address("grpcs://[::1]:443").url == "https://[::1]:443"
