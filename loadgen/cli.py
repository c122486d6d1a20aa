"""Mounts the commands of the client side."""

from __future__ import annotations

import typer

from loadgen.calibrate_command import calibrate
from loadgen.compare_command import compare
from loadgen.conformance_command import conformance
from loadgen.diff_command import diff
from loadgen.exporters.command import results_exporter
from loadgen.noise_floor_command import noise_floor
from loadgen.report_command import report


def commands(app: typer.Typer) -> None:
    """Add `calibrate`, `compare`, `conformance`, `diff`, `noise-floor`, `report` and `results-exporter`."""
    app.command("calibrate")(calibrate)
    app.command("compare")(compare)
    app.command("conformance")(conformance)
    app.command("diff")(diff)
    app.command("noise-floor")(noise_floor)
    app.command("report")(report)
    app.command("results-exporter", hidden=True)(results_exporter)
