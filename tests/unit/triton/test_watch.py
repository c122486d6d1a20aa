"""The watch on stand-ins for tritonserver: short scripts that die, hang or ignore SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from servers.launch_plan import LaunchPlan
from servers.triton import watch
from servers.triton.errors import TritonDiedError, TritonOptionError
from servers.triton.log import CAUSES
from servers.triton.watch import TritonProcess, region_prefixes

LOG = """\
2026-11-20T08:51:36Z E 20828 x.cc:642] "failed to load 'm' version 1: Internal: RuntimeError: no file\\n\\nAt:"
error: creating server: Internal - failed to load all models
"""


def plan(code: str) -> LaunchPlan:
    return LaunchPlan(
        argv=(sys.executable, "-c", code),
        env={"ABSERVE_TEST": "set"},
        http_url="http://127.0.0.1:9",  # discard: nothing listens there
        grpc_address=None,
        metrics_url="",
        model="m",
        title="a stand-in",
        max_batch_size=1,
        causes=CAUSES,
    )


def await_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_death_before_ready_carries_the_reason_of_the_log(tmp_path: Path) -> None:
    code = f"import os; print({LOG!r}); assert os.environ['ABSERVE_TEST'] == 'set'; os._exit(1)"
    with TritonProcess(plan(code), tmp_path / "log") as server:
        with pytest.raises(TritonDiedError, match=r"ended with status 1: RuntimeError: no file$") as error:
            server.wait_ready(10)
        assert error.value.log_lines == ()


def test_death_without_a_reason_carries_the_lines_that_may_show_it(tmp_path: Path) -> None:
    with TritonProcess(plan("print('Error: lost'); raise SystemExit(3)"), tmp_path / "log") as server:
        with pytest.raises(TritonDiedError, match=rf"ended with status 3; its log is {tmp_path}/log$") as error:
            server.wait_ready(10)
        assert error.value.log_lines == ("Error: lost",)


def test_a_server_that_hangs_says_why(tmp_path: Path) -> None:
    code = "print('Failed to preinitialize Python stub: no model.py', flush=True); import time; time.sleep(60)"
    with TritonProcess(plan(code), tmp_path / "log") as server:
        await_text(tmp_path / "log", "no model.py")
        with pytest.raises(TritonDiedError, match=r"was not ready after 0 s: no model\.py$"):
            server.wait_ready(0.2)


def test_a_stub_that_ends_while_it_is_checked_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = psutil.Process()
    monkeypatch.setattr(gone, "status", lambda: (_ for _ in ()).throw(psutil.NoSuchProcess(gone.pid)))
    monkeypatch.setattr(watch, "KILL_SECONDS", 0.01)
    sleeps = plan("import time; time.sleep(60)")
    with TritonProcess(sleeps, tmp_path / "log") as server:
        monkeypatch.setattr(server, "_find_stubs", lambda: [gone])
        server.assert_alive()  # while a user's config is completed, such a process comes and goes
        monkeypatch.setattr(server, "_find_stubs", list)  # or the end would kill this process
    ours = msgspec.structs.replace(sleeps, argv=(*sleeps.argv, "--disable-auto-complete-config"))
    with TritonProcess(ours, tmp_path / "log") as server:
        monkeypatch.setattr(server, "_find_stubs", lambda: [gone])
        with pytest.raises(TritonDiedError, match="died and is not restarted"):
            server.assert_alive()
        monkeypatch.setattr(server, "_find_stubs", list)


def test_death_by_signal_is_named(tmp_path: Path) -> None:
    server = TritonProcess(plan("import os; os.kill(os.getpid(), 9)"), tmp_path / "log")
    with server, pytest.raises(TritonDiedError, match="ended by SIGKILL"):
        server.wait_ready(10)


def test_not_ready_in_time(tmp_path: Path) -> None:
    server = TritonProcess(plan("import time; time.sleep(60)"), tmp_path / "log")
    with server, pytest.raises(TritonDiedError, match="not ready after 0 s"):
        server.wait_ready(0.2)


def test_a_log_that_cannot_be_written_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TritonOptionError, match=r"cannot write .*/file/log: .* --log-file"):
        TritonProcess(plan("pass"), tmp_path / "file" / "log")


def test_asked_to_end_while_loading(tmp_path: Path) -> None:
    end = threading.Event()
    end.set()
    with TritonProcess(plan("import time; time.sleep(60)"), tmp_path / "log") as server:
        assert server.wait_ready(10, end) is False


def test_stop_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    with TritonProcess(plan(code), log) as server:
        await_text(log, "deaf")
        started = time.monotonic()
        assert server.stop(timeout_seconds=0.3) == -signal.SIGKILL
        assert time.monotonic() - started < 5
        assert server.stop() == -signal.SIGKILL, "a second stop changes nothing"
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_prefix_of_a_command_line() -> None:
    argv = ("t", "--backend-config=python,shm-region-prefix-name=abserve_triton_1_", "--http-port=1")
    assert list(region_prefixes(argv)) == ["abserve_triton_1_"]
