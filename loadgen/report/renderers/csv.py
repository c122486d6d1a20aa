"""A table of a document as CSV for spreadsheets and scripts, with full precision.

A value that was not measured is an empty field. The column `run` names the combination of a matrix, and is empty for a
single run.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

import loadgen.report.document as doc
from loadgen.documents import printable

_FORMULA = ("=", "+", "-", "@", "\N{FULLWIDTH EQUALS SIGN}", "\N{FULLWIDTH PLUS SIGN}")


def csv_names(document: doc.Document) -> list[str]:
    """The names of the tables."""
    return list(dict.fromkeys(table.name for table in doc.only(document, doc.CSV).tables if table.name))


def render_csv(documents: Mapping[str, doc.Document], name: str) -> str:
    """The table of this name in every document, by the name of the run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for run, document in documents.items():
        for table in doc.only(document, doc.CSV).tables:
            if table.name == name:
                if not out.tell():
                    writer.writerow(["run", *(column.title for column in table.columns)])
                writer.writerows([field(run), *map(field, row)] for row in table.rows)
    return out.getvalue()


def field(value: doc.Value) -> object:
    """Printable text that a spreadsheet does not take for a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | doc.Cell | doc.Strip):
        return value
    text = printable(" ".join(doc.text_of(value).split()))
    return f"'{text}" if text.startswith(_FORMULA) else text
