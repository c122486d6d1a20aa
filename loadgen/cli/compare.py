"""`abserve compare`: settings in, one experiment per combination of transport and payload, runs, verdict and report.

Whatever cannot run is refused before anything is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import msgspec
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
from loadgen.experiment.language import check_language, choose_protocol, token_workloads
from loadgen.experiment.options import effective_settings, given_options, takes_settings, write_settings
from loadgen.experiment.plan import (
    AS_SERVED,
    Combination,
    PlanError,
    buckets,
    check_best,
    check_models,
    check_restarts,
    check_stack,
    check_surface,
    check_tls,
    decide_padding,
    expects_gpu,
    ignored_settings,
    make_arms,
    make_workloads,
    measurable_scenarios,
    minutes_of,
    plan_combinations,
)
from loadgen.experiment.settings import DEFAULT_PROJECT, MAIN, OUTPUT, ExperimentSettings, defaults_of
from loadgen.records.names import names_of
from loadgen.records.payloads import TOKENS, implied_payload, served_name
from loadgen.records.run import MODEL_WEIGHTS, ArmRequest, Experiment, Label, RunState, body_in_words, option_of, shown
from loadgen.records.targets import ROUTES, TARGETS, TOKEN_TRANSPORTS, Kind, Transport, is_token_transport

if TYPE_CHECKING:
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
    from loadgen.tune.best import CHOOSING_ROUNDS, choose, final_experiment, read_servers, renewed

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
            few = settings.model_copy(update={"rounds": CHOOSING_ROUNDS, "minutes": None, "restarts": 1})
            brief = plan_experiment(few).runs[0][1].workloads
            gpu = expects_gpu(*planned.arms)
            record = choose(settings, planned, brief, record, folder, run_stage, gpu=gpu)
    except KeyboardInterrupt:
        complain(f"interrupted while choosing; go on with: {again}", style="bold yellow")
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


def name_models(
    settings: ExperimentSettings, show: Callable[[str], None] | None = None
) -> tuple[ExperimentSettings, tuple[str, ...]]:
    """The settings with the model that servers at URLs have in common, if no setting names it, and notes about that;
    `show` gets what the servers answered. Raises `PlanError`."""
    from loadgen.launch.deployment import DeploymentError
    from loadgen.launch.discovery import find_models

    arms = make_arms(settings)
    settings, notes = with_language_models(settings, arms, show)
    if settings.kind is Kind.TOKENS:
        return settings, notes
    if label := next((label for label, arm in settings.arms.items() if arm.body), None):
        raise PlanError(f"{option_of(label, 'body')} is for language models, and {settings.model} is not one")
    if "model" in settings.model_fields_set or any(arm.embedded for arm in arms):
        return settings, ()
    for arm in arms:
        check_reachable(arm, "http")
    payload = settings.payload[0] if settings.payload else implied_payload(settings.model)
    preferred = served_name(settings.model, payload) or settings.model
    try:
        found = find_models(arms, preferred)
    except DeploymentError as exc:
        raise PlanError(str(exc)) from exc
    names = set(found.names.values())
    if names == {preferred}:
        return settings, found.notes
    named = {
        label: arm if len(names) == 1 else arm.model_copy(update={"model": found.names[label]})
        for label, arm in settings.arms.items()
    }
    model = found.names[next(iter(settings.arms))]
    return settings.model_copy(update={"arms": named, "model": model}), found.notes


def with_language_models(
    settings: ExperimentSettings, arms: Sequence[ArmRequest], show: Callable[[str], None] | None = None
) -> tuple[ExperimentSettings, tuple[str, ...]]:
    """The settings with the model, the protocol and the fields of the requests of each server at a URL, if these serve
    language models, and notes about them. A comparison of nothing but such servers is one of language models, whatever
    it calls the model. Raises `PlanError`."""
    from loadgen.launch.deployment import DeploymentError
    from loadgen.launch.discovery import find_language_models

    urls = [arm for arm in arms if not arm.embedded]
    if not urls or (len(urls) < len(arms) and settings.kind is Kind.TENSORS):
        return settings, ()
    for arm in urls:
        check_reachable(arm, "http")
    preferred = served_name(settings.model, TOKENS) or settings.model
    asked = tuple(name for name in settings.transport or () if is_token_transport(name))
    is_named = "model" in settings.model_fields_set
    try:
        found = find_language_models(
            urls, preferred, certain=settings.kind is Kind.TOKENS, named=is_named, asked=asked, show=show
        )  # fmt: skip
    except DeploymentError as exc:
        raise PlanError(str(exc)) from exc
    if found is None:
        return settings, ()
    named = dict(settings.arms)
    notes: list[str] = []
    common = [
        name
        for name in TOKEN_TRANSPORTS
        if all(name in served.bodies for served in found.values())
        and all(name in TARGETS[arm.target].protocols for arm in arms if arm.embedded)
    ]
    names = names_of(arms, ())
    for label, served in found.items():
        given = named[label]
        able = sorted(served.bodies, key=TOKEN_TRANSPORTS.index)
        chosen = next((name for name in (*asked, *common) if name in able), able[0])
        body = dict(served.bodies[chosen])
        notes += served.notes
        if body != (given.body or {}):
            notes.append(f"{names[label]} is asked {body_in_words(body)}, because it refuses the usual fields")
        model = given.model if served.model == preferred else served.model
        named[label] = given.model_copy(update={"model": model, "transport": chosen, "body": body or None})
    update: dict[str, object] = {"arms": named}
    if settings.kind is Kind.TENSORS:
        defaults = defaults_of(Kind.TOKENS, settings.preset)
        update |= {name: value for name, value in defaults.items() if name not in settings.model_fields_set}
        if settings.transport is None:
            update["transport"] = tuple(common[:1]) or None
        if "model" not in settings.model_fields_set:
            update["model"] = found[arms[0].label].model
    return settings.model_copy(update=update), tuple(notes)


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """What to run: one experiment per combination. In a matrix each has its own folder."""

    runs: tuple[tuple[Combination, Experiment], ...]
    is_matrix: bool
    notes: tuple[str, ...] = ()
    """Sentences about settings that are ignored."""


def plan_experiment(settings: ExperimentSettings) -> ExperimentPlan:
    """What to run. Raises `PlanError` for options that contradict each other or cannot be measured."""
    from loadgen.findings.ceiling import has_own_engines
    from loadgen.verdict.thresholds import plan_conditions

    arms = make_arms(settings)
    check_language(settings, arms)
    check_best(settings)
    check_surface(settings)
    if settings.kind is Kind.TOKENS:
        transport, arms = choose_protocol(settings, arms)
        combinations: tuple[Combination, ...] = (Combination(transport, TOKENS),)
        workloads = token_workloads(settings, gpu=expects_gpu(*arms))
    else:
        combinations = plan_combinations(arms, settings)
        workloads = make_workloads(settings, measurable_scenarios(settings, arms), gpu=expects_gpu(*arms))
    for arm, combination in product(arms, combinations):
        check_reachable(arm, combination.transport)
    check_stack(settings, arms, combinations)
    check_tls(settings, arms, combinations)
    check_models(settings, arms)
    check_inputs(settings, combinations)
    has_load = any(workload.has_blocks for workload in workloads)
    if expects_gpu(*arms) and not has_load:
        raise PlanError("the GPU verification needs a scenario with load; add one, as in --scenarios single,concurrent")
    starts_engines = has_own_engines(arms, settings.deployment) and settings.kind is Kind.TENSORS
    if settings.ceiling and not starts_engines:
        raise PlanError("--ceiling measures engines of servers that abserve starts, and it starts none; leave it out")
    if settings.ceiling and not has_load:
        raise PlanError("--ceiling is compared with the load; add a scenario of load, as in --scenarios batched")
    check_restarts(settings, workloads)
    minutes = minutes_of(settings)
    plan_conditions(settings.fail_if, workloads, tuple(settings.arms))
    is_matrix = settings.matrix or len(combinations) > 1
    if settings.best and is_matrix:
        raise PlanError("--best compares over one transport with one payload; give one of each")
    # The rest of the time is for the surface, or for choosing.
    full = settings.preset == "full" and not settings.surface and not settings.best

    def experiment(combination: Combination) -> Experiment:
        asked = settings
        if is_matrix:
            alone = {"transport": (combination.transport,), "payload": (combination.payload,), "matrix": False}
            asked = settings.model_copy(update=alone)
        compose = asked.deployment == "compose"
        return asked.stored(
            Experiment,
            arms=arms,
            weights=AS_SERVED if compose else asked.weights or MODEL_WEIGHTS,
            pad_to=buckets(asked),
            payload=combination.payload,
            transport=combination.transport,
            workloads=workloads,
            equivalence_margin=asked.margin,
            minutes=minutes if has_load else None,
            until_decided=asked.until == "decided" or bool(asked.surface),
            time_limit_minutes=asked.time_limit if asked.until == "decided" else None,
            request_timeout_s=asked.request_timeout,
            explain=full if asked.explain is None else asked.explain,
            explain_seconds=asked.explain_minutes * 60.0,
            ceiling=starts_engines and (full if asked.ceiling is None else asked.ceiling),
            compose_project=(asked.compose_project or DEFAULT_PROJECT) if compose else None,
            settings=asked.content(),
            settings_sha256=asked.sha256(),
        )

    runs = tuple((combination, experiment(combination)) for combination in combinations)
    return ExperimentPlan(runs, is_matrix, ignored_settings(settings))


def check_reachable(arm: ArmRequest, transport: Transport) -> None:
    """Raises `PlanError` for a URL that is malformed, and for a server that does not offer the transport."""
    from loadgen.client.connection import Address, AddressError
    from loadgen.client.grpc import parse_grpc_address
    from loadgen.client.tls import TlsError, tls_context

    if arm.embedded:
        offered = TARGETS[arm.target].transports
        if offered and not is_token_transport(transport) and transport not in offered:
            titles = " and ".join(ROUTES[name].title for name in offered)
            raise PlanError(
                f"{option_of(arm.label)} {arm.target} serves {titles} only; use --transport {','.join(offered)}"
            )
        return
    option = option_of(arm.label)
    try:
        address = Address.parse(arm.target, arm.access)
        if arm.grpc is not None:
            parse_grpc_address(arm.grpc, arm.access)
        tls_context(arm.access, "h2")
    except (AddressError, TlsError) as exc:
        raise PlanError(f"{option}: {exc}") from None
    if ROUTES[transport].is_grpc and arm.grpc is None:
        address_option = f"{option_of(arm.label, 'grpc')} HOST:PORT"
        raise PlanError(f"{option} {arm.target} has no {ROUTES[transport].title} address; add {address_option}")
    if ROUTES[transport].shares_memory and not address.is_local:
        raise PlanError(f"{option} {arm.target} is on another machine, which shares no memory; use --transport http")


def check_inputs(settings: ExperimentSettings, combinations: Sequence[Combination]) -> None:
    """Raises `PlanError` for inputs that do not exist, or that contradict another setting."""
    if settings.inputs is None:
        return
    from loadgen.client.inputs import InputError, image_folder

    if settings.sequence_length is not None:
        raise PlanError("--inputs have their own lengths; leave --sequence-length out")
    try:
        images = image_folder(settings.inputs)
    except (InputError, OSError) as exc:
        raise PlanError(str(exc)) from exc
    if images is None and len({combination.payload for combination in combinations}) > 1:
        raise PlanError(f"--inputs {settings.inputs} are of one payload; give one --payload")


def check_lengths(experiment: Experiment) -> None:
    """Raises `PlanError` for a language model that cannot be described, or that does not hold the longest answers."""
    from loadgen.client.inputs import InputError
    from loadgen.measure.language import model_info

    try:
        model_info(experiment)
    except InputError as exc:
        raise PlanError(str(exc)) from exc


def check_servers(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Check the servers of a run before anything is written: servers that run must be ready, and `abserve serve` checks
    the model, the weights and every option of the others; then the user's inputs and lengths. Returns the experiments
    with the padding that every arm can do. Raises `PlanError`."""
    from loadgen.client.endpoint import EndpointError
    from loadgen.client.inputs import InputError
    from loadgen.launch.deployment import Deployment, DeploymentError, RemoteDeployment
    from loadgen.launch.embedded import EmbeddedDeployment
    from loadgen.measure.language import model_info, prompt_plan
    from loadgen.measure.preparation import (
        make_deployment,
        make_inputs,
        model_name,
        prepare_inputs,
        with_generated_inputs,
    )
    from loadgen.records.store import RunStore

    checked: dict[tuple[Label, str], Deployment] = {}
    decided = []

    def check(arm: ArmRequest, deployments: Mapping[Label, Deployment], experiment: Experiment) -> None:
        try:
            deployments[arm.label].check(model_name(arm, experiment, deployments))
        except (DeploymentError, EndpointError) as exc:
            reason = str(exc).removeprefix(f"abserve serve {arm.target} cannot start: ")
            raise PlanError(f"{option_of(arm.label)} {arm.target}: {reason}") from exc

    with TemporaryDirectory(prefix="abserve-check-") as folder:
        for experiment in experiments:
            deployments: dict[Label, Deployment] = {}
            unpadded = msgspec.structs.replace(experiment, pad_to=None)  # the servers first say whether they can
            left = [arm for arm in experiment.arms if (arm.label, experiment.payload_of(arm)) not in checked]
            for arm in left:
                try:
                    deployment = make_deployment(arm, unpadded, RunStore(Path(folder)), Path(folder))
                except (DeploymentError, EndpointError) as exc:
                    raise PlanError(f"{option_of(arm.label)} {arm.target}: {exc}") from exc
                checked[arm.label, experiment.payload_of(arm)] = deployments[arm.label] = deployment
            to_start = [arm for arm in left if isinstance(deployments[arm.label], EmbeddedDeployment)]
            if to_start:
                names = names_of(experiment.arms, ())
                said = ", ".join(names[arm.label] for arm in to_start)
                announce(f"asking whether the model can be served: {said}; each imports its engine for that")
            with ThreadPoolExecutor() as pool:
                list(pool.map(partial(check, deployments=deployments, experiment=experiment), to_start))
            for arm in sorted(left, key=lambda arm: not arm.embedded):  # those to start have told the model's name
                if arm not in to_start:
                    check(arm, deployments, experiment)
            by_label = {arm.label: checked[arm.label, experiment.payload_of(arm)] for arm in experiment.arms}
            reasons = {label: deployment.cannot_pad for label, deployment in by_label.items()}
            cannot_pad = {label: reason for label, reason in reasons.items() if reason is not None}
            pads_to = {label: deployment.pads_to for label, deployment in by_label.items()}
            decided.append(decide_padding(experiment, cannot_pad, pads_to))
        try:
            for number, experiment in enumerate(decided):
                if experiment.kind is Kind.TOKENS:
                    prompt_plan(experiment, model_info(experiment))
                    continue
                started = any(arm.embedded and not arm.own_repository for arm in experiment.arms)
                running = checked[experiment.baseline.label, experiment.payload_of(experiment.baseline)]
                name = experiment.model_of(experiment.baseline) or experiment.model
                place = Path(folder) / str(number) / "samples"
                if not started and isinstance(running, RemoteDeployment):
                    decided[number] = experiment = with_generated_inputs(experiment, place, running.signature(name))
                # Otherwise the inputs come from `abserve samples` with its defaults, which fit a model that is served.
                if not started or experiment.inputs or experiment.sequence_length or experiment.pad_to:
                    _, inputs = prepare_inputs(experiment, place)
                    if inputs is None and experiment.inputs and isinstance(running, RemoteDeployment):
                        make_inputs(experiment, place.with_name("made"), running.signature(name))
        except (InputError, EndpointError) as exc:
            raise PlanError(str(exc)) from exc
    return decided


def check_run(plan: ExperimentPlan, out: Path | None, files: Mapping[str, Path | None]) -> ExperimentPlan:
    """Check the places to write to (`files` by their options) and the servers. Returns the plan with what the servers
    decide. Raises `PlanError`; a file that cannot be written ends the command."""
    check_out(out)
    check_files(files)
    asked = [experiment for _, experiment in plan.runs]
    for experiment in asked:
        check_lengths(experiment)
    experiments = check_servers(asked)
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
