"""Requests of many bytes by clients that only copy, beside what the kernel copies between two plain sockets.

    python -m tests.benchmarks.raw_rates --payload fp32 --rows 32 --connections 1,4,8 \
        "native http=8100 grpc=8101: serve native --payloads uint8,fp32 --fronts 8 --max-batch-size 64"

Each connection has a client process that sends the same request over HTTP again and again and reads the answer: one
send and one receive, nothing is made or checked but the status. The plain end of the comparison is a process for each
connection that receives as many bytes in pieces of 256 KiB and answers as many as the server does. The server and the
plain ends take turns, round by round. A ratio is the median of the rounds' ratios, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.benchmarks.served_rates import MODELS, Server, say

PIECE_BYTES = 256 * 1024
ITEM_BYTES = {"uint8": 224 * 224 * 3, "fp32": 224 * 224 * 3 * 4}
SHAPES = {"uint8": [224, 224, 3], "fp32": [3, 224, 224]}
ANSWER_BYTES = 512 * 4

FORK = multiprocessing.get_context("fork")


class Load(NamedTuple):
    """What one client does."""

    port: int
    request: bytes
    seconds: float


def cores_of(text: str) -> set[int]:
    """ "0-3,8" """
    parts = [part.partition("-") for part in text.split(",")]
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}


def request_of(payload: str, rows: int) -> bytes:
    size = rows * ITEM_BYTES[payload]
    tensor = {
        "name": "pixel_values",
        "datatype": payload.upper(),
        "shape": [rows, *SHAPES[payload]],
        "parameters": {"binary_data_size": size},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/{MODELS[payload]}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(header) + size}\r\n\r\n"
    )
    data = os.urandom(size) if payload == "uint8" else bytes(size)  # random floats would hold NaN
    return head.encode() + header + data


def receive_answer(connection: socket.socket, buffer: bytearray) -> None:
    """Raises `RuntimeError` for another status than 200."""
    count = connection.recv_into(buffer)
    head_ends = buffer.find(b"\r\n\r\n", 0, count)
    while head_ends < 0:
        if not (more := connection.recv_into(memoryview(buffer)[count:])):
            raise RuntimeError("disconnected")
        count += more
        head_ends = buffer.find(b"\r\n\r\n", 0, count)
    head = bytes(buffer[:head_ends]).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(bytes(buffer[:count]).decode(errors="replace"))
    left = head_ends + 4 + int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]) - count
    while left > 0:
        left -= connection.recv_into(buffer)


def run_client(load: Load, cores: set[int], start: Barrier, found: multiprocessing.SimpleQueue[list[float]]) -> None:
    os.sched_setaffinity(0, cores)
    buffer, took = bytearray(1 << 20), []
    with socket.create_connection(("127.0.0.1", load.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start.wait()
        ends = time.perf_counter() + load.seconds
        while (begun := time.perf_counter()) < ends:
            connection.sendall(load.request)
            receive_answer(connection, buffer)
            took.append(time.perf_counter() - begun)
    found.put(took)


def run_sink(listener: socket.socket, request_bytes: int, answer: bytes, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(request_bytes))
    while True:
        got = 0
        while got < request_bytes:
            count = connection.recv_into(buffer[got : got + PIECE_BYTES])
            if count == 0:
                return
            got += count
        connection.sendall(answer)


def loaded(loads: Sequence[Load], cores: set[int]) -> list[float]:
    """The seconds of each request of all clients at once."""
    start, found = FORK.Barrier(len(loads)), FORK.SimpleQueue()
    clients = [FORK.Process(target=run_client, args=(load, cores, start, found)) for load in loads]
    for client in clients:
        client.start()
    took = [seconds for _ in clients for seconds in found.get()]
    for client in clients:
        client.join()
    return took


def plain(connections: int, request: bytes, answer: bytes, seconds: float, sinks: set[int], cores: set[int]) -> int:
    """How many requests plain sockets take."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(connections)]
    ends = [FORK.Process(target=run_sink, args=(one, len(request), answer, sinks)) for one in listeners]
    for end in ends:
        end.start()
    count = len(loaded([Load(one.getsockname()[1], request, seconds) for one in listeners], cores))
    for end, listener in zip(ends, listeners, strict=True):
        end.join()
        listener.close()
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=Server.parse)
    parser.add_argument("--payload", choices=list(MODELS), default="fp32")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--connections", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--server-cores", default="0-7")
    parser.add_argument("--client-cores", default="8-15")
    given = parser.parse_args()
    request = request_of(given.payload, given.rows)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (given.rows * ANSWER_BYTES)
    answer += bytes(given.rows * ANSWER_BYTES)
    servers, clients = cores_of(given.server_cores), cores_of(given.client_cores)
    rates: dict[int, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        process = given.server.start(given.server_cores, log)
        try:
            say(f"{given.server.name} ready after {given.server.wait_ready(process, log):.1f} s")
            loaded([Load(int(given.server.http), request, given.seconds)], clients)
            for _ in range(given.rounds):
                for connections in map(int, given.connections.split(",")):
                    took = loaded([Load(int(given.server.http), request, given.seconds)] * connections, clients)
                    copied = plain(connections, request, answer, given.seconds, servers, clients)
                    of_round = (len(took) / given.seconds, copied / given.seconds, median(took) * 1e3)
                    rates.setdefault(connections, []).append(of_round)
        finally:
            process.terminate()
            process.wait(60)
    say("| Connections | items/s | p50, ms | GB/s | GB/s of plain sockets | ratio |\n|---:|---:|---:|---:|---:|---:|")
    for connections, rounds in rates.items():
        served, of_plain, p50 = (median(one[place] for one in rounds) for place in range(3))
        ratios = sorted(one[0] / one[1] for one in rounds)
        gigabytes = [rate * len(request) / 1e9 for rate in (served, of_plain)]
        say(
            f"| {connections} | {served * given.rows:,.0f} | {p50:.2f} | {gigabytes[0]:.2f} | {gigabytes[1]:.2f} | "
            f"{median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}) |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
