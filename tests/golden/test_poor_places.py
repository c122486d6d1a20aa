"""A run is over, and its folder is full or the terminal a poor one: what was measured is said all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.golden.synthetic_run import Plan, write_run

FULL = """
import resource, sys
from pathlib import Path
import loadgen.measure.runner
from loadgen.cli.compare import run_and_report
from loadgen.records.run import RunState
from loadgen.records.store import read_run
out = Path(sys.argv[1])
loadgen.measure.runner.run_experiment = lambda *_: RunState(state="finished", phase="finished")  # it has run already
experiment = read_run(out).experiment
sys.dont_write_bytecode = True  # it would be cut
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
status, result = run_and_report(experiment, out)
print("status", status, result.valid)
"""


def test_a_terminal_that_lacks_a_sign_shows_another(tmp_path: Path) -> None:
    """As one that is set to Latin-1, or to less."""
    folder = write_run(tmp_path / "run", Plan(pairs=4))
    done = subprocess.run(
        [sys.executable, "-m", "loadgen.entry", "report", str(folder)],
        capture_output=True, check=False, timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"B faster" in done.stdout


def test_the_result_is_shown_and_the_remedy_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Plan(pairs=4))
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"error: no reports: File too large; free some space, then: abserve report {folder}" in done.stderr
    assert "single" in done.stdout
    assert "status 1 " in done.stdout.splitlines()[-1] + " "
    assert not (folder / "report.html").exists()


GONE = """
import os, sys
from pathlib import Path
import loadgen.measure.runner
from loadgen.cli.compare import run_and_report
from loadgen.records.run import RunState
from loadgen.records.store import read_run
out = Path(sys.argv[1])
def run(_experiment, _out, progress):
    progress.phase("load")
    return RunState(state="finished", phase="finished")
loadgen.measure.runner.run_experiment = run
sys.stdin.read()  # until the reader of the output has gone
status, result = run_and_report(read_run(out).experiment, out)
sys.stderr.write(f"status {status}")
"""


def test_a_run_whose_output_nobody_reads_any_more_still_writes_its_reports(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Plan(pairs=4))
    process = subprocess.Popen(
        [sys.executable, "-c", GONE, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate("", timeout=60)
    assert said in ("status 0", "status 1")
    assert process.returncode == 0, "also when the interpreter ends"
    assert (folder / "report.html").exists()
