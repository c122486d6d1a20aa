"""What a command does with a stored result besides its reports: the summary of a CI step, and an export to MLflow."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import typer

from loadgen.cli.json_output import complain, fail
from loadgen.documents import one_line

if TYPE_CHECKING:
    from loadgen.engine_matrix.records import Matrix
    from loadgen.report.document import Document
    from loadgen.verdict.result import Result


@dataclass
class Analysis:
    """Whether the analysis of a measurement failed; the user was told."""

    failed: bool = False


@contextmanager
def analysis_of(folder: Path, again: str) -> Iterator[Analysis]:
    """Whatever fails in the analysis of a measurement becomes one sentence with the command that repeats it, because
    the samples and the records in `folder` are whole."""
    analysis = Analysis()
    try:
        yield analysis
    except (typer.Exit, click.ClickException):
        raise
    except Exception as exc:  # noqa: BLE001 (no fault of the analysis may cost a measurement)
        analysis.failed = True
        complain(
            f"the analysis failed ({type(exc).__name__}: {one_line(str(exc))}); everything that was measured is in "
            f"{folder}; analyse it again with: {again} {shlex.quote(str(folder))}; please report this as a bug"
        )


def check_export(mlflow: str | None) -> None:
    """End the command before it measures if it could not export to MLflow."""
    if mlflow is None:
        return
    from loadgen.report.mlflow import MlflowExportError, check_mlflow

    try:
        check_mlflow(mlflow)
    except MlflowExportError as exc:
        fail(str(exc))


def hand_over(document: Document, mlflow: str | None, result: Result | Matrix, folder: Path) -> None:
    """Append to the summary of a CI step if there is one, and export if `mlflow` says where. A failure is a warning,
    because the result is already stored in `folder`."""
    from loadgen.report.files import append_job_summary
    from loadgen.report.renderers.markdown import render_markdown
    from loadgen.verdict.result import Result

    if (warning := append_job_summary(render_markdown(document))) is not None:
        complain(warning, style="bold yellow")
    if mlflow is None:
        return
    from loadgen.report.mlflow import MlflowExportError, export_matrix, export_result

    try:
        if isinstance(result, Result):
            export_result(mlflow, result, folder)
        else:
            export_matrix(mlflow, result, folder)
    except MlflowExportError as exc:
        complain(str(exc), style="bold yellow")
