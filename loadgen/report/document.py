"""A report as data: chapters of sections, made of texts, lists, tables and charts. It knows neither probes nor markup.

All text is plain, and each renderer escapes it for its format; HTML sets text between backticks as code. Every block
names the formats it appears in, so a section is written once for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Flag, auto
from itertools import chain
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from loadgen.metrics.barrier import attempt

Style = Literal[
    "ok", "failed", "warning", "unknown", "note", "code",
    "arm-0", "arm-1", "arm-2", "arm-3", "arm-4", "arm-5", "arm-6", "arm-7",
]  # fmt: skip
"""The meaning of a text, for its colour and its mark; an arm's colour follows its place in the experiment."""
ARM_STYLES: tuple[Style, ...] = ("arm-0", "arm-1", "arm-2", "arm-3", "arm-4", "arm-5", "arm-6", "arm-7")
MARKS: dict[str, str] = {"failed": "✗", "warning": "!", "unknown": "?", "note": "·", "ok": "✓"}
Figure = dict[str, Any]
"""A part of a Plotly figure, as plain data."""


class Format(Flag):
    """The formats of a report. CSV takes every named table, JUnit every named table whose rows have outcomes."""

    TERMINAL = auto()
    HTML = auto()
    MARKDOWN = auto()
    CSV = auto()
    JUNIT = auto()


TERMINAL, HTML, MARKDOWN, CSV, JUNIT = Format
PAGES = HTML | MARKDOWN
READ = TERMINAL | PAGES
ALL = READ | CSV | JUNIT


class Text(msgspec.Struct, frozen=True):
    """A paragraph; the style "warning" highlights it, "note" dims it, "code" is a command or other text to copy."""

    text: str
    style: Style | None = None
    on: Format = READ


class Link(msgspec.Struct, frozen=True):
    """A link to a chapter ("#why") or to another file."""

    text: str
    target: str
    on: Format = PAGES


class Item(msgspec.Struct, frozen=True):
    """`lead` stands in bold before the text, `below` are separate paragraphs."""

    text: str
    style: Style | None = None
    lead: str = ""
    below: tuple[str, ...] = ()


class Items(msgspec.Struct, frozen=True):
    """A list."""

    items: Sequence[Item]
    on: Format = READ


class Cell(msgspec.Struct, frozen=True):
    """Styled text in a table; `short` replaces it on a terminal, `hint` is a tooltip, `target` links it on a page."""

    text: str
    style: Style | None = None
    short: str = ""
    hint: str = ""
    target: str = ""


class Strip(msgspec.Struct, frozen=True):
    """An interval to draw, as places on an axis from -1 to 1, with the band of no meaningful difference."""

    centre: float
    low: float | None
    high: float | None
    band: tuple[float, float]
    style: Style
    hint: str


Value = str | int | float | bool | None | Cell | Strip


class Column(msgspec.Struct, frozen=True):
    """A `name` stays on one line, a `number` is aligned right, a `text` may wrap, a `drawn` one holds strips. `short`
    is the heading on a terminal. A page hides a `roomy` column where the table is narrow and shows a `below` column
    under its row. `ticks` are places on the axis of a drawn column with their labels."""

    title: str
    kind: Literal["name", "number", "text", "drawn"] = "name"
    short: str = ""
    roomy: bool = False
    below: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    on: Format = ALL


def names(*titles: str) -> tuple[Column, ...]:
    """Columns of short texts."""
    return tuple(Column(title) for title in titles)


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(title, "number") for title in titles)


def texts(*titles: str) -> tuple[Column, ...]:
    """Columns of sentences."""
    return tuple(Column(title, "text") for title in titles)


RowOutcome = tuple[Literal["passed", "failure", "skipped"], str]
"""The outcome of a row for a CI system, and the type of a failure."""


class Table(msgspec.Struct, frozen=True):
    """Rows of text, or of unrounded values for CSV.

    `name`: its name in CSV and JUnit. `grouped`: rows with the same first cell belong together. `total`: the last row
    is a sum. `filtered`: a page can hide rows by words, and charts by their titles. `outcomes`: one per row, for JUnit,
    where the first cell is the name and the rest the text (the kind of a row that passed is a property); `seconds` is
    how long measuring them took.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    name: str = ""
    title: str = ""
    caption: str = ""
    grouped: bool = False
    total: bool = False
    filtered: bool = False
    outcomes: Sequence[RowOutcome] = ()
    seconds: float = 0.0
    on: Format = ALL


class View(msgspec.Struct, frozen=True):
    """A button of a chart: the traces it shows and its changes of the layout."""

    label: str
    traces: list[int]
    layout: Figure = {}


class Chart(msgspec.Struct, frozen=True):
    """`caption` says how to read it. `data` and `layout` are Plotly's; colours are names of CSS variables ("--arm-0"),
    which the page resolves. A table holds the same figures. `marks` are what stands for an arm, in the list of arms,
    too."""

    name: str
    title: str
    caption: str
    data: list[Figure]
    layout: Figure
    views: list[View] = []
    on: Format = HTML
    marks: Literal["bars", "points", "fields"] = "bars"


class Fold(msgspec.Struct, frozen=True):
    """Blocks that a page shows on demand."""

    summary: str
    blocks: tuple[Block, ...]
    on: Format = PAGES


class Panel(msgspec.Struct, frozen=True):
    """The outcome of the whole document, in a word and a sentence."""

    badge: str
    style: Style
    headline: str
    blocks: tuple[Block, ...]
    on: Format = READ


Block = Text | Link | Items | Table | Chart | Fold | Panel


class Section(msgspec.Struct, frozen=True):
    """`half`: a page shows two of them side by side."""

    title: str
    blocks: tuple[Block, ...]
    half: bool = False


class Document(msgspec.Struct, frozen=True):
    """`about` is shown at the top of a page; JUnit stores `started_at`."""

    title: str
    chapters: Mapping[str, Sequence[Section]]
    """The sections that a page shows under one heading, by that heading."""
    about: str = ""
    started_at: str | None = None

    @property
    def sections(self) -> tuple[Section, ...]:
        """All sections in order."""
        return tuple(chain.from_iterable(self.chapters.values()))

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All charts, also those inside other blocks."""
        return tuple(chain.from_iterable(_charts(section.blocks) for section in self.sections))

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables directly in a section."""
        return tuple(block for section in self.sections for block in section.blocks if isinstance(block, Table))


def section(title: str, *blocks: Block | None, on: Format = ALL, half: bool = False) -> Section | None:
    """A section of the blocks with content, in the formats `on` only; None without such blocks."""
    shown = [block for block in blocks if block is not None and block.on & on and _has_content(block)]
    return Section(title, tuple(replace(block, on=block.on & on) for block in shown), half) if shown else None


def attempted(make: Callable[..., Section | None], *arguments: object) -> Section | None:
    """The section, or a sentence in its place where it cannot be made: the rest of the report is shown."""
    name = make.__name__.strip("_").replace("_", " ")
    return attempt(
        lambda: make(*arguments),
        lambda why: section(
            "",
            Text(f"The section “{name}” could not be made: {why}. Report this as a bug; the rest is whole.", "warning"),
        ),
    )


def only(document: Document, on: Format) -> Document:
    """The part of a document that one format shows, columns included."""
    chapters = {
        title: [replace(section, blocks=blocks) for section in sections if (blocks := _shown(section.blocks, on))]
        for title, sections in document.chapters.items()
    }
    return replace(document, chapters={title: sections for title, sections in chapters.items() if sections})


def _charts(blocks: Iterable[Block]) -> Iterator[Chart]:
    for block in blocks:
        if isinstance(block, Chart):
            yield block
        elif isinstance(block, Fold | Panel):
            yield from _charts(block.blocks)


def _has_content(block: Block) -> bool:
    """Whether a block has content; a table for programs has its headings even without rows."""
    match block:
        case Table():
            return bool(block.rows) or not block.on & READ
        case Items(items=content) | Text(text=content):
            return bool(content)
        case Fold():
            return any(map(_has_content, block.blocks))
        case _:
            return True


def _shown(blocks: tuple[Block, ...], on: Format) -> tuple[Block, ...]:
    shown: list[Block] = []
    for block in blocks:
        if not block.on & on or not _has_content(block):
            continue
        if isinstance(block, Table):
            shown.append(_columns(block, on))
        elif not isinstance(block, Fold | Panel):
            shown.append(block)
        elif (inner := _shown(block.blocks, on)) or isinstance(block, Panel):
            shown.append(replace(block, blocks=inner))
    return tuple(shown)


def _columns(table: Table, on: Format) -> Table:
    """The table without the columns of other formats and, for a reader, without columns in which no row has a value."""
    places = [
        place
        for place, column in enumerate(table.columns)
        if column.on & on and (not on & READ or any(text_of(row[place]) not in ("", "–") for row in table.rows))
    ]
    columns = tuple(table.columns[place] for place in places)
    return replace(table, columns=columns, rows=[[row[place] for place in places] for row in table.rows])


_HASH = re.compile(r"\b(?:[0-9a-f]{32,}|GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")
HASH_LENGTH = 8
"""The characters that readers see of a hash or of a GPU's UUID; result.json and the tables for programs have all."""


def split_hashes(text: str) -> Iterator[tuple[str, str]]:
    """The pieces of a text as a reader sees them, each with the whole hash where it is the beginning of one, else with
    an empty text."""
    place = 0
    for match in _HASH.finditer(text):
        yield text[place : match.start()], ""
        whole = match.group()
        yield whole[: HASH_LENGTH + len("GPU-") * whole.startswith("GPU-")], whole
        place = match.end()
    yield text[place:], ""


def readable(text: str) -> str:
    """The text with hashes of eight characters."""
    return "".join(piece for piece, _ in split_hashes(text))


def text_of(value: Value, *, short: bool = False) -> str:
    """A value of a table as text."""
    match value:
        case Cell():
            return value.short if short and value.short else value.text
        case Strip():
            return value.hint
        case None:
            return "–"
        case _:
            return str(value)


def style_of(value: Value) -> Style | None:
    """The style of a value of a table, if it has one."""
    return value.style if isinstance(value, Cell | Strip) else None


def repeats(table: Table, place: int) -> bool:
    """Whether a row begins like the one before and belongs to it."""
    return table.grouped and place > 0 and text_of(table.rows[place][0]) == text_of(table.rows[place - 1][0])
