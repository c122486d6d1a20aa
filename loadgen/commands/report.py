"""`abserve report DIR`: makes the result and its reports again from the stored records of a run."""

from __future__ import annotations

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

    Exit status 0 when they were made, whatever the verdict; 1 when DIR holds no readable run, 2 for another format.
    """
    import webbrowser

    from rich.console import Console

    from loadgen.analysis.result import ResultError
    from loadgen.analysis.stored_result import stored_result
    from loadgen.report import write_reports
    from loadgen.report.files import FORMATS
    from loadgen.report.terminal import print_result
    from loadgen.storage.stored_run import StoredRunError

    if output is not None and output not in FORMATS:
        typer.echo(f"abserve report: --format {output}: there are {', '.join(FORMATS)}", err=True)
        raise typer.Exit(2)
    try:
        result = stored_result(directory)
        if output is not None:
            typer.echo(FORMATS[output](result), nl=False)
            return
        paths = write_reports(directory, result)
    except (StoredRunError, ResultError) as exc:
        typer.echo(f"abserve report: {exc}", err=True)
        raise typer.Exit(1) from exc
    except OSError as exc:
        remedy = "make room or leave to write there, or print it with --format markdown"
        typer.echo(f"abserve report: cannot write to {directory}: {exc.strerror or exc}; {remedy}", err=True)
        raise typer.Exit(1) from exc
    console = Console()
    print_result(result, console)
    for path in paths:
        console.print(f"{path}", highlight=False, soft_wrap=True)
    if open_report:
        webbrowser.open(paths[0].resolve().as_uri())
