"""Finds and reads the results to rank, and writes the reports of a ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import loadgen.report.document as doc
from loadgen.documents import MOST_RECORD_BYTES, DocumentError, decode_json, read_stored, stored_path
from loadgen.engine_matrix.files import read_matrix
from loadgen.engine_matrix.records import Matrix
from loadgen.ranking.candidates import Read, from_matrix, from_result
from loadgen.ranking.records import Ranking
from loadgen.ranking.sections import CSV_OPTIONS, CSV_POINTS
from loadgen.report.renderers.csv import render_csv
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.run.storage import StoredRunError
from loadgen.verdict.analysis import readable, stored_result
from loadgen.verdict.result_file import FILE_NAME, ResultError, read_result, write_atomically

_REMEDY = (
    "give a folder that `abserve engines` or `abserve compare` wrote to, a folder of such folders, a matrix.json or a "
    "result.json"
)


class UnreadableError(Exception):
    """A result cannot be read; the message names it."""


class _Peek(msgspec.Struct):
    schema: str = ""


def read_all(given: list[Path]) -> list[Read]:
    """Everything that can be ranked in these files and folders, each once. Raises `UnreadableError`."""
    found: dict[Path, Path] = {}
    for path in given:
        for one in _results_in(path):
            found.setdefault(one.resolve(), one)
    return [_read(path) for path in found.values()]


def _results_in(path: Path) -> Iterator[Path]:
    """A file, the result of a folder, or those of the folders in it."""
    if not path.exists():
        raise UnreadableError(f"{path} does not exist; {_REMEDY}")
    if not path.is_dir():
        yield path.resolve() if path.is_symlink() else path  # a link that the user gives is followed
        return
    own = _result_of(path)
    inner = (
        []
        if own is not None
        else [one for folder in sorted(path.rglob("*/")) if (one := _result_of(folder)) is not None]
    )
    if own is None and not inner:
        raise UnreadableError(f"{path} holds no result; {_REMEDY}")
    yield from inner if own is None else [own]


def _result_of(folder: Path) -> Path | None:
    """The matrix or the result of a folder; the folder itself where the result was not made yet."""
    for name in (Matrix.FILE, FILE_NAME):
        if stored_path(folder / name).is_file():
            return folder / name
    return folder if (folder / "experiment.json").is_file() else None


def _read(path: Path) -> Read:
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
        peek: _Peek = decode_json(read_stored(path), _Peek, most_bytes=MOST_RECORD_BYTES)
    except OSError as exc:
        raise UnreadableError(f"{path} cannot be read: {exc.strerror or exc}; {_REMEDY}") from exc
    except DocumentError as exc:
        raise UnreadableError(f"{path} cannot be read: {exc}; {_REMEDY}") from exc
    return peek.schema


def encode(ranking: Ranking) -> str:
    """Indented JSON, schema abserve.rank/1."""
    return msgspec.json.format(msgspec.json.encode(ranking), indent=2).decode() + "\n"


def formats(ranking: Ranking, document: doc.Document) -> dict[str, Callable[[], str]]:
    """The renderers for other programs, by name."""
    return {
        "csv": lambda: render_csv({"": document}, CSV_OPTIONS),
        "csv-points": lambda: render_csv({"": document}, CSV_POINTS),
        "json": lambda: encode(ranking),
        "markdown": lambda: render_markdown(document),
    }


def write_ranking(folder: Path, ranking: Ranking, document: doc.Document) -> list[Path]:
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
