"""`abserve compare`: settings in, experiment out, run, verdict and report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli.after import analysis_of, check_export, hand_over
from loadgen.cli.assembly import ExperimentPlan, check_out, check_servers, default_out, plan_experiment
from loadgen.cli.json_output import check_files, complain, fail
from loadgen.documents import one_line
from loadgen.experiment.options import effective_settings, given_options, takes_settings, write_settings
from loadgen.experiment.plan import Combination, PlanError
from loadgen.experiment.settings import MAIN, OUTPUT
from loadgen.records.run import Experiment

if TYPE_CHECKING:
    from loadgen.verdict.result_file import Result

EXIT_VALID, EXIT_INVALID, EXIT_USAGE, EXIT_THRESHOLD, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
_OUTPUT = partial(typer.Option, rich_help_panel=OUTPUT)
OUT: dict[str, Any] = {"metavar": "DIR", "help": "Folder for the results (default: results/TIME-MODEL)."}
_SEVERITY = (EXIT_VALID, EXIT_THRESHOLD, EXIT_INVALID, EXIT_USAGE, EXIT_INTERRUPTED)


@takes_settings()
def compare(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="EXPERIMENT.YAML",
            show_default=False,
            help="Read the options from this file; its keys are their names. An option, or a variable "
            "ABSERVE_COMPARE_OPTION, overrides the file.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(envvar="ABSERVE_COMPARE_OUT", show_envvar=False, rich_help_panel=MAIN, **OUT)
    ] = None,
    junit: Annotated[Path | None, _OUTPUT(metavar="FILE", help="Also write JUnit XML for CI.")] = None,
    csv: Annotated[
        Path | None,
        _OUTPUT(metavar="FILE", help="Also write the comparisons as CSV, and the blocks to FILE-blocks.csv."),
    ] = None,
    mlflow: Annotated[
        str | None,
        _OUTPUT(metavar="URI", help="Also export to MLflow: the address of a server, a folder or sqlite:///FILE."),
    ] = None,
    print_experiment: Annotated[
        bool,
        _OUTPUT("--print-experiment", help="Print all settings in effect as an experiment file, and run nothing."),
    ] = False,
    **options: object,
) -> None:
    """Start the servers, send them the same requests, and report which is faster, by how much, and whether that holds.

    Exit status: 0 the comparison is valid, 1 it is not, 2 an option or a file is wrong, 3 it is valid but a --fail-if
    condition holds or could not be measured, 130 interrupted (finished blocks are kept). An export to MLflow that fails
    is a warning.
    """
    try:
        settings = effective_settings(file, given_options(context, options))
        plan = plan_experiment(settings)
        for note in plan.notes:
            complain(note, kind="note", style="yellow")
        if not print_experiment:
            plan = check_run(plan, out, {"--junit": junit, "--csv": csv})
            check_export(mlflow)
    except PlanError as exc:
        fail(str(exc))
    if print_experiment:
        typer.echo(write_settings(settings), nl=False)
        return
    folder = out or default_out(settings.model)
    if plan.is_matrix:
        status, results = _run_matrix(plan.runs, folder, mlflow)
    else:
        status, result = run_and_report(plan.runs[0][1], folder, mlflow)
        results = {"": result}
    raise typer.Exit(_write_formats(results, junit, csv, status))


def check_run(plan: ExperimentPlan, out: Path | None, files: Mapping[str, Path | None]) -> ExperimentPlan:
    """Check the places to write to (`files` by their options) and the servers. Returns the plan with what the servers
    decide. Raises `PlanError`; a file that cannot be written ends the command."""
    check_out(out)
    check_files(files)
    experiments = check_servers([experiment for _, experiment in plan.runs])
    combinations = [combination for combination, _ in plan.runs]
    return replace(plan, runs=tuple(zip(combinations, experiments, strict=True)))


def _run_matrix(
    runs: Sequence[tuple[Combination, Experiment]], out: Path, mlflow: str | None = None
) -> tuple[int, dict[str, Result | None]]:
    """Each combination in its own folder, then the index; the worst exit status. Ctrl-C ends the whole matrix."""
    from loadgen.report.console import make_console
    from loadgen.report.matrix import MatrixEntry, write_index

    console = make_console(sys.stdout)
    entries: list[MatrixEntry] = []
    worst = EXIT_VALID
    for number, (combination, experiment) in enumerate(runs, start=1):
        console.rule(f"{number} of {len(runs)}: {combination.title}")
        status, result = run_and_report(experiment, out / combination.folder, mlflow)
        entries.append(MatrixEntry(combination, result))
        worst = max(worst, status, key=_SEVERITY.index)
        try:
            write_index(out, entries)
        except Exception as exc:  # noqa: BLE001 (a full disk or a fault of the report: the runs go on)
            complain(f"no index: {_reason(exc)}")
            worst = max(worst, EXIT_INVALID, key=_SEVERITY.index)
        if status == EXIT_INTERRUPTED:
            break
    if (out / "index.html").exists():
        console.print(f"index: {out / 'index.html'}", soft_wrap=True)
    return worst, {entry.combination.folder: entry.result for entry in entries}


def _write_formats(results: Mapping[str, Result | None], junit: Path | None, csv: Path | None, status: int) -> int:
    """Write the files asked for, also after a failed run. The exit status is worse if one cannot be written."""
    from loadgen.report.files import write_csv, write_junit

    for path, write in ((junit, write_junit), (csv, write_csv)):
        try:
            if path is not None:
                write(path, results)
        except Exception as exc:  # noqa: BLE001 (no fault of a format may cost the others)
            complain(f"cannot write {path}: {_reason(exc)}")
            status = max(status, EXIT_INVALID, key=_SEVERITY.index)
    return status


def _reason(error: Exception) -> str:
    """Why something could not be written, for people."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {one_line(str(error))}; the records are kept, so report this as a bug"


def run_and_report(experiment: Experiment, out: Path, mlflow: str | None = None) -> tuple[int, Result | None]:
    """One comparison with its reports, the summary of a CI step, and the export to MLflow if `mlflow` says where: its
    exit status, and its result unless nothing could be stored."""
    from loadgen.bench.live_ratios import LiveRatios
    from loadgen.report import write_reports
    from loadgen.report.console import make_console
    from loadgen.report.contents import result_document
    from loadgen.report.progress import RichProgress
    from loadgen.report.renderers.terminal import print_document
    from loadgen.run.runner import run_experiment
    from loadgen.storage.store import StorageError
    from loadgen.verdict.analysis import analyse

    console = make_console(sys.stdout)
    try:
        with RichProgress(console, LiveRatios(experiment)) as progress:
            state = run_experiment(experiment, out, progress)
    except StorageError as exc:
        complain(str(exc))
        return EXIT_INVALID, None
    if state.error is not None:
        complain(state.error)
    result = report = None
    with analysis_of(out, "abserve report") as analysis:
        result = analyse(out)
        try:
            report, *_ = write_reports(out, result)
        except OSError as exc:  # a full disk: show what was measured all the same
            complain(f"no reports: {exc.strerror or exc}; free some space, then: abserve report {out}")
        document = result_document(result)
        print_document(document, console)
        hand_over(document, mlflow, result, out)
    if result is None or report is None or analysis.failed:
        return EXIT_INTERRUPTED if state.state == "interrupted" else EXIT_INVALID, result
    console.print(f"report: {report}", soft_wrap=True)
    if state.state == "interrupted":
        complain(f"interrupted; finished blocks are in {out}", style="bold yellow")
        return EXIT_INTERRUPTED, result
    return exit_status(result), result


def exit_status(result: Result) -> int:
    """The status of a run that was not interrupted."""
    if not result.valid or result.state is None or result.state.state != "finished":
        return EXIT_INVALID
    return EXIT_VALID if all(one.state == "kept" for one in result.thresholds) else EXIT_THRESHOLD
