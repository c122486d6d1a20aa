"""The Triton kernels compute the lean tower's function: every kind of plan, in Triton's interpreter, without a GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.interpreter import interpreted

TOLERANCE = 1.5e-3
"""Relative; FP16 weights and activations give 4e-4 to 7e-4 on this tower."""


QUICK = ("gelu", "split, small")
"""What the default run executes: one plan, with every kind of tile. The interpreter takes seconds for each."""
REST = (
    "split", "pointers", "descriptors", "cublas", "ours after cublas", "cublas after ours", "bytes", "floats",
    "quick GELU", "a missing bias",
)  # fmt: skip


@cache
def errors_of(cases: tuple[str, ...]) -> dict[str, float]:
    errors: dict[str, float] = interpreted(Path(__file__).with_name("interpreted_kernels.py"), *cases)
    return errors


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)])
def test_the_kernels_match_the_fp32_tower(case: str) -> None:
    found = errors_of(QUICK if case in QUICK else REST)[case]
    if case == "a missing bias":  # the tolerance is one that sees a fault
        assert found > 10 * TOLERANCE
    else:
        assert found < (1.1e-5 if case == "gelu" else TOLERANCE)
