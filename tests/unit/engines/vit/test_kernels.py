"""The Triton kernels compute the lean tower's function: every kind of plan, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="torch came without Triton")

TOLERANCE = 1.5e-3
"""Relative; FP16 weights and activations give 4e-4 to 7e-4 on this tower."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize(
    "plan", ["pointers", "split", "descriptors", "cublas", "ours after cublas", "cublas after ours"]
)
def test_every_plan_matches_the_fp32_tower(report: dict[str, Any], plan: str) -> None:
    assert report["plans"][plan] < TOLERANCE


def test_bytes_and_floats(report: dict[str, Any]) -> None:
    assert len(report["inputs"]) == 2
    assert all(error < TOLERANCE for error in report["inputs"]), report["inputs"]


def test_quick_gelu(report: dict[str, Any]) -> None:
    assert report["quick"] < TOLERANCE


def test_gelu_stays_within_its_bound(report: dict[str, Any]) -> None:
    assert report["gelu"] < 1.1e-5


def test_a_missing_bias_would_be_seen(report: dict[str, Any]) -> None:
    assert report["broken"] > 10 * TOLERANCE
