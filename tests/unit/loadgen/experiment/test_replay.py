"""Which recorded requests a block sends, and when."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.grpc_messages import ModelInferRequest
from loadgen.client.inputs import InputError
from loadgen.client.recorded import prepare_recorded, recorded_request
from loadgen.experiment.plan import PlanError, make_workloads
from loadgen.experiment.prompts import PromptShape
from loadgen.experiment.replay import Replay, recorded_protocol
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.traffic import (
    STRETCH_S,
    RecordedRequest,
    RecordedTraffic,
    TrafficError,
    TrafficRecording,
    TrafficWriter,
)
from tests.recording import write_traffic

SIGNATURE = Signature("other", (TensorSignature("x", "FP32", (-1, 2)),), (TensorSignature("y", "FP32", (-1, 1)),))


def rows(number: int, count: int = 1) -> np.ndarray:
    return np.full((count, 2), number, np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """100 requests in 50 s, the last one of another shape."""
    arrivals = [(number / 2, rows(number, 1 + (number == 99))) for number in range(100)]
    return str(write_traffic(tmp_path / "traffic", arrivals))


def test_a_window_has_the_recorded_gaps_and_another_seed_another_window(folder: str) -> None:
    replay, windows = Replay(folder, "http", 5.0), set()
    for seed in range(50):
        first, offsets = replay.window(seed)
        assert replay.window(seed)[0] == first
        assert 10 <= len(offsets) <= 11
        assert offsets.tolist() == [number * 500_000_000 for number in range(len(offsets))]
        windows.add(first)
    assert len(windows) > 10


@pytest.mark.parametrize("speed", [0.5, 1.0, 4.0])
def test_speed_scales_the_times_and_keeps_the_seconds_of_a_block(folder: str, speed: float) -> None:
    replay = Replay(folder, "http", 4.0, speed)
    _, offsets = replay.window(3)
    assert np.diff(offsets).tolist() == [int(5e8 / speed)] * (len(offsets) - 1)
    assert abs(len(offsets) - 8 * speed) <= 1
    assert replay.rate_per_s() == pytest.approx(2.0 * speed)


def test_traffic_that_is_shorter_than_a_block_is_replayed_whole(folder: str) -> None:
    first, offsets = Replay(folder, "http", 1000.0).window(0)
    assert (first, len(offsets)) == (0, 100)


def test_no_window_has_a_gap_of_the_recording(tmp_path: Path) -> None:
    left_out = TrafficRecording(started_at="2026-11-29T00:00:00Z", left_out=(1, 2))
    writer = TrafficWriter(tmp_path / "traffic", left_out)
    for at_s in [*range(STRETCH_S), *range(3 * STRETCH_S, 5 * STRETCH_S)]:
        request = RecordedRequest(at_ns=at_s * 10**9, transport="http", route="/v2/models/m/infer", content_bytes=1)
        writer.add(request, b"x")
    writer.flush()
    replay = Replay(str(tmp_path / "traffic"), "http", 5.0)
    for seed in range(100):
        first, offsets = replay.window(seed)
        start_s = replay.requests()[first].at_ns / 1e9
        assert start_s + offsets[-1] / 1e9 < STRETCH_S or start_s >= 3 * STRETCH_S
    with pytest.raises(TrafficError):
        Replay(str(tmp_path / "traffic"), "http", 30.0).window(0)


@pytest.mark.parametrize("transport", ["grpc", "completions"])
def test_traffic_of_another_kind_is_refused_with_what_it_is(
    tmp_path: Path, transport: Literal["grpc", "completions"]
) -> None:
    folder = str(write_traffic(tmp_path / "http", [(0.0, rows(1)), (1.0, rows(2))]))
    with pytest.raises(TrafficError, match="2 inferences over http; choose another"):
        Replay(folder, transport, 5.0).requests()
    with pytest.raises(TrafficError, match="2 inferences over http; choose another --model"):
        recorded_protocol(folder)


def test_contents_stay_and_the_model_changes(tmp_path: Path) -> None:
    arrivals = [(0.0, rows(1)), (1.0, rows(2, 2)), (2.0, rows(1))]
    http = Replay(str(write_traffic(tmp_path / "http", arrivals)), "http", 5.0)
    bodies = prepare_recorded(http, SIGNATURE)
    traffic = RecordedTraffic(http.folder)
    assert [each.body for each in bodies.requests] == [traffic.content(each) for each in traffic.requests]
    assert bodies.requests[0] is bodies.requests[2]
    assert [each.payload_bytes for each in bodies.requests] == [8, 16, 8]
    window = bodies.window(1, 2)
    assert (window.requests, window.patches(1)[0], window.sizes) == (bodies.requests[1:], 2, (2, 1))
    grpc = Replay(str(write_traffic(tmp_path / "grpc", arrivals, grpc=True)), "grpc", 5.0)
    message = ModelInferRequest.FromString(prepare_recorded(grpc, SIGNATURE).requests[1].body)
    assert (message.model_name, message.model_version) == ("other", "")
    assert message.raw_input_contents[0] == rows(2, 2).tobytes()


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_tensors_in_shared_memory_are_not_in_a_recording(transport: Literal["http", "grpc"]) -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
    content = json.dumps({"inputs": [{**tensor, "parameters": region}]}).encode()
    if transport == "grpc":
        message = ModelInferRequest()
        message.inputs.add(**tensor)
        content = message.SerializeToString()
    request = RecordedRequest(at_ns=0, transport=transport, route="/v2/models/m/infer", content_bytes=len(content))
    with pytest.raises(InputError):
        recorded_request(request, content, SIGNATURE)


def test_parity_has_requests_of_every_shape(folder: str) -> None:
    assert Replay(folder, "http", 5.0).of_every_shape(2) == {"x FP32 [1, 2]": [0, 1], "x FP32 [2, 2]": [99]}


def test_a_workload_per_speed(folder: str) -> None:
    given = {"scenarios": "traffic", "traffic": folder, "speed": "1,2", "preset": "smoke"}
    loads = make_workloads(ExperimentSettings.model_validate(given))
    assert [(load.name, load.rate_per_s, load.is_open) for load in loads] == [
        ("traffic", 2.0, True),
        ("traffic(2×)", 4.0, True),
    ]


@pytest.mark.parametrize(("queries", "planned"), [(459, True), (700, False)])
def test_a_limit_searches_the_highest_speed_in_traffic_of_enough_requests(
    tmp_path: Path, queries: int, planned: bool
) -> None:
    folder = str(write_traffic(tmp_path / "traffic", [(number / 10, rows(number)) for number in range(600)]))
    given = {"scenarios": "traffic", "traffic": folder, "limits": "p99=50ms", "slo_queries": queries}
    settings = ExperimentSettings.model_validate({"preset": "smoke", **given})
    if planned:
        loads = make_workloads(settings)
        assert [(load.name, load.rate_per_s, load.latency_bound_ms) for load in loads] == [
            ("traffic", 10.0, None),
            ("slo(p99≤50ms, traffic)", 10.0, 50.0),
        ]
        return
    with pytest.raises(PlanError):
        make_workloads(settings)


@pytest.mark.parametrize(
    "given",
    [
        {"traffic": "/no/folder"}, {"traffic": "FOLDER", "transport": "grpc"},
        {"traffic": "FOLDER", "transport": "shm"},
        {"traffic": "FOLDER", "transport": "http,grpc"}, {"scenarios": "traffic"},
        {"traffic": "FOLDER", "check_answers": "true"}, {"check_answers": "true"}, {"speed": "2"},
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_refused_before_the_run(folder: str, given: dict[str, str]) -> None:
    settings = {name: folder if value == "FOLDER" else value for name, value in given.items()}
    with pytest.raises(PlanError):
        make_workloads(ExperimentSettings.model_validate({"preset": "smoke", **settings}))


@pytest.mark.parametrize("changed", [{"model": "another"}, {"status": 400}, {"route": "/v1/completions"}])
def test_requests_that_were_wrong_are_left_out_and_two_models_refused(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    writer = TrafficWriter(tmp_path / "traffic", TrafficRecording(started_at="2026-11-29T00:00:00Z"))
    for number in range(4):
        fields = {"transport": "http", "route": "/v2/models/m/infer", "model": "m", "status": 200, "content_bytes": 1}
        fields |= changed if number == 3 else {}
        writer.add(RecordedRequest(at_ns=number, **fields), b"x")  # type: ignore[arg-type]
    writer.flush()
    replay = Replay(str(tmp_path / "traffic"), "http", 5.0)
    if "model" in changed:
        with pytest.raises(TrafficError):
            replay.requests()
    else:
        assert len(replay.requests()) == 3


def test_a_compressed_prompt_and_its_compressed_answer_are_read(tmp_path: Path) -> None:
    writer = TrafficWriter(tmp_path / "traffic", TrafficRecording(started_at="2026-11-29T00:00:00Z", answers=True))
    asked = gzip.compress(b'{"prompt": "Why?", "max_tokens": 9}')
    answered = gzip.compress(b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 5}}\n\n')
    for at_ns in (0, 10**9):
        request = RecordedRequest(
            at_ns=at_ns, transport="http", route="/v1/completions", model="m", status=200, first_byte_ns=at_ns + 1,
            end_ns=at_ns + 2, headers={"content-encoding": "gzip"}, answer_headers={"content-encoding": "GZip"},
        )  # fmt: skip
        writer.add(request, asked, answered)
    writer.flush()
    replay = Replay(str(tmp_path / "traffic"), "text", 5.0)
    assert replay.shapes() == [PromptShape(3, 5)] * 2
    assert replay.prompt(replay.requests()[0])[0]["prompt"] == "Why?"
