"""Mounts the commands of the client side."""

from __future__ import annotations

import typer

from loadgen.compare_command import compare
from loadgen.conformance_command import conformance
from loadgen.report_command import report


def commands(app: typer.Typer) -> None:
    """Add `compare`, `conformance` and `report` to the command line."""
    app.command("compare")(compare)
    app.command("conformance")(conformance)
    app.command("report")(report)
