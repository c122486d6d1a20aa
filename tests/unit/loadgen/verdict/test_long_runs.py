"""The analysis of a run needs memory for its blocks one by one, not for all samples of a run that may last a day."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.long_run import write_long_run

ROOT = Path(__file__).resolve().parents[4]


def peak_mb(directory: Path) -> float:
    """Peak of the process's memory, beyond what it had before the analysis."""
    command = [sys.executable, "-m", "tests.golden.long_run", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    before, peak = map(float, done.stdout.split())
    return peak - before


@pytest.mark.slow  # writes 220 MB
def test_memory_does_not_grow_with_the_length_of_a_run(tmp_path: Path) -> None:
    short, long = (peak_mb(write_long_run(tmp_path / f"{mb}", mb)) for mb in (20, 200))
    assert long - short < 60, "the samples have 180 MB more"
