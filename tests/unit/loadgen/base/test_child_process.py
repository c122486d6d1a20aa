"""Child processes end when they are told to, when they will not listen, and when we are gone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from loadgen.base.child_process import ChildProcess, ProcessError
from servers.commands.native import CAUSES

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""


def await_true(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stop_kills_what_ignores_sigterm_with_its_children(tmp_path: Path) -> None:
    process = ChildProcess([sys.executable, "-c", STUBBORN], log_path=tmp_path / "log")
    await_true(lambda: "up" in (tmp_path / "log").read_text())
    tree = process.tree()
    assert len(tree) == 2
    started = time.monotonic()
    process.stop(timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in tree)
    process.stop()


def test_a_dead_process_tells_how_and_what_it_said(tmp_path: Path) -> None:
    process = ChildProcess(
        [sys.executable, "-c", "print('port taken'); raise SystemExit(4)"], log_path=tmp_path / "logs" / "x.log"
    )
    await_true(process.failure)
    assert "ended with exit status 4" in (process.failure() or "")
    assert "port taken" in (process.failure() or "")


def test_what_an_earlier_process_said_is_not_its_successors_last_word(tmp_path: Path) -> None:
    for words in ("port taken", ""):
        process = ChildProcess([sys.executable, "-c", f"print({words!r}, end='')"], log_path=tmp_path / "log")
        process.popen.wait(60)
    assert "port taken" in (tmp_path / "log").read_text()
    assert "wrote nothing" in process.last_words()


NATIVE_SAYS = "20:33:28 [error    ] the model cannot be served     reason='EngineError: no GPU here'"


def test_a_server_that_loads_no_model_says_why(tmp_path: Path) -> None:
    script = f"print({NATIVE_SAYS!r}); print('\\n'.join(['stopping'] * 9)); raise SystemExit(1)"
    process = ChildProcess([sys.executable, "-c", script], log_path=tmp_path / "t.log", causes=CAUSES)
    process.popen.wait(60)
    assert (process.failure() or "").endswith("which says: EngineError: no GPU here")
    assert process.cpu_ns() is None or process.cpu_ns() == 0
    process.stop()


def test_a_killed_process_names_the_signal(tmp_path: Path) -> None:
    process = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"], log_path=tmp_path / "log")
    assert process.failure() is None
    process.popen.kill()
    await_true(process.failure)
    assert "was killed by SIGKILL; it wrote nothing" in (process.failure() or "")
    process.stop()


def test_cpu_time_is_of_the_whole_tree(tmp_path: Path) -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '''{burn}time.sleep(600)''']);"
    process = ChildProcess([sys.executable, "-c", parent + "time.sleep(600)"], log_path=tmp_path / "log")
    await_true(lambda: (process.cpu_ns() or 0) >= 250_000_000)
    process.stop()


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot start /no/such/program"):
        ChildProcess(["/no/such/program"], log_path=tmp_path / "log")
