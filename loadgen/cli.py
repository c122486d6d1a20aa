"""Mounts the commands of the client side."""

from __future__ import annotations

import typer

from loadgen.compare_command import compare
from loadgen.doctor import doctor
from loadgen.report_command import report


def commands(app: typer.Typer) -> None:
    """Add `compare`, `report` and `doctor` to the command line."""
    app.command("compare")(compare)
    app.command("report")(report)
    app.command("doctor")(doctor)
