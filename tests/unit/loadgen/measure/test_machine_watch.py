"""Who used the processors, from recorded texts of /proc: steal cannot be made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loadgen.measure import machine_watch
from loadgen.measure.machine_watch import ProcessorReading, descendants, machine_load, read_processors

TICK = 10_000_000
OWN = os.getpid()


def process(number: int, parent: int, name: str, ticks: int, waited: int = 0, core: int = 0) -> str:
    """A line of /proc/PID/stat, with the 52 fields of Linux 6."""
    half = ticks // 2
    return (
        f"{number} ({name}) S {parent} {number} {number} 0 -1 4194304 126 0 0 0 {half} {ticks - half} {waited} 0 "
        f"20 0 1 0 5 1 1 18446744073709551615 1 1 0 0 0 0 0 4096 0 0 0 0 17 {core} 0 0 0 0 0 1 1 1 1 1 1 1 0\n"
    )


def record(folder: Path, stat: str, processes: dict[int, str], pressure: str | None = None) -> Path:
    folder.mkdir()
    (folder / "stat").write_text(stat)
    for number, text in processes.items():
        (folder / str(number)).mkdir()
        (folder / str(number) / "stat").write_text(text)
    if pressure is not None:
        (folder / "pressure").mkdir()
        (folder / "pressure" / "cpu").write_text(pressure)
    return folder


def two_readings(tmp_path: Path) -> tuple[ProcessorReading | None, ProcessorReading | None]:
    """10 s of two of three cores (2,000 ticks): 600 stolen, 1,000 busy, of which 300 ours and 650 a converter's."""
    before = record(
        tmp_path / "before",
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 0 100 5000 0 7 70 200 0 0\ncpu1 100 0 100 5000 0 7 70 200 0 0\n"
        "cpu2 1 1 1 1 1 1 1 1 1 1\nintr 5\nprocs_running 4\n",
        {OWN: process(OWN, 1, "abserve", 100), 20: process(20, OWN, "short", 50), 30: process(30, 1, "ff (m) peg", 900),
         31: process(31, 1, "elsewhere", 10, core=2)},
        "some avg10=1.00 avg60=1.00 avg300=1.00 total=5000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    )  # fmt: skip
    after = record(
        tmp_path / "after",
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 500 50 150 5200 0 7 70 500 0 0\ncpu1 500 50 150 5200 0 7 70 500 0 0\n"
        "cpu2 9 9 9 9 9 9 9 9 9 9\nintr 5\nprocs_running 1\n",
        {OWN: process(OWN, 1, "abserve", 200, waited=120), 21: process(21, OWN, "server", 130),
         30: process(30, 1, "ff (m) peg", 1550), 31: process(31, 1, "elsewhere", 5000, core=2)},
        "some avg10=1.00 avg60=1.00 avg300=1.00 total=9000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    )  # fmt: skip
    readings = [read_processors(folder, cores={0, 1}) for folder in (before, after)]
    return readings[0], readings[1]


def test_steal_other_processes_and_the_run_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ended between the readings is counted for its parent and is not lost."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine_watch, "PROC", tmp_path)
    load = machine_load(*two_readings(tmp_path), ())
    assert load is not None
    assert (load.total_ns, load.steal_ns, load.busy_ns) == (2000 * TICK, 600 * TICK, 1000 * TICK)
    assert load.known_ns == (200 + 120 + 130 - 100 - 50) * TICK
    assert load.others == ("PID 30 ff (m) peg, 0.65 cores",), "what runs on other cores is no disturbance"
    assert (load.runnable, load.waited_ns) == (3, 4_000_000)


@pytest.mark.parametrize(("pinned_to", "known"), [({2}, 300), ({1, 2}, 300 + 4990)])
def test_a_server_that_is_pinned_to_other_cores_hides_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned_to: set[int], known: int
) -> None:
    """The time of a server at a URL, on cores of its own, counted as time of these: the converter had none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: pinned_to if number == 31 else {0, 1})
    monkeypatch.setattr(machine_watch, "PROC", tmp_path)
    load = machine_load(*two_readings(tmp_path), (31,))
    assert load is not None
    assert load.known_ns == known * TICK


def test_what_cannot_be_told_is_unknown(tmp_path: Path) -> None:
    load = machine_load(*two_readings(tmp_path), None)
    assert load is not None
    assert (load.known_ns, load.others) == (None, ())
    old = record(tmp_path / "old", "cpu  1 1 1 1\ncpu0 1 1 1 1 0 0 0\n", {})
    reading = read_processors(old, cores={0})
    assert reading is not None
    assert (reading.steal_ticks, reading.runnable, reading.waited_us) == (None, None, None)
    assert read_processors(tmp_path / "none") is None


def test_descendants_are_found_whatever_their_order(tmp_path: Path) -> None:
    texts = {9: process(9, 5, "grandchild", 1), 5: process(5, 3, "child", 1), 3: process(3, 1, "root", 1),
             4: process(4, 1, "other", 1)}  # fmt: skip
    reading = read_processors(record(tmp_path / "proc", "cpu0 1 1 1 1 1 1 1 1\n", texts), cores={0})
    assert reading is not None
    assert descendants(reading.processes, (3, 77)) == {3, 5, 9}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["/usr/bin/python3", "/home/me/train.py", "--token", "s3cret"], "python3 train.py"),
        (["python3.11", "-W", "error", "-u", "job.py"], "python3.11 job.py"),
        (["python", "-m", "http.server", "s3cret"], "python -m http.server"),
        (["python", "-m", "s3cret s3cret"], "python"),
        (["python3", "-c", "login('s3cret')"], "python3"),
        (["bash", "s3cret"], "bash"),
        (["/usr/bin/java", "-jar", "/opt/server.jar", "s3cret"], "java server.jar"),
        (["/usr/bin/curl", "-H", "Authorization: s3cret", "s3cret.py"], "kernel name"),
        (["nginx: worker process"], "kernel name"),
        ([], "kernel name"),
    ],
)
def test_a_command_is_named_without_what_may_be_a_secret(
    arguments: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_watch, "PROC", tmp_path)
    (tmp_path / "812").mkdir()
    (tmp_path / "812" / "cmdline").write_bytes(b"".join(argument.encode() + b"\0" for argument in arguments))
    assert machine_watch.short_command(812, "kernel name") == shown
    assert machine_watch.short_command(813, "kernel name") == "kernel name", "it has ended"


def test_processes_of_one_name_are_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose processes each take little is named."""
    monkeypatch.setattr(machine_watch, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    idle, busy = "cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n", "cpu0 500 0 0 500 0 0 0 0\ncpu1 0 0 0 1000 0 0 0 0\n"
    started = {number: process(number, 1, "cc1plus", 0) for number in range(40, 100)}
    ended = {number: process(number, 1, "cc1plus", 10 if number == 50 else 5) for number in range(40, 100)}
    readings = [read_processors(record(tmp_path / name, stat, texts), cores={0, 1}) for name, stat, texts in (
        ("before", idle, started), ("after", busy, ended))]  # fmt: skip
    load = machine_load(readings[0], readings[1], ())
    assert load is not None
    assert load.others == ("PID 50 and 59 more cc1plus, 0.30 cores",)
