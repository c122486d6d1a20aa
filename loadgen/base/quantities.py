"""Formats numbers for readers: with their unit, in three significant digits, and 0 only for 0. How certain a number
is stands in its interval.

A formatted text is never parsed again: what a text shows as a number is `significant`, `shown_ratio` or `round`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Interval = tuple[float, float]
MAX_DECIMALS, MAX_DIGITS = 4, 6
WIDEST = 100.0
"""An interval whose ends lie further apart than this factor does not say how large a value is."""
NOT_DETERMINED = "not determined"


def significant(value: float, digits: int) -> float:
    """`value` with this many significant digits."""
    return round(value, _decimals(value, digits)) if value and math.isfinite(value) else value


def _decimals(value: float, digits: int) -> int:
    return digits - 1 - math.floor(math.log10(abs(value)))


def number(value: float, digits: int = 3) -> str:
    """`value` with this many significant digits, thousands separated, never in exponent form."""
    if value == 0.0 or not math.isfinite(value):
        return f"{abs(value):.0f}"
    return f"{significant(value, digits):,.{max(_decimals(value, digits), 0)}f}"


def measured(value: float | None) -> str:
    """A value in three significant digits, which say nothing about how certain it is; a dash where it is missing."""
    return "–" if value is None else number(value)


def apart(values: Sequence[float]) -> list[str]:
    """Values side by side: in three significant digits, or in as many more as tell them apart."""
    digits = 3
    while digits < MAX_DIGITS and len(set(values)) > len({number(value, digits) for value in values}):
        digits += 1
    return [number(value, digits) for value in values]


def measured_interval(interval: Interval) -> str:
    """The bounds of a positive value: "99.0–110", or "not determined" where they are further apart than `WIDEST`."""
    return NOT_DETERMINED if interval[1] > WIDEST * interval[0] else "–".join(apart(interval))


def measured_with_interval(value: float | None, interval: Interval | None) -> str:
    """ "128 (127–129)" """
    return measured(value) + ("" if interval is None else f" ({measured_interval(interval)})")


def _ratio_decimals(*values: float) -> int:
    """The decimals of the ratios of one comparison: two below 10, and as many more as keep them apart and keep what is
    not 1 from reading as 1."""
    least = min(values)
    decimals = 2 if least < 10.0 else 1 if least < 100.0 else 0
    while decimals < MAX_DECIMALS and (
        any(value != 1.0 and round(value, decimals) == 1.0 for value in values)
        or len(set(values)) > len({round(value, decimals) for value in values})
    ):
        decimals += 1
    return decimals


def _factor(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}" if value >= 0.1 else number(value)


def shown_ratio(value: float, interval: Interval | None) -> float:
    """A ratio with the digits that `ratio` shows."""
    return round(value, _ratio_decimals(*(interval or (value,))))


def ratio(value: float | None, interval: Interval | None) -> str:
    """ "1.90×" """
    return "–" if value is None else _factor(value, _ratio_decimals(*(interval or (value,)))) + "×"


def excludes_one(interval: Interval | None) -> bool:
    """Whether the interval of a ratio shows a difference, before any adjustment for several comparisons."""
    return interval is not None and not interval[0] <= 1.0 <= interval[1]


def is_determined(interval: Interval) -> bool:
    """Whether an interval of a ratio says anything about it: it does not where it includes 1 and spans more than
    `WIDEST`, as that of two rounds that differ much does."""
    low, high = interval
    return not low <= 1.0 <= high or high <= WIDEST * low


def ratio_interval(interval: Interval | None, rounds: int | None = None) -> str:
    """ "1.82–1.98", or "not determined by 2 rounds" if the number of rounds is given."""
    if interval is None:
        return "–"
    if not is_determined(interval):
        return NOT_DETERMINED + ("" if rounds is None else f" by {counted(rounds, 'round')}")
    decimals = _ratio_decimals(*interval)
    return "–".join(_factor(bound, decimals) for bound in interval)


def times(value: float, interval: Interval | None) -> tuple[str, str]:
    """A factor in a sentence, and its interval: "2.4 times" and "2.2 to 2.5"; from 2 on in one decimal less than in a
    table, if that keeps the bounds apart."""
    bounds = interval or (value,)
    decimals = _ratio_decimals(*bounds)
    fewer = max(decimals - 1, 0)
    if min(bounds) >= 2.0 and len({round(bound, fewer) for bound in bounds}) == len(set(bounds)):
        decimals = fewer
    between = (
        NOT_DETERMINED
        if interval and not is_determined(interval)
        else " to ".join(_factor(bound, decimals) for bound in interval or ())
    )
    return f"{_factor(value, decimals)} times", between


def ratio_with_interval(value: float, interval: Interval | None) -> str:
    """ "1.20× (1.10–1.30)" """
    return f"{ratio(value, interval)} ({ratio_interval(interval)})"


def share(value: float | None, digits: int = 2) -> str:
    """A share of 1 in per cent, from ten times on as a factor: 0.053 is "5.3 %", 12.5 is "12×"."""
    if value is None:
        return "–"
    return f"{number(value * 100.0, digits)} %" if abs(value) < 10.0 else f"{number(value, digits)}×"


def detectable(effect: float | None) -> str:
    """The smallest difference that a run detects; beyond a hundred times the figure means nothing."""
    return share(effect) if effect is None or effect <= 100.0 else "> 100×"


def signed_ms(value: float) -> str:
    """ "+12.3 ms" """
    return ("+" if value >= 0 else "−") + number(abs(value)) + " ms"


def inverse(interval: Interval | None) -> Interval | None:
    """The interval of 1 / ratio."""
    return None if interval is None else (1.0 / interval[1], 1.0 / interval[0])


def items(item: str) -> str:
    """Several of what one input is called: "images" """
    return f"{item}s"


def per_second(item: str) -> str:
    """The unit of a throughput: "images/s" """
    return f"{items(item)}/s"


def counted(count: float, noun: str) -> str:
    """ "1 pair", "4 pairs", "1,200 requests", "0.5 minutes" """
    return f"{count:{',' if isinstance(count, int) else 'g'}} {noun}{'' if count == 1 else 's'}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return capital(text).rstrip(".") + "."


def join(words: Sequence[str]) -> str:
    """ "p50, p90 and p99" """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def possessive(name: str) -> str:
    """ "Triton's", "the native server with 4 fronts'" """
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def do_not(labels: Sequence[str], what: str) -> str:
    """ "A does not report", "A and B do not report" """
    return f"{join(labels)} {'do' if len(labels) > 1 else 'does'} not {what}"
