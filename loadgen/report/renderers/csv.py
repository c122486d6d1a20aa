"""One table of a document as CSV for spreadsheets and scripts: full precision, nothing rounded.

What was not measured is an empty field. `run` names the combination of a matrix and is empty elsewhere.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

import loadgen.report.document as doc
from loadgen.documents import printable

_FORMULA = ("=", "+", "-", "@", "\N{FULLWIDTH EQUALS SIGN}", "\N{FULLWIDTH PLUS SIGN}")


def csv_names(document: doc.Document) -> list[str]:
    """The tables that `render_csv` can write."""
    return list(dict.fromkeys(table.name for table in doc.only(document, doc.CSV).tables if table.name))


def render_csv(documents: Mapping[str, doc.Document], name: str) -> str:
    """The table of this name in every document, by the name of the run; the name is empty where there is one run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    headed = False
    for run, document in documents.items():
        for table in doc.only(document, doc.CSV).tables:
            if table.name != name:
                continue
            if not headed:
                writer.writerow(["run", *(column.title for column in table.columns)])
                headed = True
            writer.writerows([_field(run), *map(_field, row)] for row in table.rows)
    return out.getvalue()


def _field(value: doc.Value) -> object:
    """Printable text, and no text that a spreadsheet would take for a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | doc.Cell | doc.Strip):
        return value
    text = printable(" ".join(doc.text_of(value).split()))
    return f"'{text}" if text.startswith(_FORMULA) else text
