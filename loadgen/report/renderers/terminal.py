"""The terminal that every command writes to, and a document on it in as few as 80 columns.

Text stays text, whatever a server, a file or a log has put into it. A terminal or pipe that has gone does not end a
measurement.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, Any, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.panel import Panel as Frame
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text as Words

import loadgen.report.document as doc
from loadgen.base.documents import printable


class LastingStream:
    """Passes everything on until the reader has gone, then drops it. The stream it wraps must stay open."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Never raises `OSError`."""
        try:
            return self._stream.write(text)
        except OSError:
            self._lose()
        return len(text)

    def flush(self) -> None:
        """Never raises `OSError`."""
        try:
            self._stream.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Send everything to /dev/null, including the rest in the stream's buffer, on which the interpreter would fail
        at its end."""
        with suppress(OSError, ValueError):
            number = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        """The stream's encoding, file number and so on."""
        return getattr(self._stream, name)


class PlainConsole(Console):
    """Passes no control character on: only rich's own styles and cursor movements reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render everything printed, tables and panels included."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment("\n".join(printable(line) for line in text.split("\n")), segment.style)


def make_console(stream: IO[str]) -> Console:
    """A console whose loss does not end a run, without markup and emoji names."""
    return PlainConsole(file=cast("IO[str]", LastingStream(stream)), markup=False, emoji=False, highlight=False)


STYLES = {
    "ok": "green",
    "failed": "bold red",
    "warning": "yellow",
    "unknown": "yellow",
    "note": "dim",
    "arm-0": "bold blue",
    "arm-1": "bold dark_orange",
    "arm-2": "bold cyan",
    "arm-3": "bold magenta",
    "arm-4": "bold medium_purple1",
    "arm-5": "bold",
    "arm-6": "bold indian_red",
    "arm-7": "bold dark_khaki",
}


def print_document(document: doc.Document, console: Console) -> None:
    """Print a document, with bold titles and an empty line after each section."""
    console.print()
    for section in doc.only(document, doc.TERMINAL).sections:
        if section.title:
            console.print(Words(section.title, style="bold"))
        for block in section.blocks:
            for part in _parts(block, console.width):
                console.print(part)
        if section.title:
            console.print()


def _parts(block: doc.Block, width: int) -> Iterator[RenderableType]:
    match block:
        case doc.Text():
            text = block.text if block.style == "code" else doc.readable(block.text)
            yield Words(text, style=STYLES.get(block.style or "", ""))
        case doc.Items():
            for item in block.items:
                yield _item(item)
        case doc.Table():
            yield from _table(block, width)
        case doc.Panel():
            yield _panel(block, width)
        case doc.Fold():
            yield Words(block.summary, style="bold")
            for inner in block.blocks:
                yield from _parts(inner, width)
        case doc.Link():
            yield Words(f"{block.text}: {block.target}")
        case _:
            yield Words(f"{block.title}: see report.html", style="dim")


def _item(item: doc.Item) -> RenderableType:
    """The mark stays alone in the first two columns where the text wraps."""
    style = STYLES.get(item.style or "", "")
    mark = doc.MARKS.get(item.style or "", "")
    lead = (f"{item.lead}{':' if item.text and len(item.lead) > 2 else ''} ", style if not mark else "bold")
    first = Words.assemble(lead if item.lead else "", doc.readable(item.text))
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    if first:
        grid.add_row(Words(mark, style=style), first)
    for text in item.below:
        grid.add_row("", Words(doc.readable(text)))
    return grid


def _table(table: doc.Table, width: int) -> Iterator[RenderableType]:
    if table.title:
        yield Words(table.title, style="bold")
    titles = [column.short or column.title for column in table.columns]
    texts = [[doc.readable(doc.text_of(cell, short=True)) for cell in row] for row in table.rows]
    columns = list(zip(titles, *texts, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in columns]
    gap = 2 if sum(widths) + 2 * (len(columns) - 1) <= width else 1
    # Text wraps between words before any word is broken, which is what rich would do.
    while sum(widths) + gap * (len(columns) - 1) > width and widths != words:
        widest = max((n for n in range(len(columns)) if widths[n] > words[n]), key=widths.__getitem__)
        widths[widest] -= 1
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, gap - 1, 0, 0))
    for column, title, given in zip(table.columns, titles, widths, strict=True):
        justify: JustifyMethod = "right" if column.kind == "number" else "left"
        grid.add_column(title, justify=justify, overflow="fold", max_width=given)
    last = len(table.rows) - 1
    clustered = any(doc.repeats(table, place) for place in range(len(table.rows)))
    for place, row in enumerate(table.rows):
        styles = [STYLES.get(doc.style_of(cell) or "", "") for cell in row]
        cells = [Words(text, style=style) for text, style in zip(texts[place], styles, strict=True)]
        if doc.repeats(table, place):
            cells[0] = Words()
        ends = clustered and place < last and not doc.repeats(table, place + 1)
        grid.add_row(*cells, end_section=ends, style="bold" if table.total and place == last else "")
    yield Group(grid, Words())
    if table.caption:
        yield Words(table.caption, style="dim")


def _panel(panel: doc.Panel, width: int) -> RenderableType:
    colour = {"ok": "green", "warning": "yellow"}.get(panel.style, "red")
    parts = [part for block in panel.blocks for part in _parts(block, width)]
    return Frame(
        Group(Words(panel.headline, style="bold"), *parts),
        title=Words(f" {panel.badge} ", style=f"bold {'black' if colour == 'yellow' else 'white'} on {colour}"),
        title_align="left",
        border_style=colour,
        box=box.ROUNDED,
        padding=(0, 1),
    )
