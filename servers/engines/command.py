"""`abserve engine`: one engine measured in process, batch by batch."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from servers.engines.interface import EngineDescription, EngineError
from servers.engines.settings import EngineSettings
from servers.models.registry import DEFAULT_MODEL, UnknownModelError, get_variant
from servers.models.weights import WeightsError, WeightsSource, parse_weights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from servers.contract.tensors import Array
    from servers.engines.measurement import BatchMeasurement
    from servers.engines.profiling.records import EngineProfile
    from servers.models.specification import ModelSpecification

SCHEMA = "abserve.engine/1"
ENV = "ABSERVE_ENGINE_"
QUIET_KINETO = "6"
"""torch's profiler else calls it an error that a machine without a GPU has none."""
_PICTURES = 16


def engine(
    kind: Annotated[
        str, typer.Option("--engine", envvar=f"{ENV}ENGINE", help="torch, onnxruntime, tensorrt or null.")
    ] = "torch",
    precision: Annotated[str, typer.Option(envvar=f"{ENV}PRECISION", help="fp32, tf32, fp16 or bf16.")] = "fp32",
    mode: Annotated[str, typer.Option(envvar=f"{ENV}MODE", help="auto, or what the engine offers.")] = "auto",
    payload: Annotated[str, typer.Option(envvar=f"{ENV}PAYLOAD", help="fp32 or uint8: what the engine gets.")] = "fp32",
    model: Annotated[str, typer.Option(envvar=f"{ENV}MODEL", help="A registered model.")] = DEFAULT_MODEL,
    weights: Annotated[
        str | None, typer.Option(envvar=f"{ENV}WEIGHTS", help="random:SEED, a pretrained tag or a checkpoint file.")
    ] = None,
    batches: Annotated[
        str, typer.Option(envvar=f"{ENV}BATCHES", help="Batch sizes to measure; default: 1 to 128, on a CPU to 8.")
    ] = "",
    max_batch_size: Annotated[
        int, typer.Option(envvar=f"{ENV}MAX_BATCH_SIZE", min=0, help="As a server has it; 0: the largest of --batches.")
    ] = 0,
    device: Annotated[str, typer.Option(envvar=f"{ENV}DEVICE", help="auto, cpu or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(envvar=f"{ENV}THREADS", help="CPU threads; 0: all cores.")] = 0,
    seconds: Annotated[
        float, typer.Option(envvar=f"{ENV}SECONDS", min=0.01, max=600, help="Time spent on each batch size.")
    ] = 1.0,
    artefacts: Annotated[
        Path, typer.Option(envvar=f"{ENV}ARTEFACTS", help="Folder of exported files; made when missing.")
    ] = Path(".artefacts"),
    profile: Annotated[
        bool, typer.Option("--profile", envvar=f"{ENV}PROFILE", help="Then also show where the time goes, by kernel.")
    ] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
) -> None:
    """Measure an engine in process: latency, images/s, TFLOP/s, and its share of a matrix product on the same card."""
    console = Console(highlight=False)
    if json is not None and not json.absolute().parent.is_dir():
        _fail(f"--json {json}: give the path of a file in a folder that exists")
    try:
        specification = get_variant(model, payload)
        source = parse_weights(specification.default_weights if weights is None else weights)
        sizes = _sizes(batches, device)
        settings = EngineSettings(kind, precision, mode, device, threads, _largest(sizes, max_batch_size))
        if profile and not _on_gpu(device):  # torch reads it when it is imported
            os.environ.setdefault("KINETO_LOG_LEVEL", QUIET_KINETO)
        with console.status("loading and measuring"):
            description, matrix, load_seconds, results, profiled = _measure(
                specification, source, settings, sizes, seconds, artefacts, profile
            )
    except (UnknownModelError, WeightsError, EngineError, OSError) as exc:
        _fail(str(exc), exc)
    _show(console, specification, description, matrix, load_seconds, results)
    if profiled is not None:
        from servers.engines.profiling.table import show_profile

        show_profile(console, profiled)
    if json is not None:
        import msgspec

        document = {
            "schema": SCHEMA,
            "model": specification.name,
            "flops_per_item": specification.flops_per_item,
            "engine": asdict(description),
            "matrix_product_tflops": matrix,
            "load_seconds": load_seconds,
            "batches": [asdict(result) for result in results],
            **({} if profiled is None else profiled.as_document()),
        }
        try:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2) + b"\n")
        except OSError as exc:
            _fail(f"cannot write {json}: {exc.strerror or exc}", exc)


def _measure(
    specification: ModelSpecification,
    weights: WeightsSource,
    settings: EngineSettings,
    sizes: list[int],
    seconds: float,
    artefacts: Path,
    profile: bool,
) -> tuple[EngineDescription, float | None, float, list[BatchMeasurement], EngineProfile | None]:
    import time

    from servers.engines.factory import build_engine
    from servers.engines.measurement import matrix_tflops, measure_engine

    path = _artefact(specification, weights, settings, artefacts)
    pictures, reference = _reference(specification, weights)
    built = build_engine(specification, weights, settings, path)
    try:
        started_ns = time.perf_counter_ns()
        built.load()
        load_seconds = (time.perf_counter_ns() - started_ns) / 1e9
        matrix = None if settings.kind == "null" else matrix_tflops(built.describe().device, settings.precision)
        results = measure_engine(built, specification, sizes, reference, pictures, seconds, matrix)
        description = built.describe()
        profiled = None
        if profile:  # last of all: it slows whatever comes after it
            from servers.engines.profiling.run import profile_engine

            profiled = profile_engine(built, specification, results)
        return description, matrix, load_seconds, results, profiled
    finally:
        built.close()


def _artefact(
    specification: ModelSpecification, weights: WeightsSource, settings: EngineSettings, root: Path
) -> Path | None:
    """The file that the engine executes, exported first when it is missing; a plan must be there."""
    from servers.engines.factory import KINDS_WITH_FILE

    if settings.kind not in KINDS_WITH_FILE:
        return None
    from servers.export.errors import ExportError
    from servers.export.executed_file import executed_file
    from servers.models.atomic_folder import FolderError

    try:
        return executed_file(settings.kind, settings.precision, specification, weights, root).path
    except (ExportError, FolderError) as exc:
        raise EngineError(str(exc)) from exc


def _reference(specification: ModelSpecification, weights: WeightsSource) -> tuple[Array, npt.NDArray[np.float32]]:
    """Photographs as the engine gets them, and what the model's own module makes of them in FP32 on the CPU."""
    import torch

    from servers.export.parity import corpus_pixels
    from servers.models.preprocessing import normalise

    pixels = corpus_pixels(specification, _PICTURES)
    images = normalise(pixels, specification.preprocessing)
    module = specification.load_module(weights)
    with torch.inference_mode():
        expected = module(torch.from_numpy(images)).numpy()
    return (images if specification.payload == "fp32" else pixels), expected


def _sizes(text: str, device: str) -> list[int]:
    if not text:
        return [1, 2, 4, 8, 16, 32, 64, 128] if _on_gpu(device) else [1, 2, 4, 8]
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise EngineError(f"--batches {text}: give whole numbers from 1 up, as in 1,8,32")
    return sizes


def _on_gpu(device: str) -> bool:
    """Before anything is loaded that could tell."""
    from servers.engines.processors import nvidia_device_present

    return device.startswith("cuda") or (device == "auto" and nvidia_device_present())


def _largest(sizes: list[int], max_batch_size: int) -> int:
    """What the engine is loaded for, which decides its buffers and its CUDA graphs."""
    if 0 < max_batch_size < max(sizes):
        raise EngineError(
            f"--max-batch-size {max_batch_size} is below {max(sizes)} of --batches: raise it or leave that size out"
        )
    return max_batch_size or max(sizes)


def _show(
    console: Console,
    specification: ModelSpecification,
    description: EngineDescription,
    matrix: float | None,
    load_seconds: float,
    results: list[BatchMeasurement],
) -> None:
    d = description
    console.print(f"{specification.title}, {d.weights}", markup=False)
    console.print(
        f"{d.kind} {d.version}, {d.precision}, mode {d.mode}, {d.details.get('device_name', d.device)}"
        f"{'' if d.threads is None else f', {d.threads} threads'}, loaded in {load_seconds:.1f} s",
        markup=False,
    )
    for key in ("kernels", "gelu", "nodes_by_provider"):
        if d.details.get(key):
            console.print(f"{key.replace('_', ' ')}: {d.details[key]}", markup=False)
    if matrix is not None:
        console.print(f"matrix product on the same device: {matrix:.3g} TFLOP/s (share: of that)", markup=False)
    table = Table(box=SIMPLE)
    for name in ("batch", "exec ms", "call ms", "p99 ms", "images/s", "TFLOP/s", "share", "cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            str(result.batch),
            "–" if result.execution_ns is None else f"{result.execution_ns / 1e6:.3f}",
            f"{result.call_ns / 1e6:.3f}",
            "–" if result.call_p99_ns is None else f"{result.call_p99_ns / 1e6:.3f}",
            f"{result.images_per_second:,.{0 if result.images_per_second >= 100 else 2}f}",
            "–" if d.kind == "null" else f"{result.tflops:.3g}",
            "–" if result.share_of_matrix_product is None else f"{result.share_of_matrix_product:.0%}",
            "–" if d.kind == "null" else f"{result.cosine_to_fp32:.6f}",
        )
    console.print(table)


def _fail(message: str, cause: Exception | None = None) -> NoReturn:
    Console(stderr=True).print(
        f"error: {message}", style="bold red", highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    raise typer.Exit(1) from cause
