"""Writes reports to files, each whole or not at all, and to the summary of a step in GitHub Actions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from loadgen.base.documents import write_atomically
from loadgen.experiment.options import write_content
from loadgen.experiment.plan import Combination
from loadgen.records.store import StoredRunError
from loadgen.report.contents import index_document, result_document
from loadgen.report.mlflow import export_result
from loadgen.report.published import Content, Published
from loadgen.report.renderers.tables import csv_names, render_csv, render_junit
from loadgen.verdict.result import FILE_NAME, Result, encode_result, read_result, stored_result

EXPERIMENT_FILE = "experiment.yaml"
CSV = "comparisons"
"""The table that the plain name csv stands for."""
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable that names the file of a step's summary, in Markdown."""
MOST_SUMMARY_BYTES = 1 << 20
"""GitHub's limit per step; it shows nothing of a longer summary."""
CUT = "\n\nThe summary was cut here: GitHub shows at most 1 MiB per step. The files of the run hold all of it.\n"


def stored(folder: Path) -> Published:
    """The comparison in a folder. Raises `StoredRunError`."""
    return published(stored_result(folder))


def published(result: Result) -> Published:
    """With result.json, the effective experiment.yaml, and every CSV table as a format. An equal result.json of an
    older version is not replaced."""
    settings, sha256 = result.experiment.settings, result.experiment.settings_sha256
    document = result_document(result)

    def content(folder: Path) -> bytes | None:
        with suppress(StoredRunError):
            if read_result(folder / FILE_NAME) == result:
                return None
        return encode_result(result)

    contents: dict[str, Content] = {FILE_NAME: content}
    if settings is not None and sha256 is not None:
        contents[EXPERIMENT_FILE] = lambda _: write_content(settings, sha256).encode()
    formats: dict[str, Callable[[], str]] = {
        "csv" if name == CSV else f"csv-{name}": partial(render_csv, {"": document}, name)
        for name in sorted(csv_names(document), key=lambda name: (name != CSV, name))
    }
    formats |= {"json": lambda: encode_result(result).decode(), "junit": lambda: render_junit({"": document})}
    return Published(document, contents, formats, partial(export_result, result))


def write_index(out_dir: Path, results: Mapping[Combination, Result | None]) -> None:
    """Write index.html and summary.md of several runs. Raises `OSError`."""
    Published(index_document(results), {}, {}, page="index.html").write(out_dir)


def write_junit(path: Path, results: Mapping[str, Result | None]) -> None:
    """Write the test cases of all runs. Raises `OSError`."""
    documents = {name: None if result is None else result_document(result) for name, result in results.items()}
    write_atomically(path, render_junit(documents).encode())


def write_csv(path: Path, results: Mapping[str, Result | None]) -> None:
    """Write the comparisons to `path` and the blocks beside it. Raises `OSError`."""
    documents = {name: result_document(result) for name, result in results.items() if result is not None}
    for name, target in ((CSV, path), ("blocks", path.with_name(f"{path.stem}-blocks{path.suffix or '.csv'}"))):
        write_atomically(target, render_csv(documents, name).encode())


def append_job_summary(markdown: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Append to the step's summary, if there is one, within its limit. A file that cannot be written is never an error:
    the return value is then a warning to show."""
    name = environment.get(STEP_SUMMARY)
    if not name:
        return None
    path = Path(name)
    try:
        size = path.stat().st_size if path.exists() else 0
        content = markdown.encode() + b"\n"
        room = MOST_SUMMARY_BYTES - size
        if len(content) > room:
            content = _shortened(content, room - len(CUT.encode()))
        if content:
            with path.open("ab") as file:
                file.write(content)
    except OSError as exc:
        return f"no job summary: {path} ({STEP_SUMMARY}) cannot be written: {exc.strerror or exc}"
    return None


def _shortened(content: bytes, room: int) -> bytes:
    """Whole lines that fit, and the sentence that says so; nothing where not even that fits."""
    if room < 0:
        return b""
    return content[: content.rfind(b"\n", 0, room + 1) + 1] + CUT.encode()
