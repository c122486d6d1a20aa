"""CPU time per inference request of the native server beside a bare uvicorn application that only reads the body.

    python -m pytest tests/benchmarks/test_native_cpu.py -m benchmark -s

The native server runs in each of its shapes: as one process (`fronts=0`), and as a supervisor, an engine's process and
one or three front ends. All servers are driven on loopback in alternating rounds by the same client: 1 or 16
connections (16 is what the scenario `concurrent` uses), each with a prepared request, a body of one FP32 image
(602 KB), one UINT8 image's size (150 KB) and a JPEG's size (30 KB). With 16, all requests are sent before the first
answer is read. The figure is the user and system time of all processes of a server by the kernel's account, divided by
the requests of the round; the ratio is the median over rounds. Run it alone: they are interleaved, but a busy machine
still widens the spread.

The bound is for the FP32 image: the native server takes at most half of bare uvicorn's CPU time. Smaller bodies have a
wide one, since they are little work beside what the bare application does not do: it decodes nothing and hands nothing
to an engine. The other bare application, `hand-off`, at least hands each body to a thread and awaits it back, as any
server must that does not execute models on its event loop.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

ROUNDS = 31
REQUESTS = 100
IMAGE_LIMIT, LONE_IMAGE_LIMIT = 0.5, 0.7
"""Of bare uvicorn's CPU time, for an FP32 image. The second is for one connection and several processes, where no other
request shares the messages between them: 0.40 to 0.66 in runs on a busy machine. With 16 connections three front ends
on two quiet cores exceed the first: 0.34 to 0.61 in four runs."""
SMALL_LIMIT = 3.0
"""Of the time with a hand-off, for one process and smaller bodies: 0.5 to 2.3 in runs on a busy machine."""
IMAGE_BYTES = 602_112
PAYLOADS = (IMAGE_BYTES, 150_528, 30_000)
FRONTS = (0, 1, 3)
CONNECTIONS = (1, 16)
Arm = tuple[int, list[socket.socket]]
"""A server's first process and its connections."""

BARE = """
import sys, uvicorn
ANSWER = bytes(2048 + 130)
HANDS_OFF = len(sys.argv) > 2
if HANDS_OFF:
    import asyncio, queue, threading
    waiting = queue.SimpleQueue()
    def engine():
        while True:
            loop, future = waiting.get()
            loop.call_soon_threadsafe(future.set_result, None)
    threading.Thread(target=engine, daemon=True).start()
async def app(scope, receive, send):
    body = bytearray()
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    if HANDS_OFF:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiting.put((loop, future))
        await future
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})
port = int(sys.argv[1])
uvicorn.run(app, port=port, lifespan="off", access_log=False, log_level="warning", timeout_keep_alive=600)
"""
# The native server on PORT, with FRONTS and perhaps GRPC_PORT. The input of its model is a vector of any length, so
# that every body size is possible. The engine answers each request of a batch alone, without merging them: an engine
# on a GPU merges none on the host either.
NATIVE = """
import sys
from servers.protocol.tensors import TensorSpec
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Axis
from servers.options.launch import bind
from servers.native.server import serve
from servers.native.shared.settings import NativeSettings
specification = ModelSpecification(
    name="null", title="null", version="1", inputs=(TensorSpec("x", "UINT8", (-1, -1)),),
    outputs=(TensorSpec("y", "FP32", (-1, 512)),), max_batch_size=32,
    load_module=lambda weights: None, axes=(Axis("width", 1, 1_000_000, {"x": 1}, padding={"x": 0}),))
import structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
port, fronts, grpc_port = map(int, [*sys.argv[1:], 0][:3])
settings = NativeSettings(grpc_port=grpc_port, max_queue_delay_us=0, fronts=fronts, keep_alive_timeout_s=600)
class Engine(NullEngine):
    def start(self, requests, *_):
        answers = [self.infer(one) for one in requests]
        return lambda: answers
build = lambda _: Engine(specification, EngineSettings(kind="null"))
grpc = bind("127.0.0.1", grpc_port) if grpc_port else None
serve(settings, [(specification, build)], bind("127.0.0.1", port), grpc)
"""


@contextmanager
def running(source: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """A server's first process and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", source, str(port), *arguments])
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                connect(port).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield process.pid, port
    finally:
        process.kill()  # its children end with it
        process.wait(10)


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@contextmanager
def connections_to(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections to a server that is ready; if it has several front ends they share them."""
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(port)) for _ in range(count)]
        for connection in connections:
            wait_ready(connection)
        yield connections


def request_bytes(payload: int) -> bytes:
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, payload], "parameters": {"binary_data_size": payload}}
    header = json.dumps({"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    head = (
        f"POST /v2/models/null/infer HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: identity\r\n"
        f"Content-Length: {len(header) + payload}\r\nInference-Header-Content-Length: {len(header)}\r\n\r\n"
    )
    return head.encode() + header + np.zeros(payload, np.uint8).tobytes()


def receive_answer(connection: socket.socket) -> None:
    start = receive(connection)
    assert start.startswith(b"HTTP/1.1 200"), start


def receive(connection: socket.socket) -> bytes:
    """The beginning of an answer, after all of it has come."""
    received = connection.recv(65536)
    end = received.index(b"\r\n\r\n") + 4
    lengths = [line for line in received[:end].lower().split(b"\r\n") if line.startswith(b"content-length: ")]
    missing = end + int(lengths[0].split(b" ")[1]) - len(received)
    while missing > 0:
        missing -= len(connection.recv(65536))
    return received[:500]


def cpu_us(pid: int) -> float:
    """User and system time of all threads of the process and its descendants, by the scheduler's clock (ns)."""
    process = psutil.Process(pid)
    total_ns = 0
    for one in (process, *process.children(recursive=True)):
        for task in Path(f"/proc/{one.pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e3


def round_cpu_us(pid: int, connections: list[socket.socket], request: bytes, count: int) -> float:
    turns = -(-count // len(connections))
    before = cpu_us(pid)
    for _ in range(turns):
        for connection in connections:
            connection.sendall(request)
        for connection in connections:
            receive_answer(connection)
    return (cpu_us(pid) - before) / (turns * len(connections))


def wait_ready(connection: socket.socket) -> None:
    deadline = time.monotonic() + 30
    while True:
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        if receive(connection).startswith(b"HTTP/1.1 200"):
            return
        assert time.monotonic() < deadline


@dataclass(frozen=True)
class Row:
    """Medians over the rounds: µs per request, and the native server's divided by the bare applications'."""

    connections: int
    payload: int
    us: dict[str, float]
    to_bare: dict[str, float]
    to_hand_off: dict[str, float]


def measure() -> list[Row]:
    most = max(CONNECTIONS)
    rows = []
    with ExitStack() as stack:
        arms: dict[str, Arm] = {}
        sources = [*((f"fronts={count}", (NATIVE, str(count))) for count in FRONTS), ("bare", (BARE,))]
        for name, command in (*sources, ("hand-off", (BARE, "hand off"))):
            pid, port = stack.enter_context(running(*command))
            arms[name] = pid, stack.enter_context(connections_to(port, most))
        for count in CONNECTIONS:
            for payload in PAYLOADS:
                rows.append(measure_row(arms, count, payload))
    return rows


def measure_row(arms: dict[str, Arm], count: int, payload: int) -> Row:
    request = request_bytes(payload)

    def one_round(names: list[str], requests: int) -> dict[str, float]:
        return {name: round_cpu_us(arms[name][0], arms[name][1][:count], request, requests) for name in names}

    names = list(arms)
    one_round(names, 50)
    rounds = [one_round(names[:: 1 if index % 2 else -1], REQUESTS) for index in range(ROUNDS)]
    native = [name for name in names if name not in ("bare", "hand-off")]
    return Row(
        count,
        payload,
        {name: statistics.median(figures[name] for figures in rounds) for name in names},
        *(
            {name: statistics.median(figures[name] / figures[other] for figures in rounds) for name in native}
            for other in ("bare", "hand-off")
        ),
    )


@pytest.mark.benchmark
@pytest.mark.timeout(540)
def test_cpu_per_request_stays_near_bare_uvicorn() -> None:
    rows = measure()
    for row in rows:
        figures = ", ".join(f"{name} {us:.0f} µs" for name, us in row.us.items())
        ratios = ", ".join(f"{name} {ratio:.2f} and {row.to_hand_off[name]:.2f}" for name, ratio in row.to_bare.items())
        sys.stdout.write(f"\n{row.connections:>3} connections, {row.payload:>7} bytes: {figures}; ratios: {ratios}")
    sys.stdout.write(f"\n{os.cpu_count()} CPUs, Python {sys.version.split()[0]}\n")
    for row in rows:
        if row.payload == IMAGE_BYTES:
            assert row.to_bare["fronts=0"] <= IMAGE_LIMIT
            assert max(row.to_bare.values()) <= (LONE_IMAGE_LIMIT if row.connections == 1 else IMAGE_LIMIT)
        else:
            assert row.to_hand_off["fronts=0"] <= SMALL_LIMIT
