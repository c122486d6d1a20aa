"""`abserve engines`: settings in, every engine measured in its own process, report out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.base.child_process import ABSERVE, ENGINE_WORKER
from loadgen.base.quantities import counted
from loadgen.cli.output import (
    MLFLOW,
    announce,
    check_export,
    check_files,
    check_out,
    complain,
    console_for,
    default_out,
    fail,
    publish,
    resumed,
    same_settings,
    settings_file,
    write_json,
)
from loadgen.cli.quiet import Anyway, await_quiet
from loadgen.experiment.matrix import MatrixSettings
from loadgen.experiment.options import (
    SettingOption,
    checked_settings,
    given_options,
    plain_options,
    read_file,
    takes_settings,
)
from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import MAIN, OUTPUT
from loadgen.records.targets import Kind

if TYPE_CHECKING:
    from loadgen.engines.store import MatrixStore
    from loadgen.records.matrix import Matrix, MatrixPlan
    from loadgen.records.run import Environment, RunState

HELP_GROUP = "Explore"

EXIT_MEASURED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
RESUME = "abserve engines --resume"
OPTIONS = plain_options(MatrixSettings, "ABSERVE_ENGINES")
_MAIN, _OUTPUT = (partial(typer.Option, rich_help_panel=panel) for panel in (MAIN, OUTPUT))


@takes_settings(options=OPTIONS)
def engines(
    context: typer.Context,
    file: Annotated[Path | None, settings_file("MATRIX.YAML", "ABSERVE_ENGINES")] = None,
    out: Annotated[
        Path | None, _MAIN(metavar="DIR", help="Folder for the results (default: results/TIME-engines).")
    ] = None,
    resume: Annotated[
        Path | None,
        _MAIN(metavar="DIR", help="Continue an interrupted matrix: what was measured is kept, failures are repeated."),
    ] = None,
    json_file: Annotated[
        str | None, _OUTPUT("--json", metavar="FILE", help="Also write the results as JSON; - is standard output.")
    ] = None,
    mlflow: Annotated[str | None, _OUTPUT(**MLFLOW)] = None,
    anyway: Anyway = False,
    **options: object,
) -> None:
    """Measure engines on models, without a server: each combination in its own process, in random rounds, with answers
    compared with FP32. Reports latency and throughput with 95 % intervals, memory, energy and one-time costs.

    Exit status: 0 everything was measured and every answer is the model's, 1 a configuration failed or answered
    wrongly, or with --strict other programs took too much of the CPU, 2 an option or a file is wrong, 130 interrupted
    (what was measured is kept).
    """
    from loadgen.engines.store import MatrixStore

    check_files({"--json": json_file})
    check_export(mlflow)
    chosen = given_options(context, options, OPTIONS)
    if resume is not None and out is not None:
        fail(f"--out {out} and --resume {resume} are two folders; give one of them")
    try:
        if resume is not None:
            store, plan, environment = _stored(resume, file, chosen)
        else:
            plan, environment = _new(out, _settings(file, chosen))
    except PlanError as exc:
        fail(str(exc))
    await_quiet(bool(plan.settings.get("strict")) and not anyway)  # before a folder is made
    if resume is None:
        store = MatrixStore(out or default_out("engines"))
    raise typer.Exit(_run(store, plan, environment, json_file, mlflow, fresh=resume is None))


_UNFIT: Mapping[Kind, tuple[tuple[str, object, str], ...]] = {
    Kind.TENSORS: (),
    Kind.TOKENS: (
        ("processes", "kept", "--processes kept would hold a language model once per engine; leave it out"),
        ("profile", True, "--profile shows no kernels of a language model; leave it out"),
    ),
}
"""Values of settings that a matrix cannot have, by what its models give."""


def _settings(file: Path | None, options: dict[SettingOption, object]) -> MatrixSettings:
    content = read_file(file, "a matrix file", "models: torchvision:resnet50")
    return checked_settings(MatrixSettings, content, file, options)


def _new(out: Path | None, settings: MatrixSettings) -> tuple[MatrixPlan, Environment]:
    """Nothing is written yet. Raises `PlanError`."""
    from loadgen.engines.plan import expand, make_plan, requests_of
    from loadgen.engines.worker_process import check, read_offers
    from loadgen.measure.machine import read_environment

    check_out(out)
    announce("asking which engines and models this machine can measure")
    try:
        kind = settings.kind
    except ValueError as exc:
        raise PlanError(f"--models {','.join(settings.models)}: {exc}") from exc
    for name, value, why in _UNFIT[kind]:
        if getattr(settings, name) == value:
            raise PlanError(why)
    offers = read_offers(settings.device, ENGINE_WORKER, kind)
    configurations = expand(settings, offers)
    checks = check(requests_of(settings, configurations, offers), ENGINE_WORKER)
    plan = make_plan(settings, offers, configurations, checks)
    return plan, read_environment(offers.gpu, {})


def _stored(
    folder: Path, file: Path | None, options: dict[SettingOption, object]
) -> tuple[MatrixStore, MatrixPlan, Environment]:
    """The matrix in the folder, if it is the one asked for and this is its machine. Raises `PlanError`."""
    from loadgen.engines.store import MatrixStore, read_plan

    def read(folder: Path) -> tuple[tuple[MatrixPlan, Environment], None, list[Environment | None]]:
        plan, environment = read_plan(folder)
        return (plan, environment), None, [environment]  # also a finished one, whose failures are repeated

    plan, before = resumed(folder, read)
    if file is not None or options:
        same_settings(folder, plan.settings, _settings(file, options).content())
    return MatrixStore(folder), plan, before


def _run(
    store: MatrixStore, plan: MatrixPlan, environment: Environment, json_file: str | None, mlflow: str | None, *,
    fresh: bool,
) -> int:  # fmt: skip
    """Measure, report, and return the exit status."""
    from loadgen.engines.judging import judge_visits
    from loadgen.engines.measure import MatrixRun
    from loadgen.engines.progress import EngineProgress
    from loadgen.measure.interruption import interruptible
    from loadgen.measure.machine import utc_now
    from loadgen.records.run import RunState
    from loadgen.records.store import StorageError, StoredRunError

    console = console_for(json_file)
    console.print(
        f"{counted(len(plan.configurations), 'configuration')} × {counted(plan.rounds, 'round')}"
        + (f", {counted(len(plan.refused), 'combination')} refused (listed in the report)" if plan.refused else "")
    )
    try:
        with store.open():
            if fresh:
                store.write(plan)
                store.write(environment)
            with EngineProgress(console) as progress:
                run = MatrixRun(plan, store, ENGINE_WORKER, now=progress.now, visit_done=progress.visit_done)
                state = run.run()
                if plan.kind is Kind.TOKENS and state.state == "finished":
                    progress.now("checking the answers against the reference")
                    try:
                        with interruptible():
                            store.write(judge_visits(plan, store.visits(), store.directory, ABSERVE))
                    except KeyboardInterrupt:
                        state = RunState(state="interrupted", phase="judging", finished_at=utc_now())
                        store.write(state)
            return _report(store.directory, state, json_file, mlflow)
    except (StorageError, StoredRunError) as exc:
        complain(str(exc))
        return EXIT_FAILED


def _report(folder: Path, state: RunState, json_file: str | None, mlflow: str | None) -> int:
    from loadgen.engines.files import published
    from loadgen.engines.store import stored_matrix

    matrix, is_written = publish(
        folder, lambda: stored_matrix(folder), published, mlflow, again=RESUME, json_file=json_file
    )
    if matrix is not None:
        write_json(matrix, json_file)
    status = exit_status(matrix) if is_written and matrix is not None else EXIT_FAILED
    if state.state == "interrupted":
        again = f"{RESUME} {shlex.quote(str(folder))}"
        complain(f"interrupted; what was measured is in {folder}; continue with: {again}", style="bold yellow")
        return EXIT_INTERRUPTED
    return status


def exit_status(matrix: Matrix) -> int:
    """The status of a matrix that was not interrupted: whether every configuration was measured and right, on a machine
    that others left alone."""
    from loadgen.checks.registry import invalidating
    from loadgen.records.matrix import NO_MODEL

    failed = any(configuration.errors for configuration in matrix.configurations)
    wrong = any(
        cell.fault is not None and matrix.configurations[cell.configuration].configuration.engine != NO_MODEL
        for cell in matrix.cells
    )
    spoilt = bool(invalidating(matrix.checks))
    return EXIT_FAILED if failed or wrong or spoilt or not matrix.cells else EXIT_MEASURED
