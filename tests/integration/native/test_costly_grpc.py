"""gRPC clients whose few bytes cost the server much: health and inference go on beside them, and memory stays bounded.

On a quiet machine health is answered within 0.1 s during each attack. The tests allow more, since others use the
machine as well; without the server's limits each attack delays health by a second or more.
"""

from __future__ import annotations

import contextlib
import gzip
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.grpc import service_pb2

from tests.again import again
from tests.integration.native.conftest import Server
from tests.integration.native.health_probe import probed
from tests.integration.native.raw_client import MIB, PIXELS, check_well, connected, head
from tests.integration.native.raw_grpc import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MOST_WINDOW,
    SETTINGS,
    RawGrpc,
    block,
    frame,
    prefixed,
)

INVALID_ARGUMENT = 3
CANCEL = 8
BESIDE_BUDGET_BYTES = 256 * MIB


@pytest.fixture(
    scope="module", params=[0, pytest.param(2, marks=pytest.mark.slow)], ids=["one process", "two front ends"]
)
def server(request, tmp_path_factory, native_starter) -> Server:
    folder = tmp_path_factory.mktemp("costly")
    started: Server = native_starter(folder, "--engine", "null", "--fronts", str(request.param))
    with RawGrpc(started.grpc_port) as client:
        assert client.call(1, b"", "ServerReady").status == 0
    check_well(started)
    return started


@pytest.fixture(
    scope="module", params=[0, pytest.param(2, marks=pytest.mark.slow)], ids=["one process", "two front ends"]
)
def small_server(request, tmp_path_factory, native_starter) -> Server:
    """One that may hold 256 MiB, so that a size class of large requests has the least number of slots."""
    folder = tmp_path_factory.mktemp("small")
    options = ("--engine", "null", "--fronts", str(request.param), "--max-held-bytes", str(256 * MIB))
    started: Server = native_starter(folder, *options)
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


@again
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


IMAGE_BYTES = PIXELS.nbytes


def image_message() -> bytes:
    """An image for the model, as a ModelInferRequest."""
    request = service_pb2.ModelInferRequest(model_name="openclip_vit_b32", raw_input_contents=[PIXELS.tobytes()])
    request.inputs.add(name="pixel_values", datatype="FP32", shape=[1, 3, 224, 224])
    serialised: bytes = request.SerializeToString()
    return serialised


def announcing_calls(server: Server, stack: contextlib.ExitStack) -> int:
    """Calls whose messages are announced and never come, more than a size class has slots; returns the bytes sent."""
    call = block()
    prefix = b"\0" + (IMAGE_BYTES + 200).to_bytes(4, "big")
    sent = 0
    for _ in range(3 * fronts_of(server)):
        client = stack.enter_context(RawGrpc(server.grpc_port))
        frames = [
            frame(HEADERS, END_HEADERS, stream, call) + frame(DATA, 0, stream, prefix) for stream in range(1, 1023, 2)
        ]
        client.send(*frames)
        sent += sum(map(len, frames))
    return sent


def announcing_requests(server: Server, stack: contextlib.ExitStack) -> int:
    """The same over HTTP."""
    announced = head(f"Content-Length: {IMAGE_BYTES + 200}") + b"{"
    count = 1100 * fronts_of(server)
    for _ in range(count):
        stack.enter_context(connected(server)).sendall(announced)
    return count * len(announced)


def fronts_of(server: Server) -> int:
    """The processes that receive: without the supervisor and the engine's, if there are any beside the first."""
    return max(1, len(server.processes) - 2)


@pytest.mark.parametrize("announce", [announcing_calls, announcing_requests])
def test_announced_messages_refuse_nobody_else(small_server, announce) -> None:
    """Some hundred kB refused every inference of their size for 30 s, since each announcement has a slot."""
    message = image_message()
    with contextlib.ExitStack() as stack:
        assert announce(small_server, stack) < MIB
        time.sleep(0.3)  # else they may arrive after the others
        for _ in range(10):
            with RawGrpc(small_server.grpc_port) as client:
                client.open(1)
                client.send(frame(DATA, END_STREAM, 1, prefixed(message)))
                assert client.answer(1).status == 0
            check_well(small_server)


ATTACK_S = 1.0


class Flood:
    """A connection that sends frames for some seconds as fast as they are taken, or until it is sent away."""

    def __init__(self, server: Server) -> None:
        self._client = RawGrpc(server.grpc_port, window=MOST_WINDOW, timeout_s=60)
        self._client.widen(0, MOST_WINDOW - 65535)
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._stream = -1
        self._number = 0
        self.open_calls = threading.Semaphore(500)

    def run(self, frames: Callable[[Flood], bytes]) -> None:
        """Send what `frames` gives again and again."""
        ends = time.monotonic() + ATTACK_S
        while time.monotonic() < ends and not self._client.closed:
            self._client.send(frames(self))
        self._ended.set()
        self._client.socket.close()
        self._reader.join()

    def open(self, headers: bytes, message: bytes | None = None, *, ends: bool = True) -> bytes:
        """Open a call, and send its message."""
        self._stream += 2
        if message is None:
            return frame(HEADERS, END_HEADERS | (END_STREAM if ends else 0), self._stream, headers)
        self.open_calls.acquire(timeout=1)
        whole = frame(DATA, END_STREAM, self._stream, prefixed(message))
        return frame(HEADERS, END_HEADERS, self._stream, headers) + whole

    def number(self) -> int:
        """Another number each time."""
        self._number += 1
        return self._number

    def _read(self) -> None:
        """Count the ends of calls, which are the only frames of HEADERS that end something."""
        client = self._client
        answered = 0
        while not client.closed and not self._ended.is_set():
            with contextlib.suppress(OSError):
                client.read()
            ended = sum(answer.ended for answer in client.answers.values())
            for _ in range(ended - answered):
                self.open_calls.release()
            answered = ended


def many_windows(flood: Flood) -> bytes:
    """5,400 window sizes in one frame, each for 500 open calls."""
    call = b"" if flood.number() > 1 else b"".join(flood.open(block(), ends=False) for _ in range(500))
    return call + frame(SETTINGS, content=struct.pack(">HIHI", 4, 65535, 4, 65536) * 2700)


def many_fields(flood: Flood) -> bytes:
    """Header blocks of 700 fields with one byte each, which differ, so that each is decoded."""
    number = flood.number()
    head = bytes(0x82 + (number >> 3 * place & 7) for place in range(8))
    return flood.open(head + b"\x82" * 700)


def many_table_sizes(flood: Flood) -> bytes:
    """Header blocks that change the size of their table 30,000 times."""
    return flood.open(b"\x20" * (30_000 - flood.number()) + block())


def statistics_calls(flood: Flood) -> bytes:
    return flood.open(block("ModelStatistics"), b"")


def metadata_calls(flood: Flood) -> bytes:
    return flood.open(block("ServerMetadata"), b"")


@pytest.mark.parametrize("frames", [many_windows, many_fields, many_table_sizes, statistics_calls, metadata_calls])
@again
def test_frames_that_cost_much_keep_nobody_waiting(server, frames) -> None:
    count = 4 * fronts_of(server)
    floods = [Flood(server) for _ in range(count)]
    with prompt_health(server), ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(flood.run, frames) for flood in floods]:
            done.result()
    check_well(server)


def test_remembered_header_blocks_take_little_and_are_forgotten(server) -> None:
    """90 clients sent 64 blocks of 31 kB each, of which the server kept 184 MB when they had left."""
    before = server.memory_bytes
    with contextlib.ExitStack() as stack, bounded_growth(server, 64 * MIB):
        for number in range(90):
            client = stack.enter_context(RawGrpc(server.grpc_port))
            for stream in range(1, 129, 2):
                headers = block(more=[("x", f"{number:04}{stream:04}" + "y" * 31_000)])
                client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, headers))
            with contextlib.suppress(OSError):
                while not client.closed and 127 not in client.answers:
                    client.read()
    check_well(server)
    assert server.memory_bytes - before < 32 * MIB


@again
def test_messages_that_wait_for_unread_answers_are_bounded_per_connection(server) -> None:
    """Two connections with 250 messages of one byte on each of 511 streams, 1.6 MB in all, took 300 MiB."""
    call, messages = block("ModelStreamInfer"), prefixed(b"\x0a") * 250
    count = 2 * fronts_of(server)
    with contextlib.ExitStack() as stack, bounded_growth(server, count * 32 * MIB), prompt_health(server):
        clients = [stack.enter_context(RawGrpc(server.grpc_port, window=0)) for _ in range(count)]
        for client in clients:
            for stream in range(1, 1023, 2):
                client.send(frame(HEADERS, END_HEADERS, stream, call), frame(DATA, 0, stream, messages))
        check_well(server)
        assert {client.answer(1021).reset for client in clients} == {CANCEL}
    check_well(server)
