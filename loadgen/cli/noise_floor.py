"""`abserve noise-floor`: one arm against itself, and what it shows is kept for later comparisons on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.assembly import default_out, plan_experiment
from loadgen.cli.compare import EXIT_INVALID, EXIT_USAGE, EXIT_VALID, run_and_report
from loadgen.experiment.file import effective_settings
from loadgen.experiment.options import given_options, takes_settings
from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import EMBEDDED

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.records.machine import NoiseFloor
    from loadgen.result.result_file import Result

RESTARTS, PAIRS, PAIRS_OF_ONE_START = 6, 24, 12
SCENARIOS = ("single", "batched", "concurrent")


@takes_settings
def noise_floor(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="EXPERIMENT.YAML",
            show_default=False,
            help="As for `abserve compare`; only its baseline runs.",
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Run nothing: take a finished comparison of an arm with itself."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default results/TIME-MODEL.")] = None,
    **options: object,
) -> None:
    """Compare arm A with itself and store how much it differs: no comparison on this machine will claim less.

    Takes the options of `abserve compare`, with other defaults: 24 pairs over 6 restarts, no cold starts. Kept in
    $XDG_CACHE_HOME/abserve for this machine, where `abserve compare` finds it. Exit status: 0 stored, 1 not, 2 what
    was asked for cannot be run, 130 interrupted.
    """
    from loadgen.machine.noise_floor import NoiseFloorError, make_floor, store_floor
    from loadgen.report.console import make_console

    errors = make_console(sys.stderr)
    try:
        result, status = (_stored(from_run), EXIT_VALID) if from_run else _measured(context, file, out, options)
        if result is None or status not in (EXIT_VALID, EXIT_INVALID):
            raise typer.Exit(status)
        floor = make_floor(result)
        path = store_floor(floor)
    except PlanError as exc:
        errors.print(f"error: {exc}", style="bold red", soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from exc
    except NoiseFloorError as exc:
        errors.print(f"error: {exc}", style="bold red", soft_wrap=True)
        raise typer.Exit(EXIT_INVALID) from exc
    _print(floor, make_console(sys.stdout))
    typer.echo(f"stored in {path}")


def self_comparison(settings: ExperimentSettings) -> ExperimentSettings:
    """The settings with the baseline as A and as B, without thresholds, which are about other arms; and this command's
    defaults where nothing was given."""
    given, arm = settings.model_fields_set, next(iter(settings.arms.values()))
    launched = arm.target in EMBEDDED
    defaults: dict[str, object] = {
        "scenarios": SCENARIOS,
        "restarts": RESTARTS if launched else 1,
        "rounds": PAIRS if launched else PAIRS_OF_ONE_START,
    }
    own = {name: value for name, value in defaults.items() if name not in given}
    return settings.model_copy(update={**own, "arms": {"a": arm, "b": arm}, "fail_if": ()})


def _measured(
    context: typer.Context, file: Path | None, out: Path | None, options: dict[str, object]
) -> tuple[Result | None, int]:
    given = given_options(context, options)
    if stray := [option.flag for option in given if option.path[0] == "arms" and option.path[1] != "a"]:
        raise PlanError(f"{stray[0]}: the noise floor compares --a with itself; leave the other arms out")
    settings = self_comparison(effective_settings(file, given))
    plan = plan_experiment(settings)
    if plan.is_matrix:
        raise PlanError("the noise floor is measured for one transport and one payload at a time; name one of each")
    status, result = run_and_report(plan.runs[0][1], out or default_out(settings.model))
    return result, status


def _stored(directory: Path) -> Result:
    from loadgen.result.analysis import analyse, readable
    from loadgen.storage.stored_run import StoredRunError

    try:
        with readable(directory):
            return analyse(directory)
    except StoredRunError as exc:
        raise PlanError(str(exc)) from exc


def _print(floor: NoiseFloor, console: Console) -> None:
    from rich.table import Table

    from loadgen.comparison.pairs import METRICS
    from loadgen.quantities import share

    table = Table(title=f"Noise floor of this machine: {floor.title}", title_justify="left", title_style="bold")
    for heading in ("scenario", "metric", "identical arms differ by up to", "pairs"):
        table.add_column(heading, justify="right" if heading in ("pairs",) else "left")
    for entry in floor.entries:
        table.add_row(entry.scenario, METRICS[entry.metric].title, share(entry.difference), str(entry.pairs))
    console.print(table)
