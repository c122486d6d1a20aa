"""`abserve noise-floor`: compares one arm with itself and keeps the differences for later runs on this machine."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.compare import EXIT_INVALID, EXIT_VALID, check_run, run_and_report
from loadgen.cli.output import CHECKING, OUT, announce, default_out, fail, print_report
from loadgen.cli.quiet import Anyway, await_quiet
from loadgen.experiment.options import effective_settings, given_options, takes_settings
from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import MAIN, ExperimentSettings
from loadgen.records.targets import TARGETS

if TYPE_CHECKING:
    from loadgen.records.machine import NoiseFloor
    from loadgen.verdict.result import Result

HELP_GROUP = "Machine"

_MAIN = partial(typer.Option, rich_help_panel=MAIN)
RESTARTS, PAIRS, PAIRS_OF_ONE_START = 6, 24, 12
SCENARIOS = ("single", "batched", "concurrent")


@takes_settings("a", scenarios=SCENARIOS, restarts=RESTARTS, rounds=PAIRS)
def noise_floor(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="EXPERIMENT.YAML",
            show_default=False,
            help="An experiment file as for `abserve compare`; only its baseline runs.",
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        _MAIN("--from", metavar="DIR", help="Run nothing, and use a finished comparison of an arm with itself."),
    ] = None,
    out: Annotated[Path | None, _MAIN(**OUT)] = None,
    anyway: Anyway = False,
    **options: object,
) -> None:
    """Compare arm A with itself and store how much it differs: no comparison of this arm will claim less.

    It counts on this machine for the same model, payload, transport and workloads.

    Takes the options of `abserve compare`, but runs 24 pairs over 6 restarts by default, and no cold starts. Stored in
    $XDG_CACHE_HOME/abserve for this machine, where `abserve compare` finds it.

    Exit status: 0 stored, 1 not stored, 2 an option or a file is wrong, 130 interrupted.
    """
    from loadgen.checks.noise_floor import COMMAND
    from loadgen.measure.machine import MachineRecordError
    from loadgen.measure.noise_floor import make_floor, store_floor
    from loadgen.records.store import StoredRunError
    from loadgen.verdict.result import readable

    try:
        folder, result, status = _stored(from_run) if from_run else _measured(context, file, out, options, anyway)
        if result is None or status not in (EXIT_VALID, EXIT_INVALID):
            raise typer.Exit(status)
        with readable(folder):
            floor = make_floor(result)
    except (PlanError, StoredRunError) as exc:
        fail(str(exc))
    except MachineRecordError as exc:
        fail(str(exc), EXIT_INVALID)
    try:
        path = store_floor(floor)
    except MachineRecordError as exc:
        fail(f"{exc}, then run: {COMMAND} --from {shlex.quote(str(folder))}", EXIT_INVALID)
    _print(floor)
    typer.echo(f"stored in {path}")


def self_comparison(settings: ExperimentSettings) -> ExperimentSettings:
    """The settings with the baseline as both A and B, this command's defaults where nothing was given, and without
    thresholds, which are about other arms. Always strict: a floor is of a quiet machine."""
    arm = next(iter(settings.arms.values()))
    launched = arm.target in TARGETS
    defaults: dict[str, object] = {
        "scenarios": SCENARIOS,
        "restarts": RESTARTS if launched else 1,
        "rounds": PAIRS if launched else PAIRS_OF_ONE_START,
        "handicap_check": False,
    }
    unset = {name: value for name, value in defaults.items() if name not in settings.model_fields_set}
    return settings.model_copy(update={**unset, "arms": {"a": arm, "b": arm}, "fail_if": (), "strict": True})


def _measured(
    context: typer.Context, file: Path | None, out: Path | None, options: dict[str, object], anyway: bool
) -> tuple[Path, Result | None, int]:
    from loadgen.measure.planning import plan_experiment

    chosen = given_options(context, options)
    if stray := [option.flag for option in chosen if option.path[0] == "arms" and option.path[1] != "a"]:
        raise PlanError(f"{stray[0]}: the noise floor compares --a with itself; leave the other arms out")
    settings = self_comparison(effective_settings(file, chosen))
    for name in ("surface", "best"):
        if getattr(settings, name):
            raise PlanError(f"the noise floor is that of single workloads and given settings; leave --{name} out")
    announce(CHECKING)
    plan = plan_experiment(settings)
    if plan.is_matrix:
        raise PlanError("the noise floor needs one transport and one payload; give one of each")
    plan = check_run(plan, out, {})
    await_quiet(not anyway, plan.runs[0][1].arms)
    folder = out or default_out(settings.model)
    status, result = run_and_report(plan.runs[0][1], folder)
    return folder, result, status


def _stored(directory: Path) -> tuple[Path, Result | None, int]:
    from loadgen.verdict.result import analyse, readable

    with readable(directory):
        return directory, analyse(directory), EXIT_VALID


def _print(floor: NoiseFloor) -> None:
    import loadgen.report.document as doc
    from loadgen.base.quantities import share
    from loadgen.metrics.registry import METRICS

    rows = [
        (entry.workload, METRICS[entry.metric].title, share(entry.difference), str(entry.pairs))
        for entry in floor.entries
    ]
    table = doc.Table((*doc.names("scenario", "metric"), *doc.numbers("identical arms differ by up to", "pairs")), rows)
    title = f"Noise floor of this machine: {floor.title}, {floor.model}, {floor.payload} over {floor.transport}"
    document = doc.Document("Noise floor", {"": [doc.Section(title, (table,))]})
    print_report(document)
