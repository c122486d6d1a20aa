"""Round ticks of a logarithmic axis that never overlap: Plotly's own stand too close in narrow ranges and in wide ones.

The roundest numbers take their places first; a less round one gets a tick only where no other is near.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from loadgen.report.charts import Figure

LEAST_GAP = 1 / 8
"""Between two ticks, as a share of the axis: a label of five characters at the width of a small window."""
_TIERS = (
    (1.0,), (2.0, 5.0), (1.5, 3.0, 7.0), (1.25, 4.0, 6.0, 8.0), (1.1, 9.0), (1.05, 9.5), (1.02, 9.8), (1.01, 9.9),
    (1.005, 9.95),
)  # fmt: skip
"""Mantissas, the roundest first."""


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers of `low` to `high`, both above 0, ascending, no two nearer than `LEAST_GAP`."""
    start, end = math.log10(low), math.log10(high)
    gap = (end - start) * LEAST_GAP
    taken: list[float] = []
    decades = sorted(range(math.floor(start), math.floor(end) + 1), key=abs)
    for tier in _TIERS:
        for decade in decades:
            for mantissa in tier:
                place = math.log10(float(f"{mantissa}e{decade}"))
                if start <= place <= end and all(abs(place - other) >= gap for other in taken):
                    taken.append(place)
    return [float(f"{10**place:.4g}") for place in sorted(taken)]


def log_axis(values: Iterable[float]) -> Figure:
    """A Plotly axis over all `values` above 0 with a little room beyond them; Plotly's own where no number is round."""
    shown = [value for value in values if value > 0.0]
    if not shown:
        return {"type": "log"}
    low, high = min(shown), max(shown)
    room = max((high / low) ** 0.04, 1.02)
    low, high = low / room, high * room
    axis: Figure = {"type": "log", "range": [math.log10(low), math.log10(high)]}
    ticks = round_ticks(low, high)
    if len(ticks) > 1:
        axis |= {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}
    return axis
