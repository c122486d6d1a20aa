"""Mounts the commands of the client side."""

from __future__ import annotations

import typer

from loadgen.compare_command import compare
from loadgen.conformance_command import conformance
from loadgen.exporters.command import results_exporter
from loadgen.report_command import report


def commands(app: typer.Typer) -> None:
    """Add `compare`, `conformance`, `report` and `results-exporter` to the command line."""
    app.command("compare")(compare)
    app.command("conformance")(conformance)
    app.command("report")(report)
    app.command("results-exporter", hidden=True)(results_exporter)
