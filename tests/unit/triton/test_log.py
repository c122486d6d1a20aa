"""Why tritonserver ended: what 2.51 wrote, and what `abserve serve triton` and `abserve compare` quote of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadgen.child_process import ChildProcess
from servers.launch_plan import cause_in
from servers.triton.log import CAUSES, relevant_lines

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
    process.popen.wait(10)
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
