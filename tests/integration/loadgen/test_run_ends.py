"""Whole runs on fake servers that are interrupted, killed or out of disk: what is kept, and that nobody is left."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest

from loadgen.experiment.schedule import schedule
from loadgen.launch.work_folder import remove_abandoned
from loadgen.records.checks import Check
from loadgen.records.run import ArmRequest, Experiment, RunState, Workload
from loadgen.records.samples import read_samples
from loadgen.records.store import RunStore, StorageError
from loadgen.report.files import published
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import await_true, blocks, make_experiment, programs_of, start_runner, stored

pytestmark = pytest.mark.usefixtures("no_process_left")


def paced(label: str) -> ArmRequest:
    """A server that leaves the cores to others during a long block."""
    return ArmRequest(label=label, target="native", settings={"delay-ms": "5"})


def long_experiment() -> Experiment:
    short = Workload(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.1, max_seconds=5, rounds=1)
    long = Workload(
        scenario="concurrent", batch_size=1, concurrency=4, requests=1, seconds=60, max_seconds=60, rounds=1
    )
    for seed in range(20):  # one in which the short workload comes first
        experiment = make_experiment(a=paced("a"), b=paced("b"), workloads=(short, long), seed=seed)
        if schedule(experiment)[0].workload == short:
            return experiment
    raise AssertionError


def finished(out: Path) -> Check:
    """What the report says of the run's end; it can be made whatever that was."""
    result = analyse(out)
    published(result).write(out)
    assert not result.valid
    (check,) = [check for check in result.checks if check.name == "run_finished"]
    assert check.ok is False
    return check


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_finished_blocks_and_leaves_nobody_behind(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    process = start_runner(long_experiment(), out)
    await_true((out / "samples" / "0002.npy.part").exists, "the long block begins")
    await_true(lambda: (out / "samples" / "0002.npy.part").stat().st_size > 2000, "its samples reach the disk")
    children = programs_of(process)
    assert len(children) == 3  # two servers and the generator
    process.send_signal(number)
    assert process.wait(60) == 130
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert stored(out / "run.json", RunState).state == "interrupted"
    records = blocks(out)
    assert [record.complete for record in records] == [True, True, False]
    assert records[2].note == "interrupted"
    assert len(np.load(out / records[2].samples)) == records[2].requests > 0
    assert finished(out).detail == "the run was interrupted during: load"
    assert not list(tmp_path.glob("abserve-run-*"))


def test_an_impatient_finger_does_not_break_into_the_clean_up(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_runner(long_experiment(), out)
    part = out / "samples" / "0002.npy.part"
    await_true(lambda: part.exists() and part.stat().st_size > 2000, "the long block is under way")
    children = programs_of(process)
    assert len(children) == 3
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    assert process.wait(60) == 130
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert stored(out / "run.json", RunState).state == "interrupted"
    assert [record.complete for record in blocks(out)] == [True, True, False], "the cut block is kept, too"
    assert not list(tmp_path.glob("abserve-run-*"))


def test_a_hangup_that_is_ignored_as_under_nohup_ends_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOHUP], stdout=subprocess.PIPE, preexec_fn=ignore_hangup, check=True, timeout=30
    )
    assert done.stdout == b"goes on\ninterrupted\n"


def ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


NOHUP = """
import os, signal
from loadgen.measure.interruption import interruptible
with interruptible():
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on", flush=True)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.usefixtures("real_exec")  # the programs end by themselves, and so not as forks do
def test_a_killed_runner_leaves_no_process_and_loses_at_most_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    process = start_runner(long_experiment(), out)
    part = out / "samples" / "0002.npy.part"
    await_true(part.exists, "the long block begins")
    await_true(lambda: part.stat().st_size > 2000, "its samples reach the disk")
    children = programs_of(process)
    assert len(children) == 3
    assert finished(out).detail == "the run is still running: load"
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert len(gone) == 3
    assert stored(out / "run.json", RunState).state == "running"
    assert [record.complete for record in blocks(out)] == [True, True]
    samples = read_samples(out / "samples" / "0002.npy")
    assert len(samples) > 10
    assert (samples["status"] == 200).all()
    assert finished(out).detail == "the run was killed during: load"
    assert len(list(tmp_path.glob("abserve-run-*"))) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove_abandoned()  # as the next run does
    assert not list(tmp_path.glob("abserve-run-*"))


def test_a_full_disk_ends_the_run_with_a_sentence_and_no_half_file(tmp_path: Path) -> None:
    out = tmp_path / "run"
    long = Workload(scenario="single", batch_size=1, concurrency=1, requests=1, seconds=60, max_seconds=60, rounds=1)
    process = start_runner(make_experiment(a=paced("a"), b=paced("b"), workloads=(long,)), out)
    await_true((out / "samples" / "0000.npy.part").exists, "the block begins")
    for child in psutil.Process(process.pid).children():
        if "loadgen.client.worker" in child.cmdline():
            child.rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
    assert process.wait(60) == 1
    state = stored(out / "run.json", RunState)
    assert state.state == "failed"
    assert state.error is not None
    assert "0000.npy: File too large; free some space or choose another folder with --out" in state.error
    (record,) = blocks(out)
    assert not record.complete
    assert not (out / record.samples).exists()
    assert len(read_samples(out / record.samples)) == (4096 - 1024) // 64


def test_how_a_run_ended_is_stored_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(tmp_path / "run")
    store.write(RunState(state="running", phase="load, with a title that is longer than what replaces it"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("loadgen.records.store.write_atomically", full)
    with pytest.raises(StorageError, match="No space left"):
        store.write(RunState(state="running", phase="load"))
    ended = RunState(state="failed", phase="load", error="cannot store it")
    store.write_last(ended)
    assert stored(tmp_path / "run" / "run.json", RunState) == ended
    with pytest.raises(StorageError, match="No space left"):
        store.write_last(RunState(state="failed", phase="load", error="x" * 4096))
    assert stored(tmp_path / "run" / "run.json", RunState) == ended


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
from loadgen.records.store import RunStore, StorageError
store = RunStore(Path(sys.argv[1]))
store.write(RunState(state="running", phase="first"))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    store.write(RunState(state="running", phase="second" * 100))
except StorageError as exc:
    print(exc)
"""
