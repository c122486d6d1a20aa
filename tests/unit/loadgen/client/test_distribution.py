"""Shares of a block and what is made of their outcomes; samples of several machines as one file."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loadgen.client.generator
from loadgen.base.documents import DocumentError
from loadgen.client.generator import LOST_MESSAGE, Contribution, merge, shares, worker_path
from loadgen.client.messages import BlockOutcome, Open
from loadgen.experiment.schedule import arrival_count, due_offsets_ns, endless_offsets_ns
from loadgen.locust.workers import WorkerReport, merge_reports
from loadgen.records.run import Arrivals
from loadgen.records.samples import SAMPLE_DTYPE, SampleWriter, read_samples, store_samples


def command(path: Path | None = None, **changes: object) -> Open:
    fields: dict[str, object] = {
        "url": "http://h:1", "batch_size": 1, "concurrency": 5, "requests": 20, "seconds": 1.0, "max_seconds": 9.0,
        "timeout_s": 1.0, "samples_path": None if path is None else str(path),
    }  # fmt: skip
    return Open(**{**fields, **changes})  # type: ignore[arg-type]


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 300))
def test_shares_add_up_and_no_user_is_two_workers(workers: int, users: int, requests: int) -> None:
    parts = shares(command(concurrency=users, requests=requests), workers)
    assert len(parts) == min(workers, users)
    assert sum(part.concurrency for part in parts) == users
    assert min(part.concurrency for part in parts) >= 1
    numbers = [part.first_user + n for part in parts for n in range(part.concurrency)]
    assert numbers == list(range(users))
    assert {part.requests for part in parts} == {requests}, "the number of all together"


@given(st.sampled_from(["constant", "poisson"]), st.integers(1, 8), st.floats(1, 500))
def test_the_workers_together_send_the_schedule_of_one(arrivals: Arrivals, workers: int, rate: float) -> None:
    asked = command(concurrency=16, arrivals=arrivals, rate_per_s=rate, arrivals_seed=3)
    count = arrival_count(rate, asked.requests, asked.seconds, asked.max_seconds)
    whole = due_offsets_ns(arrivals, rate, count, 3)
    split = [due_offsets_ns(arrivals, rate, count, 3)[part.part :: part.parts] for part in shares(asked, workers)]
    assert np.sort(np.concatenate(split)).tolist() == whole.tolist()


def test_an_endless_schedule_has_the_rate_and_never_goes_back() -> None:
    for arrivals, rate in (("constant", 3000.0), ("poisson", 3000.0)):
        offsets = np.fromiter(endless_offsets_ns(arrivals, rate, 1), dtype=np.int64, count=10_000)  # type: ignore[arg-type]
        assert (offsets[0] == 0) == (arrivals == "constant")
        assert (np.diff(offsets) >= 0).all()
        assert offsets[-1] / 1e9 == pytest.approx(10_000 / rate, rel=0.05)


def write(path: Path, users: list[int], *, errors: dict[int, int] | None = None, close: bool = True) -> None:
    writer = SampleWriter(path)
    for number, user in enumerate(users):
        send = 1_000 * number + user
        writer.add(send, send, send + 10, send + 20, 5, 6, 1, user, 0, 200, (errors or {}).get(number, -1))
    writer.flush()
    if close:
        writer.close()


def outcome(requests: int, **changes: object) -> BlockOutcome:
    fields: dict[str, object] = {
        "window_start_ns": 1, "window_end_ns": 90_000, "requests": requests, "errors": 0, "error_messages": (),
        "cpu_ns": 7, "reconnects": 0, "cut_reason": None, "storage_error": None,
    }  # fmt: skip
    return BlockOutcome(**{**fields, **changes})  # type: ignore[arg-type]


def contributions(
    path: Path, first: BlockOutcome | None, second: BlockOutcome | None, lost: str = ""
) -> list[Contribution]:
    parts = shares(command(path), 2)
    return [
        Contribution(number, 100 + number, part, result, None if result is not None else lost)
        for number, (part, result) in enumerate(zip(parts, (first, second), strict=True))
    ]


def test_errors_are_numbered_anew_and_samples_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "0000.npy"
    write(worker_path(path, 0), [0, 1, 2], errors={1: 0})
    write(worker_path(path, 1), [3, 4], errors={0: 1, 1: 0})
    first, second = outcome(3, errors=1, error_messages=("x",)), outcome(2, errors=2, error_messages=("y", "x"))
    merged = merge(command(path), contributions(path, first, second))
    samples = np.load(path)
    assert (merged.requests, merged.errors, merged.error_messages) == (5, 3, ("x", "y"))
    assert samples["user"].tolist() == [0, 3, 1, 4, 2]
    assert samples["error"].tolist() == [-1, 0, 0, 1, -1]
    assert [path.name for path in tmp_path.iterdir()] == ["0000.npy"]
    assert (merged.cut_reason, merged.cpu_ns) == (None, 14)


def test_what_a_lost_worker_had_written_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "0000.npy"
    write(worker_path(path, 0), [0, 1, 2])
    write(worker_path(path, 1), [3, 4, 3], errors={2: 5}, close=False)
    merged = merge(command(path), contributions(path, outcome(3), None, "was killed by SIGKILL"))
    assert merged.cut_reason == "load worker 2 of 2 was killed by SIGKILL"
    assert (merged.requests, merged.errors, merged.error_messages) == (6, 1, (LOST_MESSAGE,))
    assert [(worker.requests, worker.lost) for worker in merged.workers] == [(3, None), (3, "was killed by SIGKILL")]
    assert merged.workers[1].window_end_ns == 2_000 + 3 + 20


def test_where_the_merged_file_has_no_room_the_workers_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0000.npy"
    write(worker_path(path, 0), [0])
    write(worker_path(path, 1), [3])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loadgen.client.generator, "store_samples", full)
    merged = merge(command(path), contributions(path, outcome(1), outcome(1)))
    assert merged.storage_error == "No space left on device"
    assert merged.requests == 2
    assert len(read_samples(worker_path(path, 0))) == len(read_samples(worker_path(path, 1))) == 1
    assert not path.exists()


def report(number: int, folder: Path, users: list[int], machine: str, **described: object) -> WorkerReport:
    path = folder / f"own{number}.npy"
    write(path, users, errors={0: 0} if described.get("error_messages") else None)
    made = WorkerReport(
        f"client{number}", number, pid=number, host=f"host{number}", machine=machine, paths={"Single": str(path)}
    )
    content = path.read_bytes()
    for start in range(0, len(content), 100):
        made.add("Single", content[start : start + 100])
    made.finish([{"name": "Single", "error_messages": [], **described}])
    return made


def test_samples_of_two_machines_merge_and_their_clocks_do_not(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    reports = [
        report(0, tmp_path, [0, 1, 0], "boot-1", error_messages=["gone"]),
        report(1, tmp_path, [0, 0], "boot-2", error_messages=["reset"]),
    ]
    (told,) = merge_reports(reports, tmp_path / "out")
    (path,) = (tmp_path / "out").glob("merged-Single-*.npy")
    about = json.loads(path.with_suffix(".json").read_bytes())
    samples = np.load(path)
    assert "5 samples of 2 workers" in told
    assert str(path) in told
    assert samples["user"].tolist() == [0, 1, 0, 2, 2]
    assert samples["error"].tolist() == [0, -1, -1, 1, -1]
    assert about["error_messages"] == ["gone", "reset"]
    assert (about["clock"], about["complete"], about["requests"]) == ("several", True, 5)
    assert [worker["host"] for worker in about["workers"]] == ["host0", "host1"]
    rates = [worker["requests_per_s"] for worker in about["workers"]]
    assert about["requests_per_s"] == pytest.approx(sum(rates))
    assert rates[0] == pytest.approx(3 / (2_020e-9), rel=0.01)


def test_a_lost_workers_unfinished_file_is_read_where_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "gone.npy"
    write(path, [0, 1], close=False)
    lost = WorkerReport("client0", 0, pid=1, host="h", machine="boot", paths={"Single": str(path)}, lost=True)
    lost.folder = tmp_path
    lost.recover()
    (told,) = merge_reports([lost, report(1, tmp_path, [0], "boot")], tmp_path)
    assert "INCOMPLETE: load worker 1 (h, process 1) lost" in told
    (merged,) = tmp_path.glob("merged-*.json")
    about = msgspec.json.decode(merged.read_bytes())
    assert (about["complete"], about["clock"], about["requests"]) == (False, "one", 3)


def test_a_worker_names_files_of_its_folder_only(tmp_path: Path) -> None:
    """Its message may come from anybody who reaches the channel: no other file is read, no pipe is waited for, and
    nothing is written elsewhere."""
    out = tmp_path / "out"
    out.mkdir()
    write(tmp_path / "secret.npy", [0, 1])
    os.mkfifo(out / "pipe.npy")
    (out / "link.npy").symlink_to(tmp_path / "secret.npy")
    named = ("/dev/zero", str(tmp_path / "secret.npy"), f"{out}/../secret.npy", f"{out}/pipe.npy", f"{out}/link.npy")
    for path in named:
        lost = WorkerReport("client0", 0, machine="boot", paths={"Single": path}, lost=True, folder=out)
        with suppress(DocumentError):
            lost.recover()
        assert lost.contents == {}
    write(tmp_path / "own.npy", [0])
    made = report(0, tmp_path, [0], "boot")
    made.described = {f"x/../../{tmp_path.name}/stolen": {"error_messages": []}, **made.described}
    made.contents[f"x/../../{tmp_path.name}/stolen"] = (tmp_path / "own.npy").open("rb")
    assert len(list(merge_reports([made], out))) == 1
    assert not list(tmp_path.rglob("stolen*"))


def test_a_master_does_not_hold_the_samples_of_a_long_test_in_memory(tmp_path: Path) -> None:
    """32 MB of each of two workers: they were held whole, and copied three times to be merged."""
    many = np.zeros(500_000, dtype=SAMPLE_DTYPE)
    many["error"], many["end_ns"] = -1, np.arange(1, len(many) + 1)
    store_samples(tmp_path / "many.npy", [many])
    tracemalloc.start()
    reports = [WorkerReport(f"client{number}", number, folder=tmp_path / "out") for number in range(2)]
    for collected in reports:
        with (tmp_path / "many.npy").open("rb") as content:
            while piece := content.read(2**20):
                collected.add("Single", piece)
        collected.finish([{"name": "Single", "error_messages": []}])
    (told,) = merge_reports(reports, tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told.startswith("1,000,000 samples of 2 workers")
    assert peak < 24e6
    (merged,) = (tmp_path / "out").glob("merged-*.npy")
    assert np.bincount(np.load(merged, mmap_mode="r")["user"]).tolist() == [500_000, 500_000]
