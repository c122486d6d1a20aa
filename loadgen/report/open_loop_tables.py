"""Open loops as rows of text: what was offered, what was achieved, and whose the lag was."""

from __future__ import annotations

from loadgen.analysis.result import Result
from loadgen.quantities import measured, number, share

HEADINGS = (
    "scenario", "arm", "due", "due a second", "answered a second", "answered in time", "unsent", "lag p50, ms",
    "lag p99, ms", "largest lag, ms", "generator's p99, ms",
)  # fmt: skip
CAPTION = (
    "Requests fall due by a schedule. In time: before the last one was due. Lag is how much later than due a request "
    "left, in the worst block; the generator's is the part of it that was no wait for a busy connection."
)


NARROW_TITLE = "Open loops: lags in ms, own: the generator's part"
NARROW = {0: "scenario", 1: "arm", 3: "due/s", 4: "done/s", 5: "in time", 6: "unsent", 8: "lag p99", 9: "max",
          10: "own p99"}  # fmt: skip
"""Of `rows`, by the number of the column: what 80 columns have room for, under shorter headings."""


def narrow_rows(result: Result) -> list[tuple[str, ...]]:
    """As NARROW."""
    return [tuple(row[place] for place in NARROW) for row in rows(result)]


def rows(result: Result) -> list[tuple[str, ...]]:
    """One an arm and open cell."""
    found = []
    for summary in result.summaries:
        loop = summary.open_loop
        if loop is None:
            continue
        blocks = [b for b in result.blocks if (b.cell, b.label, b.complete) == (summary.cell, summary.label, True)]
        lags = [_worst([getattr(block, name) for block in blocks]) for name in (
            "send_lag_p50_ms", "send_lag_p99_ms", "send_lag_max_ms",
        )]  # fmt: skip
        found.append(
            (
                summary.cell,
                summary.label.upper(),
                f"{loop.offered:,}",
                number(loop.offered_per_s),
                measured(loop.achieved_per_s, None),
                share(loop.answered_share, 3),
                f"{loop.unsent:,}",
                *(measured(lag, None) for lag in lags),
                measured(loop.generator_lag_p99_ms, None),
            )
        )
    return found


def _worst(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
