"""`abserve serve native`: checks the options, finds the artefact, and becomes the server process or prints its plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from servers.native.launch import Launch

ENV = "ABSERVE_NATIVE_"


def serve_native(
    model: Annotated[str, typer.Option(envvar=f"{ENV}MODEL", help="A registered model.")] = "openclip_vit_b32",
    weights: Annotated[
        str, typer.Option(envvar=f"{ENV}WEIGHTS", help="random:SEED, a pretrained tag or a checkpoint file.")
    ] = "random:0",
    host: Annotated[str, typer.Option(envvar=f"{ENV}HOST", help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(envvar=f"{ENV}HTTP_PORT")] = 8100,
    grpc_port: Annotated[
        int, typer.Option(envvar=f"{ENV}GRPC_PORT", help="Kept for the gRPC door; nothing listens there yet.")
    ] = 8101,
    engine: Annotated[
        str, typer.Option(envvar=f"{ENV}ENGINE", help="torch, onnxruntime or null (no model).")
    ] = "torch",
    precision: Annotated[str, typer.Option(envvar=f"{ENV}PRECISION", help="fp32, tf32, fp16 or bf16.")] = "fp32",
    mode: Annotated[str, typer.Option(envvar=f"{ENV}MODE", help="auto, or what the engine offers.")] = "auto",
    device: Annotated[str, typer.Option(envvar=f"{ENV}DEVICE", help="auto, cpu or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(envvar=f"{ENV}THREADS", help="CPU threads; 0: all cores.")] = 0,
    max_batch_size: Annotated[int, typer.Option(envvar=f"{ENV}MAX_BATCH_SIZE")] = 32,
    max_queue_delay_us: Annotated[
        int, typer.Option(envvar=f"{ENV}MAX_QUEUE_DELAY_US", help="Longest wait for others to join a batch.")
    ] = 2000,
    queue_size: Annotated[
        int, typer.Option(envvar=f"{ENV}QUEUE_SIZE", help="Requests that may wait; the next one gets 503.")
    ] = 512,
    artefacts: Annotated[
        Path, typer.Option(envvar=f"{ENV}ARTEFACTS", help="Folder of exported files; made when missing.")
    ] = Path(".artefacts"),
    log_level: Annotated[str, typer.Option(envvar=f"{ENV}LOG_LEVEL", help="debug, info, warning or error.")] = "info",
    added_delay_ms: Annotated[float, typer.Option(envvar=f"{ENV}ADDED_DELAY_MS", hidden=True)] = 0,
    print_launch: Annotated[
        bool, typer.Option(help="Print how the server process is started, as one line of JSON, and exit.")
    ] = False,
) -> None:
    """Serve a model over the Open Inference Protocol, with PyTorch or ONNX Runtime inside."""
    options: dict[str, Any] = {
        "model": model,
        "weights": weights,
        "host": host,
        "http_port": http_port,
        "engine": engine,
        "precision": precision,
        "mode": mode,
        "device": device,
        "threads": threads,
        "max_batch_size": max_batch_size,
        "max_queue_delay_us": max_queue_delay_us,
        "queue_size": queue_size,
        "log_level": log_level,
        "added_delay_ms": added_delay_ms,
    }
    if not 1 <= grpc_port <= 65535:
        raise typer.BadParameter(f"{grpc_port} is not a port, 1 to 65535", param_hint="--grpc-port")
    from servers.native.launch import LaunchError, check

    try:
        launch = check(options)
        plan = launch.plan(*_artefact(launch, artefacts) if launch.needs_artefact else (None, None))
    except LaunchError as error:
        typer.echo(f"abserve serve native: {error}", err=True)
        raise typer.Exit(1) from error
    if print_launch:
        sys.stdout.buffer.write(plan.to_json())
        return
    sys.stdout.flush()
    os.execve(plan.argv[0], plan.argv, {**os.environ, **plan.env})  # the server gets our PID and our signals


def _artefact(launch: Launch, root: Path) -> tuple[Path, dict[str, object]]:
    """The exported file and its manifest, made first when it is missing. Raises `LaunchError`."""
    from servers.engines.interface import EngineError
    from servers.export.artefacts import ensure_artefact
    from servers.export.errors import ExportError
    from servers.models.atomic_folder import FolderError
    from servers.models.weights import WeightsError
    from servers.native.launch import LaunchError

    try:
        artefact = ensure_artefact(
            launch.specification, launch.weights, root, progress=lambda step: typer.echo(step, err=True)
        )
    except (ExportError, WeightsError, EngineError, FolderError) as exc:
        raise LaunchError(str(exc)) from exc
    return artefact.path.absolute(), artefact.manifest.to_dict()
