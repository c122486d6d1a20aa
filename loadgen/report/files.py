"""The formats for other programs: their names, and writing them to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import loadgen.report.document as doc
from loadgen.documents import write_atomically
from loadgen.report.contents import result_document
from loadgen.report.renderers.csv import csv_names, render_csv
from loadgen.report.renderers.junit import render_junit
from loadgen.report.renderers.markdown import render_markdown
from loadgen.verdict.result import Result, encode_result

CSV = "comparisons"
"""The table that the plain name csv stands for."""


def formats(result: Result, document: doc.Document | None = None) -> dict[str, Callable[[], str]]:
    """The renderers by name; every CSV table is a format."""
    found = document or result_document(result)
    tables = {
        "csv" if name == CSV else f"csv-{name}": lambda name=name: render_csv({"": found}, name)
        for name in sorted(csv_names(found), key=lambda name: (name != CSV, name))
    }
    return tables | {
        "json": lambda: encode_result(result).decode(),
        "junit": lambda: render_junit({"": found}),
        "markdown": lambda: render_markdown(found),
    }


def write_junit(path: Path, results: Mapping[str, Result | None]) -> None:
    """Write the file whole or not at all. Raises `OSError`."""
    documents = {name: None if result is None else result_document(result) for name, result in results.items()}
    write_atomically(path, render_junit(documents).encode())


def write_csv(path: Path, results: Mapping[str, Result | None]) -> None:
    """Write the comparisons to `path` and the blocks beside it. Raises `OSError`."""
    documents = {name: result_document(result) for name, result in results.items() if result is not None}
    for name, target in ((CSV, path), ("blocks", path.with_name(f"{path.stem}-blocks{path.suffix or '.csv'}"))):
        write_atomically(target, render_csv(documents, name).encode())
