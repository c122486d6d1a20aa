"""`abserve compare`: settings in, experiment out, run, verdict and report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.assembly import default_out, plan_experiment
from loadgen.experiment.combinations import Combination
from loadgen.experiment.file import effective_settings, write_settings
from loadgen.experiment.options import given_options, takes_settings
from loadgen.experiment.plan import PlanError
from loadgen.records.run import Experiment

if TYPE_CHECKING:
    from loadgen.result.result_file import Result

EXIT_VALID, EXIT_INVALID, EXIT_USAGE, EXIT_THRESHOLD, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
_SEVERITY = (EXIT_VALID, EXIT_THRESHOLD, EXIT_INVALID, EXIT_USAGE, EXIT_INTERRUPTED)


@takes_settings
def compare(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="EXPERIMENT.YAML",
            show_default=False,
            help="An experiment file: its keys are the options' names. An option overrides it, and so does a "
            "variable ABSERVE_COMPARE_OPTION.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            envvar="ABSERVE_COMPARE_OUT", show_envvar=False, help="Folder for the results; default results/TIME-MODEL."
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="PATH", help="Write JUnit XML for CI there, too.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="PATH", help="Write the comparisons as CSV there; blocks go to PATH-blocks.csv."),
    ] = None,
    print_experiment: Annotated[
        bool, typer.Option("--print-experiment", help="Write the experiment file that is in effect, and run nothing.")
    ] = False,
    **options: object,
) -> None:
    """Start the servers, measure them with the same requests, say which is faster, by how much, and whether it holds.

    Exit status: 0 the comparison is valid, 1 it is not, 2 what was asked for cannot be run, 3 it is valid and a
    --fail-if condition holds or could not be measured, 130 interrupted (finished blocks are kept).
    """
    from loadgen.report.console import make_console

    try:
        settings = effective_settings(file, given_options(context, options))
        plan = plan_experiment(settings)
        _check_places({"--junit": junit, "--csv": csv})
    except PlanError as exc:
        make_console(sys.stderr).print(f"error: {exc}", style="bold red", soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from exc
    if print_experiment:
        typer.echo(write_settings(settings), nl=False)
        return
    folder = out or default_out(settings.model)
    if plan.is_matrix:
        status, results = _run_matrix(plan.runs, folder)
    else:
        status, result = run_and_report(plan.runs[0][1], folder)
        results = {"": result}
    raise typer.Exit(_write_formats(results, junit, csv, status))


def _run_matrix(runs: Sequence[tuple[Combination, Experiment]], out: Path) -> tuple[int, dict[str, Result | None]]:
    """Each combination in a folder of its own, then the index. The worst exit status; Ctrl-C ends it all."""
    from loadgen.report.console import make_console
    from loadgen.report.matrix import MatrixEntry, write_index

    console = make_console(sys.stdout)
    entries: list[MatrixEntry] = []
    worst = EXIT_VALID
    for number, (combination, experiment) in enumerate(runs, start=1):
        console.rule(f"{number} of {len(runs)}: {combination.title}")
        status, result = run_and_report(experiment, out / combination.folder)
        entries.append(MatrixEntry(combination, result))
        worst = max(worst, status, key=_SEVERITY.index)
        write_index(out, entries)
        if status == EXIT_INTERRUPTED:
            break
    console.print(f"index: {out / 'index.html'}", soft_wrap=True)
    return worst, {entry.combination.folder: entry.result for entry in entries}


def _check_places(paths: Mapping[str, Path | None]) -> None:
    """Said before the run and not after it. Raises `PlanError`."""
    for option, path in paths.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise PlanError(f"{option} {path}: give the path of a file in a folder that exists")


def _write_formats(results: Mapping[str, Result | None], junit: Path | None, csv: Path | None, status: int) -> int:
    """The files asked for, also of a run that failed; what cannot be written spoils the exit status."""
    from loadgen.report.console import make_console
    from loadgen.report.files import write_csv, write_junit

    try:
        if junit is not None:
            write_junit(junit, results)
        if csv is not None:
            write_csv(csv, results)
    except OSError as exc:
        make_console(sys.stderr).print(f"error: cannot write {exc.filename}: {exc.strerror or exc}", soft_wrap=True)
        return max(status, EXIT_INVALID, key=_SEVERITY.index)
    return status


def run_and_report(experiment: Experiment, out: Path) -> tuple[int, Result | None]:
    """One comparison with its reports; its exit status, and its result where there is one."""
    from loadgen.bench.live_ratios import LiveRatios
    from loadgen.report import write_reports
    from loadgen.report.console import make_console
    from loadgen.report.contents import result_document
    from loadgen.report.progress import RichProgress
    from loadgen.report.renderers.terminal import print_document
    from loadgen.result.analysis import analyse
    from loadgen.run.runner import run_experiment
    from loadgen.storage.store import StorageError

    console, errors = make_console(sys.stdout), make_console(sys.stderr)
    try:
        with RichProgress(console, LiveRatios(experiment)) as progress:
            state = run_experiment(experiment, out, progress)
    except StorageError as exc:
        errors.print(f"error: {exc}", style="bold red", soft_wrap=True)
        return EXIT_INVALID, None
    if state.error is not None:
        errors.print(f"error: {state.error}", style="bold red", soft_wrap=True)
    result = analyse(out)
    try:
        report, *_ = write_reports(out, result)
    except OSError as exc:  # a full disk: what was measured is still shown
        remedy = f"free some space, then: abserve report {out}"
        errors.print(f"error: no reports: {exc.strerror or exc}; {remedy}", style="bold red", soft_wrap=True)
        print_document(result_document(result), console)
        return EXIT_INVALID, result
    print_document(result_document(result), console)
    console.print(f"report: {report}", soft_wrap=True)
    if state.state == "interrupted":
        errors.print(f"interrupted; finished blocks are in {out}", style="bold yellow", soft_wrap=True)
        return EXIT_INTERRUPTED, result
    return exit_status(result), result


def exit_status(result: Result) -> int:
    """Of a run that ended by itself."""
    if not result.valid or result.state is None or result.state.state != "finished":
        return EXIT_INVALID
    return EXIT_VALID if all(one.state == "kept" for one in result.thresholds) else EXIT_THRESHOLD
