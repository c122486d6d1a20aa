"""What the recorder reads in the bytes that pass, however they are cut."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from loadgen.client.grpc import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFIX,
    RST_STREAM,
    SETTINGS,
    frame_head,
    header_block,
)
from loadgen.client.grpc_messages import ModelInferRequest
from loadgen.recorder.grpc import GrpcTap
from loadgen.recorder.http import HttpTap
from loadgen.recorder.recorder import Recorder, described
from loadgen.records.traffic import RecordedTraffic, TrafficRecording, TrafficWriter

HEAD = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}], "parameters": {"priority": 4}}
).encode()
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
Piece = tuple[str, bytes]


class Recorded:
    """A recording in a folder; `through` sends pieces through a new tap, cut at random places."""

    def __init__(self, folder: Path, **more: object) -> None:
        self.folder = folder
        bounds = {name: more.pop(name) for name in ("requests", "minutes") if name in more}
        self.writer = TrafficWriter(folder, TrafficRecording(**{"started_at": "2026-11-29T00:00:00Z", **more}))  # type: ignore[arg-type]
        self.recorder = Recorder(self.writer, **bounds)  # type: ignore[arg-type]

    def through(self, make: Callable[[Recorder], HttpTap | GrpcTap], pieces: Sequence[Piece], seed: int = 0) -> None:
        tap, dice = make(self.recorder), random.Random(seed)
        for number, (way, data) in enumerate(pieces):
            cuts = sorted(dice.sample(range(1, len(data)), min(len(data) - 1, dice.choice([0, 1, 5, 50]))))
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                getattr(tap, way)(data[start:end], self.recorder.started_ns + 1000 * number)
        tap.closed(self.recorder.started_ns + 1000 * len(pieces))

    def read(self) -> RecordedTraffic:
        assert self.recorder.stop("the test has ended", wait_s=60.0)
        return RecordedTraffic(self.folder)


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "traffic", answers=True)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(path: str, *chunks: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x;a=b\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nT: 1\r\n\r\n"


@pytest.mark.parametrize("seed", range(20))
def test_requests_of_one_connection(recorded: Recorded, seed: int) -> None:
    binary = f"Inference-Header-Content-Length: {len(HEAD)}"
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    recorded.through(
        HttpTap,
        [
            ("sent", b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"),
            ("received", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
            ("sent", post("/v2/models/a%2Fb/versions/3/infer?key=secret", HEAD + bytes(8), binary, "Cookie: c=1")),
            ("received", b"HTTP/1.1 100 Continue\r\n\r\n" + OK),
            ("sent", b"HEAD /v2 HTTP/1.1\r\nHost: x\r\n\r\n"),
            ("received", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
            ("sent", chunked("/v1/chat/completions", b'{"model": "gpt",', b' "messages": []}')),
            ("received", stream),
            ("sent", post("/base/v1/completions", b'{"model": "gpt"}', "Authorization: Bearer secret") * 2),
            ("received", b"HTTP/1.1 503 Busy\r\nContent-Length: 1\r\n\r\nx" + OK),
        ],
        seed,
    )
    read = recorded.read()
    infer, chat, busy, good = read.requests
    assert (infer.model, infer.version, infer.priority, infer.status) == ("a/b", "3", 4, 200)
    assert infer.route == "/v2/models/a%2Fb/versions/3/infer"
    assert [(each.name, each.datatype, each.shape) for each in infer.tensors] == [("x", "FP32", (1, 2))]
    assert infer.headers == {"inference-header-content-length": str(len(HEAD))}
    assert (infer.at_ns, infer.first_byte_ns, infer.end_ns) == (2000, 3000, 3000)
    assert (read.content(infer), read.answer(infer)) == (HEAD + bytes(8), b"{}")
    assert (chat.model, read.content(chat), read.answer(chat)) == ("gpt", b'{"model": "gpt", "messages": []}', b"abcde")
    assert [(each.status, each.model) for each in (busy, good)] == [(503, "gpt"), (200, "gpt")]
    stored = b"".join(path.read_bytes() for path in recorded.folder.rglob("*") if path.is_file())
    assert b"secret" not in stored
    assert b"c=1" not in stored


def test_an_answer_without_a_length_ends_with_its_connection(recorded: Recorded) -> None:
    recorded.through(
        HttpTap,
        [
            ("sent", post("/v2/models/m/generate_stream", gzip.compress(b"{}"), "Content-Encoding: gzip")),
            ("received", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n"),
            ("received", b"data: 2\n\n"),
        ],
    )  # fmt: skip
    (request,) = recorded.read().requests
    assert (request.first_byte_ns, request.end_ns, request.answer_bytes) == (1000, 3000, 18)
    assert request.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"])
def test_an_answer_that_breaks_off_has_no_end(recorded: Recorded, answer: bytes) -> None:
    pieces = [("sent", post("/v1/completions", b"{}"))] + ([("received", answer)] if answer else [])
    recorded.through(HttpTap, pieces)
    (request,) = recorded.read().requests
    assert (request.end_ns, request.answer) == (None, None)
    assert request.status == (200 if answer else None)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01 no http\r\n\r\n", b"x" * 100_000, b"POST / HTTP/1.1\r\nContent-Length: -\r\n\r\n"]
)
def test_other_protocols_are_refused(recorded: Recorded, data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (of any kind: the relay then passes the bytes on without the tap)
        recorded.through(HttpTap, [("sent", data)])
    assert recorded.read().requests == ()


def grpc_call(stream: int, method: str, *messages: bytes) -> bytes:
    fields = ((b":path", f"/inference.GRPCInferenceService/{method}".encode()), (b"authorization", b"secret"))
    block = header_block(fields)
    data = b"".join(PREFIX.pack(0, len(message)) + message for message in messages)
    cut = len(data) // 2
    return b"".join(
        [
            frame_head(HEADERS, END_HEADERS, stream, len(block)), block,
            frame_head(DATA, 0, stream, cut), data[:cut],
            frame_head(DATA, END_STREAM, stream, len(data) - cut), data[cut:],
        ]
    )  # fmt: skip


def grpc_answer(stream: int, *messages: bytes, status: int = 0) -> bytes:
    head, tail = header_block([(b":status", b"200")]), header_block([(b"grpc-status", str(status).encode())])
    data = b"".join(PREFIX.pack(0, len(message)) + message for message in messages)
    return b"".join(
        [
            frame_head(HEADERS, END_HEADERS, stream, len(head)), head,
            frame_head(DATA, 0, stream, len(data)), data,
            frame_head(HEADERS, END_HEADERS | END_STREAM, stream, len(tail)), tail,
        ]
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_calls_of_one_connection(recorded: Recorded, seed: int) -> None:
    message = ModelInferRequest(model_name="m", model_version="2")
    message.inputs.add(name="x", datatype="INT64", shape=[4])
    message.parameters.add(key="priority").value.uint64_param = 7
    message.raw_input_contents.append(bytes(32))
    body = message.SerializeToString()
    settings = frame_head(SETTINGS, 0, 0, 0)
    recorded.through(
        GrpcTap,
        [
            ("sent", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + grpc_call(1, "ModelInfer", body)),
            ("received", settings + grpc_answer(1, b"answer")),
            ("sent", grpc_call(3, "ServerLive", b"") + grpc_call(5, "ModelStreamInfer", body, body)),
            ("received", grpc_answer(3, b"") + grpc_answer(5, b"first", b"second", b"more")),
            ("sent", grpc_call(7, "ModelInfer", body) + grpc_call(9, "ModelInfer", body)),
            ("received", grpc_answer(7, status=14) + frame_head(RST_STREAM, 0, 9, 4) + bytes(4)),
        ],
        seed,
    )
    read = recorded.read()
    assert [each.status for each in read.requests] == [0, 0, 0, 14, None]
    assert [read.answer(each) for each in read.requests] == [b"answer", b"first", b"secondmore", b"", None]
    assert {read.content(each) for each in read.requests} == {body}
    first = read.requests[0]
    assert (first.model, first.version, first.priority, first.tensors[0].shape) == ("m", "2", 7, (4,))
    assert first.end_ns == 1000
    assert b"secret" not in b"".join(path.read_bytes() for path in recorded.folder.rglob("*") if path.is_file())


def test_a_request_that_did_not_come_whole_is_not_recorded(recorded: Recorded) -> None:
    recorded.through(HttpTap, [("sent", post("/v1/completions", b"{}") + post("/v1/completions", b"{}")[:-1])])
    read = recorded.read()
    assert [(each.status, each.content_bytes) for each in read.requests] == [(None, 2)]
    assert read.recording.lost == 0


@pytest.mark.parametrize("make", [HttpTap, GrpcTap])
def test_a_request_under_way_is_lost_with_the_bytes_that_are_missing(
    recorded: Recorded, make: type[HttpTap | GrpcTap]
) -> None:
    tap, call = make(recorded.recorder), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + grpc_call(3, "ModelInfer", b"\n\x01m")
    tap.sent(call if make is GrpcTap else post("/v1/completions", b"{}"), recorded.recorder.started_ns)
    tap.lose()
    tap.closed(recorded.recorder.started_ns)
    read = recorded.read()
    assert (read.requests, read.recording.lost) == ((), 1)


def test_contents_are_left_out(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "traffic", contents=False)
    recorded.through(HttpTap, [("sent", post("/v2/models/m/infer", HEAD)), ("received", OK)])
    (request,) = recorded.read().requests
    assert (request.content, request.content_bytes, request.tensors[0].shape) == (None, len(HEAD), (1, 2))


def test_the_recording_ends_after_its_requests(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "traffic", requests=3)
    for _ in range(5):
        recorded.through(HttpTap, [("sent", post("/v1/completions", b"{}")), ("received", OK)])
    read = recorded.read()
    assert (len(read.requests), read.recording.ended) == (3, "its requests were recorded")


def test_a_share_is_recorded(tmp_path: Path) -> None:
    """Fewer than 300 or more than 700 of 1,000 come in less than 1 of 10³⁰ runs."""
    recorded = Recorded(tmp_path / "traffic", share=0.5)
    recorded.through(HttpTap, [("sent", post("/v1/completions", b"{}")), ("received", OK)] * 1000)
    assert 300 < len(recorded.read().requests) < 700


def test_a_full_disk_ends_the_recording_and_no_more(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorded.writer, "add", full)
    for _ in range(3):
        recorded.through(HttpTap, [("sent", post("/v1/completions", b"{}")), ("received", OK)])
    assert recorded.read().requests == ()
    assert recorded.recorder.failed


def test_what_finds_no_place_in_memory_is_counted(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.recorder.recorder.MOST_HELD_BYTES", 5_000)
    recorded.through(HttpTap, [("sent", post("/v1/completions", bytes(4_000))), ("received", OK)])
    recorded.through(HttpTap, [("sent", post("/v1/completions", bytes(100))), ("received", OK)])
    read = recorded.read()
    assert [each.content_bytes for each in read.requests] == [100]
    assert read.recording.lost == 1


@pytest.mark.parametrize("body", [b'{"model": "\xff"}', b'{"x": ' + b"[" * 100_000, b"no JSON"])
@pytest.mark.parametrize("length", ["", "none", "5"])
def test_a_body_that_cannot_be_read_leaves_what_the_path_says(body: bytes, length: str) -> None:
    headers = {"inference-header-content-length": length} if length else {}
    says = described("http", "/v2/models/m%2F1/versions/2/infer", headers, body)
    assert (says["model"], says["version"]) == ("m/1", "2")
