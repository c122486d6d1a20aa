"""The Triton kernels compute the lean tower's function: every kind of plan, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="torch came without Triton")

TOLERANCE = 1.5e-3
"""Relative; FP16 weights and activations give 4e-4 to 7e-4 on this tower."""


QUICK = ("gelu", "split")
"""What the default run executes: one plan, with every kind of tile. The interpreter takes seconds for each."""
REST = (
    "pointers", "descriptors", "cublas", "ours after cublas", "cublas after ours", "bytes", "floats", "quick GELU",
    "a missing bias",
)  # fmt: skip


@cache
def errors_of(cases: tuple[str, ...]) -> dict[str, float]:
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, *cases], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    errors: dict[str, float] = json.loads(done.stdout)
    return errors


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)])
def test_the_kernels_match_the_fp32_tower(case: str) -> None:
    found = errors_of(QUICK if case in QUICK else REST)[case]
    if case == "a missing bias":  # the tolerance is one that sees a fault
        assert found > 10 * TOLERANCE
    else:
        assert found < (1.1e-5 if case == "gelu" else TOLERANCE)
