"""What idle connections cost the requests of another client: 1 beside 4,096 of them.

    python -m pytest tests/benchmarks/test_idle_connections.py -m benchmark -s

For each transport and shape of the native server two servers run side by side, one with a single idle connection and
one with 4,096: HTTP connections that have had an answer, or HTTP/2 connections after the preface. One client sends each
server 300 requests with one UINT8 image in alternating rounds, one at a time. A ratio is that of the mean CPU times, or
of the percentiles of all latencies, and has a 95 % interval by resampling rounds (percentile bootstrap, Efron 1979; it
takes rounds as independent).
"""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import pytest

from loadgen.client.grpc import Http2Connection
from tests.benchmarks.test_grpc_cpu import HEAD, message_bytes
from tests.benchmarks.test_native_cpu import (
    NATIVE,
    connect,
    connections_to,
    cpu_us,
    receive,
    receive_answer,
    request_bytes,
    running,
)
from tests.integration.native.raw_grpc import PREFACE, settings

ROUNDS = 31
REQUESTS = 300
FEW, MANY = 1, 4096
MOST = 1.2
"""Of the CPU time and of the 99th percentile with FEW; the interval of the ratio must not lie above."""
RESAMPLES = 500
PAYLOAD = 150_528
READY = b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"


def idle_http(connection: socket.socket) -> None:
    connection.sendall(READY)
    receive(connection)


def idle_grpc(connection: socket.socket) -> None:
    connection.sendall(PREFACE + settings())
    assert connection.recv(65536)


def http_client(connection: socket.socket) -> Callable[[], None]:
    request = request_bytes(PAYLOAD)

    def send() -> None:
        connection.sendall(request)
        receive_answer(connection)

    return send


def grpc_client(connection: socket.socket) -> Callable[[], None]:
    client, message = Http2Connection(connection, timeout_s=30, most_bytes=2**20), message_bytes(PAYLOAD)

    def send() -> None:
        client.request(HEAD, [message], perf_counter_ns())
        while not client.ended:
            client.receive()
        assert client.fields[b"grpc-status"] == b"0"

    return send


TRANSPORTS = {"HTTP": (idle_http, http_client), "gRPC": (idle_grpc, grpc_client)}


@dataclass(frozen=True)
class Round:
    """One server's: µs of CPU time per request, and latencies in µs."""

    cpu_us: float
    latencies_us: np.ndarray


def one_round(pid: int, send: Callable[[], None], requests: int = REQUESTS) -> Round:
    latencies_ns = []
    before = cpu_us(pid)
    for _ in range(requests):
        start_ns = perf_counter_ns()
        send()
        latencies_ns.append(perf_counter_ns() - start_ns)
    return Round((cpu_us(pid) - before) / requests, np.array(latencies_ns) / 1e3)


FIGURES: dict[str, Callable[[list[Round]], float]] = {
    "CPU": lambda rounds: float(np.mean([one.cpu_us for one in rounds])),
    "p50": lambda rounds: float(np.percentile([one.latencies_us for one in rounds], 50)),
    "p99": lambda rounds: float(np.percentile([one.latencies_us for one in rounds], 99)),
}


def interval(figure: Callable[[list[Round]], float], few: list[Round], many: list[Round]) -> tuple[float, float]:
    """The 95 % interval of the ratio."""
    ratios = []
    for places in np.random.default_rng(1).integers(len(few), size=(RESAMPLES, len(few))):
        ratios.append(figure([many[place] for place in places]) / figure([few[place] for place in places]))
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


@contextmanager
def arm(transport: str, fronts: int, idle_count: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A server's process and its client, beside idle connections."""
    make_idle, make_client = TRANSPORTS[transport]
    with ExitStack() as stack, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        grpc_port: int = probe.getsockname()[1]
        probe.close()
        pid, http_port = stack.enter_context(running(NATIVE, str(fronts), str(grpc_port)))
        stack.enter_context(connections_to(http_port, 1 + fronts))
        port = http_port if transport == "HTTP" else grpc_port
        for _ in range(idle_count):
            make_idle(stack.enter_context(connect(port)))
        send = make_client(stack.enter_context(connect(port)))
        one_round(pid, send, 200)
        yield pid, send


@pytest.mark.benchmark
@pytest.mark.timeout(500)
@pytest.mark.parametrize("fronts", [0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_idle_connections_cost_other_clients_little(transport: str, fronts: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with arm(transport, fronts, FEW) as few, arm(transport, fronts, MANY) as many:
            rounds: dict[int, list[Round]] = {few[0]: [], many[0]: []}
            for index in range(ROUNDS):
                for pid, send in [few, many][:: 1 if index % 2 else -1]:
                    rounds[pid].append(one_round(pid, send))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    lows = {}
    for name, figure in FIGURES.items():
        few_us, many_us = (figure(own) for own in rounds.values())
        lows[name], high = interval(figure, *rounds.values())
        sys.stdout.write(
            f"\n{transport}, fronts={fronts}, {name}: {few_us:.0f} µs with {FEW}, {many_us:.0f} µs with {MANY} idle; "
            f"ratio {many_us / few_us:.2f} ({lows[name]:.2f} to {high:.2f})"
        )
    assert lows["CPU"] <= MOST
    assert lows["p99"] <= MOST
