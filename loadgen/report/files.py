"""The formats for other programs: which there are, and writing them where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from loadgen.analysis.result import Result, encode_result, write_atomically
from loadgen.report.csv import blocks_csv, comparisons_csv
from loadgen.report.junit import render_junit
from loadgen.report.markdown import render_markdown

FORMATS: Mapping[str, Callable[[Result], str]] = {
    "csv": lambda result: comparisons_csv({"": result}),
    "csv-blocks": lambda result: blocks_csv({"": result}),
    "json": lambda result: encode_result(result).decode(),
    "junit": lambda result: render_junit({"": result}),
    "markdown": render_markdown,
}


def write_junit(path: Path, results: Mapping[str, Result | None]) -> None:
    """Whole or not at all. Raises `OSError`."""
    write_atomically(path, render_junit(results).encode())


def write_csv(path: Path, results: Mapping[str, Result | None]) -> None:
    """Comparisons to `path`, blocks beside it. Raises `OSError`."""
    there = {name: result for name, result in results.items() if result is not None}
    write_atomically(path, comparisons_csv(there).encode())
    write_atomically(path.with_name(f"{path.stem}-blocks{path.suffix or '.csv'}"), blocks_csv(there).encode())
