"""`abserve compare`: options in, experiment out, run, verdict and report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from loadgen.combinations import Combination, plan_combinations
from loadgen.plan import BATCH_SIZES, SCENARIOS, PlanError, expects_gpu, make_cells
from loadgen.records import ArmRequest, Experiment, Label
from loadgen.stack_request import (
    AS_SERVED,
    DEFAULT_PROJECT,
    DEFAULT_WEIGHTS,
    check_stack_request,
    parse_deployment,
)

if TYPE_CHECKING:
    from loadgen.result import Result

EXIT_VALID, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 130


def _env(name: str) -> str:
    return f"ABSERVE_COMPARE_{name}"


def compare(
    a: Annotated[str, typer.Option("--a", envvar=_env("A"), help="native, triton or the URL of a server.")] = "native",
    b: Annotated[str, typer.Option("--b", envvar=_env("B"), help="native, triton or the URL of a server.")] = "triton",
    model: Annotated[
        str, typer.Option(envvar=_env("MODEL"), help="A registered model, or one that both URLs serve.")
    ] = "openclip_vit_b32",
    weights: Annotated[
        str, typer.Option(envvar=_env("WEIGHTS"), help="random:SEED, a pretrained tag or a checkpoint file.")
    ] = DEFAULT_WEIGHTS,
    scenarios: Annotated[str, typer.Option(envvar=_env("SCENARIOS"), help="Which, separated by commas.")] = ",".join(
        SCENARIOS
    ),
    preset: Annotated[
        str, typer.Option(envvar=_env("PRESET"), help="quick (5 minutes) or full (about 25, narrower intervals).")
    ] = "quick",
    batch_sizes: Annotated[
        str, typer.Option(envvar=_env("BATCH_SIZES"), help="Of the batched scenario, separated by commas.")
    ] = ",".join(map(str, BATCH_SIZES)),
    concurrency: Annotated[
        int, typer.Option(envvar=_env("CONCURRENCY"), min=1, help="Users of the concurrent scenario.")
    ] = 16,
    requests: Annotated[
        int, typer.Option(envvar=_env("REQUESTS"), min=1, help="Requests of one block of the concurrent scenario.")
    ] = 200,
    pairs: Annotated[
        int | None, typer.Option(envvar=_env("PAIRS"), min=1, help="Pairs of blocks a cell; default: the preset's.")
    ] = None,
    threads: Annotated[
        int, typer.Option(envvar=_env("THREADS"), min=0, help="Engine threads, the same for both; 0: all cores.")
    ] = 0,
    seed: Annotated[int, typer.Option(envvar=_env("SEED"), help="Decides the order of the blocks.")] = 0,
    margin: Annotated[
        float, typer.Option(envvar=_env("MARGIN"), min=0.001, max=1.0, help="Differences within it are equivalence.")
    ] = 0.05,
    gpu_control: Annotated[
        bool,
        typer.Option(
            "--gpu-control/--no-gpu-control",
            envvar=_env("GPU_CONTROL"),
            help="With a GPU: run an arm on the CPU too, which must not pass for a GPU server.",
        ),
    ] = True,
    transport: Annotated[
        str | None,
        typer.Option(envvar=_env("TRANSPORT"), help="http (default), grpc, shm; several make a matrix."),
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(envvar=_env("PAYLOAD"), help="fp32 (default), uint8, jpeg; several make a matrix."),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", envvar=_env("MATRIX"), help="Every transport with every payload, each a run.")
    ] = False,
    a_payload: Annotated[
        str | None,
        typer.Option(envvar=_env("A_PAYLOAD"), help="For arm a alone; then no server is called the faster one."),
    ] = None,
    b_payload: Annotated[str | None, typer.Option(envvar=_env("B_PAYLOAD"), help="Likewise for arm b.")] = None,
    a_grpc: Annotated[
        str | None, typer.Option(envvar=_env("A_GRPC"), help="HOST:PORT of the gRPC door where --a is a URL.")
    ] = None,
    b_grpc: Annotated[str | None, typer.Option(envvar=_env("B_GRPC"), help="Likewise where --b is a URL.")] = None,
    deployment: Annotated[
        str,
        typer.Option(
            envvar=_env("DEPLOYMENT"), help="embedded (we start both servers) or compose (the running stack's)."
        ),
    ] = "embedded",
    compose_project: Annotated[
        str | None,
        typer.Option(envvar=_env("COMPOSE_PROJECT"), help=f"Name of the stack; default {DEFAULT_PROJECT}."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(envvar=_env("OUT"), help="Folder for the results; default results/TIME-MODEL.")
    ] = None,
    a_option: Annotated[
        list[str] | None,
        typer.Option(
            "--a-option", envvar=_env("A_OPTIONS"), help="KEY=VALUE for `abserve serve` of arm a; repeatable."
        ),
    ] = None,
    b_option: Annotated[
        list[str] | None,
        typer.Option(
            "--b-option", envvar=_env("B_OPTIONS"), help="KEY=VALUE for `abserve serve` of arm b; repeatable."
        ),
    ] = None,
) -> None:
    """Start both servers, measure them with the same requests, say which is faster, by how much, and whether it holds.

    Exit status: 0 the comparison is valid, 1 it is not, 130 interrupted (finished blocks are kept).
    """
    try:
        arm_a = make_arm("a", a, a_option or [], payload=a_payload, grpc=a_grpc)
        arm_b = make_arm("b", b, b_option or [], payload=b_payload, grpc=b_grpc)
        combinations = plan_combinations(arm_a, arm_b, model, _names_of(transport), _names_of(payload), matrix=matrix)
        kind = parse_deployment(deployment, compose_project)
        if kind == "compose":
            transports = [one.transport for one in combinations]
            check_stack_request(
                arm_a, arm_b, transports=transports, scenarios=_names(scenarios), weights=weights, threads=threads
            )
        experiment = Experiment(
            a=arm_a,
            b=arm_b,
            model=model,
            weights=AS_SERVED if kind == "compose" else weights,
            payload=combinations[0].payload,
            transport=combinations[0].transport,
            cells=make_cells(
                preset,
                _names(scenarios),
                batch_sizes=_numbers(batch_sizes),
                concurrency=concurrency,
                requests=requests,
                pairs=pairs,
                gpu=expects_gpu(arm_a, arm_b),
            ),
            preset=preset,
            seed=seed,
            equivalence_margin=margin,
            threads=threads,
            gpu_control=gpu_control,
            deployment=kind,
            compose_project=(compose_project or DEFAULT_PROJECT) if kind == "compose" else None,
        )
    except PlanError as exc:
        Console(stderr=True).print(f"error: {exc}", style="bold red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(EXIT_INVALID) from exc
    folder = out or default_out(model)
    if len(combinations) == 1 and not matrix:
        raise typer.Exit(run_and_report(experiment, folder)[0])
    raise typer.Exit(_run_matrix(experiment, combinations, folder))


def make_arm(
    label: Label, target: str, options: list[str], *, payload: str | None = None, grpc: str | None = None
) -> ArmRequest:
    """One side from its options. Raises `PlanError` for an option without `=` or options of a server not ours."""
    settings: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        name = name.strip().lstrip("-")
        if not separator or not name:
            raise PlanError(f"--{label}-option {option}: write it as KEY=VALUE, as in max-queue-delay-us=0")
        settings[name] = value.strip()
    if target not in {"native", "triton"}:
        if "://" not in target and ":" not in target:
            raise PlanError(f"--{label} {target}: give native, triton or a URL like http://127.0.0.1:8000")
        if settings:
            raise PlanError(f"--{label}-option has no effect on {target}, which is not started by us")
    elif grpc is not None:
        raise PlanError(f"--{label}-grpc has no effect on {target}, whose address we choose ourselves")
    return ArmRequest(label=label, target=target, settings=settings, payload=payload, grpc=grpc)


def default_out(model: str) -> Path:
    """results/TIME-MODEL, in UTC."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("results") / f"{stamp}-{model}"


def _run_matrix(experiment: Experiment, combinations: Sequence[Combination], out: Path) -> int:
    """Each combination in a folder of its own, then the index. The worst exit status; Ctrl-C ends it all."""
    from loadgen.report.matrix import MatrixEntry, write_index

    console = Console(highlight=False)
    entries: list[MatrixEntry] = []
    worst = EXIT_VALID
    for number, combination in enumerate(combinations, start=1):
        console.rule(f"{number} of {len(combinations)}: {combination.title}")
        one = msgspec.structs.replace(experiment, transport=combination.transport, payload=combination.payload)
        status, result = run_and_report(one, out / combination.folder)
        entries.append(MatrixEntry(combination, result))
        worst = max(worst, status)
        write_index(out, entries)
        if status == EXIT_INTERRUPTED:
            break
    console.print(f"index: {out / 'index.html'}", soft_wrap=True)
    return worst


def run_and_report(experiment: Experiment, out: Path) -> tuple[int, Result | None]:
    """One comparison with its reports; its exit status, and its result where there is one."""
    from loadgen.analysis import analyse
    from loadgen.report import write_reports
    from loadgen.report.progress import RichProgress
    from loadgen.report.terminal import print_result
    from loadgen.runner import run_experiment
    from loadgen.store import StorageError

    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    try:
        with RichProgress(console) as progress:
            state = run_experiment(experiment, out, progress)
    except StorageError as exc:
        errors.print(f"error: {exc}", style="bold red", soft_wrap=True, markup=False)
        return EXIT_INVALID, None
    if state.error is not None:
        errors.print(f"error: {state.error}", style="bold red", soft_wrap=True, markup=False)
    result = analyse(out)
    write_reports(out, result)
    print_result(result, console)
    if state.state == "interrupted":
        errors.print(f"interrupted; finished blocks are in {out}", style="bold yellow", soft_wrap=True, markup=False)
        return EXIT_INTERRUPTED, result
    return EXIT_VALID if result.valid and state.state == "finished" else EXIT_INVALID, result


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _names_of(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else _names(text)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise PlanError(f"--batch-sizes {text}: give whole numbers separated by commas, as in 1,4,8") from None
