"""The formats for other programs: which there are, and writing them where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import loadgen.report.document as doc
from loadgen.report.contents import result_document
from loadgen.report.renderers.csv import csv_names, render_csv
from loadgen.report.renderers.junit import render_junit
from loadgen.report.renderers.markdown import render_markdown
from loadgen.result.result_file import Result, encode_result, write_atomically

CSV = "comparisons"
"""The table that is meant where no other is named."""


def formats(result: Result, document: doc.Document | None = None) -> dict[str, Callable[[], str]]:
    """By name; every table for CSV is a format of its own."""
    shown = document or result_document(result)
    tables = {
        "csv" if name == CSV else f"csv-{name}": lambda name=name: render_csv({"": shown}, name)
        for name in sorted(csv_names(shown), key=lambda name: (name != CSV, name))
    }
    return tables | {
        "json": lambda: encode_result(result).decode(),
        "junit": lambda: render_junit({"": shown}),
        "markdown": lambda: render_markdown(shown),
    }


def write_junit(path: Path, results: Mapping[str, Result | None]) -> None:
    """Whole or not at all. Raises `OSError`."""
    documents = {name: None if result is None else result_document(result) for name, result in results.items()}
    write_atomically(path, render_junit(documents).encode())


def write_csv(path: Path, results: Mapping[str, Result | None]) -> None:
    """Comparisons to `path`, blocks beside it. Raises `OSError`."""
    documents = {name: result_document(result) for name, result in results.items() if result is not None}
    write_atomically(path, render_csv(documents, CSV).encode())
    blocks = path.with_name(f"{path.stem}-blocks{path.suffix or '.csv'}")
    write_atomically(blocks, render_csv(documents, "blocks").encode())
