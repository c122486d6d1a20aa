"""`abserve report DIR`: makes the result and its reports again from the stored records of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory that `abserve compare` wrote to.")],
    open_report: Annotated[bool, typer.Option("--open", help="Show report.html in the web browser.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--format", help="Print csv, csv-blocks, json, junit or markdown instead; then no file is written."
        ),
    ] = None,
) -> None:
    """Make result.json, report.html and summary.md again from the records in DIR, also of an interrupted run.

    Where the raw samples are not kept, as in a published folder, the reports are made from its result.json.

    Exit status 0 when they were made, whatever the verdict; 1 when they cannot be written, 2 when DIR holds no readable
    run, and for another format.
    """
    import webbrowser

    from loadgen.report import write_reports
    from loadgen.report.console import make_console
    from loadgen.report.contents import result_document
    from loadgen.report.files import formats
    from loadgen.report.renderers.terminal import print_document
    from loadgen.result.analysis import readable, stored_result
    from loadgen.result.result_file import ResultError
    from loadgen.storage.stored_run import StoredRunError

    console = make_console(sys.stdout)
    try:
        with readable(directory):
            result = stored_result(directory)
            if output is not None:
                known = formats(result)
                if output not in known:
                    typer.echo(f"abserve report: --format {output}: there are {', '.join(known)}", err=True)
                    raise typer.Exit(2)
                typer.echo(known[output](), nl=False)
                return
            paths = write_reports(directory, result)
            print_document(result_document(result), console)
    except (StoredRunError, ResultError) as exc:
        typer.echo(f"abserve report: {exc}", err=True)
        raise typer.Exit(2) from exc
    except OSError as exc:
        remedy = "make room or leave to write there, or print it with --format markdown"
        typer.echo(f"abserve report: cannot write to {directory}: {exc.strerror or exc}; {remedy}", err=True)
        raise typer.Exit(1) from exc
    for path in paths:
        console.print(f"{path}", highlight=False, soft_wrap=True)
    if open_report:
        webbrowser.open(paths[0].resolve().as_uri())
