"""gRPC by hand-made HTTP/2 frames: what the server must accept in any form, and how it answers."""

from __future__ import annotations

import gzip
import signal
import zlib

import pytest
from tritonclient.grpc import service_pb2

from tests.integration.native.conftest import Server
from tests.integration.native.raw_grpc import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    WITH_PRIORITY,
    RawGrpc,
    block,
    frame,
    prefixed,
    rows_message,
    settings,
)

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 3, 4, 8, 12, 13, 14
MESSAGE = rows_message([1, 2, 3, 4])
PENDING = "abserve_native_pending_requests"


@pytest.fixture
def server(open_controlled) -> Server:
    return open_controlled


@pytest.fixture
def own_server(controlled) -> Server:
    """One whose gate `infer` a test may close, or that it may end."""
    server: Server = controlled("--max-queue-delay-us", "0", grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    return server


@pytest.fixture
def wide(controlled, tmp_path) -> Server:
    """A server that takes rows of any size."""
    (tmp_path / "wide").touch()
    server = controlled("--max-queue-delay-us", "0", grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    return server


def test_a_message_may_come_in_any_pieces(server) -> None:
    head, message = block(), prefixed(MESSAGE)
    with RawGrpc(server.grpc_port) as client:
        whole = frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, END_STREAM, 1, message)
        for position in range(len(whole)):
            client.send(whole[position : position + 1])
        assert client.answer(1).rows == [1, 2, 3, 4]

        client.send(frame(HEADERS, END_HEADERS, 3, head))
        for byte in message:
            client.send(frame(DATA, 0, 3, bytes([byte])))
        client.send(frame(DATA, END_STREAM, 3))
        assert client.answer(3).rows == [1, 2, 3, 4]

        padded = bytes([7]) + bytes(5) + head[:20] + bytes(7)
        client.send(frame(HEADERS, PADDED | WITH_PRIORITY, 5, padded), frame(CONTINUATION, 0, 5, head[20:30]))
        client.send(frame(CONTINUATION, END_HEADERS, 5, head[30:]), frame(PRIORITY, 0, 5, bytes(5)), frame(200, 3, 5))
        client.send(frame(DATA, PADDED, 5, bytes([200]) + message[:30] + bytes(200)))
        client.send(frame(DATA, PADDED | END_STREAM, 5, bytes([0]) + message[30:]))
        assert client.answer(5).rows == [1, 2, 3, 4]


@pytest.mark.parametrize("frame_bytes", [9, 100, 16384, 2**20])
def test_large_messages_arrive_whole_beside_each_other(wide, frame_bytes) -> None:
    """Frames of two calls alternate, so that the bytes of both messages and the frames' heads mix in every read."""
    values = 1000 if frame_bytes < 100 else 400_000
    messages = {stream: prefixed(rows_message([stream, *range(3), *[0.5] * values])) for stream in (1, 3)}
    with RawGrpc(wide.grpc_port) as client:
        for stream in messages:
            client.open(stream)
        rest = dict(messages)
        while any(rest.values()):
            for stream, data in rest.items():
                if data:
                    rest[stream] = data[frame_bytes:]
                    end = 0 if rest[stream] else END_STREAM
                    client.send(frame(DATA, end, stream, data[:frame_bytes]))
        for stream in messages:
            assert client.answer(stream).rows[:4] == [stream, 0, 1, 2]


def test_repeated_messages_keep_their_own_values(server) -> None:
    with RawGrpc(server.grpc_port) as client:
        for number in range(20):
            values = [number + 0.5, *[0.0] * 3]
            assert client.call(4 * number + 1, rows_message(values)).rows == values
            assert client.call(4 * number + 3, rows_message(values, id="x" * number)).rows == values


def test_answers_wait_for_the_client_s_windows(server) -> None:
    with RawGrpc(server.grpc_port, window=0) as client:
        client.open(1)
        client.send(frame(DATA, END_STREAM, 1, prefixed(MESSAGE)))
        while not client.answers.get(1) or not client.answers[1].headers:
            client.read()
        assert client.answers[1].data == b""
        client.widen(1, 10)
        while len(client.answers[1].data) < 10:
            client.read()
        assert not client.answers[1].ended
        client.send(settings(window=1000))
        assert client.answer(1).rows == [1, 2, 3, 4]


def test_a_stream_goes_on_while_its_answers_are_taken(server) -> None:
    """More messages than the server keeps at once, of which many are sent before the first answer is read."""
    count = 600
    with RawGrpc(server.grpc_port, window=2**20) as client:
        client.widen(0, 2**20)
        client.open(1, "ModelStreamInfer")
        for value in range(count):
            client.send(
                frame(DATA, END_STREAM if value == count - 1 else 0, 1, prefixed(rows_message([value, 0, 0, 0])))
            )
        answer = client.answer(1)
    assert answer.status == 0
    data, seen = answer.data, []
    while data:
        size = int.from_bytes(data[1:5], "big")
        response = service_pb2.ModelStreamInferResponse.FromString(data[5 : 5 + size]).infer_response
        assert response.parameters["triton_final_response"].bool_param
        seen.append(int.from_bytes(response.raw_output_contents[0][:4], "little"))
        data = data[5 + size :]
    assert len(seen) == count
    assert len(set(seen)) == count


def test_all_messages_of_one_last_frame_are_answered(server) -> None:
    """The server answers the first ones before it has used the frame's rest."""
    count = 300
    with RawGrpc(server.grpc_port, window=2**20) as client:
        client.widen(0, 2**20)
        client.open(1, "ModelStreamInfer")
        client.send(frame(DATA, END_STREAM, 1, b"".join(prefixed(b"\x0a\x02no") for _ in range(count))))
        data = client.answer(1).data
        assert data.count(b"unknown model: 'no'") == count


@pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_messages_are_read(server, name, compress) -> None:
    with RawGrpc(server.grpc_port) as client:
        for stream, method, message in ((1, "ModelInfer", MESSAGE), (3, "ServerLive", b"")):
            client.send(frame(HEADERS, END_HEADERS, stream, block(method, [("grpc-encoding", name)])))
            client.send(frame(DATA, END_STREAM, stream, prefixed(compress(message), 1)))
            assert client.answer(stream).status == 0
        client.send(frame(HEADERS, END_HEADERS, 5, block(more=[("grpc-encoding", name)])))
        client.send(frame(DATA, END_STREAM, 5, prefixed(b"no such thing", 1)))
        assert client.answer(5).status == INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (block("NoSuchMethod"), {"grpc-status": str(UNIMPLEMENTED)}),
        (block(path="/other.Service/ModelInfer"), {"grpc-status": str(UNIMPLEMENTED)}),
        (block(more=[("grpc-encoding", "snappy")]), {"grpc-status": str(UNIMPLEMENTED)}),
        (block(more=[("grpc-timeout", "soon")]), {"grpc-status": str(INTERNAL)}),
        (block(more=[("content-type", "text/html")]), {":status": "415"}),
        (block(method="GET"), {":status": "405"}),
        (block(more=[("x", "y" * 20_000)]), {"grpc-status": str(RESOURCE_EXHAUSTED)}),
    ],
)
def test_calls_that_cannot_be_carried_out_end_at_their_headers(server, head, expected) -> None:
    with RawGrpc(server.grpc_port) as client:
        client.send(frame(HEADERS, END_HEADERS, 1, head))
        answer = client.answer(1)
        assert expected.items() <= answer.headers.items()
        client.send(frame(DATA, END_STREAM, 1, prefixed(MESSAGE)))  # which was under way
        assert client.call(3, MESSAGE).rows == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", INVALID_ARGUMENT),
        (b"\0\0", INVALID_ARGUMENT),
        (prefixed(MESSAGE)[:-1], INVALID_ARGUMENT),
        (prefixed(MESSAGE, 1), INTERNAL),
        (prefixed(MESSAGE, 9), INTERNAL),
        (b"\0\xff\xff\xff\xff", RESOURCE_EXHAUSTED),
    ],
)
def test_messages_that_are_none_end_their_call(server, data, status) -> None:
    with RawGrpc(server.grpc_port) as client:
        client.open(1)
        client.send(frame(DATA, END_STREAM, 1, data))
        assert client.answer(1).status == status
        assert client.call(3, MESSAGE).rows == [1, 2, 3, 4]


def test_an_error_s_words_arrive_in_ascii(server) -> None:
    request = service_pb2.ModelInferRequest(model_name="mödel % 100\n")
    with RawGrpc(server.grpc_port) as client:
        details = client.call(1, request.SerializeToString()).headers["grpc-message"]
        assert details.isascii()
        assert "m%C3%B6del %25 100" in details


def test_a_ping_is_answered_and_an_acknowledged_one_is_not(server) -> None:
    with RawGrpc(server.grpc_port) as client:
        client.send(frame(PING, 1, 0, b"answered"), frame(PING, 0, 0, b"question"))
        while not client.pings:
            client.read()
        assert client.pings == [b"question"]


def test_a_deadline_that_passes_in_the_queue_ends_the_call(own_server) -> None:
    with RawGrpc(own_server.grpc_port) as client:
        assert client.call(1, MESSAGE).rows == [1, 2, 3, 4]  # the next ones need no parsing
        (own_server.folder / "infer").unlink()
        (own_server.folder / "infer-reached").unlink()
        client.open(3)
        client.send(frame(DATA, END_STREAM, 3, prefixed(MESSAGE)))
        own_server.wait_until(lambda: (own_server.folder / "infer-reached").exists(), "the engine is busy")
        client.send(frame(HEADERS, END_HEADERS, 5, block(more=[("grpc-timeout", "100m")])))
        client.send(frame(DATA, END_STREAM, 5, prefixed(MESSAGE)))
        assert client.answer(5).status == DEADLINE_EXCEEDED
        assert own_server.metric(PENDING) == 0
        assert own_server.metric('abserve_native_requests_failure_total{model="rows",reason="expired"') == 1
        own_server.open("infer")
        assert client.answer(3).rows == [1, 2, 3, 4]


def test_a_call_that_is_reset_leaves_the_queue(own_server) -> None:
    with RawGrpc(own_server.grpc_port) as client:
        assert client.call(1, MESSAGE).rows == [1, 2, 3, 4]
        (own_server.folder / "infer").unlink()
        (own_server.folder / "infer-reached").unlink()
        client.open(3)
        client.send(frame(DATA, END_STREAM, 3, prefixed(MESSAGE)))
        own_server.wait_until(lambda: (own_server.folder / "infer-reached").exists(), "the engine is busy")
        client.open(5)
        client.send(frame(DATA, END_STREAM, 5, prefixed(MESSAGE)))
        own_server.wait_until(lambda: own_server.metric(PENDING) == 1, "it waits")
        client.send(frame(RST_STREAM, 0, 5, (8).to_bytes(4, "big")))
        own_server.wait_until(lambda: own_server.metric(PENDING) == 0, "it is withdrawn")
        assert own_server.metric("abserve_native_client_disconnects_total") == 1
        own_server.open("infer")
        assert client.answer(3).rows == [1, 2, 3, 4]
    assert own_server.model_stats()["inference_count"] == 2


def test_at_the_end_calls_are_finished_and_new_ones_refused(own_server) -> None:
    with RawGrpc(own_server.grpc_port) as client, RawGrpc(own_server.grpc_port) as idle:
        assert client.call(1, MESSAGE).rows == [1, 2, 3, 4]
        (own_server.folder / "infer").unlink()
        (own_server.folder / "infer-reached").unlink()
        client.open(3)
        client.send(frame(DATA, END_STREAM, 3, prefixed(MESSAGE)))
        client.open(5, "ModelStreamInfer")
        own_server.wait_until(lambda: (own_server.folder / "infer-reached").exists(), "the engine is busy")
        own_server.process.send_signal(signal.SIGTERM)
        idle.read_until_closed()
        assert idle.goaway == 0
        while client.goaway is None:
            client.read()
        assert client.answer(5).status == UNAVAILABLE  # a stream that waits for its client
        client.open(7)
        assert client.answer(7).reset == 7
        own_server.open("infer")
        assert client.answer(3).rows == [1, 2, 3, 4]
        client.read_until_closed()
    assert own_server.process.wait(60) == 0
