"""The files of an engine matrix: its stored records read back, and its reports written.

`matrix.json` holds everything that was found. `cells.csv` and `cells.parquet` have one row per cell with the unit in
every column's name; Parquet needs pyarrow, which `pip install 'abserve[parquet]'` brings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from loadgen.documents import DocumentError, list_inside, read_inside, read_record, read_stored, stored_path
from loadgen.engine_matrix.analyse import analyse
from loadgen.engine_matrix.break_even import path_of
from loadgen.engine_matrix.records import CellResult, Configuration, Estimate, Matrix, Plan, Visit
from loadgen.engine_matrix.sections import matrix_document
from loadgen.records.run import Environment, RunState
from loadgen.report.renderers.csv import field
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.run.storage import StoredRunError
from loadgen.verdict.result_file import ResultError, write_atomically

R = TypeVar("R")
CELLS_CSV, CELLS_PARQUET = "cells.csv", "cells.parquet"
NO_PARQUET = f"{CELLS_PARQUET} was not written: it needs pyarrow; run pip install 'abserve[parquet]'"


class Row(NamedTuple):
    """What the columns of one cell are made of."""

    matrix: Matrix
    asked: Configuration
    cell: CellResult


class Column(NamedTuple):
    """A column of the tidy table. `kind` is the type of its values; every value may be None."""

    name: str
    kind: type
    of: Callable[[Row], str | int | float | bool | None]


def is_matrix(directory: Path) -> bool:
    """Whether a folder holds an engine matrix."""
    return any(stored_path(directory / name).exists() for name in (Plan.FILE, Matrix.FILE))


def stored_matrix(directory: Path) -> Matrix:
    """The matrix of the stored visits, or the stored matrix.json of a folder without visits, such as a published one.

    Raises `StoredRunError` and `ResultError`.
    """
    try:
        visits = [name for name in list_inside(directory, "visits") if name.endswith(".json")]
    except (OSError, DocumentError) as exc:
        raise StoredRunError(f"{directory / 'visits'} cannot be read: {exc}") from exc
    if not visits and stored_path(directory / Matrix.FILE).exists():
        return read_matrix(directory / Matrix.FILE)
    plan, environment = _read(directory, Plan.FILE, Plan), _read(directory, Environment.FILE, Environment)
    if plan is None or environment is None:
        missing = Plan.FILE if plan is None else Environment.FILE
        raise StoredRunError(
            f"{directory} holds no engine matrix: {missing} is missing; give the directory that `abserve engines` "
            "wrote to"
        )
    read = [_read(directory, name, Visit) for name in visits]
    state = _read(directory, RunState.FILE, RunState)
    return analyse(plan, environment, [one for one in read if one is not None], state)


def _read(directory: Path, name: str, kind: type[R]) -> R | None:
    """A record, or None without its file. Raises `StoredRunError`."""
    try:
        return cast("R", read_record(read_inside(directory, name), kind))
    except FileNotFoundError:
        return None
    except (OSError, DocumentError) as exc:
        raise StoredRunError(f"{directory / name} cannot be read: {exc}") from exc


def read_matrix(path: Path) -> Matrix:
    """Read a `matrix.json`, also compressed. Raises `ResultError` for a missing file, another schema or an unknown
    field."""
    try:
        return cast("Matrix", read_record(read_stored(path), Matrix))
    except (OSError, DocumentError) as exc:
        raise ResultError(f"{path} is not an engine matrix of this version of abserve: {exc}") from exc


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
    """The same table as Parquet, with typed columns; what was not measured is null."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    types: dict[type, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    rows = list(_rows(matrix))
    table = pa.table({one.name: pa.array([one.of(row) for row in rows], type=types[one.kind]) for one in COLUMNS})
    out = io.BytesIO()
    parquet.write_table(table, out)
    return out.getvalue()


def _rows(matrix: Matrix) -> Iterator[Row]:
    for cell in matrix.cells:
        yield Row(matrix, matrix.plan.configurations[cell.configuration], cell)


def _estimates(name: str, of: Callable[[CellResult], Estimate | None], scale: float = 1.0) -> list[Column]:
    """A value and the bounds of its 95 % interval as three columns."""

    def part(attribute: str) -> Callable[[Row], float | None]:
        def get(row: Row) -> float | None:
            found = of(row.cell)
            value = None if found is None else getattr(found, attribute)
            return None if value is None else float(value) * scale

        return get

    return [
        Column(f"{name}{suffix}", float, part(attribute))
        for suffix, attribute in (("", "value"), ("_low", "low"), ("_high", "high"))
    ]


def _plain(name: str, kind: type) -> Column:
    """A field of the cell under its own name."""
    return Column(name, kind, lambda row: cast("str | int | float | None", getattr(row.cell, name)))


def _asked(name: str, kind: type = str) -> Column:
    """A field of the configuration under its own name."""
    return Column(name, kind, lambda row: cast("str | int | None", getattr(row.asked, name)))


COLUMNS: tuple[Column, ...] = (
    *map(_asked, ("model", "engine", "mode", "precision", "device")),
    _asked("threads", int),
    _plain("batch", int),
    _plain("length", int),
    Column("path", str, lambda row: path_of(row.asked)),
    Column("engine_version", str, lambda row: _version(row)),
    Column("item", str, lambda row: row.matrix.configurations[row.cell.configuration].item),
    _plain("rounds", int),
    *_estimates("latency_ms", lambda cell: cell.latency_ns, 1e-6),
    Column("p99_ms", float, lambda row: None if row.cell.p99_ns is None else row.cell.p99_ns / 1e6),
    *_estimates("call_ms", lambda cell: cell.call_ns, 1e-6),
    *_estimates("items_per_second", lambda cell: cell.items_per_second),
    *_estimates("speedup", lambda cell: cell.speedup),
    _plain("tflops", float),
    _plain("first_call_seconds", float),
    _plain("cosine_min", float),
    _plain("top1", float),
    _plain("relative_error", float),
    Column("ranked", bool, lambda row: row.cell.excluded is None),
    _plain("excluded", str),
    *(_plain(name, int) for name in ("allocated_bytes", "reserved_bytes", "process_device_bytes", "rss_bytes")),
    *_estimates("joules_per_item", lambda cell: cell.joules_per_item),
    *_estimates("sustained_ms", lambda cell: cell.sustained_ns, 1e-6),
)
"""The tidy table; columns are only added at its end."""


def _version(row: Row) -> str | None:
    version = row.matrix.configurations[row.cell.configuration].description.get("version")
    return None if version is None else str(version)
