"""Mounts the commands of the client side."""

from __future__ import annotations

import typer

from loadgen.cli.calibrate import calibrate
from loadgen.cli.compare import compare
from loadgen.cli.conformance import conformance
from loadgen.cli.diff import diff
from loadgen.cli.noise_floor import noise_floor
from loadgen.cli.report import report
from loadgen.exporters.command import results_exporter


def commands(app: typer.Typer) -> None:
    """Add `calibrate`, `compare`, `conformance`, `diff`, `noise-floor`, `report` and `results-exporter`."""
    app.command("calibrate")(calibrate)
    app.command("compare")(compare)
    app.command("conformance")(conformance)
    app.command("diff")(diff)
    app.command("noise-floor")(noise_floor)
    app.command("report")(report)
    app.command("results-exporter", hidden=True)(results_exporter)
