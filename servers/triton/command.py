"""`abserve serve triton`: prepares the embedded Triton, then prints its command line or runs it in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console

from servers.cli.defaults import OptionError
from servers.cli.launch import LaunchPlan
from servers.cli.options import checked, fail, takes_settings
from servers.engines.interface import EngineError
from servers.export.manifest import ExportError, Manifest
from servers.language.specification import is_language_model
from servers.models.files import FolderError
from servers.models.registry import UnknownModelError, get_variants
from servers.models.weights import WeightsError, parse_weights, pin
from servers.triton.installation import TritonDiedError, TritonError
from servers.triton.launch import (
    assert_python,
    assert_ready,
    choose_backend,
    does_not_pad,
    find_installation,
    is_loopback,
    prepare,
    prepare_language,
    prepare_repository,
)
from servers.triton.process import TritonProcess
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings

READY_SECONDS = 330.0
HEALTH_SECONDS = 0.5


@takes_settings(TritonSettings)
def serve_triton(
    print_launch: Annotated[
        bool,
        typer.Option(
            "--print-launch",
            envvar="ABSERVE_TRITON_PRINT_LAUNCH",
            help="Prepare everything, print the command line as JSON for a supervisor, and exit.",
            rich_help_panel="Output",
        ),
    ] = False,
    **options: object,
) -> None:
    """Run a real tritonserver: one installed here, as in NVIDIA's images, or that of the wheel nvidia-pytriton."""
    settings = checked(TritonSettings, options)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with _stdout_for_results() as results:
        try:
            plan = _plan(settings, console)
            if print_launch:
                results.write(plan.to_json())
                return
            _run(plan, settings.log_file or settings.folder / "tritonserver.log", console)
        except (OptionError, UnknownModelError, WeightsError) as exc:
            fail(str(exc), exc, status=2)
        except (TritonError, EngineError, ExportError, FolderError) as exc:
            if isinstance(exc, TritonDiedError):
                for line in exc.log_lines:
                    console.print(line, style="dim")
            fail(str(exc), exc)


def _plan(settings: TritonSettings, console: Console) -> LaunchPlan:
    """Check the options and the machine, export the model if its file is missing, and lay out the repository."""
    from servers.engines.factory import check_engine, environment_of
    from servers.engines.padding import padding_of, parse_pad_to
    from servers.engines.settings import engine_kind, precision_on
    from servers.export.artefacts import current_plan, executed_file
    from servers.export.tensorrt import library_version

    installation = find_installation(settings, announce=console.print)
    if not is_loopback(settings.host) and installation.version == "2.51":
        console.print(
            f"warning: Triton 2.51 is from 2024 and gets no fixes; only trusted clients may reach {settings.host}"
        )
    if settings.triton_repository is not None:
        return prepare_repository(settings, installation)
    if is_language_model(settings.model):
        return prepare_language(settings, installation, console.print)
    specifications = get_variants(settings.model, settings.payloads)
    assert_ready(settings)  # before the export, which takes most of a minute
    requested = parse_weights(settings.weights, specifications[0].default_weights)
    weights = pin(requested, specifications[0].find_pretrained)

    def has_plan() -> bool:
        precision, release = precision_on("cuda", settings.precision), library_version()
        batch = settings.max_batch_size or specifications[0].max_batch_size
        return all(
            current_plan(precision, specification.executed, weights, settings.artefacts, batch, release)
            for specification in specifications
        )

    backend = choose_backend(settings, installation, has_plan)
    try:
        engine = settings.resolved_engine(backend)
        check_engine(specifications[0].executed, engine)
        padding_of(specifications[0], parse_pad_to(settings.pad_to))
        engine.check_here()
        elsewhere = backend == "python" and environment_of(engine.kind) is not None
    except EngineError as exc:
        raise OptionError(str(exc)) from exc
    if elsewhere:
        raise OptionError(
            f"Triton's python backend executes in this environment, and the libraries of the {engine.kind} engine "
            "are in another one; use abserve serve native"
        )
    if backend != "python":
        if any(specification.payload == "jpeg" for specification in specifications):
            assert_python(installation, "decoding JPEG", "send another payload")
        if parse_pad_to(settings.pad_to):
            raise OptionError(f"--pad-to: {does_not_pad(backend)}; leave the option out, or use --backend python")
    release = library_version() if backend == "tensorrt" else None  # the python backend's is found with the bindings
    if backend == "tensorrt" and release is None:
        raise OptionError(
            "libnvinfer, which the tensorrt backend loads, was not found, so its version is unknown; add its folder to "
            "LD_LIBRARY_PATH, or use --backend onnxruntime"
        )
    files: dict[str, tuple[Path, Manifest | None]] = {}  # JPEG and UINT8 execute the same file
    models = []
    for specification in specifications:
        executed = specification.executed
        if engine_kind(engine.kind).executes is None:
            models.append(PlacedModel(specification))
            continue
        if executed.name not in files:
            files[executed.name] = executed_file(
                engine.kind,
                engine.precision,
                executed,
                weights,
                settings.artefacts,
                console.print,
                max_batch_size=engine.max_batch_size,
                release=release,
            )
        path, manifest = files[executed.name]
        models.append(PlacedModel(specification, path, None if manifest is None else manifest.to_dict()))
    return prepare(settings, models, weights, installation, backend)


def _run(plan: LaunchPlan, log_file: Path, console: Console) -> None:
    """Run in the foreground until a signal. Raises `TritonDiedError` if the server ends before."""
    asked_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_end.set())
    console.print(f"starting {plan.title}; log: {log_file}")
    with TritonProcess(plan, log_file) as server:
        if not server.wait_ready(READY_SECONDS, asked_to_end):
            return
        console.print(f"ready: {plan.model} at {plan.http_url} (HTTP), {plan.grpc_address} (gRPC), {plan.metrics_url}")
        while not asked_to_end.wait(HEALTH_SECONDS):
            server.assert_alive()
        console.print("stopping")


@contextmanager
def _stdout_for_results() -> Iterator[BinaryIO]:
    """Keep the file descriptor of stdout for the result; other output there, also of C libraries, goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(stdout), "wb") as results:
            yield results
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
