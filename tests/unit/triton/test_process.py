"""The watch on stand-ins for tritonserver, short scripts that die, hang or ignore SIGTERM; the reason in a log."""

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

from loadgen.base.child_process import ChildProcess
from servers.options.defaults import OptionError
from servers.options.launch import LaunchPlan, cause_in
from servers.triton import process
from servers.triton.installation import TritonDiedError
from servers.triton.process import CAUSES, TritonProcess, region_prefixes, relevant_lines

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
    deadline = time.monotonic() + 60
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
    monkeypatch.setattr(process, "KILL_SECONDS", 0.01)
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
    with pytest.raises(OptionError, match=r"cannot write .*/file/log: .* --log-file"):
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


BEGIN = """\
2026-11-25T08:50:30Z W 7 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned memory pool \
will not be available: CUDA driver version is insufficient for CUDA runtime version"
2026-11-25T08:50:30Z E 7 server.cc:241] "CudaDriverHelper has not been initialized."
"""
END = """
2026-11-25T08:50:30Z I 7 server.cc:604]
+------------------+------+
| Repository Agent | Path |
+------------------+------+

2026-11-25T08:50:30Z I 7 server.cc:305] "Waiting for in-flight requests to complete."
2026-11-25T08:50:30Z I 7 server.cc:321] "Timeout 20: Found 0 model versions that have in-flight inferences"
2026-11-25T08:50:30Z I 7 server.cc:336] "All models are stopped, unloading models"
2026-11-25T08:50:30Z I 7 server.cc:345] "Timeout 20: Found 0 live models and 0 in-flight non-inference requests"
error: creating server: Internal - failed to load all models
"""
POLLED = (
    "Poll failed for model directory 'wrong': unexpected directory name 'wrong' for model 'other', directory name must "
    "equal model name"
)
NO_MODULE = "ModuleNotFoundError: No module named 'nothing_here'"
NO_MODULE_LINES = rf"""
I1125 08:50:31.344939 15343 pb_stub.cc:366]  Failed to initialize Python stub: {NO_MODULE}

At:
  /q/imp/1/model.py(1): <module>

2026-11-25T08:50:31Z E 7 backend_model.cc:692] "ERROR: Failed to create instance: {NO_MODULE}\n\nAt:\n  /q/imp\n"
2026-11-25T08:50:31Z E 7 model_lifecycle.cc:642] "failed to load 'imp' version 1: Internal: {NO_MODULE}\n\nAt:\n  /q\n"
2026-11-25T08:50:31Z E 7 model_repository_manager.cc:703] "Invalid argument: ensemble 'ens' depends on 'imp' which has \
no loaded version. Model 'imp' loading failed with error: version 1 is at UNAVAILABLE state: Internal: {NO_MODULE}\n;"
"""
CASES = {
    POLLED: f'2026-11-25T08:50:30Z E 7 model_repository_manager.cc:1460] "{POLLED}"\n',
    NO_MODULE: NO_MODULE_LINES,
    "instance group gpu_0 of model gpu has kind KIND_GPU but no GPUs are available": (
        "2026-11-25T08:50:31Z E 7 model_lifecycle.cc:642] \"failed to load 'gpu' version 1: Invalid argument: instance "
        'group gpu_0 of model gpu has kind KIND_GPU but no GPUs are available"\n'
    ),
    "at least one version must be available under the version policy of model 'py'": (
        "2026-11-25T08:50:55Z E 7 model_repository_manager.cc:724] \"failed to load model 'py': at least one version "
        "must be available under the version policy of model 'py'\"\n"
    ),
    "unable to load shared library: libonnxruntime.so: cannot open shared object file: No such file or directory": (
        "E1125 08:40:46.412 7615 model_lifecycle.cc:642] failed to load 'ox' version 1: Not found: unable to load "
        "shared library: libonnxruntime.so: cannot open shared object file: No such file or directory\n"
    ),
    "Python model file not found in 'q/py/1/model.py'": (
        "I1125 08:51:09.823541 15948 pb_stub.cc:2105]  Failed to preinitialize Python stub: Python model file not "
        "found in 'q/py/1/model.py'\n"
    ),
    "load failed for model 'ens': ensemble ens contains models that are not available or ambiguous: imp": (
        "error: creating server: Invalid argument - load failed for model 'ens': ensemble ens contains models that are "
        "not available or ambiguous: imp\n"
    ),
    "failed to start HTTP service: Unavailable - Socket '127.0.0.1:28000' already in use": (
        '2026-11-25T08:50:34Z E 7 main.cc:257] "failed to start HTTP service: Unavailable - Socket '
        "'127.0.0.1:28000' already in use \"\n"
    ),
    "error while loading shared libraries: libcudart.so.12: cannot open shared object file": (
        "/opt/tritonserver/bin/tritonserver: error while loading shared libraries: libcudart.so.12: cannot open shared "
        "object file\n"
    ),
    "unrecognized option '--nonsense=1'": "tritonserver: unrecognized option '--nonsense=1'\nUsage: tritonserver\n",
}


@pytest.mark.parametrize("cause", CASES)
def test_the_cause_is_found_once_far_above_the_end(cause: str, tmp_path: Path) -> None:
    log = BEGIN + CASES[cause] + END
    assert cause_in(log, CAUSES) == cause
    script = f"print({log!r}); raise SystemExit(1)"
    process = ChildProcess([sys.executable, "-c", script], log_path=tmp_path / "t.log", causes=CAUSES)
    process.popen.wait(60)
    assert process.failure() == f"ended with exit status 1; see {tmp_path / 't.log'}, which says: {cause}"


def test_the_end_of_a_log_is_no_cause() -> None:
    assert cause_in(BEGIN + END, CAUSES) is None


def test_without_a_cause_the_lines_that_matter_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(BEGIN + "Error: Failed to initialize NVML\n" + END)
    assert relevant_lines(log) == ("error: creating server: Internal - failed to load all models",)
    log.write_text("one\n\n+---+\n| a |\n+---+\ntwo\n")
    assert relevant_lines(log) == ("one", "two")
    assert relevant_lines(tmp_path / "none") == ()
