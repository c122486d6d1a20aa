"""The files of a tuning: tuning.json, report.html, summary.md and the deployment, each whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

import loadgen.report.document as doc
from loadgen.documents import FINAL, write_atomically
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.run.storage import StoredRunError, read_one
from loadgen.tune.deploy import best_commands, deployed_files
from loadgen.tune.outcome import TuningOutcome, outcome_of
from loadgen.tune.records import Tuning
from loadgen.tune.sections import tuning_document
from loadgen.verdict.result import Result, stored_result


def encode_tuning(tuning: Tuning) -> bytes:
    """Indented JSON, the same bytes for the same tuning."""
    return msgspec.json.format(msgspec.json.encode(tuning), indent=1) + b"\n"


def read_tuning(directory: Path) -> Tuning:
    """The tuning in a folder, as far as it got. Raises `StoredRunError`."""
    tuning = read_one(directory, Tuning)
    if tuning is None:
        raise StoredRunError(
            f"{directory} holds no tuning: {Tuning.FILE} is missing; give the folder of `abserve tune`"
        )
    return tuning


def stored_outcome(directory: Path, tuning: Tuning) -> TuningOutcome:
    """What a tuning tells, with the result of its final if that has run. Raises `StoredRunError`."""
    has_final = any(run.stage == "final" and run.problem is None for run in tuning.runs)
    final: Result | None = stored_result(directory / FINAL) if has_final else None
    return outcome_of(tuning, final)


def document_of(directory: Path, outcome: TuningOutcome) -> doc.Document:
    """The report, with the files that deploy the best as far as they are written."""
    return tuning_document(outcome, best_commands(outcome), deployed_files(directory))


def formats(tuning: Tuning, document: doc.Document) -> dict[str, Callable[[], str]]:
    """The formats that a command can print, by name."""
    return {"json": lambda: encode_tuning(tuning).decode(), "markdown": lambda: render_markdown(document)}


def write_reports(directory: Path, document: doc.Document) -> list[Path]:
    """Write report.html and summary.md, each whole or not at all; returns their paths, report.html first. Raises
    `OSError`."""
    contents = {"report.html": render_html(document), "summary.md": render_markdown(document)}
    for name, content in contents.items():
        write_atomically(directory / name, content.encode())
    return [directory / name for name in contents]
