"""What goes wrong on the generator's side is caused here, and each time the run says so and keeps what was measured."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time_ns

import numpy as np
import psutil
import pytest

import loadgen.measure.load_runner
from loadgen.client.endpoint import Endpoint
from loadgen.client.generator import GeneratorProcess
from loadgen.client.inputs import write_synthetic
from loadgen.client.messages import Open, Prepare
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import BlockRecord, Experiment, RunState, Workload
from loadgen.records.samples import read_samples
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, await_true, blocks, make_experiment, start_runner, stored

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.slow]

LONG = Workload(scenario="concurrent", batch_size=1, concurrency=4, requests=1, seconds=60, max_seconds=60, rounds=1)


def children_of(process: subprocess.Popen[bytes], module: str) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if module in child.cmdline()]


def run_until_samples(experiment: Experiment, out: Path, name: str) -> subprocess.Popen[bytes]:
    process = start_runner(experiment, out)
    part = out / "samples" / name
    await_true(lambda: part.exists() and part.stat().st_size > 3000, "samples reach the disk")
    return process


def test_a_killed_generator_fails_the_run_and_its_samples_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = run_until_samples(make_experiment(workloads=(LONG,)), out, "0000.npy.part")
    (generator,) = children_of(process, "loadgen.client.worker")
    generator.send_signal(signal.SIGKILL)
    assert process.wait(60) == 1
    state = stored(out / "run.json", RunState)
    assert state.error is not None
    assert "the load generator was killed by SIGKILL" in state.error
    written = sum(len(read_samples(path)) for path in (out / "samples").iterdir())
    assert written > 10
    result = analyse(out)
    assert not result.valid
    (complete,) = [check for check in result.checks if check.name == "blocks_complete"]
    assert complete.ok is None
    assert f"{written:,} requests of an unfinished block are not compared" in complete.detail


def test_a_lost_worker_fails_the_run_and_everything_measured_is_in_one_file(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = run_until_samples(make_experiment(workloads=(LONG,), processes=2), out, "0000.worker1.npy.part")
    worker = max(children_of(process, "loadgen.client.worker"), key=lambda child: (child.create_time(), child.pid))
    worker.send_signal(signal.SIGKILL)
    assert process.wait(60) == 1
    (record,) = blocks(out)
    assert not record.complete
    assert record.note is not None
    assert record.note.startswith("load worker 2 of 2 was killed by SIGKILL")
    assert record.workers[1].lost is not None
    assert record.workers[1].requests > 0
    assert len(np.load(out / record.samples)) == record.requests == sum(worker.requests for worker in record.workers)
    result = analyse(out)
    assert not result.valid
    assert any("load worker 2 of 2 was killed" in sentence for sentence in result.verdict.failed)


def test_a_worker_with_a_full_disk_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_runner(make_experiment(workloads=(LONG,), processes=2), out)
    await_true((out / "samples" / "0000.worker1.npy.part").exists, "the block begins")
    for worker in children_of(process, "loadgen.client.worker"):
        worker.rlimit(psutil.RLIMIT_FSIZE, (8192, 8192))
    assert process.wait(60) == 1
    state = stored(out / "run.json", RunState)
    assert state.error is not None
    assert "File too large; free some space or choose another folder with --out" in state.error
    (record,) = blocks(out)
    assert not record.complete


STEPPING_CLOCK = """
import time

_time, _calls = time.time, 0


def stepping():
    global _calls
    _calls += 1
    return _time() + (7200.0 if _calls // 3 % 2 else -7200.0)


time.time = stepping
time.time_ns = lambda: int(stepping() * 1e9)
"""


@pytest.fixture
def stepping_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorProcess]:
    """Two workers for whom the wall clock jumps by four hours all the time."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(STEPPING_CLOCK)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "clock"), os.environ.get("PYTHONPATH", "")]))
        process = GeneratorProcess(tmp_path / "generator.log", processes=2)
    yield process
    process.stop()


def test_the_wall_clock_does_not_matter_to_the_generator(
    stepping_generator: GeneratorProcess, fake_url: Callable[..., str], tmp_path: Path
) -> None:
    url = fake_url("--delay-ms", "20")
    signature = Endpoint(url).signature("openclip_vit_b32")
    write_synthetic(signature, tmp_path / "samples", "fp32", 0)
    stepping_generator.prepare(
        Prepare(
            samples_directory=str(tmp_path / "samples"), payload="fp32", signature=signature, batch_sizes=(1,), seed=0
        )
    )
    command = Open(
        url=url, batch_size=1, concurrency=4, requests=1, seconds=5.0, max_seconds=20.0, timeout_s=10.0,
        samples_path=str(tmp_path / "0000.npy"), arrivals="constant", rate_per_s=50.0,
    )  # fmt: skip
    stepping_generator.open(command)
    outcome = stepping_generator.go(command)
    samples = np.load(tmp_path / "0000.npy")
    assert (outcome.cut_reason, outcome.errors, len(samples)) == (None, 0, 250)
    assert np.diff(np.sort(samples["intended_ns"])).tolist() == [20_000_000] * 249
    assert (samples["send_ns"] >= samples["intended_ns"]).all()
    assert ((samples["end_ns"] - samples["send_ns"]) >= 20e6).all()
    assert ((samples["end_ns"] - samples["intended_ns"]) < 3600e9).all()
    assert 4.9e9 < outcome.window_end_ns - outcome.window_start_ns < 3600e9


def test_a_step_of_the_wall_clock_is_noted_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    calls: list[None] = []

    def stepping() -> int:
        calls.append(None)
        return time_ns() + (0 if len(calls) == 1 else 3_600_000_000_000)

    monkeypatch.setattr(loadgen.measure.load_runner, "time_ns", stepping)
    workload = Workload(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0, max_seconds=5, rounds=1)
    state = run_experiment(make_experiment(workloads=(workload,)), out, RunProgress(), abserve=FAKE_ABSERVE)
    assert state.state == "finished"
    first, second = (record for record in blocks(out) if isinstance(record, BlockRecord))
    assert first.complete
    assert "the wall clock was set by +3,600 s" in (first.note or "")
    assert second.note is None
    assert 0 < first.window_end_ns - first.window_start_ns < 60e9
