"""Ticks of a logarithmic axis: round, few, inside the range, never so near that their labels meet."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report.charts import LEAST_GAP, log_axis, round_ticks

exponents = st.floats(-6.0, 6.0)


@given(exponents, st.floats(0.001, 6.0))
def test_no_two_are_near_and_none_is_outside(start: float, decades: float) -> None:
    low, high = 10**start, 10 ** (start + decades)
    ticks = round_ticks(low, high)
    assert len(ticks) <= 9
    assert ticks == sorted(ticks)
    assert all(low * 0.999999 <= tick <= high * 1.000001 for tick in ticks)
    gap = decades * LEAST_GAP
    assert all(math.log10(b / a) > gap * 0.999 for a, b in itertools.pairwise(ticks))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 1.1, [0.9, 0.95, 1.0, 1.05, 1.1]),
        (0.93, 1.07, [0.95, 0.98, 1.0, 1.02, 1.05]),
        (0.42, 1.08, [0.5, 0.6, 0.7, 0.8, 1.0]),
        (0.25, 8.2, [0.3, 0.5, 1.0, 2.0, 5.0, 8.0]),
        (300.0, 19_000.0, [500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0]),
    ],
)
def test_the_roundest_come_first(low: float, high: float, expected: list[float]) -> None:
    assert round_ticks(low, high) == expected


def test_the_axis_leaves_room_at_both_ends() -> None:
    axis = log_axis([2.0, 0.5, 1.0])
    assert axis["range"][0] < math.log10(0.5)
    assert axis["range"][1] > math.log10(2.0)
    assert axis["ticktext"][axis["tickvals"].index(1.0)] == "1"


@pytest.mark.parametrize("values", [[], [0.0], [9_300.0]])
def test_without_round_numbers_plotly_chooses(values: list[float]) -> None:
    assert "tickvals" not in log_axis(values)
