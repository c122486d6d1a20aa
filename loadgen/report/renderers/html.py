"""A document as one HTML file that needs no network; all but its charts is there without JavaScript too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import msgspec
from plotly.offline import get_plotlyjs

import loadgen.report.document as doc
from loadgen.documents import printable

HERE = Path(__file__).parent / "templates"
STRIP_WIDTH = 240.0


def render_html(document: doc.Document) -> str:
    """The whole page; Plotly is in it only where a chart is."""
    shown = doc.only(document, doc.HTML)
    charts = any(isinstance(block, doc.Chart) for section in shown.sections for block in section.blocks)
    return (
        _templates()
        .get_template("document.html.j2")
        .render(
            document=shown,
            style=(HERE / "document.css").read_text(),
            script=(HERE / "document.js").read_text(),
            plotly=get_plotlyjs() if charts else "",
        )
    )


@lru_cache(maxsize=1)
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters["script_json"] = script_json
    environment.filters["code"] = code
    environment.filters["slug"] = lambda text: re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    environment.tests["drawn"] = lambda value: isinstance(value, doc.Strip)
    environment.tests["chart"] = lambda block: isinstance(block, doc.Chart)
    environment.globals |= {
        "kind": lambda block: type(block).__name__,
        "marks": doc.MARKS,
        "text_of": doc.text_of,
        "style_of": doc.style_of,
        "repeats": doc.repeats,
        "parts": _parts,
        "strip_x": strip_x,
        "strip_width": STRIP_WIDTH,
    }
    return environment


def _shown(value: Any) -> Any:
    """What a template puts into the page; its markup is escaped after this, unless the template itself wrote it."""
    return printable(value) if type(value) is str else value


def _parts(table: doc.Table, row: Sequence[doc.Value]) -> tuple[list[tuple[doc.Column, doc.Value]], ...]:
    """The cells of a row with their columns, and what stands below it."""
    pairs = list(zip(table.columns, row, strict=True))
    cells = [(column, value) for column, value in pairs if not column.below]
    return cells, [(column, value) for column, value in pairs if column.below and doc.text_of(value)]


def strip_x(place: float) -> float:
    """Where a place from -1 to 1 is drawn, with room for a mark at both ends."""
    return round(STRIP_WIDTH / 2.0 + place * (STRIP_WIDTH / 2.0 - 6.0), 1)


def code(text: str) -> markupsafe.Markup:
    """Text in which `what stands in backticks` is set as code."""
    return markupsafe.Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(printable(text)))))


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever a server's name holds."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c").replace("&", "\\u0026")
