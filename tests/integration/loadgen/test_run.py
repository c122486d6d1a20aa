"""Whole runs on fake servers: what is stored when all goes well, and what when it does not."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from loadgen.analysis.analysis import analyse
from loadgen.analysis.checks.outcome import Check
from loadgen.experiment.schedule import schedule
from loadgen.records.run import (
    ArmRecord,
    ArmRequest,
    BlockRecord,
    Cell,
    ColdStart,
    Environment,
    Experiment,
    ParityRecord,
    RunState,
)
from loadgen.records.sample_files import read_samples
from loadgen.report import write_reports
from loadgen.run.progress import SilentProgress
from loadgen.run.runner import run_experiment
from loadgen.storage.store import StorageError
from tests.integration.loadgen.conftest import FAKE_ABSERVE, await_true, make_experiment

pytestmark = pytest.mark.usefixtures("no_process_left")


def run(experiment: Experiment, out: Path) -> RunState:
    return run_experiment(experiment, out, SilentProgress(), abserve=FAKE_ABSERVE)


def seed_with_b_first(*cells: Cell) -> int:
    return next(seed for seed in range(50) if schedule(cells, seed)[0].label == "b")


def stored(path: Path, kind: type):
    return msgspec.json.decode(path.read_bytes(), type=kind)


def blocks(out: Path) -> list[BlockRecord]:
    return [stored(path, BlockRecord) for path in sorted((out / "blocks").glob("*.json"))]


def test_a_run_stores_every_record_and_says_finished(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cold = Cell(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, pairs=2)
    experiment = make_experiment(cells=(cold, *make_experiment().cells))
    state = run(experiment, out)
    assert (state.state, state.error) == ("finished", None)
    assert stored(out / "run.json", RunState) == state
    assert stored(out / "experiment.json", Experiment) == experiment
    environment = stored(out / "environment.json", Environment)
    assert environment.inputs["kind"] == "photographs"
    assert environment.host["cpu_count"] >= 1
    arms = stored(out / "arms.json", list[ArmRecord])
    assert [(arm.label, arm.title, arm.launched) for arm in arms] == [
        ("a", "fake native", True),
        ("b", "fake triton", True),
    ]
    assert arms[0].in_effect["max_queue_delay_us"] == 2000
    assert arms[0].in_effect["device"] == "cpu"
    parity = stored(out / "parity.json", ParityRecord)
    assert parity.ok
    assert {case.kind for case in parity.cases} == {"reference", "alone"}
    starts = stored(out / "cold_starts.json", list[ColdStart])
    assert sorted((start.label, start.repetition) for start in starts) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    for start in starts:
        assert start.live_ns is not None
        assert start.ready_ns is not None
        assert start.first_answer_ns is not None
        assert 0 < start.live_ns <= start.ready_ns <= start.first_answer_ns

    planned = schedule(experiment.cells, experiment.seed)
    records = blocks(out)
    assert [(r.index, r.cell, r.pair, r.label, r.position) for r in records] == [
        (b.index, b.cell.name, b.pair, b.label, b.position) for b in planned
    ]
    for record, block in zip(records, planned, strict=True):
        assert record.complete
        assert record.errors == 0
        samples = np.load(out / record.samples)
        assert len(samples) == record.requests == record.items >= block.cell.requests
        assert (samples["end_ns"].max(), samples["status"].min()) == (record.window_end_ns, 200)
        assert samples["send_ns"].min() >= record.window_start_ns
        assert (samples["send_ns"] < samples["first_byte_ns"]).all()
        assert (samples["first_byte_ns"] <= samples["end_ns"]).all()
        assert set(samples["user"]) == set(range(block.cell.concurrency))
        assert len(set(samples["body"])) >= min(len(samples), 5)
        assert record.stages is not None
        assert (record.stages.requests, record.stages.batches) == (record.requests, {1: record.requests})
        assert record.generator_cpu_ns > 0
        assert record.server_cpu_ns is not None
    assert not list(out.rglob("*.part"))


def test_blocks_do_not_overlap_and_the_pairs_lie_side_by_side(tmp_path: Path) -> None:
    run(make_experiment(), tmp_path / "run")
    records = blocks(tmp_path / "run")
    for earlier, later in pairwise(records):
        assert earlier.window_end_ns <= later.window_start_ns


def test_a_slower_arm_is_measured_as_slower_by_what_was_added(tmp_path: Path) -> None:
    run(make_experiment(b_settings={"delay-ms": "30"}), tmp_path / "run")
    medians: dict[str, list[float]] = {"a": [], "b": []}
    for record in blocks(tmp_path / "run"):
        if record.cell == "single":
            samples = np.load(tmp_path / "run" / record.samples)
            medians[record.label].append(float(np.median(samples["end_ns"] - samples["send_ns"])))
    added_ms = (min(medians["b"]) - min(medians["a"])) / 1e6
    assert 28 < added_ms < 60


@pytest.mark.parametrize("fault", ["wrong", "wrong-batches", "empty"])
def test_arms_that_answer_differently_are_not_compared(tmp_path: Path, fault: str) -> None:
    out = tmp_path / "run"
    state = run(make_experiment(b_settings={fault: "true"}), out)
    assert state.state == "failed"
    assert state.phase == "checking parity"
    assert state.error is not None
    assert "their speed is not compared" in state.error
    assert not stored(out / "parity.json", ParityRecord).ok
    assert blocks(out) == []


def test_a_server_that_dies_mid_block_cuts_the_block_and_fails_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    # parity asks 16 times and warm-up 13; a block of one user asks thousands of times
    long = Cell(scenario="single", batch_size=1, concurrency=1, requests=10, seconds=20.0, max_seconds=20.0, pairs=1)
    conditions = {"fail_if": ["b.p50 > 1e9"]}
    state = run(
        make_experiment(
            cells=(long,), b_settings={"die-after": "200"}, seed=seed_with_b_first(long), settings=conditions
        ),
        out,
    )
    assert state.state == "failed"
    assert state.error is not None
    assert "ended with exit status 9" in state.error
    assert "b-triton.log" in state.error
    (dead,) = [record for record in blocks(out) if record.label == "b"]
    assert not dead.complete
    # the request that it died of, the one that found nobody, and perhaps one that met it dying
    assert dead.errors in (2, 3)
    samples = np.load(out / dead.samples)
    assert len(samples) == dead.requests > 100
    assert (samples["error"] >= 0).sum() == dead.errors
    assert 2 <= len(dead.error_messages) <= dead.errors
    result = analyse(out)
    assert not result.valid
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}
    (threshold,) = result.thresholds
    assert threshold.state == "not_measurable"


def test_requests_that_fail_are_counted_with_their_messages_and_not_sent_again(tmp_path: Path) -> None:
    """The server answers 200 requests well, so that parity and warm-up pass, then fails every second one."""
    out = tmp_path / "run"
    cell = Cell(scenario="single", batch_size=1, concurrency=1, requests=100, seconds=0, max_seconds=20, pairs=1)
    state = run(make_experiment(cells=(cell,), b_settings={"good-first": "80", "error-every": "2"}), out)
    assert state.state == "finished"
    (record,) = [record for record in blocks(out) if record.label == "b"]
    assert record.complete
    assert record.requests == 100
    assert record.error_messages == ("HTTP 503: the queue is full",)
    assert 20 <= record.errors <= 50
    assert record.items == record.requests - record.errors
    samples = np.load(out / record.samples)
    assert ((samples["error"] == 0) == (samples["status"] == 503)).all()


def test_a_server_that_only_fails_is_not_asked_for_ever(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cell = Cell(scenario="single", batch_size=1, concurrency=1, requests=10, seconds=20, max_seconds=20, pairs=1)
    state = run(
        make_experiment(
            cells=(cell,), b_settings={"good-first": "60", "drop-every": "1"}, seed=seed_with_b_first(cell)
        ),
        out,
    )
    assert state.state == "failed"
    assert state.error is not None
    assert "100 requests in a row failed" in state.error
    (record,) = [record for record in blocks(out) if record.label == "b"]
    assert record.error_messages == ("connection closed by the server without an answer",)


def test_a_server_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    state = run(make_experiment(b_settings={"crash": "true"}), tmp_path / "run")
    assert state.state == "failed"
    assert state.error is not None
    assert "arm b (triton): the server ended with exit status 3" in state.error
    assert "cannot open the model" in state.error


def test_remote_arms_need_no_statistics_and_an_unknown_model_gets_synthetic_inputs(tmp_path: Path, fake_url) -> None:
    urls = [fake_url("--model", "other", "--no-stats"), fake_url("--model", "other", "--no-stats")]
    experiment = make_experiment(
        a=ArmRequest(label="a", target=urls[0]), b=ArmRequest(label="b", target=urls[1]), model="other"
    )
    out = tmp_path / "run"
    state = run_experiment(experiment, out, SilentProgress(), abserve=(sys.executable, "-c", "exit(1)"))
    assert (state.state, state.error) == ("finished", None)
    assert stored(out / "environment.json", Environment).inputs["kind"] == "synthetic"
    for record in blocks(out):
        assert (record.stages, record.server_cpu_ns, record.complete) == (None, None, True)
    assert stored(out / "arms.json", list[ArmRecord])[0].title == "fake 1.0 fp32"


def test_nobody_at_the_url_is_one_sentence(tmp_path: Path, unused_url: str) -> None:
    experiment = make_experiment(a=ArmRequest(label="a", target=unused_url))
    state = run(experiment, tmp_path / "run")
    assert state.state == "failed"
    assert state.error is not None
    assert f"arm a ({unused_url}): the server at {unused_url} does not answer" in state.error


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text("{}")
    with pytest.raises(StorageError, match="choose another folder with --out"):
        run(make_experiment(), tmp_path)


RUNNER = """
import sys
from pathlib import Path
import msgspec
from loadgen.run.progress import SilentProgress
from loadgen.records.run import Experiment
from loadgen.run.runner import run_experiment
experiment = msgspec.json.decode(sys.stdin.buffer.read(), type=Experiment)
state = run_experiment(experiment, Path(sys.argv[1]), SilentProgress(), abserve=(sys.executable, sys.argv[2]))
sys.exit({"finished": 0, "failed": 1, "interrupted": 130}[state.state])
"""


def start_runner(experiment: Experiment, out: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", RUNNER, str(out), FAKE_ABSERVE[1]], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(experiment))
    process.stdin.close()
    return process


def long_experiment() -> Experiment:
    short = Cell(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.1, max_seconds=5, pairs=1)
    long = Cell(scenario="concurrent", batch_size=1, concurrency=4, requests=1, seconds=60, max_seconds=60, pairs=1)
    for seed in range(20):  # one in which the short cell comes first
        experiment = make_experiment(cells=(short, long), seed=seed)
        if schedule(experiment.cells, seed)[0].cell == short:
            return experiment
    raise AssertionError


def finished(out: Path) -> Check:
    """What the report says of the run's end; it can be made whatever that was."""
    result = analyse(out)
    write_reports(out, result)
    assert not result.valid
    (check,) = [check for check in result.checks if check.name == "run_finished"]
    assert check.ok is False
    return check


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_finished_blocks_and_leaves_nobody_behind(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    process = start_runner(long_experiment(), out)
    await_true((out / "samples" / "0002.npy.part").exists, "the long block begins")
    await_true(lambda: (out / "samples" / "0002.npy.part").stat().st_size > 2000, "its samples reach the disk")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(20) == 130
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert stored(out / "run.json", RunState).state == "interrupted"
    records = blocks(out)
    assert [record.complete for record in records] == [True, True, False]
    assert records[2].note == "interrupted"
    assert len(np.load(out / records[2].samples)) == records[2].requests > 0
    assert finished(out).detail == "interrupted during: load"


def test_a_killed_runner_leaves_no_process_and_loses_at_most_a_second(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_runner(long_experiment(), out)
    part = out / "samples" / "0002.npy.part"
    await_true(part.exists, "the long block begins")
    await_true(lambda: part.stat().st_size > 2000, "its samples reach the disk")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3  # two servers and the generator
    assert finished(out).detail == "the run still runs: load"
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert len(gone) == 3
    assert stored(out / "run.json", RunState).state == "running"
    assert [record.complete for record in blocks(out)] == [True, True]
    samples = read_samples(out / "samples" / "0002.npy")
    assert len(samples) > 10
    assert (samples["status"] == 200).all()
    assert finished(out).detail == "the run was killed during: load"


def test_a_full_disk_ends_the_run_with_a_sentence_and_no_half_file(tmp_path: Path) -> None:
    out = tmp_path / "run"
    long = Cell(scenario="single", batch_size=1, concurrency=1, requests=1, seconds=60, max_seconds=60, pairs=1)
    process = start_runner(make_experiment(cells=(long,)), out)
    await_true((out / "samples" / "0000.npy.part").exists, "the block begins")
    for child in psutil.Process(process.pid).children():
        if "loadgen.generator" in child.cmdline():
            child.rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
    assert process.wait(30) == 1
    state = stored(out / "run.json", RunState)
    assert state.state == "failed"
    assert state.error is not None
    assert "0000.npy: File too large; free some space or choose another folder with --out" in state.error
    (record,) = blocks(out)
    assert not record.complete
    assert not (out / record.samples).exists()
    assert len(read_samples(out / record.samples)) == (4096 - 1024) // 64


def test_records_on_a_full_disk_are_never_half_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_STORE, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    assert "run.json: File too large; free some space or choose another folder with --out" in done.stdout
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["run.json"]
    assert stored(tmp_path / "run" / "run.json", RunState).phase == "first"


FULL_STORE = """
import resource, sys
from pathlib import Path
from loadgen.records.run import RunState
from loadgen.storage.store import RunStore, StorageError
store = RunStore(Path(sys.argv[1]))
store.state(RunState(state="running", phase="first"))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    store.state(RunState(state="running", phase="second" * 100))
except StorageError as exc:
    print(exc)
"""


def test_each_restart_is_a_fresh_start_with_its_share_of_the_pairs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cell = Cell(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0, max_seconds=5, pairs=3)
    ready: list[str] = []

    class Listener(SilentProgress):
        def arm_ready(self, record: ArmRecord) -> None:
            ready.append(record.url)

    state = run_experiment(make_experiment(cells=(cell,), restarts=2), out, Listener(), abserve=FAKE_ABSERVE)
    assert (state.state, state.error) == ("finished", None)
    assert len(set(ready)) == 4  # fresh ports: other processes
    assert [(record.pair, record.restart) for record in blocks(out)[::2]] == [(0, 0), (1, 1), (2, 1)]
