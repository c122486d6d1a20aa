"""No more digits than the interval supports, and always the sign of the truth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.quantities import (
    detectable,
    inverse,
    measured,
    measured_interval,
    number,
    ratio,
    ratio_interval,
    sentence,
    share,
)


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,230"), (0.012345, "0.0123"), (12.345, "12.3"), (0.0, "0"), (999.96, "1,000")]
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (104.37, (99.0, 110.0), "104"),
        (104.37, (104.30, 104.44), "104.4"),
        (1234.5, (1000.0, 1500.0), "1,230"),
        (1234.5, (600.0, 1900.0), "1,200"),
        (54.2, (0.6, 4800.0), "50"),
        (0.0, (-3.0, 3.0), "0"),
        (1.2345, None, "1.23"),
        (None, None, "–"),
    ],
)
def test_digits_follow_the_interval(value: float | None, interval: tuple[float, float] | None, text: str) -> None:
    assert measured(value, interval) == text


def test_ratios() -> None:
    assert ratio(1.8973, (1.82, 1.98)) == "1.90×"
    assert ratio_interval((1.82, 1.98)) == "1.82–1.98"
    assert ratio(1.8973, (1.5, 2.4)) == "1.9×"
    assert ratio(None, None) == "–"
    assert inverse((2.0, 4.0)) == (0.25, 0.5)
    assert share(0.0534) == "5.3 %"
    assert sentence("no GPU.") == "No GPU."


def test_nothing_measured_reads_as_zero_and_no_percentage_is_absurd() -> None:
    assert measured(0.00001, (0.00001, 0.00001)) == "0.00001"
    assert ratio(0.001, None) == "0.001×"
    assert ratio_interval((0.001, 0.002)).startswith("0.001")
    assert (share(9.99), share(11.0), share(11_000.0)) == ("1,000 %", "11×", "11,000×")
    assert (detectable(0.06), detectable(1e12)) == ("6.0 %", "> 100×")


def test_an_interval_that_says_nothing_is_not_printed_as_numbers() -> None:
    """Two rounds of a machine that stalled gave the first one."""
    assert ratio_interval((0.00000006, 44_507_966.9), 2) == "not determined by 2 rounds"
    assert ratio_interval((0.05, 20.0)) == "not determined"
    assert ratio_interval((0.11, 9.0), 2) == "0.1–9.0"
    assert ratio_interval((12.0, 4000.0), 2) == "12.0–4,000.0", "at least 12×, whatever else"
    assert measured_interval((99.0, 110.0)) == "99–110"
    assert measured_interval((0.6, 4800.0)) == "not determined"


@given(st.floats(0.9, 0.99999), st.floats(0.0001, 0.05))
def test_a_bound_that_excludes_one_never_reads_as_one(low: float, width: float) -> None:
    high = min(low + width, 0.9999)
    if low < high and high < 0.99995:
        assert not ratio_interval((low, high)).endswith(("–1.0", "–1.00", "–1.000", "–1.0000"))
