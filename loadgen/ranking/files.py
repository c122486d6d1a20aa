"""Finds and reads the results to rank, and writes the reports of a ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import loadgen.report.document as doc
from loadgen.documents import MOST_RECORD_BYTES, DocumentError, decode_json, read_stored, stored_path
from loadgen.engine_matrix.records import Matrix
from loadgen.engine_matrix.store import read_matrix
from loadgen.ranking.analyse import RankInput, from_matrix, from_result
from loadgen.ranking.records import RankResult
from loadgen.ranking.sections import CSV_OPTIONS, CSV_POINTS
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_csv
from loadgen.storage.stored_run import StoredRunError
from loadgen.verdict.analysis import readable, stored_result
from loadgen.verdict.result_file import FILE_NAME, ResultError, read_result, write_atomically

_REMEDY = (
    "give a folder that `abserve engines` or `abserve compare` wrote to, a folder of such folders, a matrix.json or a "
    "result.json"
)


class UnreadableError(Exception):
    """A result cannot be read; the message names it."""


class _SchemaOnly(msgspec.Struct):
    schema: str = ""


def read_all(paths: list[Path]) -> list[RankInput]:
    """Everything that can be ranked in these files and folders, each once. Raises `UnreadableError`."""
    results: dict[Path, Path] = {}
    for path in paths:
        for result in _results_in(path):
            results.setdefault(result.resolve(), result)
    return [_read(path) for path in results.values()]


def _results_in(path: Path) -> Iterator[Path]:
    """A file, the result of a folder, or those of the folders in it."""
    if not path.exists():
        raise UnreadableError(f"{path} does not exist; {_REMEDY}")
    if not path.is_dir():
        yield path.resolve() if path.is_symlink() else path  # a link that the user gives is followed
        return
    result = _result_of(path)
    inner = map(_result_of, sorted(path.rglob("*/"))) if result is None else ()
    results = [each for each in (result, *inner) if each is not None]
    if not results:
        raise UnreadableError(f"{path} holds no result; {_REMEDY}")
    yield from results


def _result_of(folder: Path) -> Path | None:
    """The matrix or the result of a folder; the folder itself where the result was not made yet."""
    for name in (Matrix.FILE, FILE_NAME):
        if stored_path(folder / name).is_file():
            return folder / name
    return folder if (folder / "experiment.json").is_file() else None


def _read(path: Path) -> RankInput:
    name = str(path.parent if path.name in (Matrix.FILE, FILE_NAME) else path)
    schema = "" if path.is_dir() else _schema(path)
    try:
        with readable(path):
            if path.is_dir():
                return from_result(name, stored_result(path))
            if schema.startswith("abserve.engines/"):
                return from_matrix(name, read_matrix(path))
            if schema.startswith("abserve.result/"):
                return from_result(name, read_result(path))
    except (StoredRunError, ResultError) as exc:
        raise UnreadableError(str(exc)) from exc
    raise UnreadableError(f"{path} is neither an engine matrix nor a comparison; {_REMEDY}")


def _schema(path: Path) -> str:
    try:
        document: _SchemaOnly = decode_json(read_stored(path), _SchemaOnly, most_bytes=MOST_RECORD_BYTES)
    except OSError as exc:
        raise UnreadableError(f"{path} cannot be read: {exc.strerror or exc}; {_REMEDY}") from exc
    except DocumentError as exc:
        raise UnreadableError(f"{path} cannot be read: {exc}; {_REMEDY}") from exc
    return document.schema


def encode(ranking: RankResult) -> str:
    """Indented JSON, schema abserve.rank/1."""
    return msgspec.json.format(msgspec.json.encode(ranking), indent=2).decode() + "\n"


def formats(ranking: RankResult, document: doc.Document) -> dict[str, Callable[[], str]]:
    """The renderers for other programs, by name."""
    return {
        "csv": lambda: render_csv({"": document}, CSV_OPTIONS),
        "csv-points": lambda: render_csv({"": document}, CSV_POINTS),
        "json": lambda: encode(ranking),
        "markdown": lambda: render_markdown(document),
    }


def write_ranking(folder: Path, ranking: RankResult, document: doc.Document) -> list[Path]:
    """Write report.html, summary.md, rank.json, options.csv and points.csv, each whole or not at all; returns their
    paths, report.html first. Raises `OSError`."""
    render = formats(ranking, document)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "report.html": render_html(document),
        "summary.md": render["markdown"](),
        "rank.json": render["json"](),
        "options.csv": render["csv"](),
        "points.csv": render["csv-points"](),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content.encode())
    return [folder / name for name in contents]
