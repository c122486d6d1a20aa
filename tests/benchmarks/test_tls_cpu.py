"""What TLS costs the native server: CPU time per request with and without it.

    python -m pytest tests/benchmarks/test_tls_cpu.py -m benchmark -s

Two servers of one process, one with TLS (a P-256 certificate), are asked in turn in the same rounds by the same client,
which sends one request after the other: over HTTP and gRPC, on a kept connection and on a new one for each. The figure
is the time of test_native_cpu.py; the ratio, TLS ÷ plain, is the median over rounds, with the quartiles. With
`TLS_FIGURES=FILE` the figures are written as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns

import pytest

from loadgen.client.grpc import Http2Connection
from loadgen.client.tls import AlpnProtocol, tls_context, wrapped_socket
from loadgen.launch.embedded import make_certificate
from loadgen.records.run import Access
from tests.benchmarks.test_grpc_cpu import HEAD, measured, message_bytes
from tests.benchmarks.test_native_cpu import NATIVE, connect, receive_answer, request_bytes, running, wait_ready

ROUNDS, REQUESTS = 41, 50
PAYLOADS = (64, 150_528)
MOST_KEPT, MOST_NEW = 2.5, 12.0
"""TLS ÷ plain on a kept and on a new connection; see the table in docs/results/measured/native-server.md."""
Ask = Callable[[], None]


@contextmanager
def server(pem: str | None) -> Iterator[Callable[[str, int, bool], Ask]]:
    """Makes what asks once over "http" or "grpc", with so many bytes, on a kept or on a new connection."""
    os.environ.pop("ABSERVE_NATIVE_TLS_CERTIFICATE", None)
    if pem is not None:
        os.environ["ABSERVE_NATIVE_TLS_CERTIFICATE"] = pem
    with ExitStack() as stack, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        grpc_port: int = probe.getsockname()[1]
        probe.close()
        pid, port = stack.enter_context(running(NATIVE, "0", str(grpc_port)))

        def open_one(protocol: str) -> socket.socket:
            alpn: AlpnProtocol = "h2" if protocol == "grpc" else "http/1.1"
            connection = connect(grpc_port if protocol == "grpc" else port)
            if pem is None:
                return connection
            return wrapped_socket(connection, tls_context(Access(ca=pem), alpn), "localhost", alpn)

        with open_one("http") as first:
            wait_ready(first)

        def asking(protocol: str, payload: int, kept: bool) -> Ask:
            content = message_bytes(payload) if protocol == "grpc" else request_bytes(payload)

            def on(connection: socket.socket) -> Ask:
                if protocol == "http":

                    def ask() -> None:
                        connection.sendall(content)
                        receive_answer(connection)

                    return ask
                http2 = Http2Connection(connection, timeout_s=30, most_bytes=2**20)

                def call() -> None:
                    http2.request(HEAD, [content], perf_counter_ns())
                    while not http2.ended:
                        http2.receive()
                    assert http2.fields[b"grpc-status"] == b"0"

                return call

            if kept:
                return on(stack.enter_context(open_one(protocol)))

            def anew() -> None:
                with open_one(protocol) as connection:
                    on(connection)()

            return anew

        asking.pid = pid  # type: ignore[attr-defined]
        yield asking


@pytest.mark.benchmark
@pytest.mark.timeout(540)
def test_what_tls_costs_per_request(tmp_path: Path) -> None:
    rows = []
    with server(None) as plain, server(make_certificate(tmp_path, "tls", None)) as secured:
        for protocol in ("http", "grpc"):
            for kept in (True, False):
                for payload in PAYLOADS:
                    asks = [(each.pid, each(protocol, payload, kept)) for each in (plain, secured)]  # type: ignore[attr-defined]
                    rounds = []
                    for number in range(ROUNDS + 1):  # the first warms up
                        order = (0, 1) if number % 2 else (1, 0)
                        figures = {arm: measured(asks[arm][0], REQUESTS, asks[arm][1], 1) for arm in order}
                        rounds.append((figures[0], figures[1]))
                    del rounds[0]
                    plain_us, tls_us = (round(statistics.median(arm), 1) for arm in zip(*rounds, strict=True))
                    low, ratio, high = (round(each, 3) for each in statistics.quantiles(tls / us for us, tls in rounds))
                    row = {"protocol": protocol, "kept": kept, "bytes": payload, "plain_us": plain_us}
                    rows.append(row | {"tls_us": tls_us, "ratio": ratio, "low": low, "high": high})
                    sys.stdout.write(f"\n{rows[-1]}")
    if "TLS_FIGURES" in os.environ:
        Path(os.environ["TLS_FIGURES"]).write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        assert float(row["ratio"]) <= (MOST_KEPT if row["kept"] else MOST_NEW), row
