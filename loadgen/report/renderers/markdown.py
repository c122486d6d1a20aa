"""A document as Markdown: for an issue, a pull request or a file beside the page."""

from __future__ import annotations

import re
from collections.abc import Iterator

import loadgen.report.document as doc
from loadgen.base.documents import printable

_MARKS = re.compile(r"[\\|*_`<\[]|&(?=#?\w+;)|(?<=~)~")
_BEGINS = re.compile(r"^(?:#|>|[-=~+](?=[-=~\s]|$))|(?<=^\d)[.)](?=\s|$)|(?<=^\d\d)[.)](?=\s|$)")


def render_markdown(document: doc.Document) -> str:
    """The whole document, ending in a newline."""
    shown = doc.only(document, doc.MARKDOWN)
    parts = []
    for section in shown.sections:
        parts += [f"## {escape(section.title)}"] if section.title else []
        parts += [part for block in section.blocks for part in _parts(block)]
    if not any(isinstance(block, doc.Panel) for section in shown.sections for block in section.blocks):
        parts.insert(0, f"# {escape(document.title)}")
    return "\n\n".join(parts) + "\n"


def _parts(block: doc.Block) -> Iterator[str]:
    match block:
        case doc.Text(style="code"):
            yield fenced(block.text)
        case doc.Text():
            yield f"> {escape(block.text)}" if block.style == "warning" else escape(block.text)
        case doc.Link():
            yield f"[{escape(block.text)}]({block.target})"
        case doc.Items():
            yield "\n".join(_item(item) for item in block.items)
        case doc.Table():
            yield from _table(block)
        case doc.Panel():
            yield f"# {escape(block.badge)}"
            yield escape(block.headline)
            for inner in block.blocks:
                yield from _parts(inner)
        case doc.Fold():
            yield f"{escape(block.summary)}:"
            for inner in block.blocks:
                yield from _parts(inner)
        case _:
            yield f"{escape(block.title)}: see report.html"


def _item(item: doc.Item) -> str:
    texts = [escape(text) for text in (item.text, *item.below) if text]
    if item.text and item.below and not item.text.endswith((".", ":", "?")):
        texts[0] += "."
    return "- " + (f"**{escape(item.lead)}**: " if item.lead else "") + " ".join(texts)


def _table(table: doc.Table) -> Iterator[str]:
    if table.title:
        yield f"{escape(table.title)}:"
    rows = [
        [escape(column.title) for column in table.columns],
        ["---:" if column.kind == "number" else "---" for column in table.columns],
        *[[_cell(cell) for cell in row] for row in table.rows],
    ]
    yield "\n".join("| " + " | ".join(row) + " |" for row in rows)
    if table.caption:
        yield escape(table.caption)


def _cell(value: doc.Value) -> str:
    text = escape(doc.text_of(value))
    if isinstance(value, doc.Cell) and value.target:
        return f"[{text}]({value.target})"
    return f"**{text}**" if isinstance(value, doc.Cell) and value.style == "failed" and text else text


def escape(text: str) -> str:
    """Text on one line, with everything escaped that Markdown takes for markup, a new cell, or, where a line begins, a
    heading, a quotation, a list or a rule."""
    clean = _MARKS.sub(r"\\\g<0>", doc.readable(printable(" ".join(text.split()))))
    return _BEGINS.sub(r"\\\g<0>", clean)


def fenced(text: str) -> str:
    """Unescaped text in a fence that it cannot end."""
    body = "\n".join(printable(line) for line in text.splitlines())
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return f"{fence}\n{body}\n{fence}"
