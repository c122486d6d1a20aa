"""`abserve tune`: settings in, the best configuration of each server under the load, then the verdict between them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from loadgen.base.quantities import counted
from loadgen.cli.compare import EXIT_INTERRUPTED, EXIT_INVALID, check_run, run_and_report
from loadgen.cli.output import (
    CHECKING,
    OUT,
    announce,
    complain,
    console_for,
    default_out,
    fail,
    print_report,
    publish,
    resumed,
    same_settings,
    settings_file,
)
from loadgen.cli.quiet import Anyway, await_quiet
from loadgen.experiment.options import (
    SettingOption,
    checked_settings,
    given_options,
    plain_options,
    read_file,
    takes_settings,
)
from loadgen.experiment.plan import PlanError, expects_gpu, make_arms
from loadgen.experiment.settings import MAIN, ArmSettings
from loadgen.experiment.tuning import TuneSettings, check_tuning, screening_settings
from loadgen.records.run import Environment, Experiment, Label, RunState
from loadgen.records.store import StorageError, read_one
from loadgen.records.tuning import ANCHOR, Space, Tuning

if TYPE_CHECKING:
    from loadgen.tune.outcome import TuningOutcome

HELP_GROUP = "Compare"

OPTIONS = plain_options(TuneSettings, "ABSERVE_TUNE")
_MAIN = partial(typer.Option, rich_help_panel=MAIN)
_FILE, _EXAMPLE = "a file of a tuning", "model: openclip_vit_b32"
_FREE = {"minutes", "at_once"}
"""Settings that a tuning may go on with other values of."""


@takes_settings(options=OPTIONS)
def tune(
    context: typer.Context,
    file: Annotated[Path | None, settings_file("TUNE.YAML", "ABSERVE_TUNE")] = None,
    out: Annotated[Path | None, _MAIN(**OUT)] = None,
    resume: Annotated[
        Path | None, _MAIN(metavar="DIR", help="Go on with an interrupted tuning; --minutes counts from its start.")
    ] = None,
    dry_run: Annotated[
        bool, _MAIN("--dry-run", help="Print what would be searched and how many tries fit, and measure nothing.")
    ] = False,
    anyway: Anyway = False,
    **options: object,
) -> None:
    """Find the best settings of each server for your load and limit, then compare the servers at their best.

    Many configurations are measured briefly beside each other, the best few again from fresh starts, and the winners
    with the defaults in one comparison, whose figures alone are reported.

    Exit status: 0 the final comparison is valid, or rough because others used the machine, 1 it is invalid or nothing
    could be measured, 2 an option or a file is wrong, 130 interrupted (go on with --resume).
    """
    chosen = given_options(context, options, OPTIONS)
    if resume is not None and out is not None:
        fail(f"--out {out} and --resume {resume} are two folders; give one of them")
    try:
        stored = None if resume is None else _stored(resume, file, chosen)
        settings = _settings(file, chosen) if stored is None else stored[0]
        announce(CHECKING)
        first = _check(settings, out)
        spaces = _spaces(settings, first) if stored is None else stored[1].spaces
    except PlanError as exc:
        fail(str(exc))
    gpu = expects_gpu(*first.arms)
    if dry_run:
        _print_plan(settings, spaces, settings.side_by_side(gpu=gpu))
        return
    await_quiet(settings.strict and not anyway)
    folder = resume or out or default_out(settings.model)
    padding = () if first.cannot_pad and first.pad_to is None else first.pad_to
    raise typer.Exit(_run(settings, spaces, folder, padding, None if stored is None else stored[1], gpu=gpu))


def _settings(file: Path | None, chosen: dict[SettingOption, object]) -> TuneSettings:
    return checked_settings(TuneSettings, read_file(file, _FILE, _EXAMPLE), file, chosen)


def _stored(folder: Path, file: Path | None, chosen: dict[SettingOption, object]) -> tuple[TuneSettings, Tuning]:
    """The settings and the tuning in a folder, if it can go on and is the one asked for. Raises `PlanError`."""
    from loadgen.tune.files import read_tuning

    def read(folder: Path) -> tuple[Tuning, str, list[Environment | None]]:
        tuning = read_tuning(folder)
        return tuning, tuning.state, [read_one(folder / run.folder, Environment) for run in tuning.runs]

    tuning = resumed(folder, read)
    asked = checked_settings(TuneSettings, dict(tuning.settings), folder / Tuning.FILE, {})
    if file is None and not chosen:
        return asked, tuning
    content = dict(tuning.settings) if file is None else read_file(file, _FILE, _EXAMPLE)
    again = checked_settings(TuneSettings, content, file, chosen)
    same_settings(folder, asked.model_dump(exclude=_FREE), again.model_dump(exclude=_FREE))
    return again, msgspec.structs.replace(tuning, settings=again.content())


def _check(settings: TuneSettings, out: Path | None) -> Experiment:
    """The experiment of all defaults, whose servers can be started. Raises `PlanError`."""
    from loadgen.measure.planning import plan_experiment

    arms: dict[Label, ArmSettings] = {f"{target}-0": ArmSettings(target=target) for target in settings.arms}
    if len(arms) == 1:  # a comparison has two arms at least
        arms[ANCHOR] = ArmSettings(target=settings.arms[0])
    asked = screening_settings(settings, arms)
    check_tuning(settings, gpu=expects_gpu(*make_arms(asked)))
    return check_run(plan_experiment(asked), out, {}).runs[0][1]


def _spaces(settings: TuneSettings, first: Experiment) -> tuple[Space, ...]:
    """What can be tuned of each target. Raises `PlanError`."""
    from loadgen.measure.preparation import serve_options
    from loadgen.tune.declared import read_spaces
    from loadgen.tune.space import values_of

    options = {
        arm.target: {
            name: value
            for name, value in (serve_options(arm, first) | arm.settings).items()
            if (name, value) != ("threads", "0") and name != "slots"  # these are searched
        }
        for arm in first.arms
    }
    return read_spaces(
        settings.arms,
        options,
        tune={name: values_of(values) for name, values in settings.tune.items()},
        fix=settings.fix,
        outstanding=settings.users,
    )


def _print_plan(settings: TuneSettings, spaces: Sequence[Space], at_once: int) -> None:
    """The spaces, their sizes, and how many of the contenders will be measured."""
    import loadgen.report.document as doc
    from loadgen.tune.race import forecast
    from loadgen.tune.space import condition_in_words, size

    sections = []
    for space in spaces:
        rows = [
            (setting.name, setting.default, ", ".join(setting.values), condition_in_words(setting) or "always")
            for setting in space.settings
        ]
        table = doc.Table(doc.texts("setting", "default", "values tried", "applies"), rows)
        left_out = (doc.Text(f"Not searched: {clause}.") for clause in space.not_searched)
        sections.append(doc.Section(f"{space.target}: {counted(size(space), 'contender')}", (table, *left_out)))
    runs, places = forecast(settings.minutes, at_once)
    print_report(doc.Document("Tuning", {"": sections}))
    typer.echo(
        f"{counted(settings.minutes, 'minute')}: about {counted(runs, 'screening')} of {at_once} contenders each, "
        f"so {counted(places, 'place')} for {sum(map(size, spaces)):,} contenders; then the finalists and the final"
    )


def _run(
    settings: TuneSettings,
    spaces: Sequence[Space],
    folder: Path,
    padding: tuple[int, ...] | None,
    stored: Tuning | None,
    *,
    gpu: bool,
) -> int:
    """Tune, report, and return the exit status."""
    from loadgen.tune.progress import RichRaceProgress
    from loadgen.tune.race import TuningRace

    statuses: list[int] = []
    progress = RichRaceProgress(console_for(), spaces)

    def compare(experiment: Experiment, out: Path) -> RunState | None:
        with progress.paused():
            status, _ = run_and_report(experiment, out)
        statuses.append(status)
        return read_one(out, RunState)

    race = TuningRace(settings, spaces, folder, progress, compare, gpu=gpu, padding=padding, resume=stored)
    try:
        with progress:
            tuning = race.run()
    except StorageError as exc:
        complain(str(exc))
        return EXIT_INVALID
    if tuning.error is not None:
        complain(tuning.error)
    _report(folder, tuning)
    again = f"abserve tune --resume {shlex.quote(str(folder))}"
    if tuning.state == "interrupted":
        complain(f"interrupted; what was measured is in {folder}; go on with: {again}", style="bold yellow")
        return EXIT_INTERRUPTED
    if tuning.state == "failed":
        complain(f"what was measured is in {folder}; go on with: {again}")
        return EXIT_INVALID
    return statuses[-1] if statuses else EXIT_INVALID


def _report(folder: Path, tuning: Tuning) -> None:
    """Write the report and the files that deploy the best, and print what was found so far."""
    from loadgen.tune.deploy import write_deployment
    from loadgen.tune.files import published, stored_outcome

    def deploy() -> TuningOutcome:
        outcome = stored_outcome(folder, tuning)
        with suppress(OSError):  # a full disk, which the reports tell
            for problem in write_deployment(folder, outcome):
                complain(problem, style="yellow", kind="note")
        return outcome

    publish(folder, deploy, partial(published, folder))
