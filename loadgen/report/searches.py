"""Open loops, searches for a rate and ramps on the terminal and in documents."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.analysis.result import Result
from loadgen.report import open_loop_tables
from loadgen.report import search_tables as tables


def print_searches(result: Result, console: Console) -> None:
    """A table for open loops, one for the searches and two for the ramps; nothing without any."""
    if rows := open_loop_tables.narrow_rows(result):
        _print(open_loop_tables.NARROW_TITLE, tuple(open_loop_tables.NARROW.values()), rows, console)
    if rows := tables.rate_rows(result):
        _print("The highest rate within the bound", tables.RATE_HEADINGS, rows, console)
    if rows := tables.ramp_rows(result):
        _print("Ramp to saturation", tables.RAMP_HEADINGS, rows, console)
        _print("The first ramp of each arm", tables.RUNG_HEADINGS, tables.rung_rows(result), console)


def _print(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]], console: Console) -> None:
    console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    used = [any(row[place] for row in rows) for place in range(len(headings))]
    for place, heading in enumerate(headings):
        if used[place]:
            table.add_column(heading, justify="left" if heading in ("scenario", "arm", "note") else "right")
    for row in rows:
        table.add_row(*(cell for place, cell in enumerate(row) if used[place]))
    console.print(table)


SECTIONS = (
    ("Open loops", open_loop_tables.HEADINGS, open_loop_tables.rows, open_loop_tables.CAPTION),
    ("The highest rate within the bound", tables.RATE_HEADINGS, tables.rate_rows, tables.RATE_CAPTION),
    ("Ramp to saturation", tables.RAMP_HEADINGS, tables.ramp_rows, tables.RAMP_CAPTION),
    ("The first ramp of each arm", tables.RUNG_HEADINGS, tables.rung_rows, ""),
)
"""(title, headings, rows of a result, caption) for documents."""
LONG_SECTIONS = (
    *SECTIONS,
    ("Every trial of the searches", tables.TRIAL_HEADINGS, tables.trial_rows, tables.TRIAL_CAPTION),
)
"""The same for a page on which one scrolls."""
