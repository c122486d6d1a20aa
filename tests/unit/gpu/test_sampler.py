"""The sampler as a process, over a stub library, read back by the load generator's side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.findings.gpu.records import read_readings

Start = Callable[..., Any]
FAST = ("--reading-seconds", "0.02", "--drain-seconds", "0.05", "--edge-seconds", "30", "--reconnect-seconds", "0.02")


def test_both_clocks_are_clock_monotonic() -> None:
    """The sampler stamps with monotonic_ns, the generator with perf_counter_ns: on Linux one clock."""
    for name in ("monotonic", "perf_counter"):
        assert time.get_clock_info(name).implementation == "clock_gettime(CLOCK_MONOTONIC)"
    assert abs(time.perf_counter_ns() - time.monotonic_ns()) < 1_000_000_000


def test_readings_lie_on_the_generators_time_axis(start_sampler: Start, stub_library: Path) -> None:
    before_ns = time.perf_counter_ns()
    sampler = start_sampler(stub_library, *FAST)
    assert sampler.ready["status"] == "ok"
    sampler.wait_for(lambda: len(sampler.lines("reading")) > 3)
    assert sampler.stop() == 0
    after_ns = time.perf_counter_ns()
    readings = read_readings(sampler.path.parent, [sampler.path.name])
    device = readings.devices["GPU-stub"]
    assert before_ns < device.energy_at_ns[0] < device.energy_at_ns[-1] < after_ns
    assert before_ns - 20e9 < device.sample_end_ns[0]  # the buffer reaches back before the start
    assert abs(device.sample_end_ns[-1] - after_ns) < 5e9
    # The stub's counter is 80 J for every second of the same clock: what was read lies within a second of its stamp.
    assert device.energy_joules == pytest.approx(80 * np.asarray(device.energy_at_ns) / 1e9, abs=80)
    (header,) = readings.headers
    assert header.driver_version == "580.65"
    assert header.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_an_edge_is_in_the_file_when_it_is_answered(start_sampler: Start, stub_library: Path) -> None:
    sampler = start_sampler(stub_library, "--reading-seconds", "3600")
    sampler.command("edge first")
    count = len(sampler.lines("reading"))
    answer = sampler.command("edge block 7 before")
    assert (answer["edge"], answer["status"]) == ("block 7 before", "ok")
    edge = sampler.lines("edge")[-1]
    assert (edge["label"], edge["at_ns"]) == ("block 7 before", answer["at_ns"])
    assert edge["devices"][0]["processes"] == [{"pid": sampler.process.pid, "used_bytes": 1 << 20}]
    assert len(sampler.lines("reading")) == count + 1
    assert "unknown command" in sampler.command("fly")["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it(start_sampler: Start, stub_library: Path, number: signal.Signals) -> None:
    sampler = start_sampler(stub_library)
    sampler.process.send_signal(number)
    assert sampler.process.wait(timeout=60) == 0
    assert sampler.lines()[-1]["reason"] == number.name


def test_it_ends_with_its_supervisor(start_sampler: Start, stub_library: Path) -> None:
    sampler = start_sampler(stub_library)
    sampler.process.stdin.close()
    assert sampler.process.wait(timeout=60) == 0
    assert sampler.lines()[-1] == sampler.lines("end")[0]
    assert sampler.lines()[-1]["reason"] == "end of input"


def test_a_device_lost_and_found_again(start_sampler: Start, stub_library: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    sampler = start_sampler(stub_library, *FAST, STUB_LOST=str(lost))
    assert sampler.command("edge before")["status"] == "ok"
    lost.touch()
    sampler.wait_for(lambda: any(e["event"] == "gpu_lost" for e in sampler.lines("event")))
    assert sampler.command("edge while lost")["status"] == "gpu_lost"
    assert sampler.lines("edge")[-1]["devices"] == []
    lost.unlink()
    sampler.wait_for(lambda: any(e["event"] == "recovered" for e in sampler.lines("event")))
    assert sampler.command("edge after")["status"] == "ok"
    assert sampler.stop() == 0
    assert [e["event"] for e in sampler.lines("event")] == ["gpu_lost", "recovered"]
    (event,) = [e for e in read_readings(sampler.path.parent, [sampler.path.name]).events if e.event == "gpu_lost"]
    assert (event.uuid, event.code) == ("GPU-stub", "GPU_IS_LOST")
    gap = [r["at_ns"] for r in sampler.lines("reading")]
    recovered = next(e["at_ns"] for e in sampler.lines("event") if e["event"] == "recovered")
    assert not [t for t in gap if event.at_ns < t < recovered]


def test_without_a_gpu_it_records_that_and_no_reading(start_sampler: Start) -> None:
    sampler = start_sampler(None)
    assert sampler.ready["status"] == "no_library"
    assert sampler.command("edge x")["status"] == "no_library"
    assert sampler.stop() == 0
    readings = read_readings(sampler.path.parent, [sampler.path.name])
    assert (readings.status, readings.devices) == ("no_library", {})


def test_a_full_disk_is_one_sentence_and_exit_status_1(stub_library: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full here")
    done = subprocess.run(
        [sys.executable, "-m", "servers.gpu.sampler", "--out", "/dev/full"],
        env=os.environ | {"LD_LIBRARY_PATH": str(stub_library)}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "cannot write /dev/full: No space left on device; free some space or choose another file\n"
