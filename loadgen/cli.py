"""Mounts the commands of the client side."""

from __future__ import annotations

import typer

from loadgen.compare_command import compare
from loadgen.report_command import report


def commands(app: typer.Typer) -> None:
    """Add `compare` and `report` to the command line."""
    app.command("compare")(compare)
    app.command("report")(report)
