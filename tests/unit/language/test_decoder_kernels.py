"""The Triton kernels choose the tokens that torch's operators do, in Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="torch came without Triton")


QUICK = ("fused",)
"""What the default run executes: steps with prompts are never fused, so it has both forms. The others take minutes."""
REST = ("plain", "fused, biases", "fused, window", "fused, group of three", "experts", "gpt2")


@cache
def tokens_of(cases: tuple[str, ...]) -> dict[str, Any]:
    """By case, the tokens of a few steps."""
    root = Path(__file__).parents[3]
    paths = os.pathsep.join((str(root), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    script = Path(__file__).with_name("interpreted_decoder.py")
    done = subprocess.run([sys.executable, script, *cases], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)])
def test_kernels_choose_the_tokens_of_torch(case: str) -> None:
    report = tokens_of(QUICK if case in QUICK else REST)
    assert report[case]["kernels"] == report[case]["expected"]
    assert len({token for step in report[case]["expected"] for token in step}) > 3
    assert report[case]["can_fuse"] == (case not in ("experts", "gpt2"))


@pytest.mark.slow
def test_each_token_is_read_by_its_own_experts_only() -> None:
    """Two experts each; rows and tokens that only fill the size of a step have none."""
    assert tokens_of(REST)["experts"]["read"] == [80, 2, 34, 8, 4, 2]
