"""`abserve results-exporter`: the results of the runs in a folder as Prometheus metrics."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from loadgen.base.exposure import ANYONE, exposure


def results_exporter(
    folder: Annotated[Path, typer.Argument(help="Folder whose sub-folders are runs.")] = Path("results"),
    host: Annotated[
        str, typer.Option(envvar="ABSERVE_RESULTS_EXPORTER_HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    anyone: Annotated[bool, typer.Option("--anyone", envvar="ABSERVE_RESULTS_EXPORTER_ANYONE", help=ANYONE)] = False,
    port: Annotated[
        int, typer.Option(envvar="ABSERVE_RESULTS_EXPORTER_PORT", min=1, max=65535, help="Port to listen on.")
    ] = 9446,
) -> None:
    """Serve the verdicts and states of runs as Prometheus metrics until stopped."""
    from loadgen.report.prometheus import RunsCollector, start_exporter

    if reason := exposure("--host", host, anyone=anyone):
        typer.echo(reason, err=True)
        raise typer.Exit(2)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        stop = start_exporter(RunsCollector(folder), host, port)
    except OSError as exc:
        typer.echo(f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --port or --host", err=True)
        raise typer.Exit(1) from exc
    typer.echo(f"verdicts of the runs in {folder} at http://{host}:{port}/metrics")
    ended.wait()
    stop()
