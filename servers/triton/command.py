"""`abserve serve triton`: prepare the embedded Triton and print how to launch it, or run it in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import typer
from rich.console import Console

from servers.engines.interface import EngineError
from servers.export.errors import ExportError
from servers.launch_plan import LaunchPlan
from servers.models.atomic_folder import FolderError
from servers.models.registry import UnknownModelError, get_variants
from servers.models.weights import WeightsError, WeightsSource, parse_weights, pin
from servers.options import checked, takes_settings
from servers.triton.errors import TritonDiedError, TritonError
from servers.triton.launch import assert_ready, is_loopback, prepare
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings
from servers.triton.watch import TritonProcess

READY_SECONDS = 330.0
HEALTH_SECONDS = 0.5


@takes_settings(TritonSettings)
def serve_triton(
    print_launch: Annotated[
        bool,
        typer.Option(
            "--print-launch",
            envvar="ABSERVE_TRITON_PRINT_LAUNCH",
            help="Prepare everything, print the command line as JSON and exit: for a supervisor.",
        ),
    ] = False,
    **options: object,
) -> None:
    """Run a real tritonserver without a container: the one inside NVIDIA's wheel nvidia-pytriton."""
    settings = checked(TritonSettings, options)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with _stdout_for_results() as results:
        try:
            specification = get_variants(settings.model, settings.payloads)[0]
            asked_for = parse_weights(settings.weights or specification.default_weights)
            plan = _plan(settings, pin(asked_for, specification.find_pretrained), console)
            if print_launch:
                results.write(plan.to_json())
                return
            _run(plan, settings.log_file or settings.folder / "tritonserver.log", console)
        except TritonDiedError as exc:
            for line in exc.log_lines:
                console.print(line, markup=False, style="dim")
            _fail(console, exc)
        except (TritonError, UnknownModelError, WeightsError, EngineError, ExportError, FolderError) as exc:
            _fail(console, exc)


def _plan(settings: TritonSettings, weights: WeightsSource, console: Console) -> LaunchPlan:
    """Check the machine before the export, which takes most of a minute, and export only what is executed."""
    from servers.engines.factory import KINDS_WITH_FILE
    from servers.export.artefacts import ExecutedFile, executed_file

    say = partial(console.print, markup=False)
    assert_ready(settings)
    if not is_loopback(settings.host):
        say(f"warning: Triton 2.51 is from 2024 and gets no fixes; nobody untrusted may reach {settings.host}")
    made: dict[str, ExecutedFile] = {}  # JPEG and UINT8 share theirs
    models = []
    for specification in get_variants(settings.model, settings.payloads):
        executed = specification.executed
        if settings.engine not in KINDS_WITH_FILE:
            models.append(PlacedModel(specification))
            continue
        if executed.name not in made:
            made[executed.name] = executed_file(
                settings.engine, settings.precision, executed, weights, settings.artefacts, progress=say
            )
        file = made[executed.name]
        models.append(PlacedModel(specification, file.path, None if file.manifest is None else file.manifest.to_dict()))
    return prepare(settings, models, weights, announce=say)


def _run(plan: LaunchPlan, log_file: Path, console: Console) -> None:
    """In the foreground until a signal asks for the end; raises `TritonDiedError` when it ends by itself."""
    asked_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_end.set())
    console.print(f"starting {plan.title}; log: {log_file}", markup=False)
    with TritonProcess(plan, log_file) as server:
        if not server.wait_ready(READY_SECONDS, asked_to_end):
            return
        console.print(
            f"ready: {plan.model} at {plan.http_url} (HTTP), {plan.grpc_address} (gRPC), {plan.metrics_url}",
            markup=False,
        )
        while not asked_to_end.wait(HEALTH_SECONDS):
            server.assert_alive()
        console.print("stopping", markup=False)


@contextmanager
def _stdout_for_results() -> Iterator[BinaryIO]:
    """Stdout's file descriptor for the result alone; whatever else writes there, C libraries too, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "wb") as results:
            yield results
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _fail(console: Console, exc: Exception) -> NoReturn:
    console.print(f"error: {exc}", markup=False, style="bold red")
    raise typer.Exit(1) from exc
