"""`abserve report DIR`: makes the result and its reports again from the stored records of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from loadgen.cli.output import announce, fail

if TYPE_CHECKING:
    from loadgen.report.document import Document

HELP_GROUP = "Compare"


def report(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The folder of `abserve compare`, `engines` or `tune`."),
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
    mlflow: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Also export to MLflow: the address of a server, a folder or sqlite:///FILE."),
    ] = None,
) -> None:
    """Make result.json, report.html and summary.md again from the records in DIR, also after an interrupted run.

    A published folder without raw samples is reported from its result.json. Of an engine matrix: matrix.json,
    report.html, summary.md, cells.csv and cells.parquet, from its visits or, without those, its matrix.json. Of a
    tuning: report.html and summary.md, from its tuning.json and its final comparison.

    Exit status: 0 the reports were made, whatever the verdict; 1 they cannot be written, or the export to MLflow
    failed; 2 DIR holds no readable run, the format is unknown, or MLflow is not installed.
    """
    announce("reading the records", in_logs=False)
    import webbrowser

    from loadgen.documents import kind_of
    from loadgen.experiment.plan import unknown
    from loadgen.report.mlflow import MlflowExportError, check_mlflow
    from loadgen.report.renderers.terminal import make_console, print_document
    from loadgen.run.storage import StoredRunError
    from loadgen.verdict.result import readable

    if mlflow is not None and output is not None:
        fail("give --mlflow or --format, not both")
    console = make_console(sys.stdout)
    try:
        check_mlflow(mlflow)
        with readable(directory):
            read = {"tuning": _stored_tuning, "engines": _stored_matrix, "comparison": _stored_comparison}
            stored = read[kind_of(directory) or "comparison"](directory)
            if output is not None:
                if output not in stored.formats:
                    fail(unknown("--format", output, list(stored.formats)))
                typer.echo(stored.formats[output](), nl=False)
                return
            paths = stored.write()
            print_document(stored.document, console)
    except (StoredRunError, MlflowExportError) as exc:
        fail(str(exc))
    except OSError as exc:
        fail(
            f"cannot write to {directory}: {exc.strerror or exc}; make it writable, or add --format markdown to print "
            "the report",
            1,
        )
    for path in (*paths, *stored.notes):
        console.print(f"{path}", soft_wrap=True)
    try:
        if mlflow is not None:
            with readable(directory):
                stored.export(mlflow)
    except (MlflowExportError, StoredRunError) as exc:
        fail(str(exc), 1)
    if open_report:
        webbrowser.open(paths[0].resolve().as_uri())


class StoredResult(NamedTuple):
    """The report of a folder, and functions that write it in other forms."""

    document: Document
    formats: dict[str, Callable[[], str]]
    write: Callable[[], list[Path]]
    export: Callable[[str], str]
    """To an MLflow store, after `write`."""
    notes: tuple[str, ...] = ()


def _stored_comparison(directory: Path) -> StoredResult:
    from loadgen.report.contents import result_document
    from loadgen.report.files import formats, write_reports
    from loadgen.report.mlflow import export_result
    from loadgen.verdict.result import stored_result

    result = stored_result(directory)
    write, export = partial(write_reports, directory, result), partial(export_result, result=result, folder=directory)
    return StoredResult(result_document(result), formats(result), write, export)


def _stored_matrix(directory: Path) -> StoredResult:
    from loadgen.engine_matrix import files
    from loadgen.engine_matrix.sections import matrix_document
    from loadgen.engine_matrix.store import stored_matrix
    from loadgen.report.mlflow import export_matrix

    matrix = stored_matrix(directory)
    notes = () if files.has_parquet() else (files.NO_PARQUET,)
    write = partial(files.write_reports, directory, matrix)
    export = partial(export_matrix, matrix=matrix, folder=directory)
    return StoredResult(matrix_document(matrix), files.formats(matrix), write, export, notes)


def _stored_tuning(directory: Path) -> StoredResult:
    """MLflow gets its final comparison, which is the answer."""
    from loadgen.documents import FINAL
    from loadgen.report.mlflow import MlflowExportError, export_result
    from loadgen.tune.files import document_of, formats, read_tuning, stored_outcome, write_reports

    tuning = read_tuning(directory)
    outcome = stored_outcome(directory, tuning)
    document = document_of(directory, outcome)

    def export(uri: str) -> str:
        if outcome.final is None:
            raise MlflowExportError(f"{directory} has no final comparison to export")
        return export_result(uri, result=outcome.final, folder=directory / FINAL)

    return StoredResult(document, formats(tuning, document), partial(write_reports, directory, document), export)
