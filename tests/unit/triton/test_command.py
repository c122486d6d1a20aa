"""Standard output is for the result alone, whoever else writes there."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os
from servers.triton.command import _stdout_for_results as stdout_for_results
with stdout_for_results() as results:
    print("an exporter's progress")
    os.write(1, b"a C library's warning\\n")
    results.write(b"the result\\n")
print("afterwards")
"""


def test_only_results_reach_stdout() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "the result\nafterwards\n"
    assert sorted(done.stderr.splitlines()) == ["a C library's warning", "an exporter's progress"]
