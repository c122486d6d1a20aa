"""`locust -f loadgen/scenarios.py` on several processes: one schedule, one sample file, no worker lost unnoticed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from loadgen.records.samples import read_samples
from tests.integration.loadgen.conftest import await_true
from tests.integration.loadgen.test_locustfile import LOCUSTFILE

pytestmark = pytest.mark.slow


def start(url: str, out: Path, images: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, "--headless", "--only-summary"]
    stored = ["--samples-dir", str(images), "--samples-out", str(out)]
    return subprocess.Popen([*command, *stored, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def merged(out: Path) -> tuple[np.ndarray, dict]:
    (path,) = out.glob("merged-*.npy")
    return read_samples(path), json.loads(path.with_suffix(".json").read_bytes())


@pytest.mark.parametrize(("users", "holders"), [(6, 2), (1, 1)])
def test_workers_share_a_rate_and_their_samples_are_merged(
    fake_url: Callable[..., str], images: Path, tmp_path: Path, users: int, holders: int
) -> None:
    """A worker without users has no share: the rate is what was asked for all the same."""
    out = tmp_path / "raw"
    url = fake_url("--delay-ms", "5")
    options = f"--processes 2 -u {users} -r {users} -t 4s --arrivals constant --rate 50 OpenLoop"
    process = start(url, out, images, *options.split())
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    samples, about = merged(out)
    assert about["complete"]
    assert about["clock"] == "one"
    assert len(samples) == about["requests"] == sum(worker["requests"] for worker in about["workers"])
    assert set(samples["user"]) == set(range(users)), "users are numbered through over the workers"
    senders = [worker for worker in about["workers"] if worker["requests"]]
    assert len(senders) == holders
    for worker in senders:
        first = worker["first_user"]
        mine = (samples["user"] >= first) & (samples["user"] < first + users // holders)
        gaps = np.diff(np.sort(samples["intended_ns"][mine]))
        assert gaps == pytest.approx(holders * 1e9 / 50), "each takes every n-th arrival"
    assert about["requests_per_s"] == pytest.approx(50.0, rel=0.1)
    assert (samples["send_ns"] >= samples["intended_ns"]).all()


def test_a_killed_worker_ends_the_test_as_invalid_and_keeps_what_it_measured(
    fake_url: Callable[..., str], images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "raw"
    url = fake_url("--delay-ms", "5")
    process = start(url, out, images, "--processes", "2", "-u", "4", "-r", "4", "-t", "120s", "Concurrent")
    await_true(
        lambda: len(list(out.glob("*.part"))) == 2 and all(p.stat().st_size > 10_000 for p in out.glob("*.part")),
        "samples of both workers",
    )
    killed = psutil.Process(process.pid).children()[0]
    killed.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=60)  # of the 120 s that were asked for
    assert process.returncode != 0
    assert "INVALID: load worker" in errors
    assert f"process {killed.pid}) lost during the test" in errors
    samples, about = merged(out)
    assert not about["complete"]
    (lost,) = [worker for worker in about["workers"] if worker["lost"]]
    (other,) = [worker for worker in about["workers"] if not worker["lost"]]
    assert (lost["pid"], lost["requests"] > 50) == (killed.pid, True)
    assert len(samples) == lost["requests"] + other["requests"]


def test_a_master_and_workers_started_apart_work_the_same(
    fake_url: Callable[..., str], images: Path, tmp_path: Path, unused_url: str
) -> None:
    """As on several machines, but for the network between them."""
    port = unused_url.rpartition(":")[2]
    url = fake_url("--delay-ms", "5")
    out = tmp_path / "raw"
    expected = ["--master", "--expect-workers", "2", "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
    master = start(url, out, images, *expected, "-u", "4", "-r", "4", "-t", "3s", "Concurrent")
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--worker", "--master-port", port]
    workers = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    _, errors = master.communicate(timeout=90)
    assert master.returncode == 0, errors
    assert [worker.wait(60) for worker in workers] == [0, 0]
    samples, about = merged(out)
    assert about["complete"]
    assert {worker["pid"] for worker in about["workers"]} == {worker.pid for worker in workers}
    assert len(samples) == sum(worker["requests"] for worker in about["workers"]) > 100


def test_an_open_loop_without_a_rate_is_refused(fake_url: Callable[..., str], images: Path, tmp_path: Path) -> None:
    process = start(fake_url(), tmp_path / "raw", images, "-u", "1", "-t", "20s", "OpenLoop")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--rate 50" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("end", ["refused", "killed"])
def test_no_worker_outlives_the_command(fake_url: Callable[..., str], images: Path, tmp_path: Path, end: str) -> None:
    """Locust leaves those that still start where its start fails."""
    url = "http://127.0.0.1:9" if end == "refused" else fake_url()
    marker = str(tmp_path / "raw")
    process = start(url, tmp_path / "raw", images, "--processes", "2", "-u", "2", "-t", "60s", "Concurrent")
    if end == "killed":
        await_true(lambda: len(psutil.Process(process.pid).children()) == 2, "both workers")
        process.kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    await_true(lambda: not [one for one in psutil.process_iter() if marker in command_of(one)], "no process is left")


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
