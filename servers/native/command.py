"""`abserve serve native`: checks the options, finds the artefact, and becomes the server process or prints its plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from servers.models.specification import ModelSpecification
    from servers.native.launch import Launch

ENV = "ABSERVE_NATIVE_"


def serve_native(
    model: Annotated[str, typer.Option(envvar=f"{ENV}MODEL", help="A registered model.")] = "openclip_vit_b32",
    payloads: Annotated[
        str,
        typer.Option(envvar=f"{ENV}PAYLOADS", help="Variants to serve, of fp32,uint8,jpeg; default: the model named."),
    ] = "",
    weights: Annotated[
        str, typer.Option(envvar=f"{ENV}WEIGHTS", help="random:SEED, a pretrained tag or a checkpoint file.")
    ] = "random:0",
    host: Annotated[str, typer.Option(envvar=f"{ENV}HOST", help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(envvar=f"{ENV}HTTP_PORT")] = 8100,
    grpc_port: Annotated[int, typer.Option(envvar=f"{ENV}GRPC_PORT", help="0: no gRPC door.")] = 8101,
    engine: Annotated[
        str, typer.Option(envvar=f"{ENV}ENGINE", help="torch, onnxruntime, tensorrt or null (no model).")
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
    queue_timeout_us: Annotated[
        int, typer.Option(envvar=f"{ENV}QUEUE_TIMEOUT_US", help="Longest wait in the queue, then 503; 0: no limit.")
    ] = 0,
    pipeline: Annotated[
        bool,
        typer.Option(envvar=f"{ENV}PIPELINE", help="Gather one batch while another is executed, where the engine can."),
    ] = False,
    max_body_bytes: Annotated[
        int, typer.Option(envvar=f"{ENV}MAX_BODY_BYTES", help="Largest request body; a larger one gets 413.")
    ] = 64 * 2**20,
    max_json_bytes: Annotated[
        int, typer.Option(envvar=f"{ENV}MAX_JSON_BYTES", help="Longest JSON of one request; a longer one gets 413.")
    ] = 32 * 2**20,
    max_held_bytes: Annotated[
        int, typer.Option(envvar=f"{ENV}MAX_HELD_BYTES", help="All requests' bodies together; beyond it 503.")
    ] = 2 * 2**30,
    read_timeout_s: Annotated[
        float, typer.Option(envvar=f"{ENV}READ_TIMEOUT_S", help="Longest time for a request to arrive.")
    ] = 30,
    decode_threads: Annotated[
        int, typer.Option(envvar=f"{ENV}DECODE_THREADS", help="Threads that decode JPEGs; 0: one a core, at most 4.")
    ] = 0,
    max_image_pixels: Annotated[
        int, typer.Option(envvar=f"{ENV}MAX_IMAGE_PIXELS", help="Largest JPEG that is decoded.")
    ] = 40_000_000,
    allow_shared_memory: Annotated[
        bool,
        typer.Option(
            "--allow-shared-memory",
            envvar=f"{ENV}ALLOW_SHARED_MEMORY",
            help="Let clients register shared memory of this machine.",
        ),
    ] = False,
    allow_model_control: Annotated[
        bool,
        typer.Option(
            "--allow-model-control",
            envvar=f"{ENV}ALLOW_MODEL_CONTROL",
            help="Let clients unload and load models.",
        ),
    ] = False,
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
        "payloads": payloads,
        "weights": weights,
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "engine": engine,
        "precision": precision,
        "mode": mode,
        "device": device,
        "threads": threads,
        "max_batch_size": max_batch_size,
        "max_queue_delay_us": max_queue_delay_us,
        "queue_size": queue_size,
        "queue_timeout_us": queue_timeout_us,
        "pipeline": pipeline,
        "max_body_bytes": max_body_bytes,
        "max_json_bytes": max_json_bytes,
        "max_held_bytes": max_held_bytes,
        "read_timeout_s": read_timeout_s,
        "decode_threads": decode_threads,
        "max_image_pixels": max_image_pixels,
        "allow_shared_memory": allow_shared_memory,
        "allow_model_control": allow_model_control,
        "log_level": log_level,
        "added_delay_ms": added_delay_ms,
    }
    from servers.native.launch import LaunchError, check

    try:
        launch = check(options)
        plan = launch.plan(
            {
                specification.name: _artefact(launch, specification, artefacts)
                for specification in launch.needs_artefacts
            }
        )
    except LaunchError as error:
        typer.echo(f"abserve serve native: {error}", err=True)
        raise typer.Exit(1) from error
    if print_launch:
        sys.stdout.buffer.write(plan.to_json())
        return
    sys.stdout.flush()
    os.execve(plan.argv[0], plan.argv, {**os.environ, **plan.env})  # the server gets our PID and our signals


def _artefact(launch: Launch, specification: ModelSpecification, root: Path) -> tuple[Path, dict[str, object] | None]:
    """The exported file, made first when it is missing, and its manifest. Raises `LaunchError`."""
    from servers.engines.interface import EngineError
    from servers.export.errors import ExportError
    from servers.export.executed_file import executed_file
    from servers.models.atomic_folder import FolderError
    from servers.models.weights import WeightsError
    from servers.native.launch import LaunchError

    settings = launch.settings
    try:
        found = executed_file(
            settings.engine,
            settings.precision,
            specification,
            launch.weights,
            root,
            progress=lambda step: typer.echo(step, err=True),
        )
    except (ExportError, WeightsError, EngineError, FolderError) as exc:
        raise LaunchError(str(exc)) from exc
    return found.path.absolute(), None if found.manifest is None else found.manifest.to_dict()
