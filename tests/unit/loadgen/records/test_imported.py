"""Traffic of other tools: HAR archives, AIPerf's lines with prompts, and perf_analyzer's data with intervals."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import abserve
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.inputs import InputError
from loadgen.client.recorded import prepare_recorded
from loadgen.experiment.replay import Replay, recorded_protocol
from loadgen.records.imported import read_traffic
from loadgen.records.traffic import RecordedTraffic, TrafficError

INFER = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
KEY = {"name": "Authorization", "value": "Bearer hidden"}


def entry(at_s: float, path: str, body: Any, answer: Any = None, *, method: str = "POST") -> dict[str, Any]:
    text = {"text": json.dumps(body)}
    content = {"text": base64.b64encode(json.dumps(answer).encode()).decode(), "encoding": "base64"}
    return {
        "startedDateTime": f"2026-11-29T10:00:{at_s:06.3f}Z", "time": 25.0,
        "request": {"method": method, "url": f"http://server:8000{path}?key=hidden", "headers": [
            KEY, {"name": "Content-Type", "value": "application/json"}, {"name": "Content-Encoding", "value": "gzip"},
        ], **({"postData": text} if method == "POST" else {})},
        "response": {"status": 200, "headers": [], "content": content if answer is not None else {"size": 0}},
    }  # fmt: skip


def har(folder: Path, *entries: dict[str, Any]) -> str:
    path = folder / "calls.har"
    path.write_text(json.dumps({"log": {"version": "1.2", "entries": entries}}))
    return str(path)


def test_an_archive_is_traffic_as_a_folder_is(tmp_path: Path) -> None:
    answer = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]}
    path = har(
        tmp_path,
        entry(3.5, "/v2/models/m/versions/2/infer", INFER, answer),
        entry(1.25, "/v2/models/m/infer", INFER),
        entry(2.0, "/index.html", None, method="GET"),
    )
    traffic = read_traffic(path)
    first, last = traffic.requests
    assert (first.at_ns, last.at_ns, last.end_ns) == (0, 2_250_000_000, 2_275_000_000)
    assert (first.model, first.version, last.version, last.status) == ("m", None, "2", 200)
    assert last.shape == "x FP32 [1, 2]"
    assert json.loads(traffic.content(last) or b"") == INFER
    assert json.loads(traffic.answer(last) or b"") == answer
    assert last.headers == {"content-type": "application/json"}
    traffic.save(tmp_path / "saved")
    saved = RecordedTraffic(tmp_path / "saved")
    assert saved.requests == traffic.requests
    assert not any(b"hidden" in file.read_bytes() for file in (tmp_path / "saved").rglob("*") if file.is_file())
    assert len(Replay(path, "http", 10.0).window(0)[1]) == 2
    assert len(abserve.load_traffic(path).requests) == 2


def test_a_request_that_cannot_be_described_leaves_the_others(tmp_path: Path) -> None:
    refused = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2], "data": [1.0, 2.0]}]}
    archive = har(tmp_path, entry(1.0, "/v2/models/m/infer", INFER), entry(2.0, "/v2/models/m/infer", refused))
    assert [request.tensors == () for request in read_traffic(archive).requests] == [False, True]


def test_prompts_with_texts_keep_them_and_their_lengths(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    lines = [
        {"timestamp": 1000, "text_input": "Why?", "output_length": 7},
        {"timestamp": 1500.5, "messages": [{"role": "user", "content": "What?"}], "output_length": 9},
        {"timestamp": 1800, "text_input": "How?", "output_length": 11, "session_id": "s"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert not read_traffic(str(path)).is_trace
    assert recorded_protocol(str(path)) == "text"
    replay = Replay(str(path), "text", 10.0)
    assert replay.window(0)[1].tolist() == [0, 800_000_000]
    assert [shape.output_tokens for shape in replay.shapes()] == [7, 11]
    assert replay.prompt(replay.requests()[0])[0]["prompt"] == "Why?"
    (chat,) = [request for request in read_traffic(str(path)).requests if "chat" in request.route]
    assert replay.shape(chat).output_tokens == 9


def test_a_trace_of_lengths_alone_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1764000000000, "input_length": 6, "output_length": 5, "hash_ids": [1]}\n')
    traffic = read_traffic(str(path))
    assert (traffic.is_trace, traffic.requests[0].at_ns) == (True, 0)


SIGNATURE = Signature("m", (TensorSignature("x", "FP32", (-1, -1)), TensorSignature("t", "BYTES", (-1, 1))), ())


def perf_analyzer(folder: Path, data: list[Any], intervals: str) -> str:
    path = folder / "input.json"
    path.write_text(json.dumps({"data": data}))
    path.with_name("input.json.intervals").write_text(intervals)
    return str(path)


def test_data_of_perf_analyzer_gets_its_intervals_and_the_types_of_the_model(tmp_path: Path) -> None:
    raw = base64.b64encode(np.arange(3, dtype="<f4").tobytes()).decode()
    data = [
        {"x": {"content": [1.0, 2.0], "shape": [2]}, "t": ["a"]},
        [{"x": {"b64": raw, "shape": [3]}, "t": {"content": ["bc"]}}],
    ]
    replay = Replay(perf_analyzer(tmp_path, data, "1000\n2000\n500\n"), "http", 10.0)
    assert replay.window(0)[1].tolist() == [0, 1_000_000, 3_000_000]
    bodies = prepare_recorded(replay, SIGNATURE)
    assert bodies.sizes == (1, 1, 1)
    assert bodies.requests[0] is bodies.requests[2]
    inputs = json.JSONDecoder().raw_decode(bodies.requests[1].body.decode("latin-1"))[0]["inputs"]
    assert [(each["name"], each["datatype"], each["shape"]) for each in inputs] == [
        ("x", "FP32", [1, 3]), ("t", "BYTES", [1, 1]),
    ]  # fmt: skip
    assert bodies.requests[1].body.endswith(np.arange(3, dtype="<f4").tobytes() + b"\x02\0\0\0bc")
    with pytest.raises(InputError):
        prepare_recorded(replay, Signature("m", (TensorSignature("other", "FP32", (-1, 2)),), ()))


@pytest.mark.parametrize(
    ("data", "intervals", "place"),
    [
        ([{"x": [1]}], "5\nsoon\n", "line 2"), ([{"x": [1]}], "", "no intervals"), ([[5]], "5", "entry 1"),
        ([{"x": [1]}], "9" * 5000, "line 1"), ([{"x": [1]}], ("9" * 15 + "\n") * 5, "years apart"),
    ],
)  # fmt: skip
def test_data_of_perf_analyzer_that_cannot_be_read_is_named(
    tmp_path: Path, data: list[Any], intervals: str, place: str
) -> None:
    with pytest.raises(TrafficError, match=place):
        read_traffic(perf_analyzer(tmp_path, data, intervals))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"timestamp": 0, "text_input": "a"}\n{"timestamp": "x", "text_input": "b"}', "line 2"),
        ('{"timestamp": 0, "output_length": 5}', "line 1"),
        ("not json", "line 1"),
        ('{"log": {"entries": [{"startedDateTime": 5, "request": {"method": "GET", "url": "/"}}]}}', "entry 1"),
        ('{"log": {"entries": []}}', "no requests"),
        ('{"timestamp": 0, "text_input": "a"}\n{"timestamp": 1e300, "text_input": "b"}', "line 2"),
        ('{"timestamp": 0, "text_input": "a"}\n{"timestamp": 9e12, "text_input": "b"}', "years apart"),
        ('{"data": [{"x": [1]}]}', "no times"),
        ("", "no requests"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, content: str, place: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(TrafficError, match=place):
        read_traffic(str(path))
