"""HTTP/2 of the gRPC client against a server that is scripted frame by frame, and against the gRPC library."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from typing import Any

import grpc
import pytest

from loadgen.client.connection import ConnectionRefused
from loadgen.client.grpc import GrpcConnection, frame_head, grpc_request

PREFACE = 24
OK_HEAD, OK_TRAILER = b"\x88", b"\0\x0bgrpc-status\x010"


class Peer:
    """One accepted connection of the scripted server."""

    def __init__(self, connection: socket.socket) -> None:
        self.stream = connection.makefile("rb")
        self.connection = connection
        assert self.stream.read(PREFACE).startswith(b"PRI * HTTP/2.0")

    def frame(self) -> tuple[int, int, int, bytes]:
        """(kind, flags, stream, content) of the next one."""
        high, low, kind, flags, stream = struct.unpack(">HBBBI", self.stream.read(9))
        return kind, flags, stream, self.stream.read(high << 8 | low)

    def send(self, kind: int, flags: int, stream: int, content: bytes = b"") -> None:
        self.connection.sendall(frame_head(kind, flags, stream, len(content)) + content)

    def message(self) -> tuple[int, bytes]:
        """The stream and the content of the next whole request."""
        content, stream, flags = b"", 0, 0
        while not (stream and flags & 1):
            kind, flags, number, part = self.frame()
            if kind == 0:
                content += part
            stream = number if kind in (0, 1) else 0
        return stream, content

    def answer(self, stream: int, text: bytes = b"fine") -> None:
        self.send(1, 4, stream, OK_HEAD)
        self.send(0, 0, stream, struct.pack(">BI", 0, len(text)) + text)
        self.send(1, 5, stream, OK_TRAILER)


Script = Callable[[Peer], None]


@pytest.fixture
def scripted() -> Iterator[Callable[[Script], GrpcConnection]]:
    """A client of a server that runs the script on every connection."""
    made: list[GrpcConnection] = []
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def start(*scripts: Script) -> GrpcConnection:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            with listener:
                for script in scripts:
                    connection, _ = listener.accept()
                    with connection:
                        try:
                            script(Peer(connection))
                        except (ConnectionError, struct.error):
                            pass
                        except BaseException as exc:  # noqa: BLE001 (told after the test)
                            failures.append(exc)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        made.append(GrpcConnection(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=5))
        return made[-1]

    yield start
    for connection in made:
        connection.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []


def ask(connection: GrpcConnection, message: bytes = b"question") -> Any:
    return connection.send(grpc_request(message, len(message)))


def test_flow_control_is_kept(scripted: Any) -> None:
    """A window of 1,000 bytes, opened bit by bit: never more than that is under way."""
    message = bytes(range(256)) * 20

    def script(peer: Peer) -> None:
        peer.send(4, 0, 0, struct.pack(">HI", 4, 1000))
        received, flags = b"", 0
        while not flags & 1:
            kind, flags, stream, part = peer.frame()
            flags = flags if kind == 0 else 0
            if kind != 0:
                continue
            received += part
            assert len(part) <= 1000
            peer.send(8, 0, stream, struct.pack(">I", len(part)))
        assert received[5:] == message
        peer.answer(stream)

    exchange = ask(scripted(script), message)
    assert (exchange.failure, bytes(exchange.body)) == (None, b"fine")


def test_the_largest_frame_is_kept(scripted: Any) -> None:
    seen = []

    def script(peer: Peer) -> None:
        peer.send(4, 0, 0, struct.pack(">HIHI", 4, 1 << 20, 5, 20_000))
        peer.send(8, 0, 0, struct.pack(">I", 1 << 20))
        flags, stream = 0, 0
        while not flags & 1:
            kind, flags, stream, part = peer.frame()
            flags = flags if kind == 0 else 0
            seen.append(len(part) if kind == 0 else 0)
        peer.answer(stream)

    assert ask(scripted(script), bytes(100_000)).good
    assert max(seen) == 20_000
    assert sum(seen) == 100_005


def test_interim_frames_change_nothing(scripted: Any) -> None:
    """Pings are answered; priorities, padding, continued blocks, unknown kinds and other streams are understood."""

    def script(peer: Peer) -> None:
        peer.send(4, 0, 0)
        for _ in range(2):
            stream, _ = peer.message()
            peer.send(6, 0, 0, b"12345678")
            peer.send(77, 0, 0, b"unknown")
            peer.send(0, 0, 99, b"other")
            peer.send(1, 0x28, stream, b"\x02" + bytes(5) + OK_HEAD[:0] + bytes(2))
            peer.send(9, 4, stream, OK_HEAD)
            peer.send(0, 8, stream, b"\x03" + struct.pack(">BI", 0, 4) + b"fi" + bytes(3))
            peer.send(0, 0, stream, b"ne")
            peer.send(1, 5, stream, OK_TRAILER)
            while peer.frame()[:2] != (6, 1):
                pass

    connection = scripted(script)
    for _ in range(2):
        exchange = ask(connection)
        assert (exchange.failure, bytes(exchange.body)) == (None, b"fine")
    assert connection.reconnects == 0


@pytest.mark.parametrize(
    ("code", "failure"),
    [(7, "gRPC UNAVAILABLE"), (8, "gRPC CANCELLED"), (11, "gRPC RESOURCE_EXHAUSTED"), (2, "gRPC INTERNAL")],
)
def test_a_broken_stream_leaves_the_connection(scripted: Any, code: int, failure: str) -> None:
    def script(peer: Peer) -> None:
        peer.send(4, 0, 0)
        stream, _ = peer.message()
        peer.send(3, 0, stream, struct.pack(">I", code))
        peer.answer(peer.message()[0])

    connection = scripted(script)
    exchange = ask(connection)
    assert not exchange.good
    assert exchange.failure.startswith(failure)
    assert ask(connection).good
    assert connection.reconnects == 0


def test_an_answer_before_the_end_of_the_request(scripted: Any) -> None:
    """A server that refuses a message by its first bytes: the rest is not sent, and the next call is good."""

    def script(peer: Peer) -> None:
        peer.send(4, 0, 0, struct.pack(">HI", 4, 100))
        kind = stream = 0
        while kind != 0 or not stream:
            kind, _, stream, _ = peer.frame()
        peer.send(1, 5, stream, b"\x88\0\x0bgrpc-status\x018\0\x0cgrpc-message\x09too%20big")
        while peer.frame()[0] != 3:
            pass
        peer.send(4, 0, 0, struct.pack(">HI", 4, 1 << 20))
        peer.answer(peer.message()[0])

    connection = scripted(script)
    exchange = ask(connection, bytes(5000))
    assert (exchange.status, exchange.failure) == (1008, "gRPC RESOURCE_EXHAUSTED: too big")
    assert ask(connection, bytes(5000)).good


def test_a_server_that_leaves_is_connected_to_again(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaving(peer: Peer) -> None:
        peer.send(4, 0, 0)
        stream, _ = peer.message()
        peer.answer(stream)
        peer.send(7, 0, 0, struct.pack(">II", stream, 0))
        assert peer.stream.read() is not None

    def staying(peer: Peer) -> None:
        peer.send(4, 0, 0)
        peer.answer(peer.message()[0])

    connected_ns: list[int] = []
    create_connection = socket.create_connection

    def connect(*arguments: Any, **options: Any) -> socket.socket:
        connected_ns.append(perf_counter_ns())
        return create_connection(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", connect)
    connection = scripted(leaving, staying)
    assert ask(connection).good
    exchange = ask(connection)
    assert (exchange.good, connection.reconnects) == (True, 1)
    assert exchange.send_ns <= connected_ns[1], "the time to connect again is in the latency"


def test_a_connection_that_dies_under_a_request(scripted: Any) -> None:
    def script(peer: Peer) -> None:
        peer.send(4, 0, 0)
        peer.message()

    exchange = ask(scripted(script))
    assert (exchange.status, exchange.failure) == (1014, "gRPC UNAVAILABLE: connection closed by the server")


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"\x8e", "gRPC UNKNOWN: HTTP status 500 and no gRPC status"),
        (b"\x08\x03503", "gRPC UNAVAILABLE: HTTP status 503 and no gRPC status"),
        (b"\x88\0\x0bgrpc-status\x010", "gRPC INTERNAL: the response is not one uncompressed message"),
        *(
            (block, "gRPC UNAVAILABLE: the server's headers cannot be decoded")
            for block in (
                b"\xbe",  # an entry of the dynamic table, which the server was told not to keep
                b"\x7f\x00\x01a",
                b"\x3f\xe1\x1f\x88",  # the size of that table
                b"\x80",
                b"\0\x05ab",
                b"\0\x01x\x82\xff\xff",
            )
        ),
    ],
)
def test_unusable_responses_are_failures(scripted: Any, answer: bytes, failure: str) -> None:
    def script(peer: Peer) -> None:
        peer.send(4, 0, 0)
        peer.send(1, 5, peer.message()[0], answer)
        peer.stream.read()

    exchange = ask(scripted(script))
    assert not exchange.good
    assert exchange.failure == failure


@pytest.mark.parametrize(("kind", "flags", "content"), [(8, 0, b""), (3, 0, b"\0"), (0, 8, b""), (7, 0, b"\0\0\0\1")])
def test_a_frame_shorter_than_its_kind_allows_is_a_failure(
    scripted: Any, kind: int, flags: int, content: bytes
) -> None:
    def script(peer: Peer) -> None:
        peer.send(4, 0, 0)
        stream = peer.message()[0]
        peer.send(kind, flags, 0 if kind == 7 else stream, content[:3])
        peer.stream.read()

    exchange = ask(scripted(script))
    assert (exchange.status, exchange.good) == (1014, False)
    assert "frames that are too short" in (exchange.failure or "")


def test_http_1_is_no_grpc(scripted: Any) -> None:
    def script(peer: Peer) -> None:
        peer.connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    with pytest.raises(ConnectionRefused, match="does not speak gRPC"):
        scripted(script).connect()


def test_large_messages_both_ways_through_the_grpc_library() -> None:
    class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
        def service(self, _details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda message, _context: message[::-1])

    unlimited = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=(Echo(),), options=unlimited)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        connection = GrpcConnection(f"127.0.0.1:{port}", timeout_s=30)
        try:
            for size in (0, 1, 16_379, 16_380, 65_530, 5_000_000, 20_000_000):
                message = struct.pack(">I", size)[:size] + bytes(max(size - 8, 0)) + b"end!"[: max(size - 4, 0)]
                exchange = ask(connection, message)
                assert exchange.failure is None
                assert bytes(exchange.body) == message[::-1]
            assert connection.reconnects == 0
        finally:
            connection.close()
            server.stop(0).wait()
