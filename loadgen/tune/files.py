"""The files of a tuning: tuning.json, report.html, summary.md and the deployment, each whole or not at all."""

from __future__ import annotations

from pathlib import Path

from loadgen.base.documents import FINAL, indented
from loadgen.records.store import StoredRunError, read_one
from loadgen.records.tuning import Tuning
from loadgen.report.mlflow import MlflowExportError, export_result
from loadgen.report.published import Published
from loadgen.tune.deploy import best_commands, deployed_files
from loadgen.tune.outcome import TuningOutcome, outcome_of
from loadgen.tune.sections import tuning_document
from loadgen.verdict.result import Result, stored_result


def read_tuning(directory: Path) -> Tuning:
    """The tuning in a folder, as far as it got. Raises `StoredRunError`."""
    tuning = read_one(directory, Tuning)
    if tuning is None:
        raise StoredRunError(
            f"{directory} holds no tuning: {Tuning.FILE} is missing; give the folder of `abserve tune`"
        )
    return tuning


def stored_outcome(directory: Path, tuning: Tuning) -> TuningOutcome:
    """What a tuning tells, with the result of its final if that has run. Raises `StoredRunError`."""
    has_final = any(run.stage == "final" and run.problem is None for run in tuning.runs)
    final: Result | None = stored_result(directory / FINAL) if has_final else None
    return outcome_of(tuning, final)


def stored(folder: Path) -> Published:
    """The tuning in a folder. Raises `StoredRunError`."""
    return published(folder, stored_outcome(folder, read_tuning(folder)))


def published(folder: Path, outcome: TuningOutcome) -> Published:
    """With the files that deploy the best as far as they are written. MLflow gets the final comparison, which is the
    answer."""

    def export(uri: str, folder: Path) -> str:
        if outcome.final is None:
            raise MlflowExportError(f"{folder} has no final comparison to export")
        return export_result(outcome.final, uri, folder / FINAL)

    document = tuning_document(outcome, best_commands(outcome), deployed_files(folder))
    return Published(document, {}, {"json": lambda: indented(outcome.tuning).decode()}, export)
