"""The time to connect again, where a server has closed the connection, is part of the next request's latency."""

from __future__ import annotations

import socket
import threading
from time import perf_counter_ns

import pytest

from loadgen.client.http import HttpConnection
from tests.unit.loadgen.client.test_http_connection import GOOD, answering, get, read_request, serving


@pytest.mark.parametrize("announced", [True, False])
def test_the_time_to_connect_again_is_in_the_latency(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed loop's latency counts from `send_ns`: it was taken after connecting, so a server that closes its
    connection after every response looked as fast as one that keeps it."""
    closed, connected_ns = threading.Event(), []

    def close_after_one(connection: socket.socket) -> None:
        answering(GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") if announced else GOOD)(connection)
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    def connect(*args: object, **options: object) -> socket.socket:
        connected_ns.append(perf_counter_ns())
        return create_connection(*args, **options)  # type: ignore[arg-type]

    create_connection = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", connect)
    with serving(close_after_one, answering(GOOD)) as address:
        connection = HttpConnection(address)
        connection.connect()
        assert connection.send(get(address)).send_ns >= connected_ns[0], "the first connection is made beforehand"
        assert closed.wait(60)
        exchange = connection.send(get(address))
        assert (exchange.status, connection.reconnects) == (200, 1)
        assert exchange.send_ns <= connected_ns[1]
        connection.close()


@pytest.mark.parametrize("soon", [True, False])
def test_a_server_that_closes_soon_after_an_answer_is_not_raced(soon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's server closes its connection after every stream and does not say so: a request that was sent before
    the end arrived failed. An idle connection's end after a while says nothing of the next one."""
    monkeypatch.setattr("loadgen.client.http.SOON_NS", 10**12 if soon else 0)
    closed = threading.Event()

    def close_after_one(connection: socket.socket) -> None:
        answering(GOOD)(connection)
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    def close_at_the_next(connection: socket.socket) -> None:
        answering(GOOD)(connection)
        read_request(connection)

    with serving(close_after_one, *[close_at_the_next] * (1 + soon)) as address:
        connection = HttpConnection(address)
        assert connection.send(get(address)).status == 200
        assert closed.wait(60)
        assert connection.send(get(address)).status == 200
        assert (connection.send(get(address)).status, connection.reconnects) == ((200, 2) if soon else (0, 1))
        connection.close()
