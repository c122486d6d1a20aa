"""CPU time per inference request over gRPC beside gRPC's own library and beside HTTP.

    python -m pytest tests/benchmarks/test_grpc_cpu.py -m benchmark -s

Three servers in processes of their own on loopback: the native server over gRPC, the same over HTTP, and an application
of grpcio's asyncio server that takes the message and answers as many bytes. They are driven in alternating rounds by
the same client, with 1 or 16 connections, as in test_native_cpu.py, whose figures these are like.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from loadgen.client.grpc import Http2Connection, header_block
from tests.benchmarks.test_native_cpu import (
    NATIVE,
    REQUESTS,
    ROUNDS,
    connect,
    connections_to,
    cpu_us,
    receive_answer,
    request_bytes,
    running,
)

PAYLOADS = (602_112, 150_528)
CONNECTIONS = (1, 16)
MOST_OF_LIBRARY = 0.75
"""Of the CPU time of the library, which only answers: it decodes nothing and hands nothing to another thread."""
MOST_OF_HTTP = 1.6
"""Of the CPU time of the same request over HTTP."""

LIBRARY = """
import asyncio, sys
import grpc.aio
ANSWER = bytes(2048 + 60)
async def main():
    async def infer(request, context):
        return ANSWER
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)))
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()
asyncio.run(main())
"""
HEAD = header_block(
    {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/inference.GRPCInferenceService/ModelInfer",
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }.items()
)

Round = Callable[[int, int], float]
"""The server's CPU time per request (µs), of some connections and requests."""


def message_bytes(payload: int) -> bytes:
    request = service_pb2.ModelInferRequest(
        model_name="null", raw_input_contents=[np.zeros(payload, np.uint8).tobytes()]
    )
    request.inputs.add(name="x", datatype="UINT8", shape=[1, payload])
    serialised: bytes = request.SerializeToString()
    return b"\0" + len(serialised).to_bytes(4, "big") + serialised


def measured(pid: int, count: int, turn: Callable[[], None], connections: int) -> float:
    turns = -(-count // connections)
    before = cpu_us(pid)
    for _ in range(turns):
        turn()
    return (cpu_us(pid) - before) / (turns * connections)


def grpc_round(pid: int, connections: list[Http2Connection], message: bytes, count: int) -> float:
    def turn() -> None:
        for connection in connections:
            connection.request(HEAD, [message], perf_counter_ns())
        for connection in connections:
            while not connection.ended:
                connection.receive()
            assert connection.fields[b"grpc-status"] == b"0"

    return measured(pid, count, turn, len(connections))


def http_round(pid: int, connections: list[socket.socket], request: bytes, count: int) -> float:
    def turn() -> None:
        for connection in connections:
            connection.sendall(request)
        for connection in connections:
            receive_answer(connection)

    return measured(pid, count, turn, len(connections))


@contextmanager
def arms() -> Iterator[tuple[list[tuple[int, list[Http2Connection]]], tuple[int, list[socket.socket]]]]:
    """Process and connections of the native server and the library over gRPC, and of the native server over HTTP."""
    most = max(CONNECTIONS)
    with ExitStack() as stack, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        grpc_port = probe.getsockname()[1]
        probe.close()
        native, http_port = stack.enter_context(running(NATIVE, "0", str(grpc_port)))
        library, library_port = stack.enter_context(running(LIBRARY))
        over_http = stack.enter_context(connections_to(http_port, most))
        over_grpc = []
        for pid, port in ((native, grpc_port), (library, library_port)):
            sockets = [stack.enter_context(connect(port)) for _ in range(most)]
            over_grpc.append((pid, [Http2Connection(one, timeout_s=30, most_bytes=2**20) for one in sockets]))
        yield over_grpc, (native, over_http)


@dataclass(frozen=True)
class Row:
    """Medians over the rounds: µs per request, and the native server's over gRPC divided by the others'."""

    connections: int
    payload: int
    grpc_us: float
    library_us: float
    http_us: float
    to_library: float
    to_http: float


def measure() -> list[Row]:
    rows = []
    with arms() as (over_grpc, (http_pid, over_http)):
        for count in CONNECTIONS:
            for payload in PAYLOADS:
                message, request = message_bytes(payload), request_bytes(payload)

                def one_round(
                    requests: int, count: int = count, message: bytes = message, request: bytes = request
                ) -> list[float]:
                    figures = [
                        grpc_round(pid, connections[:count], message, requests) for pid, connections in over_grpc
                    ]
                    return [*figures, http_round(http_pid, over_http[:count], request, requests)]

                one_round(50)
                rounds = [one_round(REQUESTS) for _ in range(ROUNDS)]
                rows.append(
                    Row(
                        count,
                        payload,
                        *(statistics.median(figures[arm] for figures in rounds) for arm in range(3)),
                        *(statistics.median(figures[0] / figures[arm] for figures in rounds) for arm in (1, 2)),
                    )
                )
    return rows


@pytest.mark.benchmark
def test_cpu_per_grpc_request_stays_near_http() -> None:
    rows = measure()
    for row in rows:
        sys.stdout.write(
            f"\n{row.connections:>3} connections, {row.payload:>7} bytes: gRPC {row.grpc_us:6.0f} µs, grpcio "
            f"{row.library_us:6.0f} µs, HTTP {row.http_us:6.0f} µs; ratios {row.to_library:.2f} and {row.to_http:.2f}"
        )
    sys.stdout.write(f"\n{os.cpu_count()} CPUs, Python {sys.version.split()[0]}\n")
    for row in rows:
        assert row.to_library <= MOST_OF_LIBRARY
        assert row.to_http <= MOST_OF_HTTP
