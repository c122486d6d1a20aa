"""`abserve compare`: settings in, one experiment per combination of transport and payload, runs, verdict and report.

Whatever cannot run is refused before anything is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.base.documents import one_line
from loadgen.base.quantities import counted
from loadgen.cli.output import (
    CHECKING,
    MLFLOW,
    OUT,
    announce,
    check_export,
    check_files,
    check_out,
    complain,
    console_for,
    default_out,
    fail,
    print_report,
    publish,
    resumed,
    settings_file,
)
from loadgen.cli.quiet import Anyway, await_quiet
from loadgen.experiment.options import effective_settings, given_options, takes_settings, write_settings
from loadgen.experiment.plan import (
    Combination,
    PlanError,
    expects_gpu,
)
from loadgen.experiment.settings import MAIN, OUTPUT, ExperimentSettings
from loadgen.records.run import Experiment, RunState, shown

if TYPE_CHECKING:
    from loadgen.measure.planning import ExperimentPlan
    from loadgen.verdict.result import Result

HELP_GROUP = "Compare"

EXIT_VALID, EXIT_INVALID, EXIT_USAGE, EXIT_THRESHOLD, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
_OUTPUT = partial(typer.Option, rich_help_panel=OUTPUT)
GENERATED = (
    "the inputs are random values made from the first server's metadata, where variable sizes are 16 and integers are "
    "0 or 1; send your own with --inputs FILE"
)
_SEVERITY = (EXIT_VALID, EXIT_THRESHOLD, EXIT_INVALID, EXIT_USAGE, EXIT_INTERRUPTED)


@takes_settings()
def compare(
    context: typer.Context,
    file: Annotated[Path | None, settings_file("EXPERIMENT.YAML", "ABSERVE_COMPARE")] = None,
    out: Annotated[
        Path | None, typer.Option(envvar="ABSERVE_COMPARE_OUT", show_envvar=False, rich_help_panel=MAIN, **OUT)
    ] = None,
    junit: Annotated[Path | None, _OUTPUT(metavar="FILE", help="Also write JUnit XML for CI.")] = None,
    csv: Annotated[
        Path | None,
        _OUTPUT(metavar="FILE", help="Also write the comparisons as CSV, and the blocks to FILE-blocks.csv."),
    ] = None,
    mlflow: Annotated[str | None, _OUTPUT(**MLFLOW)] = None,
    print_experiment: Annotated[
        bool, _OUTPUT("--print-experiment", help="Print all settings in effect as an experiment file, and run nothing.")
    ] = False,
    dry_run: Annotated[
        bool, _OUTPUT("--dry-run", help="With --best: print what would be tried, and measure nothing.")
    ] = False,
    resume: Annotated[
        Path | None,
        _OUTPUT(
            metavar="DIR",
            show_default=False,
            help="Go on with an interrupted comparison with --best: what is chosen stays, the rest is measured.",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        _OUTPUT(
            "--verbose/--no-verbose", help="Show what each server at a URL answered when its model was looked for."
        ),
    ] = False,
    anyway: Anyway = False,
    **options: object,
) -> None:
    """Start the servers, send them the same requests, and report which is faster, by how much, and whether that holds.

    Exit status: 0 the comparison is valid, or rough because others used the machine, 1 it is invalid (with --strict
    also a rough one), 2 an option or a file is wrong, 3 a --fail-if condition holds or could not be measured, 130
    interrupted (finished blocks are kept). An export to MLflow that fails is a warning.
    """
    from loadgen.measure.planning import name_models, plan_experiment

    try:
        given = given_options(context, options)
        settings = effective_settings(file, given) if resume is None else _resumed(resume, file or out or given)
        notes: tuple[str, ...] = ()
        if not print_experiment:
            announce(CHECKING)
            settings, notes = name_models(settings, partial(typer.echo, err=True) if verbose else None)
        plan = plan_experiment(settings)
        for note in (*plan.notes, *notes):
            complain(note, kind="note", style="yellow")
        if not print_experiment:
            plan = check_run(plan, out, {"--junit": junit, "--csv": csv})
            check_export(mlflow)
    except PlanError as exc:
        fail(str(exc))
    if dry_run and not settings.best:
        fail("--dry-run is for comparisons with --best; leave it out, or add --best")
    if print_experiment:
        typer.echo(write_settings(settings), nl=False)
        return
    if dry_run:
        _print_choices(plan.runs[0][1])
        return
    await_quiet(settings.strict and not anyway, plan.runs[0][1].arms)
    folder = resume or out or default_out(settings.model)
    if settings.best:
        status, result = _run_best(settings, plan.runs[0][1], folder, mlflow)
        results = {"": result}
    elif plan.is_matrix:
        status, results = _run_matrix(plan.runs, folder, mlflow)
    else:
        status, result = run_and_report(plan.runs[0][1], folder, mlflow)
        results = {"": result}
    raise typer.Exit(_write_formats(results, junit, csv, status))


def _resumed(folder: Path, more: object) -> ExperimentSettings:
    """The settings of an interrupted comparison with --best. Raises `PlanError`."""
    from loadgen.experiment.options import checked_settings
    from loadgen.findings.best import BestRecord
    from loadgen.records.run import Environment
    from loadgen.records.store import StoredRunError, read_one
    from loadgen.tune.best import FOLDER

    if more:
        raise PlanError(f"--resume {folder}: its settings are stored; leave everything else out but --anyway")

    def read(folder: Path) -> tuple[BestRecord, str | None, list[Environment | None]]:
        record, state = read_one(folder, BestRecord), read_one(folder, RunState)
        if record is None:
            raise StoredRunError(f"it holds no comparison with --best; {BestRecord.FILE} is missing")
        runs = sorted(path.parent for path in folder.glob(f"{FOLDER}/*/{Environment.FILE}"))
        return record, None if state is None else state.state, [read_one(run, Environment) for run in runs]

    record = resumed(folder, read)
    return checked_settings(ExperimentSettings, dict(record.settings), folder / BestRecord.FILE, {})


def _print_choices(planned: Experiment) -> None:
    """What --best would try, in how many runs, and how the minutes are shared. A server that refuses its options ends
    the command."""
    import loadgen.report.document as doc
    from loadgen.tune.best import CHOOSING_SHARE, most_at_once, read_servers, stages

    try:
        servers = read_servers(planned)
    except PlanError as exc:
        fail(str(exc))
    rows = [
        (shown(server.server), server.target, server.settings_in_words(entry))
        for server in servers
        for entry in server.configurations
    ]
    loads = ", ".join(load.name for load in planned.workloads if load.has_blocks)
    table = doc.Table(doc.names("arm", "server", "settings"), rows, grouped=True)
    print_report(doc.Document("Tried for each load", {"": [doc.Section(loads, (table,))]}))
    runs = len(stages(servers, most_at_once(planned, gpu=expects_gpu(*planned.arms))))
    time = ""
    if planned.minutes is not None:
        share = CHOOSING_SHARE if runs else 0.0
        time = f", about {share * planned.minutes:.0f} of {planned.minutes:g} minutes"
    typer.echo(f"{counted(runs, 'run')} that choose{'s' if runs == 1 else ''}{time}; then the comparison")


def _run_best(
    settings: ExperimentSettings, planned: Experiment, folder: Path, mlflow: str | None
) -> tuple[int, Result | None]:
    """Choose every server's settings for each load, then compare them; the exit status and the result."""
    from loadgen.findings.best import BestRecord
    from loadgen.measure.preparation import Prepared
    from loadgen.measure.progress import LiveRatios
    from loadgen.measure.runner import run_experiment
    from loadgen.records.store import StorageError, StoredRunError, read_one
    from loadgen.report.progress import RichProgress
    from loadgen.tune.best import choose, final_experiment, read_servers, renewed

    console = console_for()

    def run_stage(experiment: Experiment, out: Path, prepared: Prepared) -> RunState:
        names = ", ".join(arm.label for arm in experiment.arms)
        console.rule(f"choosing, {out.name}: {names}")
        with RichProgress(console, LiveRatios(experiment)) as progress:
            return run_experiment(experiment, out, progress, prepared=prepared)

    again = f"abserve compare --resume {shlex.quote(str(folder))}"
    try:
        record = read_one(folder, BestRecord) if folder.exists() else None
        if record is None:
            record = BestRecord(servers=read_servers(planned), settings=settings.content())
        renewed(folder)
        if not record.done:
            record = choose(settings, planned, record, folder, run_stage, gpu=expects_gpu(*planned.arms))
    except KeyboardInterrupt:
        more = f" while choosing; go on with: {again}" if (folder / BestRecord.FILE).exists() else " before any load"
        complain(f"interrupted{more}", style="bold yellow")
        return EXIT_INTERRUPTED, None
    except (PlanError, StorageError, StoredRunError) as exc:
        complain(str(exc))
        return EXIT_INVALID, None
    for problem in record.problems:
        complain(problem, style="yellow", kind="note")
    console.rule("comparing what was chosen")
    status, result = run_and_report(final_experiment(planned, record), folder, mlflow)
    if status == EXIT_INTERRUPTED:
        complain(f"what was chosen stays; compare it again with: {again}", style="bold yellow", kind="note")
    return status, result


def check_run(plan: ExperimentPlan, out: Path | None, files: Mapping[str, Path | None]) -> ExperimentPlan:
    """Check the places to write to (`files` by their options) and the servers. Returns the plan with what the servers
    decide. Raises `PlanError`; a file that cannot be written ends the command."""
    from loadgen.measure.planning import check_servers

    check_out(out)
    check_files(files)
    asked = [experiment for _, experiment in plan.runs]
    experiments = check_servers(asked, announce)
    if any(before.inputs != after.inputs for before, after in zip(asked, experiments, strict=True)):
        complain(GENERATED, kind="note", style="yellow")
    combinations = [combination for combination, _ in plan.runs]
    return replace(plan, runs=tuple(zip(combinations, experiments, strict=True)))


def _run_matrix(
    runs: Sequence[tuple[Combination, Experiment]], out: Path, mlflow: str | None = None
) -> tuple[int, dict[str, Result | None]]:
    """Each combination in its own folder, then the index; the worst exit status. Ctrl-C ends the whole matrix."""
    from loadgen.report.files import write_index

    console = console_for()
    results: dict[Combination, Result | None] = {}
    worst = EXIT_VALID
    for number, (combination, experiment) in enumerate(runs, start=1):
        console.rule(f"{number} of {len(runs)}: {combination.title}")
        status, result = run_and_report(experiment, out / combination.folder, mlflow)
        results[combination] = result
        worst = max(worst, status, key=_SEVERITY.index)
        try:
            write_index(out, results)
        except Exception as exc:  # noqa: BLE001 (a full disk or a fault of the report: the runs go on)
            complain(f"no index: {_reason(exc)}")
            worst = max(worst, EXIT_INVALID, key=_SEVERITY.index)
        if status == EXIT_INTERRUPTED:
            break
    if (out / "index.html").exists():
        console.print(f"index: {out / 'index.html'}", soft_wrap=True)
    return worst, {combination.folder: result for combination, result in results.items()}


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
    from loadgen.checks.registry import validity
    from loadgen.measure.progress import LiveRatios
    from loadgen.measure.runner import run_experiment
    from loadgen.records.store import StorageError
    from loadgen.report.files import published
    from loadgen.report.progress import RichProgress
    from loadgen.verdict.result import analyse

    console = console_for()
    try:
        with RichProgress(console, LiveRatios(experiment)) as progress:
            state = run_experiment(experiment, out, progress)
    except StorageError as exc:
        complain(str(exc))
        return EXIT_INVALID, None
    if state.error is not None:
        complain(state.error)
    result, is_written = publish(out, lambda: analyse(out), published, mlflow)
    if not is_written or result is None:
        return EXIT_INTERRUPTED if state.state == "interrupted" else EXIT_INVALID, result
    if state.state == "interrupted":
        complain(f"interrupted; finished blocks are in {out}", style="bold yellow")
        return EXIT_INTERRUPTED, result
    status = exit_status(result)
    if status == EXIT_INVALID:
        complain(last_words(result), kind=validity(result.checks))
    else:
        console.print(f"{validity(result.checks)}: {last_words(result)}", soft_wrap=True)
    return status, result


def last_words(result: Result) -> str:
    """The headline, and what is wrong and what to do where the run is not valid, as the last line of the command."""
    from loadgen.checks.registry import gravest

    blamed = gravest(result.checks)
    why = result.verdict.caveats if result.rough else result.verdict.untold
    return " ".join([result.headline, *why[:1], *([blamed.remedy] if blamed else [])])


def exit_status(result: Result) -> int:
    """The status of a run that was not interrupted."""
    if not (result.valid or result.rough) or result.state is None or result.state.state != "finished":
        return EXIT_INVALID
    return EXIT_VALID if all(threshold.state == "kept" for threshold in result.thresholds) else EXIT_THRESHOLD
