"""`abserve report DIR`: makes the result and its reports again from the stored records of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli.json_output import fail


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `abserve compare` wrote to.")],
    open_report: Annotated[bool, typer.Option("--open", help="Open report.html in the web browser.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Print csv, csv-blocks, json, junit or markdown, and write no file.",
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Also export to MLflow: the address of a server, a folder or sqlite:///FILE."),
    ] = None,
) -> None:
    """Make result.json, report.html and summary.md again from the records in DIR, also after an interrupted run.

    A published folder without raw samples is reported from its result.json.

    Exit status: 0 the reports were made, whatever the verdict; 1 they cannot be written, or the export to MLflow
    failed; 2 DIR holds no readable run, the format is unknown, or MLflow is not installed.
    """
    import webbrowser

    from loadgen.experiment.plan import unknown
    from loadgen.exporters.mlflow import ExportError, check_mlflow, export_result
    from loadgen.report import write_reports
    from loadgen.report.console import make_console
    from loadgen.report.contents import result_document
    from loadgen.report.files import formats
    from loadgen.report.renderers.terminal import print_document
    from loadgen.result.analysis import readable, stored_result
    from loadgen.result.result_file import ResultError
    from loadgen.storage.stored_run import StoredRunError

    if mlflow is not None and output is not None:
        fail("give --mlflow or --format, not both")
    console = make_console(sys.stdout)
    try:
        check_mlflow(mlflow)
        with readable(directory):
            result = stored_result(directory)
            if output is not None:
                known = formats(result)
                if output not in known:
                    fail(unknown("--format", output, list(known)))
                typer.echo(known[output](), nl=False)
                return
            paths = write_reports(directory, result)
            print_document(result_document(result), console)
    except (StoredRunError, ResultError, ExportError) as exc:
        fail(str(exc))
    except OSError as exc:
        fail(
            f"cannot write to {directory}: {exc.strerror or exc}; make it writable, or add --format markdown to print "
            "the report",
            1,
        )
    for path in paths:
        console.print(f"{path}", soft_wrap=True)
    try:
        if mlflow is not None:
            export_result(mlflow, result, directory)
    except ExportError as exc:
        fail(str(exc), 1)
    if open_report:
        webbrowser.open(paths[0].resolve().as_uri())
