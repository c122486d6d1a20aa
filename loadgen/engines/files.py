"""The files of an engine matrix: report.html, summary.md, matrix.json, and its cells as CSV and Parquet.

`cells.csv` and `cells.parquet` have one row per cell with the unit in every column's name; Parquet needs pyarrow, which
`pip install 'abserve[parquet]'` brings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadgen.base.documents import indented
from loadgen.engines.analyse import path_of
from loadgen.engines.sections import matrix_document
from loadgen.engines.store import stored_matrix
from loadgen.records.matrix import CellResult, Configuration, Matrix
from loadgen.report.mlflow import export_matrix
from loadgen.report.published import Content, Published
from loadgen.report.renderers.tables import field
from loadgen.stats.estimates import Estimate

CELLS_CSV, CELLS_PARQUET = "cells.csv", "cells.parquet"
NO_PARQUET = f"{CELLS_PARQUET} was not written: it needs pyarrow; run pip install 'abserve[parquet]'"


Value = str | int | float | bool | None
CellColumn = tuple[str, type, Callable[[Matrix, CellResult], Value]]
"""A column of the tidy table: its name, the type of its values, and its value for a cell."""


def stored(folder: Path) -> Published:
    """The matrix in a folder. Raises `StoredRunError`."""
    return published(stored_matrix(folder))


def published(matrix: Matrix) -> Published:
    """With matrix.json, cells.csv and, where pyarrow is installed, cells.parquet."""
    contents: dict[str, Content] = {
        Matrix.FILE: lambda _: indented(matrix),
        CELLS_CSV: lambda _: cells_csv(matrix).encode(),
    }
    notes: tuple[str, ...] = (NO_PARQUET,)
    if has_parquet():
        contents[CELLS_PARQUET], notes = lambda _: cells_parquet(matrix), ()
    formats = {"csv": lambda: cells_csv(matrix), "json": lambda: indented(matrix).decode()}
    return Published(matrix_document(matrix), contents, formats, partial(export_matrix, matrix), notes)


def has_parquet() -> bool:
    """Whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def cells_csv(matrix: Matrix) -> str:
    """One row per cell; what was not measured is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for name, _, _ in COLUMNS])
    writer.writerows([field(value_of(matrix, cell)) for _, _, value_of in COLUMNS] for cell in matrix.cells)
    return out.getvalue()


def cells_parquet(matrix: Matrix) -> bytes:
    """The table of cells as Parquet, with typed columns; what was not measured is null."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    types: dict[type, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    table = pa.table(
        {
            name: pa.array([value_of(matrix, cell) for cell in matrix.cells], type=types[kind])
            for name, kind, value_of in COLUMNS
        }
    )
    out = io.BytesIO()
    parquet.write_table(table, out)
    return out.getvalue()


def _estimates(name: str, of: Callable[[CellResult], Estimate | None], scale: float = 1.0) -> list[CellColumn]:
    """A value and the bounds of its 95 % interval as three columns."""

    def part(attribute: str) -> Callable[[Matrix, CellResult], Value]:
        return lambda _, cell: None if (estimate := of(cell)) is None else getattr(estimate.scaled(scale), attribute)

    return [
        (f"{name}{suffix}", float, part(attribute))
        for suffix, attribute in (("", "value"), ("_low", "low"), ("_high", "high"))
    ]


def _fields(
    kind: type, *names: str, of: Callable[[Matrix, CellResult], object] = lambda _, cell: cell
) -> list[CellColumn]:
    """Fields of the cell, or of another record that belongs to it, under their own names."""

    def column(name: str) -> CellColumn:
        return name, kind, lambda matrix, cell: getattr(of(matrix, cell), name)

    return [column(name) for name in names]


def _configuration(matrix: Matrix, cell: CellResult) -> Configuration:
    return matrix.plan.configurations[cell.configuration]


def _version(matrix: Matrix, cell: CellResult) -> str | None:
    version = matrix.configurations[cell.configuration].description.get("version")
    return None if version is None else str(version)


def _generation(cell: CellResult, name: str) -> Any:
    """A field of a language model's cell; None of another one."""
    return None if cell.generation is None else getattr(cell.generation, name)


COLUMNS: tuple[CellColumn, ...] = (
    *_fields(str, "model", "engine", "mode", "precision", "device", of=_configuration),
    *_fields(int, "threads", of=_configuration),
    *_fields(int, "batch", "length"),
    ("path", str, lambda matrix, cell: path_of(_configuration(matrix, cell))),
    ("engine_version", str, _version),
    ("item", str, lambda matrix, cell: matrix.configurations[cell.configuration].item),
    *_fields(int, "rounds"),
    *_estimates("latency_ms", lambda cell: cell.latency_ns, 1e-6),
    ("p99_ms", float, lambda _, cell: None if cell.p99_ns is None else cell.p99_ns / 1e6),
    *_estimates("call_ms", lambda cell: cell.call_ns, 1e-6),
    *_estimates("items_per_second", lambda cell: cell.items_per_second),
    *_estimates("speedup", lambda cell: cell.speedup),
    *_fields(float, "tflops", "first_call_seconds", "cosine_min", "top1", "relative_error"),
    ("ranked", bool, lambda _, cell: cell.excluded is None),
    *_fields(str, "excluded"),
    *_fields(int, "allocated_bytes", "reserved_bytes", "process_device_bytes", "rss_bytes"),
    *_estimates("joules_per_item", lambda cell: cell.joules_per_item),
    *_estimates("sustained_ms", lambda cell: cell.sustained_ns, 1e-6),
    *_estimates("prompt_tokens_per_second", lambda cell: _generation(cell, "prompt_tokens_per_second")),
    *_estimates("first_token_ms", lambda cell: _generation(cell, "first_token_ns"), 1e-6),
    *_estimates("bandwidth_share", lambda cell: _generation(cell, "bandwidth_share")),
    ("mean_deficit", float, lambda _, cell: _generation(cell, "mean_deficit")),
    ("largest_deficit", float, lambda _, cell: _generation(cell, "largest_deficit")),
    ("best_share", float, lambda _, cell: _generation(cell, "best_share")),
)
"""The tidy table; columns are only added at its end."""
