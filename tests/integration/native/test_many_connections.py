"""Hundreds of clients that come or leave at once: each is served, and front ends share them evenly."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.integration.native.conftest import Server, wait_until
from tests.integration.native.raw_client import LIVE, read_answer
from tests.integration.native.raw_grpc import PREFACE, settings
from tests.integration.native.test_processes import FRONT_ENDS, front_ends, has_ended

CLIENTS = 1500
"""More than the supervisor's sockets to two front ends hold (278 each), and fewer than the backlog."""


@contextlib.contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Processes that do nothing in the `with` block, as busy ones do."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def connect(stack: contextlib.ExitStack, port: int, count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(count)]


def is_served(client: socket.socket) -> bool:
    try:
        return client.recv(1) != b""
    except ConnectionResetError:
        return False


@pytest.mark.parametrize("fronts", [0, FRONT_ENDS])
@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_clients_of_busy_front_ends_wait_until_they_are_served(controlled, fronts, protocol) -> None:
    """Of 1,000 clients that came while both front ends were busy, 444 were disconnected without an answer."""
    server = controlled("--fronts", str(fronts), grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    port, request = (server.port, LIVE) if protocol == "HTTP" else (server.grpc_port, PREFACE + settings(window=65535))
    with contextlib.ExitStack() as stack:
        with stopped(front_ends(server) if fronts else server.processes):
            clients = connect(stack, port, CLIENTS)
            for client in clients:
                client.sendall(request)
        served = Counter(map(is_served, clients))
    assert served == {True: CLIENTS}


def test_clients_of_front_ends_that_have_died_are_served_by_their_successors(controlled) -> None:
    server = controlled("--fronts", str(FRONT_ENDS))
    server.open("load", "infer")
    server.wait_ready()
    known = front_ends(server)
    with contextlib.ExitStack() as stack:
        with stopped([psutil.Process(server.process.pid)]):  # both are dead before it sends them anybody
            clients = connect(stack, server.port, 10)
            for process in known:
                process.kill()
            wait_until(lambda: all(map(has_ended, known)), "their sockets are closed")
            for client in clients:
                client.sendall(LIVE)
        assert [read_answer(client)[0] for client in clients] == [200] * 10


def owners(server: Server) -> dict[int, psutil.Process]:
    """By the port of a client: the front end that has its connection."""
    return {
        connection.raddr.port: process
        for process in front_ends(server)
        for connection in process.net_connections("tcp")
        if connection.raddr and connection.laddr.port == server.port
    }


def test_connections_are_spread_evenly_after_many_have_closed_at_once(controlled) -> None:
    """Of 400 that one front end closed while the supervisor was busy it learnt of 278, and sent the other one more."""
    server = controlled("--fronts", str(FRONT_ENDS))
    server.open("load", "infer")
    server.wait_ready()
    first, _ = front_ends(server)
    with contextlib.ExitStack() as stack:
        clients = connect(stack, server.port, 800)
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, clients)) == {200}
        known = owners(server)
        leaving = [client for client in clients if known[client.getsockname()[1]] == first]
        assert 350 < len(leaving) < 450
        with stopped([psutil.Process(server.process.pid)]):
            for client in leaving:
                client.close()
            wait_until(lambda: first not in owners(server).values(), "the front end has closed them")
        for _ in range(100):  # until the supervisor has read all messages of the front end
            few = connect(stack, server.port, 4)
            assert {ask(client) for client in few} == {200}
            known = owners(server)
            if all(known[client.getsockname()[1]] == first for client in few):
                break
            for client in few:
                client.close()
        new = few + connect(stack, server.port, 400 - len(few))
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, new)) == {200}
        shares = Counter(process.pid for process in owners(server).values())
    assert len(shares) == FRONT_ENDS
    assert min(shares.values()) >= 380, shares


def ask(client: socket.socket) -> int:
    client.sendall(LIVE)
    return read_answer(client)[0]
