"""Hostile gRPC clients: each is bounded or sent away, and others are served all the time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.integration.native.raw_client import MIB
from tests.integration.native.raw_grpc import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawGrpc,
    block,
    frame,
    prefixed,
    rows_message,
    settings,
)

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 1, 3, 6, 9, 11
RESOURCE_EXHAUSTED, UNAVAILABLE = 8, 14
MESSAGE = rows_message([1, 2, 3, 4])
HEAD = block()
ONE = (1).to_bytes(4, "big")
CANCELLED = (8).to_bytes(4, "big")
CALL = frame(HEADERS, END_HEADERS, 1, HEAD)


@pytest.fixture(scope="module")
def server(tmp_path_factory, native_starter):
    return native_starter(tmp_path_factory.mktemp("hostile"), "--engine", "null", "--read-timeout-s", "1")


def check_served(server) -> None:
    """A new client is served, whatever the others do."""
    with RawGrpc(server.grpc_port) as client:
        assert client.call(1, b"", "ServerReady").data[-1] == 1
    assert server.process.poll() is None


BROKEN = {
    "HTTP/1": (b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", PROTOCOL_ERROR),
    "TLS": (bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(100), PROTOCOL_ERROR),
    "no settings": (PREFACE + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "settings of 5 bytes": (PREFACE + frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "settings of a call": (PREFACE + frame(SETTINGS, 0, 1, b""), FRAME_SIZE_ERROR),
    "too large a window": (PREFACE + settings(window=2**31), FLOW_CONTROL_ERROR),
    "too small a frame": (PREFACE + settings(frame=1), PROTOCOL_ERROR),
}
BROKEN_LATER = {
    "DATA without a call": (frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
    "DATA of the connection": (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "DATA after the end": (CALL + frame(DATA, END_STREAM, 1, b"\0") * 2, None),
    "only padding": (CALL + frame(DATA, PADDED, 1, bytes([5])), PROTOCOL_ERROR),
    "no padding length": (CALL + frame(DATA, PADDED, 1), PROTOCOL_ERROR),
    "a header's padding": (frame(HEADERS, PADDED | END_HEADERS, 1, bytes([200]) + HEAD), PROTOCOL_ERROR),
    "an even call": (frame(HEADERS, END_HEADERS, 2, HEAD), PROTOCOL_ERROR),
    "a call of the connection": (frame(HEADERS, END_HEADERS, 0, HEAD), PROTOCOL_ERROR),
    "headers that are none": (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
    "headers cut off": (frame(HEADERS, END_HEADERS, 1, HEAD[:-3]), COMPRESSION_ERROR),
    "headers twice": (CALL + CALL, PROTOCOL_ERROR),
    "other frames inside a block": (frame(HEADERS, 0, 1, HEAD[:5]) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "a continuation of nothing": (frame(CONTINUATION, END_HEADERS, 1, HEAD), PROTOCOL_ERROR),
    "an empty continuation": (frame(HEADERS, 0, 1, HEAD[:5]) + frame(CONTINUATION, 0, 1), PROTOCOL_ERROR),
    "a ping of 7 bytes": (frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "a reset of 3 bytes": (CALL + frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    "a reset of no call": (frame(RST_STREAM, 0, 9, CANCELLED), PROTOCOL_ERROR),
    "a push": (frame(PUSH_PROMISE, END_HEADERS, 1, ONE + HEAD), PROTOCOL_ERROR),
    "a window that grows by 0": (frame(WINDOW_UPDATE, 0, 0, bytes(4)), PROTOCOL_ERROR),
    "too large a window": (frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
    "too large a window of a call": (CALL + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
    "a window of no call": (frame(WINDOW_UPDATE, 0, 9, ONE), PROTOCOL_ERROR),
    "huge frames of headers": (frame(HEADERS, END_HEADERS, 1, length=2**24 - 1), FRAME_SIZE_ERROR),
    "huge pings": (frame(PING, 0, 0, length=2**20), FRAME_SIZE_ERROR),
    "a continuation flood": (
        frame(HEADERS, 0, 1, HEAD) + frame(CONTINUATION, 0, 1, bytes([0, 1, 97, 1, 98]) * 3000) * 3,
        ENHANCE_YOUR_CALM,
    ),
    "a header bomb": (  # an entry of 3 KB, and 10,000 references to it
        frame(HEADERS, 0, 1, b"\x40\x01a\x7f\xb9\x16" + b"b" * 3000) + frame(CONTINUATION, 4, 1, b"\xbe" * 10_000),
        COMPRESSION_ERROR,
    ),
    "beyond the call's window": (
        CALL + frame(DATA, 0, 1, b"\0" + (9 * MIB).to_bytes(4, "big")) + frame(DATA, 0, 1, length=2**24 - 1),
        FLOW_CONTROL_ERROR,
    ),
    "empty frames": (CALL + frame(DATA, 0, 1) * 6000, ENHANCE_YOUR_CALM),
    "pings": (frame(PING, 0, 0, bytes(8)) * 6000, ENHANCE_YOUR_CALM),
    "settings": (frame(SETTINGS) * 6000, ENHANCE_YOUR_CALM),
    "33 settings": (frame(SETTINGS, content=bytes([0, 3, 0, 0, 0, 9]) * 33), ENHANCE_YOUR_CALM),
    "priorities": (frame(PRIORITY, 0, 1, bytes(5)) * 6000, ENHANCE_YOUR_CALM),
    "windows": (frame(WINDOW_UPDATE, 0, 0, ONE) * 6000, ENHANCE_YOUR_CALM),
    "unknown frames": (frame(99) * 6000, ENHANCE_YOUR_CALM),
    "bytes of a message one by one": (CALL + frame(DATA, 0, 1, b"\0") * 6000, ENHANCE_YOUR_CALM),
}


@pytest.mark.parametrize("name", BROKEN)
def test_who_does_not_speak_http2_is_sent_away(server, name) -> None:
    data, code = BROKEN[name]
    with RawGrpc(server.grpc_port, greet=False) as client:
        client.send(data)
        client.read_until_closed()
        assert client.goaway == code
    check_served(server)


@pytest.mark.parametrize("name", BROKEN_LATER)
def test_who_breaks_http2_is_sent_away(server, name) -> None:
    data, code = BROKEN_LATER[name]
    with RawGrpc(server.grpc_port) as client:
        client.send(data)
        if code is None:
            assert client.answer(1).status is not None
        else:
            client.read_until_closed()
            assert client.goaway in (code, None)  # None: the client's own bytes were still under way
    check_served(server)


def test_rapid_resets_end_the_connection(server) -> None:
    with RawGrpc(server.grpc_port) as client:
        for stream in range(1, 20_000, 2):
            client.send(frame(HEADERS, END_HEADERS, stream, HEAD), frame(RST_STREAM, 0, stream, CANCELLED))
            if client.closed:
                break
        client.read_until_closed()
        assert client.goaway in (ENHANCE_YOUR_CALM, None)
    check_served(server)


def test_more_calls_than_are_allowed_are_refused_and_the_others_go_on(server) -> None:
    with RawGrpc(server.grpc_port) as client:
        client.send(*[frame(HEADERS, END_HEADERS, stream, HEAD) for stream in range(1, 1201, 2)])
        for stream in range(1025, 1201, 2):
            assert client.answer(stream).reset == 7
        client.send(frame(DATA, END_STREAM, 1, prefixed(b"\xff")))
        assert client.answer(1).status == 3
        check_served(server)
        assert client.answer(3).status == UNAVAILABLE  # its message has not come within the read timeout


def test_who_does_not_take_its_answers_is_cut_off(server) -> None:
    """By HTTP/2's window, and by the socket's."""
    with RawGrpc(server.grpc_port, window=0) as stalled, RawGrpc(server.grpc_port) as deaf:
        stalled.open(1, "ServerMetadata")
        stalled.send(frame(DATA, END_STREAM, 1, prefixed(b"")))
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.widen(0, 2**31 - 1 - 65535)
        deaf.send(settings(window=2**31 - 1))
        deaf.socket.settimeout(0.5)
        with contextlib.suppress(TimeoutError):  # the server stops reading
            for stream in range(1, 100_000, 2):
                deaf.open(stream, "ModelMetadata")
                deaf.send(frame(DATA, END_STREAM, stream, prefixed(b"\x0a\x02no")))
                if deaf.closed:
                    break
        check_served(server)
        assert stalled.answer(1).reset == 8
    check_served(server)


@contextlib.contextmanager
def growth(server, most_mib: float) -> Iterator[None]:
    before = server.memory_bytes
    yield
    assert (server.memory_bytes - before) / MIB < most_mib


def test_announced_messages_hold_nothing(native) -> None:
    """Ten thousand messages of 60 MiB are announced by six bytes each, where all may have 256 MiB."""
    server = native("--max-held-bytes", str(256 * MIB), "--read-timeout-s", "2", grpc=True)
    server.wait_ready()
    check_served(server)
    with growth(server, 160), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawGrpc(server.grpc_port)) for _ in range(20)]
        for client in clients:
            for stream in range(1, 1001, 2):
                client.send(frame(HEADERS, END_HEADERS, stream, HEAD))
                client.send(frame(DATA, 0, stream, prefixed(b"")[:1] + (60 * MIB).to_bytes(4, "big") + b"x"))
        check_served(server)
        for client in clients:
            assert client.answer(999).status == UNAVAILABLE


def test_half_messages_of_streams_that_end_give_their_memory_back(controlled, tmp_path) -> None:
    (tmp_path / "wide").touch()
    limits = ("--max-held-bytes", str(64 * MIB), "--max-body-bytes", str(16 * MIB))
    server = controlled("--max-queue-delay-us", "0", *limits, grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    message = prefixed(rows_message([1.0] * (3 * MIB // 2)))  # 6 MiB
    for way in ("reset", "closed"):
        for _ in range(12):
            with RawGrpc(server.grpc_port) as client:
                client.open(1)
                client.send(frame(DATA, 0, 1, message[: 4 * MIB]))
                if way == "reset":
                    client.send(frame(RST_STREAM, 0, 1, CANCELLED))
                    assert client.call(3, b"", "ServerLive").status == 0
        with RawGrpc(server.grpc_port) as client:
            client.open(1)
            client.send(frame(DATA, END_STREAM, 1, message))
            assert client.answer(1).rows == [1.0] * 4
    # Two at once, which no bytes that were forgotten could stand beside.
    with RawGrpc(server.grpc_port) as client:
        for stream in range(1, 13, 2):
            client.open(stream)
            client.send(frame(DATA, END_STREAM, stream, message))
        assert {client.answer(stream).status for stream in range(1, 13, 2)} == {0}
    # A client that closes may take its own bytes back, so that the server never sees the call.
    assert 12 <= server.metric("abserve_native_client_disconnects_total") <= 24


def test_messages_without_end_on_a_stream_are_bounded(server) -> None:
    """Empty messages, faster than they are answered, while the client takes no answer."""
    with growth(server, 64), RawGrpc(server.grpc_port, window=0) as client:
        client.open(1, "ModelStreamInfer")
        client.send(frame(DATA, 0, 1, prefixed(b"") * 100_000))
        while client.answers.get(1) is None or client.answers[1].reset is None:
            client.read()  # it is ended since it does not read
            if client.closed:
                break
    check_served(server)


frames = st.builds(
    frame,
    st.integers(0, 12),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 3, 5, 2]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([HEAD, block("ModelStreamInfer"), prefixed(MESSAGE), prefixed(b""), bytes(4), bytes(8), ONE]),
    ),
)


@given(st.lists(st.one_of(frames, st.just(CALL), st.binary(max_size=30)), max_size=30))
@hypothesis_settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_frames_leave_others_served(server, sent) -> None:
    with RawGrpc(server.grpc_port) as client:
        client.send(*sent)
        with contextlib.suppress(OSError):
            client.socket.shutdown(socket.SHUT_WR)
            client.read_until_closed()
    check_served(server)
