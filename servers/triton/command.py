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
from servers.engines.settings import EngineSettings
from servers.export.errors import ExportError
from servers.launch_plan import LaunchPlan
from servers.models.atomic_folder import FolderError
from servers.models.image_decoder import DecodingSettings
from servers.models.preprocessing import MAX_PIXELS
from servers.models.registry import DEFAULT_MODEL, UnknownModelError, get_variants
from servers.models.weights import WeightsError, WeightsSource, parse_weights
from servers.triton.errors import TritonDiedError, TritonError
from servers.triton.launch import assert_ready, is_loopback, prepare
from servers.triton.repository import PlacedModel
from servers.triton.settings import TritonSettings
from servers.triton.watch import TritonProcess

READY_SECONDS = 330.0
HEALTH_SECONDS = 0.5


def serve_triton(
    model: Annotated[str, typer.Option(envvar="ABSERVE_TRITON_MODEL", help="Registered model.")] = DEFAULT_MODEL,
    payloads: Annotated[
        str,
        typer.Option(
            envvar="ABSERVE_TRITON_PAYLOADS", help="Variants to serve, of fp32,uint8,jpeg; default: the model named."
        ),
    ] = "",
    weights: Annotated[
        str | None,
        typer.Option(
            envvar="ABSERVE_TRITON_WEIGHTS",
            help="random:SEED, a pretrained tag or a checkpoint file; the model's default when left out.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(envvar="ABSERVE_TRITON_HOST", help="Address to listen on; this old a Triton belongs on loopback."),
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(envvar="ABSERVE_TRITON_HTTP_PORT", min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(envvar="ABSERVE_TRITON_GRPC_PORT", min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(envvar="ABSERVE_TRITON_METRICS_PORT", min=1, max=65535)] = 8002,
    engine: Annotated[
        str,
        typer.Option(envvar="ABSERVE_TRITON_ENGINE", help="What executes the model inside Triton's python backend."),
    ] = "onnxruntime",
    precision: Annotated[
        str, typer.Option(envvar="ABSERVE_TRITON_PRECISION", help="fp32, tf32, fp16 or bf16, as the engine offers.")
    ] = "fp32",
    mode: Annotated[str, typer.Option(envvar="ABSERVE_TRITON_MODE", help="auto, or what the engine offers.")] = "auto",
    device: Annotated[
        str, typer.Option(envvar="ABSERVE_TRITON_DEVICE", help="auto, cpu or cuda:N; auto takes a GPU where one is.")
    ] = "auto",
    threads: Annotated[
        int, typer.Option(envvar="ABSERVE_TRITON_THREADS", min=0, help="Intra-op threads on the CPU; 0: all cores.")
    ] = 0,
    max_batch_size: Annotated[
        int | None,
        typer.Option(envvar="ABSERVE_TRITON_MAX_BATCH_SIZE", min=1, help="Default: the model's own."),
    ] = None,
    max_queue_delay_us: Annotated[
        int,
        typer.Option(envvar="ABSERVE_TRITON_MAX_QUEUE_DELAY_US", min=0, help="How long a batch waits for company."),
    ] = 2000,
    queue_size: Annotated[
        int, typer.Option(envvar="ABSERVE_TRITON_QUEUE_SIZE", min=1, help="Requests that may wait; more get 503.")
    ] = 512,
    decode_threads: Annotated[
        int,
        typer.Option(envvar="ABSERVE_TRITON_DECODE_THREADS", min=0, help="Threads that decode JPEGs; 0: up to 4."),
    ] = 0,
    max_image_pixels: Annotated[
        int, typer.Option(envvar="ABSERVE_TRITON_MAX_IMAGE_PIXELS", min=1, help="Largest JPEG that is decoded.")
    ] = MAX_PIXELS,
    artefacts: Annotated[
        Path, typer.Option(envvar="ABSERVE_TRITON_ARTEFACTS", help="Folder of exported models.")
    ] = Path(".artefacts"),
    work_dir: Annotated[
        Path | None,
        typer.Option(envvar="ABSERVE_TRITON_WORK_DIR", help="Model repository. Default: ARTEFACTS/triton/HTTP_PORT."),
    ] = None,
    log_file: Annotated[
        Path | None,
        typer.Option(envvar="ABSERVE_TRITON_LOG_FILE", help="Default: tritonserver.log in the working folder."),
    ] = None,
    print_launch: Annotated[
        bool,
        typer.Option(
            "--print-launch",
            envvar="ABSERVE_TRITON_PRINT_LAUNCH",
            help="Prepare everything, print the command line as JSON and exit: for a supervisor.",
        ),
    ] = False,
) -> None:
    """Run a real tritonserver without a container: the one inside NVIDIA's wheel nvidia-pytriton."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with _stdout_for_results() as results:
        try:
            specification = get_variants(model, payloads)[0]
            text = weights or specification.default_weights
            source = parse_weights(text)
            settings = TritonSettings(
                model=model,
                payloads=payloads,
                weights=text,
                host=host,
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                engine=EngineSettings(
                    kind=engine,
                    precision=precision,
                    mode=mode,
                    device=device,
                    threads=threads,
                    max_batch_size=max_batch_size or specification.max_batch_size,
                ),
                max_queue_delay_us=max_queue_delay_us,
                queue_size=queue_size,
                decoding=DecodingSettings(decode_threads, max_image_pixels),
                artefacts=artefacts,
                work_dir=work_dir,
            )
            plan = _plan(settings, source, console)
            if print_launch:
                results.write(plan.to_json())
                return
            _run(plan, log_file or settings.folder / "tritonserver.log", console)
        except TritonDiedError as exc:
            for line in exc.log_lines:
                console.print(line, markup=False, style="dim")
            _fail(console, exc)
        except (TritonError, UnknownModelError, WeightsError, EngineError, ExportError, FolderError) as exc:
            _fail(console, exc)


def _plan(settings: TritonSettings, weights: WeightsSource, console: Console) -> LaunchPlan:
    """Check the machine before the export, which takes most of a minute, and export only what is executed."""
    from servers.engines.factory import KINDS_WITH_FILE
    from servers.export.executed_file import ExecutedFile, executed_file

    say = partial(console.print, markup=False)
    assert_ready(settings)
    if not is_loopback(settings.host):
        say(f"warning: Triton 2.51 is from 2024 and gets no fixes; nobody untrusted may reach {settings.host}")
    made: dict[str, ExecutedFile] = {}  # JPEG and UINT8 share theirs
    models = []
    for specification in get_variants(settings.model, settings.payloads):
        executed = specification.executed
        engine = settings.engine
        if engine.kind not in KINDS_WITH_FILE:
            models.append(PlacedModel(specification))
            continue
        if executed.name not in made:
            made[executed.name] = executed_file(
                engine.kind, engine.precision, executed, weights, settings.artefacts, progress=say
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
