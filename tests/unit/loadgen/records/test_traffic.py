"""The format `abserve.traffic/1`: what is written is read again, whatever ends the writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import abserve
from loadgen.records.traffic import (
    STRETCH_S,
    RecordedRequest,
    RecordedTensor,
    RecordedTraffic,
    TrafficError,
    TrafficRecording,
    TrafficWriter,
)

STARTED = TrafficRecording(started_at="2026-11-29T00:00:00Z")

LINE = b'{"at_ns": %b, "transport": "http", "route": "%b"}\n'


def request(at_s: float, **more: object) -> RecordedRequest:
    return RecordedRequest(at_ns=int(at_s * 1e9), transport="http", route="/v2/models/m/infer", **more)  # type: ignore[arg-type]


def writer(folder: Path, **more: object) -> TrafficWriter:
    return TrafficWriter(folder, TrafficRecording(**{"started_at": STARTED.started_at, **more}))  # type: ignore[arg-type]


def contents(folder: Path) -> list[Path]:
    return [path for path in (folder / "contents").rglob("*") if path.is_file()]


def test_requests_come_back_in_the_order_of_their_arrivals_each_content_once(tmp_path: Path) -> None:
    written = writer(tmp_path / "t")
    tensors = (RecordedTensor(name="x", datatype="FP32", shape=(1, 2)),)
    written.add(request(11.0, tensors=tensors, priority=3), b"body", b"answer")
    written.add(request(0.5, model="m", version="2", status=200, end_ns=7), b"body")
    written.flush(ended="done", seconds=12.0)
    read = abserve.load_traffic(tmp_path / "t")
    first, second = read.requests
    assert (first.at_ns, first.model, first.version, first.status, first.end_ns) == (500_000_000, "m", "2", 200, 7)
    assert (second.tensors, second.priority) == (tensors, 3)
    assert [read.content(each) for each in read.requests] == [b"body", b"body"]
    assert (read.answer(first), read.answer(second)) == (None, b"answer")
    assert len(contents(tmp_path / "t")) == 2
    assert (read.recording.requests, read.recording.ended, read.recording.seconds) == (2, "done", 12.0)


def test_what_was_flushed_is_read_though_the_last_line_is_torn(tmp_path: Path) -> None:
    written = writer(tmp_path / "t")
    written.add(request(1.0), b"one")
    written.flush()
    with (tmp_path / "t/requests/000000.jsonl").open("ab") as file:
        file.write(b'{"at_ns": 2, "transp')
    read = RecordedTraffic(tmp_path / "t")
    assert [read.content(each) for each in read.requests] == [b"one"]
    assert read.recording.ended is None


def test_beyond_the_limit_whole_stretches_are_left_out_and_said(tmp_path: Path) -> None:
    written = writer(tmp_path / "t", max_bytes=50_000)
    for number in range(200):
        written.add(request(number * STRETCH_S / 10), b"%09d" % number * 111)  # about 1 kB each, 10 per stretch
    written.flush()
    read = RecordedTraffic(tmp_path / "t")
    kept = {each.stretch for each in read.requests}
    assert kept
    assert kept | set(read.recording.left_out) == set(range(20))
    assert not kept & set(read.recording.left_out)
    assert len(read.requests) == 10 * len(kept) == read.recording.requests == len(contents(tmp_path / "t"))
    assert sum(path.stat().st_size for path in contents(tmp_path / "t")) <= 50_000


def test_a_content_that_a_kept_stretch_shares_stays(tmp_path: Path) -> None:
    written = writer(tmp_path / "t", max_bytes=30_000)
    for number in range(100):
        written.add(request(number * STRETCH_S), b"shared" * 200)
        written.add(request(number * STRETCH_S + 1), b"%09d" % number * 111)
    written.flush()
    read = RecordedTraffic(tmp_path / "t")
    assert len(read.requests) > 2
    assert all(read.content(each) is not None for each in read.requests)


def test_the_stretches_that_stay_are_from_all_times(tmp_path: Path) -> None:
    """A rule that kept the first or the last ones would keep none of either half in 1 of 10⁹ runs of this test."""
    written = writer(tmp_path / "t", max_bytes=100_000)
    for number in range(1000):
        written.add(request(number * STRETCH_S), b"%09d" % number * 111)
    kept = set(range(1000)) - set(written._left_out)
    assert 40 < len(kept) < 100
    assert any(number < 500 for number in kept)
    assert any(number >= 500 for number in kept)


def test_some_requests_are_saved_as_traffic(tmp_path: Path) -> None:
    written = writer(tmp_path / "t")
    for number in range(3):
        written.add(request(number), b"%d" % number)
    written.flush()
    read = RecordedTraffic(tmp_path / "t")
    read.save(tmp_path / "part", read.requests[1:])
    part = RecordedTraffic(tmp_path / "part")
    assert [part.content(each) for each in part.requests] == [b"1", b"2"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "traffic.json").unlink(),
        lambda folder: (folder / "traffic.json").write_text(json.dumps({"schema": "abserve.traffic/2"})),
        lambda folder: (folder / "traffic.json").write_bytes(b'{"started_at": "\xff"}'),
        lambda folder: (folder / "requests/000000.jsonl").write_text("{}\n"),
        lambda folder: (folder / "requests/000000.jsonl").write_bytes(LINE % (b"0", b"\xff")),
        lambda folder: (folder / "requests/000000.jsonl").write_bytes(LINE % (b"9" * 30, b"/")),
        lambda folder: (folder / "requests/000001.jsonl").symlink_to("000000.jsonl"),
    ],
    ids=["no record", "another version", "no text", "no request", "no text in a request", "a huge time", "a link"],
)
def test_what_is_not_traffic_is_an_error(spoil, tmp_path: Path) -> None:
    written = writer(tmp_path / "t")
    written.add(request(0.0), b"x")
    written.flush()
    spoil(tmp_path / "t")
    with pytest.raises(abserve.AbserveError):
        abserve.load_traffic(tmp_path / "t")


def test_a_changed_content_is_noticed(tmp_path: Path) -> None:
    written = writer(tmp_path / "t")
    written.add(request(0.0), b"x")
    written.flush()
    contents(tmp_path / "t")[0].write_bytes(b"y")
    read = RecordedTraffic(tmp_path / "t")
    with pytest.raises(TrafficError):
        read.content(read.requests[0])


def test_a_folder_with_traffic_is_not_written_to(tmp_path: Path) -> None:
    writer(tmp_path / "t")
    with pytest.raises(TrafficError):
        writer(tmp_path / "t")
