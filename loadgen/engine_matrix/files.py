"""The files of an engine matrix: report.html, summary.md, matrix.json, and its cells as CSV and Parquet.

`cells.csv` and `cells.parquet` have one row per cell with the unit in every column's name; Parquet needs pyarrow, which
`pip install 'abserve[parquet]'` brings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from loadgen.documents import write_atomically
from loadgen.engine_matrix.analyse import path_of
from loadgen.engine_matrix.records import CellResult, Configuration, Estimate, Matrix
from loadgen.engine_matrix.sections import matrix_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import field

CELLS_CSV, CELLS_PARQUET = "cells.csv", "cells.parquet"
NO_PARQUET = f"{CELLS_PARQUET} was not written: it needs pyarrow; run pip install 'abserve[parquet]'"


class CellRow(NamedTuple):
    """What the columns of one cell are made of."""

    matrix: Matrix
    configuration: Configuration
    cell: CellResult


class CellColumn(NamedTuple):
    """A column of the tidy table. `kind` is the type of its values; every value may be None."""

    name: str
    kind: type
    of: Callable[[CellRow], str | int | float | bool | None]


def encode_matrix(matrix: Matrix) -> bytes:
    """Indented JSON, the same bytes for the same matrix."""
    return msgspec.json.format(msgspec.json.encode(matrix), indent=1) + b"\n"


def formats(matrix: Matrix) -> dict[str, Callable[[], str]]:
    """The formats that a command can print, by name."""
    return {
        "csv": lambda: cells_csv(matrix),
        "json": lambda: encode_matrix(matrix).decode(),
        "markdown": lambda: render_markdown(matrix_document(matrix)),
    }


def write_reports(directory: Path, matrix: Matrix) -> list[Path]:
    """Write report.html, summary.md, matrix.json, cells.csv and, where pyarrow is installed, cells.parquet, each whole
    or not at all; returns their paths, report.html first. Raises `OSError`."""
    document = matrix_document(matrix)
    contents = {
        "report.html": render_html(document).encode(),
        "summary.md": render_markdown(document).encode(),
        Matrix.FILE: encode_matrix(matrix),
        CELLS_CSV: cells_csv(matrix).encode(),
    }
    if has_parquet():
        contents[CELLS_PARQUET] = cells_parquet(matrix)
    for name, content in contents.items():
        write_atomically(directory / name, content)
    return [directory / name for name in contents]


def has_parquet() -> bool:
    """Whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def cells_csv(matrix: Matrix) -> str:
    """One row per cell; what was not measured is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in COLUMNS])
    writer.writerows([field(column.of(row)) for column in COLUMNS] for row in _rows(matrix))
    return out.getvalue()


def cells_parquet(matrix: Matrix) -> bytes:
    """The table of cells as Parquet, with typed columns; what was not measured is null."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    types: dict[type, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    rows = list(_rows(matrix))
    table = pa.table(
        {column.name: pa.array([column.of(row) for row in rows], type=types[column.kind]) for column in COLUMNS}
    )
    out = io.BytesIO()
    parquet.write_table(table, out)
    return out.getvalue()


def _rows(matrix: Matrix) -> Iterator[CellRow]:
    for cell in matrix.cells:
        yield CellRow(matrix, matrix.plan.configurations[cell.configuration], cell)


def _estimates(name: str, of: Callable[[CellResult], Estimate | None], scale: float = 1.0) -> list[CellColumn]:
    """A value and the bounds of its 95 % interval as three columns."""

    def part(attribute: str) -> Callable[[CellRow], float | None]:
        return lambda row: None if (estimate := of(row.cell)) is None else getattr(estimate.scaled(scale), attribute)

    return [
        CellColumn(f"{name}{suffix}", float, part(attribute))
        for suffix, attribute in (("", "value"), ("_low", "low"), ("_high", "high"))
    ]


def _plain(name: str, kind: type) -> CellColumn:
    """A field of the cell under its own name."""
    return CellColumn(name, kind, lambda row: cast("str | int | float | None", getattr(row.cell, name)))


def _of_configuration(name: str, kind: type = str) -> CellColumn:
    """A field of the configuration under its own name."""
    return CellColumn(name, kind, lambda row: cast("str | int | None", getattr(row.configuration, name)))


COLUMNS: tuple[CellColumn, ...] = (
    *map(_of_configuration, ("model", "engine", "mode", "precision", "device")),
    _of_configuration("threads", int),
    _plain("batch", int),
    _plain("length", int),
    CellColumn("path", str, lambda row: path_of(row.configuration)),
    CellColumn("engine_version", str, lambda row: _version(row)),
    CellColumn("item", str, lambda row: row.matrix.configurations[row.cell.configuration].item),
    _plain("rounds", int),
    *_estimates("latency_ms", lambda cell: cell.latency_ns, 1e-6),
    CellColumn("p99_ms", float, lambda row: None if row.cell.p99_ns is None else row.cell.p99_ns / 1e6),
    *_estimates("call_ms", lambda cell: cell.call_ns, 1e-6),
    *_estimates("items_per_second", lambda cell: cell.items_per_second),
    *_estimates("speedup", lambda cell: cell.speedup),
    _plain("tflops", float),
    _plain("first_call_seconds", float),
    _plain("cosine_min", float),
    _plain("top1", float),
    _plain("relative_error", float),
    CellColumn("ranked", bool, lambda row: row.cell.excluded is None),
    _plain("excluded", str),
    *(_plain(name, int) for name in ("allocated_bytes", "reserved_bytes", "process_device_bytes", "rss_bytes")),
    *_estimates("joules_per_item", lambda cell: cell.joules_per_item),
    *_estimates("sustained_ms", lambda cell: cell.sustained_ns, 1e-6),
)
"""The tidy table; columns are only added at its end."""


def _version(row: CellRow) -> str | None:
    version = row.matrix.configurations[row.cell.configuration].description.get("version")
    return None if version is None else str(version)
