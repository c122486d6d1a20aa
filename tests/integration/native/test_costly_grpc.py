"""gRPC clients whose few bytes cost the server much: health and inference go on beside them, and memory stays bounded.

On a quiet machine health is answered within 0.1 s during each attack. The tests allow more, since others use the
machine as well; without the server's limits each attack delays health by a second or more.
"""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.native.conftest import Server
from tests.integration.native.health_probe import probed
from tests.integration.native.raw_client import MIB, check_well
from tests.integration.native.raw_grpc import DATA, END_HEADERS, END_STREAM, HEADERS, RawGrpc, block, frame, prefixed

INVALID_ARGUMENT = 3
BESIDE_BUDGET_BYTES = 256 * MIB


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two front ends"])
def server(request, tmp_path_factory, native_starter) -> Server:
    folder = tmp_path_factory.mktemp("costly")
    started: Server = native_starter(folder, "--engine", "null", "--fronts", str(request.param))
    with RawGrpc(started.grpc_port) as client:
        assert client.call(1, b"", "ServerReady").status == 0
    check_well(started)
    return started


@contextlib.contextmanager
def prompt_health(server: Server) -> Iterator[None]:
    """Health is answered in time during the `with` block, compared with how it was just before."""
    with probed(server.port) as before:
        time.sleep(0.5)
    with probed(server.port) as during:
        yield
    assert during.slowest_s < 0.5 + 10 * before.slowest_s, f"{during}; before: {before}"


@contextlib.contextmanager
def bounded_growth(server: Server, most_bytes: int) -> Iterator[None]:
    """All processes together never have this much more memory than before."""
    ended = threading.Event()

    def largest_bytes() -> int:
        largest = server.memory_bytes
        while not ended.wait(0.02):
            largest = max(largest, server.memory_bytes)
        return largest

    before = server.memory_bytes
    with ThreadPoolExecutor(1) as pool:
        largest = pool.submit(largest_bytes)
        try:
            yield
        finally:
            ended.set()
    assert (largest.result() - before) / MIB < most_bytes / MIB


def varint(value: int) -> bytes:
    """As protobuf writes a number, in five bytes."""
    return bytes([*(value >> 7 * place & 0x7F | 0x80 for place in range(4)), value >> 28])


def packed_zeros(count: int) -> bytes:
    """A ModelInferRequest with so many values of one byte, which become eight each."""
    contents = b"\x1a" + varint(count) + bytes(count)
    shape = varint(count)
    name, datatype = b"\x0a\x0cpixel_values", b"\x12\x05INT64"
    item = name + datatype + b"\x1a" + varint(len(shape)) + shape + b"\x2a" + varint(len(contents)) + contents
    model = b"openclip_vit_b32"
    return b"\x0a" + varint(len(model)) + model + b"\x2a" + varint(len(item)) + item


def test_packed_values_cost_no_more_than_their_bytes(server) -> None:
    """Six messages of 63 kB: 62 MiB each when inflated, and 7.1 GB together as the values that protobuf made."""
    packed = gzip.compress(packed_zeros(62 * MIB))
    assert len(packed) < 100_000

    def attack(_: int) -> int | None:
        with RawGrpc(server.grpc_port, timeout_s=60) as client:
            client.send(frame(HEADERS, END_HEADERS, 1, block(more=[("grpc-encoding", "gzip")])))
            client.send(frame(DATA, END_STREAM, 1, prefixed(packed, 1)))
            return client.answer(1).status

    most = 6 * 62 * MIB + BESIDE_BUDGET_BYTES
    with prompt_health(server), bounded_growth(server, most), ThreadPoolExecutor(6) as pool:
        assert set(pool.map(attack, range(6))) == {INVALID_ARGUMENT}
    check_well(server)
