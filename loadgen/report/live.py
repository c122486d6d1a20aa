"""How the cells stand while a run goes on: a table with a narrowing interval for each arm, or a line for each pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from loadgen.bench.live_ratios import LiveRatio
from loadgen.quantities import ratio, ratio_interval
from loadgen.records.run import shown

FIXED = "Nothing is stopped by what shows here, and the verdict comes after the checks."
OPEN = "Pairs are added until every scenario is decided; these intervals may be looked at after each."
MIN_TRACK, MAX_TRACK = 10, 40
_MIN_SPAN = math.log(1.05)


def ratio_line(one: LiveRatio) -> str:
    """For a log: "concurrent(16) throughput B/A 1.31× (1.22–1.40) after 3 of 8 pairs"."""
    of = "" if one.planned is None else f" of {one.planned}"
    standing = f"{_which(one)} {ratio(one.ratio, one.ci95)}"
    interval = f" ({ratio_interval(one.ci95)})" if one.ci95 is not None else ""
    why = "" if one.ci95 is not None else f"; no interval: {one.reason}"
    return f"{one.cell}  {one.metric} {standing}{interval} after {one.pairs}{of} pairs{why}"


def _which(one: LiveRatio) -> str:
    return f"{shown(one.arm)}/{shown(one.baseline)}"


def ratio_table(ratios: Sequence[LiveRatio], width: int) -> Table:
    """A row for each cell and arm, for a terminal of `width` columns; all intervals on one axis, 1 in its middle. With
    two arms the heading says which ratio it is, with more each row does."""
    arms = {shown(one.arm) for one in ratios}
    several = len(arms) > 1
    heading = next((f"arm/{shown(one.baseline)}" if several else _which(one) for one in ratios), "")
    used = 62 + max(0, len(heading) - 6) + (2 + max(map(len, arms)) if several else 0)
    track = min(MAX_TRACK, max(MIN_TRACK, width - used))
    span = max((_reach(one) for one in ratios), default=_MIN_SPAN)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("cell", no_wrap=True)
    table.add_column("pairs", justify="right", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    if several:
        table.add_column("arm", overflow="fold")
    table.add_column(heading, justify="right", overflow="fold")
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column(_axis(track, span), no_wrap=True, width=track)
    for one in ratios:
        table.add_row(
            one.cell,
            f"{one.pairs}" if one.planned is None else f"{one.pairs}/{one.planned}",
            one.metric.removesuffix(" latency"),
            *([shown(one.arm)] if several else []),
            ratio(one.ratio, one.ci95),
            ratio_interval(one.ci95),
            track_of(one, track, span),
        )
    return table


def track_of(one: LiveRatio, track: int, span: float) -> Text:
    """The interval as a line on a logarithmic axis from exp(-span) to exp(span), the ratio as a dot, 1 as a bar."""
    cells = [" "] * track
    cells[track // 2] = "│"
    if one.ci95 is not None:
        low, high = (_column(bound, track, span) for bound in one.ci95)
        for place in range(low, high + 1):
            cells[place] = "┼" if place == track // 2 else "─"
    if one.ratio is not None:
        cells[_column(one.ratio, track, span)] = "●"
    style = "" if one.ci95 is None or one.ci95[0] <= 1.0 <= one.ci95[1] else "bold"
    return Text("".join(cells), style=style)


def _column(value: float, track: int, span: float) -> int:
    place = track // 2 + round(math.log(value) / span * (track // 2))
    return min(max(place, 0), track - 1)


def _reach(one: LiveRatio) -> float:
    """How far from 1 a row goes; an interval of few pairs may be as wide as it likes without squeezing the others."""
    bounds = [abs(math.log(bound)) for bound in one.ci95 or ()]
    centre = abs(math.log(one.ratio)) if one.ratio else 0.0
    return max(_MIN_SPAN, centre * 1.1, min(max(bounds, default=0.0), 3.0 * max(centre, _MIN_SPAN)))


def _axis(track: int, span: float) -> Text:
    low, high = f"{math.exp(-span):.2f}", f"{math.exp(span):.2f}"
    room = track - len(low) - len(high)
    return Text(low + "1".center(room) + high if room > 2 else "1".center(track), style="dim")
