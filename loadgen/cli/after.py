"""What a command does with a stored result besides its reports: the summary of a CI step, and an export to MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.cli.json_output import complain, fail

if TYPE_CHECKING:
    from loadgen.report.document import Document
    from loadgen.result.result_file import Result
    from loadgen.studies.engines.records import Matrix


def check_export(mlflow: str | None) -> None:
    """End the command before it measures if it could not export to MLflow."""
    if mlflow is None:
        return
    from loadgen.exporters.mlflow import ExportError, check_mlflow

    try:
        check_mlflow(mlflow)
    except ExportError as exc:
        fail(str(exc))


def hand_over(document: Document, mlflow: str | None, result: Result | Matrix, folder: Path) -> None:
    """Append to the summary of a CI step if there is one, and export if `mlflow` says where. A failure is a warning,
    because the result is already stored in `folder`."""
    from loadgen.report.job_summary import append_job_summary
    from loadgen.report.renderers.markdown import render_markdown
    from loadgen.result.result_file import Result

    if (warning := append_job_summary(render_markdown(document))) is not None:
        complain(warning, style="bold yellow")
    if mlflow is None:
        return
    from loadgen.exporters.mlflow import ExportError, export_matrix, export_result

    try:
        if isinstance(result, Result):
            export_result(mlflow, result, folder)
        else:
            export_matrix(mlflow, result, folder)
    except ExportError as exc:
        complain(str(exc), style="bold yellow")
