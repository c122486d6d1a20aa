"""Three digits, more where figures side by side need them, and always the sign of the truth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.base.quantities import (
    apart,
    detectable,
    inverse,
    measured,
    measured_interval,
    number,
    ratio,
    ratio_interval,
    sentence,
    share,
    shown_ratio,
)


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,230"), (0.012345, "0.0123"), (12.345, "12.3"), (0.0, "0"), (999.96, "1,000")]
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_figure_has_three_digits_however_certain_it_is() -> None:
    """Rounded to their intervals, 104.4 beside 83.1 read "100 | 80" or even "100 | 100", beside "B 1.25×"."""
    assert [measured(value) for value in (104.37, 54.2, 1.2345, 0.0, None)] == ["104", "54.2", "1.23", "0", "–"]


def test_figures_side_by_side_differ_where_the_values_do() -> None:
    assert apart((1002.0, 1005.0)) == ["1,002", "1,005"]
    assert apart((100.0, 125.0)) == ["100", "125"]
    assert apart((100.0, 100.0)) == ["100", "100"]
    assert measured_interval((104.30, 104.44)) == "104.3–104.4"


def test_ratios() -> None:
    assert ratio(1.8973, (1.82, 1.98)) == "1.90×"
    assert ratio_interval((1.82, 1.98)) == "1.82–1.98"
    assert ratio(1.8973, (1.5, 2.4)) == "1.90×"
    assert (ratio(18.61, (15.7, 22.1)), ratio_interval((15.7, 22.1))) == ("18.6×", "15.7–22.1")
    assert (ratio(1.046, (1.0451, 1.0469)), ratio_interval((1.0451, 1.0469))) == ("1.046×", "1.045–1.047")
    assert ratio(None, None) == "–"
    assert inverse((2.0, 4.0)) == (0.25, 0.5)
    assert share(0.0534) == "5.3 %"
    assert sentence("no GPU.") == "No GPU."


def test_nothing_measured_reads_as_zero_and_no_percentage_is_absurd() -> None:
    assert measured(0.00001) == "0.0000100"
    assert ratio(0.001, None) == "0.00100×"
    assert ratio_interval((0.001, 0.002)).startswith("0.001")
    assert (share(9.99), share(11.0), share(11_000.0)) == ("1,000 %", "11×", "11,000×")
    assert (detectable(0.06), detectable(1e12)) == ("6.0 %", "> 100×")


def test_an_interval_that_says_nothing_is_not_printed_as_numbers() -> None:
    """Two rounds of a machine that stalled gave the first one."""
    assert ratio_interval((0.00000006, 44_507_966.9), 2) == "not determined by 2 rounds"
    assert ratio_interval((0.05, 20.0)) == "not determined"
    assert ratio_interval((0.11, 9.0), 2) == "0.11–9.00"
    assert ratio_interval((12.0, 4000.0), 2) == "12.0–4,000.0", "at least 12×, whatever else"
    assert measured_interval((99.0, 110.0)) == "99.0–110"
    assert measured_interval((0.6, 4800.0)) == "not determined"


@given(st.floats(1.0002, 1.05), st.floats(0.0001, 0.2))
def test_a_winner_is_never_one_times_as_fast(low: float, width: float) -> None:
    middle, interval = low + width / 2, (low, low + width)
    assert shown_ratio(middle, interval) > 1.0
    assert not ratio(middle, interval).startswith(("1.0×", "1.00×", "1.000×", "1.0000×"))


@given(st.floats(0.9, 0.99999), st.floats(0.0001, 0.05))
def test_a_bound_that_excludes_one_never_reads_as_one(low: float, width: float) -> None:
    high = min(low + width, 0.9999)
    if low < high and high < 0.99995:
        assert not ratio_interval((low, high)).endswith(("–1.0", "–1.00", "–1.000", "–1.0000"))
