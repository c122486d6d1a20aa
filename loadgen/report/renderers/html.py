"""A document as one HTML file that needs no network; all but its charts is readable without JavaScript."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
import markupsafe
import msgspec

import loadgen.report.document as doc
from loadgen.base.documents import printable

HERE = Path(__file__).parent / "templates"
PLOTLY = Path(__file__).parent / "plotly" / "plotly-cartesian-4.1.1.min.js.gz"
"""The part of Plotly with the traces that charts use; compressed, so that a report stays small enough to send."""
STRIP_WIDTH = 240.0
MOST_ROWS = 16
"""A longer table is shown on demand."""
TABLE_WIDTHS = {"narrow": (4, 400), "middle": (9, 780), "wide": (999, 1000), "crowded": (999, 9999)}
"""Kinds of tables: the most columns of each, and the width in pixels below which its rows become cards, so that nothing
is cut or scrolls sideways."""
MOST_TEXTS = 10


def render_html(document: doc.Document) -> str:
    """The whole page; Plotly is included only where there is a chart."""
    shown = doc.only(document, doc.HTML)
    plotly = base64.b64encode(PLOTLY.read_bytes()).decode() if shown.charts else ""
    return _template().render(document=shown, plotly=plotly)


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Before escaping, which spares only markup that the template itself wrote.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters |= {
        "script_json": _script_json,
        "code": code,
        "slug": lambda text: re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-"),
    }
    environment.tests |= {
        "drawn": lambda value: isinstance(value, doc.Strip),
        "hinted": lambda value: isinstance(value, doc.Cell) and bool(value.hint),
        "linked": lambda value: isinstance(value, doc.Cell) and bool(value.target),
        "chart": lambda block: isinstance(block, doc.Chart),
    }
    environment.globals |= {
        "style": _style(),
        "script": (HERE / "document.js").read_text(),
        "kind": lambda block: type(block).__name__,
        "marks": doc.MARKS,
        "text_of": doc.text_of,
        "style_of": doc.style_of,
        "repeats": doc.repeats,
        "parts": _parts,
        "width_of": _width_of,
        "strip_x": strip_x,
        "strip_width": STRIP_WIDTH,
        "most_rows": MOST_ROWS,
    }
    return environment.get_template("document.html.j2")


def _style() -> str:
    """The style sheet, with the rules of cards for every kind of table; paper has tables where they fit."""
    cards = (HERE / "cards.css").read_text()
    rules = (
        f"@media {'all' if kind == 'crowded' else 'screen'} {{ @container (max-width: {pixels}px) "
        f"{{ table.{kind} {{\n{cards}}} }} }}\n"
        for kind, (_, pixels) in TABLE_WIDTHS.items()
    )
    return (HERE / "document.css").read_text() + "".join(rules)


def _width_of(columns: Sequence[doc.Column]) -> str:
    """The kind of a table by its columns; more than `MOST_TEXTS` of words fit on no screen."""
    if sum(column.kind in ("name", "text") for column in columns) > MOST_TEXTS:
        return "crowded"
    return next(kind for kind, (most, _) in TABLE_WIDTHS.items() if len(columns) <= most)


def _parts(table: doc.Table, row: Sequence[doc.Value]) -> tuple[list[tuple[doc.Column, doc.Value]], ...]:
    """The cells of a row with their columns, and the cells to show below it."""
    pairs = list(zip(table.columns, row, strict=True))
    cells = [(column, value) for column, value in pairs if not column.below]
    return cells, [(column, value) for column, value in pairs if column.below and doc.text_of(value)]


def strip_x(place: float) -> float:
    """Where to draw a place from -1 to 1, with room for a mark at both ends."""
    return round(STRIP_WIDTH / 2.0 + place * (STRIP_WIDTH / 2.0 - 16.0), 1)


def code(text: str) -> markupsafe.Markup:
    """Text in which `words in backticks` are set as code, and hashes are short with the whole one in a tooltip."""
    pieces = (
        f'<abbr title="{whole}">{piece}</abbr>' if whole else re.sub("`([^`]+)`", r"<code>\1</code>", piece)
        for piece, whole in doc.split_hashes(str(markupsafe.escape(printable(text))))
    )
    return markupsafe.Markup("".join(pieces))


def _script_json(chart: doc.Chart) -> str:
    """A chart as JSON that cannot end the script element around it, whatever a server's name holds."""
    figure = {"data": chart.data, "layout": chart.layout, "views": chart.views}
    return msgspec.json.encode(figure).decode().replace("<", "\\u003c").replace("&", "\\u0026")
