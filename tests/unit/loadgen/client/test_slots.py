"""The slots of shared memory: each request is written once, and every answer belongs to the input in its slot."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Thread
from typing import Any

import pytest

from loadgen.client.bodies import RawTensor
from loadgen.client.connection import Address, ConnectionRefused
from loadgen.client.shared_memory import FOLDER, SharedMemoryConnection, SharedMemoryRequest, SlotPool, prefix

INPUT_BYTES, DIGEST_BYTES = 4096, 32
PLACES = (16, 2048)


class Digests(ThreadingHTTPServer):
    """Maps the regions and answers with the SHA-256 of the input, which it writes where the request says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.regions: dict[str, mmap.mmap] = {}
        self.most_regions = 0
        self.at_once: Barrier | None = None
        """Requests wait here for each other."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Digests

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        *_, name, command = self.path.split("/")
        answer: dict[str, Any] = {}
        if command == "register":
            descriptor = os.open(FOLDER / json.loads(body)["key"].lstrip("/"), os.O_RDWR)
            self.server.regions[name] = mmap.mmap(descriptor, 0)
            self.server.most_regions = max(self.server.most_regions, len(self.server.regions))
            os.close(descriptor)
        elif command == "unregister":
            self.server.regions.pop(name).close()
        else:
            if self.server.at_once is not None:
                self.server.at_once.wait(60)
            request = json.loads(body)
            place = request["inputs"][0]["parameters"]
            memory, start = self.server.regions[place["shared_memory_region"]], place.get("shared_memory_offset", 0)
            digest = hashlib.sha256(memory[start : start + place["shared_memory_byte_size"]]).digest()
            start = request["outputs"][0]["parameters"].get("shared_memory_offset", 0)
            memory[start : start + DIGEST_BYTES] = digest
            answer = {"outputs": [{"name": "y", "datatype": "UINT8", "shape": [DIGEST_BYTES]}]}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Digests]:
    with Digests() as digests:
        thread = Thread(target=digests.serve_forever, args=(0.01,))
        thread.start()
        yield digests
        digests.shutdown()
        thread.join()
    assert not list(FOLDER.glob(f"{prefix(os.getpid())}*"))


def pool_of(server: Digests, count: int) -> tuple[SlotPool, list[SharedMemoryRequest]]:
    requests = [
        SharedMemoryRequest(
            (RawTensor("x", "UINT8", (INPUT_BYTES,), bytes([number]) * INPUT_BYTES, PLACES),), {"y": DIGEST_BYTES}
        )
        for number in range(count)
    ]
    return SlotPool(Address("127.0.0.1", server.server_port), "m", requests), requests


def digest_of(request: SharedMemoryRequest, patches: tuple[bytes, ...] = ()) -> bytes:
    data = bytearray(request.inputs[0].data)
    for place, patch in zip(PLACES, patches, strict=False):
        data[place : place + len(patch)] = patch
    return hashlib.sha256(data).digest()


def ask(connection: SharedMemoryConnection, request: SharedMemoryRequest, patches: tuple[bytes, ...] = ()) -> bytes:
    exchange = connection.send(request, patches)
    assert exchange.status == 200
    return connection.read_outputs(exchange)["y"].tobytes()


def test_nothing_is_written_again_and_each_answer_belongs_to_its_input(server: Digests) -> None:
    pool, requests = pool_of(server, 3)
    user = SharedMemoryConnection(pool)
    user.connect()
    assert (pool.writes, len(server.regions)) == (3, 2)
    for turn in range(12):
        request, patches = requests[turn % 3], (b"%4d" % turn, b"%3d" % turn)
        assert ask(user, request, patches) == digest_of(request, patches)
    assert pool.writes == 3
    user.close()
    assert server.regions == {}
    assert ask(user, requests[1]) == digest_of(requests[1]), "the memory is made again after it was given back"
    user.close()


def test_users_of_one_request_at_one_moment_have_places_of_their_own(server: Digests) -> None:
    """More users than slots hold the request: those without one write it once more, and only once."""
    users, turns = 5, 4
    pool, requests = pool_of(server, 2)
    connections = [SharedMemoryConnection(pool) for _ in range(users)]
    for connection in connections:
        connection.connect()
    server.at_once = Barrier(users)
    wrong: list[tuple[int, int]] = []

    def load(number: int) -> None:
        for turn in range(turns):
            patches = (b"%2d%2d" % (number, turn), b"%3d" % turn)
            if ask(connections[number], requests[0], patches) != digest_of(requests[0], patches):
                wrong.append((number, turn))

    threads = [Thread(target=load, args=(number,)) for number in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.writes == 2 + users - 1
    for connection in connections:
        assert len(server.regions) == 1 + users
        connection.close()
    assert server.regions == {}


def test_users_that_come_and_go_take_no_more_memory(server: Digests) -> None:
    pool, requests = pool_of(server, 2)
    stays = SharedMemoryConnection(pool)
    for _ in range(5):
        comes = SharedMemoryConnection(pool)
        assert ask(stays, requests[0]) == digest_of(requests[0])
        assert ask(comes, requests[1]) == digest_of(requests[1])
        comes.close()
    assert server.most_regions == 3
    stays.close()
    assert server.regions == {}


def test_a_kept_answer_outlives_the_next_request(server: Digests) -> None:
    pool, requests = pool_of(server, 2)
    user = SharedMemoryConnection(pool)
    exchange = user.send(requests[0])
    kept, copied = user.copy_outputs(), exchange.copy()
    ask(user, requests[1])
    assert user.read_outputs(copied, kept)["y"].tobytes() == digest_of(requests[0])
    user.close()


def test_a_server_that_cannot_be_reached_leaves_nothing() -> None:
    pool = SlotPool(Address("127.0.0.1", 1), "m", ())
    with pytest.raises(ConnectionRefused):
        SharedMemoryConnection(pool).connect()
    assert not list(FOLDER.glob(f"{prefix(os.getpid())}*"))


UNDER_GEVENT = """
from gevent import monkey; monkey.patch_all()
import gevent, socket, time, pytest
from loadgen.client.connection import GreenletSocket, is_patched

assert is_patched()
listener = socket.create_server(("127.0.0.1", 0))
raw = socket.create_connection(listener.getsockname(), timeout=0.2)
peer, _ = listener.accept()
own = GreenletSocket(raw)
buffer = memoryview(bytearray(1000))
began = time.monotonic()
with pytest.raises(TimeoutError):
    own.recv_into(buffer)
assert 0.15 < time.monotonic() - began < 2.0
assert not own.has_input()
own.settimeout(5.0)
own.sendall(b"question")
gevent.spawn_later(0.05, peer.sendall, b"answer")
assert own.recv_into(buffer) == 6 and peer.recv(100) == b"question"
big = bytes(8_000_000)
reader = gevent.spawn(lambda: sum(len(peer.recv(65536)) for _ in iter(lambda: 0, 1)))
own.settimeout(0.0)
with pytest.raises(BlockingIOError):
    own.recv_into(buffer)
own.settimeout(5.0)
received = []
def drain():
    while sum(received) < len(big):
        received.append(len(peer.recv(1_000_000)))
reader.kill()
drained = gevent.spawn(drain)
own.sendall(big)
drained.get(timeout=60)
waits = gevent.spawn(own.recv_into, buffer)
gevent.sleep(0.01)
own.close()
own.close()
with pytest.raises(OSError):
    waits.get(timeout=60)
peer.close()
"""


def test_the_socket_of_a_patched_process_waits_times_out_and_closes() -> None:
    subprocess.run([sys.executable, "-c", UNDER_GEVENT], check=True, timeout=60)
