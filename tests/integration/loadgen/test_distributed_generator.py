"""A generator of two workers: the same load as from one, in one sample file, and a worker that is lost is noticed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from loadgen.client.generator import GeneratorProcess
from loadgen.client.messages import BlockOutcome, GeneratorError, Open
from loadgen.experiment.schedule import due_offsets_ns
from tests.integration.loadgen.conftest import await_true, prepared

pytestmark = pytest.mark.usefixtures("no_process_left")


@pytest.fixture
def generator(tmp_path: Path) -> Iterator[GeneratorProcess]:
    process = GeneratorProcess(tmp_path / "generator.log", processes=2)
    yield process
    process.stop()


@pytest.fixture
def url(generator: GeneratorProcess, tmp_path: Path, fake_url: Callable[..., str]) -> str:
    return prepared(generator, tmp_path, fake_url("--delay-ms", "20", "--error-every", "50"))


def workers() -> list[psutil.Process]:
    """In the order in which they were started."""
    children = [child for child in psutil.Process().children() if "loadgen.client.worker" in child.cmdline()]
    return sorted(children, key=lambda child: (child.create_time(), child.pid))


def command(url: str, path: Path | None, **changes: object) -> Open:
    fields: dict[str, object] = {
        "url": url, "batch_size": 1, "concurrency": 5, "requests": 61, "seconds": 0, "max_seconds": 20,
        "timeout_s": 10, "samples_path": None if path is None else str(path),
    }  # fmt: skip
    return Open(**{**fields, **changes})  # type: ignore[arg-type]


def run(generator: GeneratorProcess, block: Open) -> BlockOutcome:
    generator.open(block)
    return generator.go(block)


def test_two_workers_send_what_one_process_would(generator: GeneratorProcess, url: str, tmp_path: Path) -> None:
    closed = run(generator, command(url, tmp_path / "0000.npy"))
    samples = np.load(tmp_path / "0000.npy")
    assert len(samples) == closed.requests
    assert closed.requests in (61, 62), "two workers may see at the same moment that one request is missing"
    assert set(samples["user"]) == set(range(5))
    assert sum(worker.requests for worker in closed.workers) == closed.requests
    assert min(worker.requests for worker in closed.workers) > 10
    assert len({worker.pid for worker in closed.workers}) == 2
    assert closed.errors == (samples["error"] >= 0).sum() >= 1
    assert closed.error_messages == ("HTTP 503: the queue is full",)
    assert (np.diff(samples["send_ns"]) >= 0).all()
    first = [samples["send_ns"][samples["user"] == user].min() for user in range(5)]
    assert min(first) >= closed.window_start_ns
    assert closed.cpu_ns == sum(worker.cpu_ns for worker in closed.workers) > 0

    opened = run(
        generator,
        command(
            url, tmp_path / "0001.npy", requests=1, seconds=1.0, arrivals="poisson", rate_per_s=40.0, arrivals_seed=5
        ),
    )
    samples = np.load(tmp_path / "0001.npy")
    planned = due_offsets_ns("poisson", 40.0, 40, 5)
    due = set((samples["intended_ns"] - opened.window_start_ns).tolist())
    assert len(due) == len(samples) == opened.requests
    assert due <= set(planned.tolist()), "all of it, where the machine is fast enough"
    assert (samples["send_ns"] >= samples["intended_ns"]).all()
    assert (opened.offered, opened.due_span_ns) == (40, int(planned[-1]))
    assert all(0 < worker.requests <= 20 for worker in opened.workers)
    assert not list(tmp_path.glob("*worker*.npy*")), "the workers' own files were merged"


def test_every_worker_keeps_the_load_up_until_the_last_counted_request_is_answered(
    generator: GeneratorProcess, tmp_path: Path, fake_url: Callable[..., str]
) -> None:
    """A worker per user, as with `--processes 16` and 16 users. Each used to stop after its own last request, so the
    last counted requests ran at a falling load."""
    url = prepared(generator, tmp_path, fake_url("--delay-ms", "200", "--slots", "1"))
    outcome = run(generator, command(url, tmp_path / "0000.npy", concurrency=2, requests=1, seconds=0.7))
    assert len(outcome.workers) == 2
    assert outcome.cool_down >= 1


def test_workers_for_whom_nothing_falls_due_send_nothing(tmp_path: Path, fake_url: Callable[..., str]) -> None:
    """Two requests, three workers: the third once took an empty schedule for a closed loop and sent all it could."""
    loop = {"arrivals": "constant", "rate_per_s": 10.0, "requests": 1, "seconds": 0.15}
    generator = GeneratorProcess(tmp_path / "generator.log", processes=3)
    try:
        url = prepared(generator, tmp_path, fake_url())
        outcome = run(generator, command(url, tmp_path / "0000.npy", **loop))
        fewer = run(generator, command(url, tmp_path / "0001.npy", concurrency=2))
    finally:
        generator.stop()
    assert (outcome.offered, outcome.requests, outcome.cut_reason) == (2, 2, None)
    assert [worker.requests for worker in outcome.workers] == [1, 1, 0]
    assert (len(fewer.workers), fewer.cut_reason) == (2, None), "of two users no third process has one"
    assert set(np.load(tmp_path / "0001.npy")["user"]) == {0, 1}


def test_a_worker_that_is_killed_cuts_the_block_and_nothing_measured_is_lost(
    generator: GeneratorProcess, url: str, tmp_path: Path
) -> None:
    block = command(url, tmp_path / "0000.npy", seconds=20.0)
    generator.open(block)
    first, second = workers()
    written = tmp_path / "0000.worker0.npy.part"

    def kill_when_it_has_written() -> None:
        await_true(lambda: written.stat().st_size > 3000, "samples of the first worker")
        first.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_when_it_has_written)
    killer.start()
    outcome = generator.go(block)
    killer.join()
    assert outcome.cut_reason is not None
    assert outcome.cut_reason.startswith("load worker 1 of 2 was killed by SIGKILL")
    samples = np.load(tmp_path / "0000.npy")
    lost, other = outcome.workers
    assert lost.lost is not None
    assert (other.lost, other.pid) == (None, second.pid)
    assert 1 <= lost.requests == np.isin(samples["user"], [0, 1, 2]).sum()
    assert len(samples) == outcome.requests == lost.requests + other.requests
    with pytest.raises(GeneratorError, match="load worker 1 of 2 was killed"):
        generator.open(block)


@pytest.mark.slow
def test_what_all_workers_refuse_is_refused_once(
    generator: GeneratorProcess, url: str, unused_url: str, tmp_path: Path
) -> None:
    with pytest.raises(GeneratorError, match="no bodies of batch size 7"):
        generator.open(command(url, None, batch_size=7))
    with pytest.raises(GeneratorError, match="Connection refused"):
        generator.open(command(unused_url, tmp_path / "0000.npy"))
    assert run(generator, command(url, None, concurrency=1, requests=3)).requests == 3
    assert not list(tmp_path.glob("*.npy*"))


@pytest.mark.slow
def test_a_worker_that_hangs_is_lost_too(generator: GeneratorProcess, url: str, tmp_path: Path) -> None:
    block = command(url, tmp_path / "0000.npy", seconds=60.0, max_seconds=60.0)
    generator.open(block)
    hung, _ = workers()
    written = tmp_path / "0000.worker0.npy.part"

    def stop_it() -> None:
        await_true(lambda: written.stat().st_size > 3000, "samples of that worker")
        os.kill(hung.pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop_it)
    stopper.start()
    outcome = generator.go(block)
    stopper.join()
    assert outcome.cut_reason is not None
    assert "sent no heartbeat" in outcome.cut_reason
    assert outcome.requests == len(np.load(tmp_path / "0000.npy"))
