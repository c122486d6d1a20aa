"""`abserve report DIR`: makes the result and its reports again from the stored records of a run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.output import MLFLOW, announce, console_for, fail, print_report, printed

if TYPE_CHECKING:
    from loadgen.base.documents import FolderKind
    from loadgen.report.published import Published

HELP_GROUP = "Compare"

_KINDS: Mapping[FolderKind, str] = {
    "tuning": "loadgen.tune.files", "engines": "loadgen.engines.files", "comparison": "loadgen.report.files",
}  # fmt: skip
"""The module that reads the folder of each command, by `stored`."""


def report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of `abserve compare`, `engines` or `tune`, or of several.")
    ],
    open_report: Annotated[bool, typer.Option("--open", help="Open report.html in the web browser.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Print csv, csv-blocks, json, junit or markdown, and write no file. Of an engine matrix: csv, json or "
            "markdown; of a tuning: json or markdown.",
        ),
    ] = None,
    mlflow: Annotated[str | None, typer.Option(**MLFLOW)] = None,
) -> None:
    """Make result.json, report.html and summary.md again from the records in DIR, also after an interrupted run.

    A published folder without raw samples is reported from its result.json. Of an engine matrix: matrix.json,
    report.html, summary.md, cells.csv and cells.parquet; of a tuning: report.html and summary.md; of a folder of runs:
    history.html and history.md, with trends.

    Exit status: 0 the reports were made, whatever the verdict; 1 they cannot be written, or the export to MLflow
    failed; 2 DIR holds no readable run, the format is unknown, or MLflow is not installed.
    """
    announce("reading the records", in_logs=False)
    import webbrowser

    from loadgen.base.documents import kind_of, results_in
    from loadgen.records.store import StoredRunError
    from loadgen.report.mlflow import MlflowExportError, check_mlflow
    from loadgen.verdict.result import readable

    if mlflow is not None and output is not None:
        fail("give --mlflow or --format, not both")
    try:
        check_mlflow(mlflow)
        with readable(directory):
            found = kind_of(directory)
            if found is None and directory.is_dir() and next(results_in(directory), None) is not None:
                kind = import_module("loadgen.report.history")
            else:
                kind = import_module(_KINDS[found or "comparison"])
            stored: Published = kind.stored(directory)
            if output is not None:
                printed(stored, output)
                return
            paths = stored.write(directory)
            print_report(stored.document)
    except (StoredRunError, MlflowExportError) as exc:
        fail(str(exc))
    except OSError as exc:
        fail(
            f"cannot write to {directory}: {exc.strerror or exc}; make it writable, or add --format markdown to print "
            "the report",
            1,
        )
    for path in (*paths, *stored.notes):
        console_for().print(f"{path}", soft_wrap=True)
    try:
        if mlflow is not None and stored.export is not None:
            with readable(directory):
                stored.export(mlflow, directory)
    except (MlflowExportError, StoredRunError) as exc:
        fail(str(exc), 1)
    if open_report:
        webbrowser.open(paths[0].resolve().as_uri())
