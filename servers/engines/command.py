"""`abserve engine`: one engine measured in process, batch by batch."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from servers.engines.factory import build_engine, check_engine
from servers.engines.interface import EngineDescription, EngineError
from servers.engines.processors import nvidia_device_present
from servers.engines.settings import KINDS, EngineSettings
from servers.models.registry import UnknownModelError, get_variant
from servers.models.weights import WeightsError, WeightsSource, parse_weights, pin
from servers.options import EngineOptions, checked, fail, settings_of, takes_settings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from servers.contract.tensors import Array
    from servers.engines.measurement import BatchMeasurement
    from servers.engines.profiling.profile import EngineProfile
    from servers.models.specification import ModelSpecification

SCHEMA = "abserve.engine/1"
_PICTURES = 16


class MeasurementSettings(EngineOptions):
    """Every field is an option of `abserve engine` and a variable ABSERVE_ENGINE_…"""

    model_config = settings_of("ABSERVE_ENGINE_")

    payload: str = Field("fp32", description="fp32 or uint8: the engine's input.")
    batches: str = Field("", description="Batch sizes to measure; default: 1 to 128, on a CPU to 8.")
    max_batch_size: int = Field(0, ge=0, description="Largest batch, as for a server; 0: the largest of --batches.")
    seconds: float = Field(1.0, ge=0.01, le=600, description="Time spent on each batch size.")
    profile: bool = Field(False, description="Then also show the time per kernel.")


@takes_settings(MeasurementSettings)
def engine(
    json: Annotated[Path | None, typer.Option("--json", help="Also write all results to this file.")] = None,
    **options: object,
) -> None:
    """Measure an engine in process: latency, images/s, TFLOP/s, and its share of a matrix product on the same card."""
    settings = checked(MeasurementSettings, options)
    console = Console(highlight=False)
    if json is not None and not json.absolute().parent.is_dir():
        fail(f"--json {json}: give the path of a file in a folder that exists", status=2)
    try:
        specification = get_variant(settings.model, settings.payload)
        weights = parse_weights(specification.default_weights if settings.weights is None else settings.weights)
        sizes = _sizes(settings)
        requested = settings.engine_settings(settings.max_batch_size or max(sizes))
        check_engine(specification, requested)
        if settings.device != "auto" or not nvidia_device_present():
            requested.mode_on("cuda" if _on_gpu(settings.device) else "cpu")
        source = pin(weights, specification.find_pretrained)
    except (UnknownModelError, WeightsError, EngineError) as exc:
        fail(str(exc), exc, status=2)
    if settings.profile and not _on_gpu(settings.device):
        # torch reads it when it is imported; otherwise its profiler reports a missing GPU as an error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        with console.status("loading and measuring"):
            description, matrix, load_seconds, results, profiled = _measure(
                specification, source, settings, requested, sizes
            )
    except (WeightsError, EngineError, OSError) as exc:
        fail(str(exc), exc)
    _show(console, specification, description, matrix, load_seconds, results)
    if profiled is not None:
        from servers.engines.profiling.profile import show_profile

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
            fail(f"cannot write {json}: {exc.strerror or exc}", exc)


def _measure(
    specification: ModelSpecification,
    weights: WeightsSource,
    settings: MeasurementSettings,
    requested: EngineSettings,
    sizes: list[int],
) -> tuple[EngineDescription, float | None, float, list[BatchMeasurement], EngineProfile | None]:
    from servers.engines.measurement import matrix_tflops, measure_engine

    path = _artefact(specification, weights, settings)
    pictures, reference = _reference(specification, weights)
    built = build_engine(specification, weights, requested, path)
    try:
        started_ns = time.perf_counter_ns()
        built.load()
        load_seconds = (time.perf_counter_ns() - started_ns) / 1e9
        matrix = None if settings.engine == "null" else matrix_tflops(built.describe().device, settings.precision)
        results = measure_engine(built, specification, sizes, reference, pictures, settings.seconds, matrix)
        description = built.describe()
        profiled = None
        if settings.profile:  # last, because it slows everything after it
            from servers.engines.profiling.profile import profile_engine

            profiled = profile_engine(built, specification, results)
        return description, matrix, load_seconds, results, profiled
    finally:
        built.close()


def _artefact(specification: ModelSpecification, weights: WeightsSource, settings: MeasurementSettings) -> Path | None:
    """The file that the engine executes, exported first when it is missing; a plan must exist."""
    if not KINDS[settings.engine].executes_file:
        return None
    from servers.export.artefacts import executed_file
    from servers.export.errors import ExportError
    from servers.models.atomic_folder import FolderError

    try:
        return executed_file(settings.engine, settings.precision, specification, weights, settings.artefacts).path
    except (ExportError, FolderError) as exc:
        raise EngineError(str(exc)) from exc


def _reference(specification: ModelSpecification, weights: WeightsSource) -> tuple[Array, npt.NDArray[np.float32]]:
    """Photographs as the engine gets them, and the answers of the model's own module in FP32 on the CPU."""
    import torch

    from servers.export.parity import corpus_pixels
    from servers.models.preprocessing import normalise

    pixels = corpus_pixels(specification, _PICTURES)
    images = normalise(pixels, specification.preprocessing)
    module = specification.load_module(weights)
    with torch.inference_mode():
        expected = module(torch.from_numpy(images)).numpy()
    return (images if specification.payload == "fp32" else pixels), expected


def _sizes(settings: MeasurementSettings) -> list[int]:
    text, largest = settings.batches, settings.max_batch_size
    if not text:
        sizes = [1, 2, 4, 8, 16, 32, 64, 128] if _on_gpu(settings.device) else [1, 2, 4, 8]
        return [size for size in sizes if size <= largest] if largest else sizes
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise EngineError(f"--batches {text}: give whole numbers from 1 up, as in 1,8,32")
    sizes = [int(part) for part in parts]
    if 0 < largest < max(sizes):
        raise EngineError(
            f"--max-batch-size {largest} is below {max(sizes)} of --batches: raise it or leave that size out"
        )
    return sizes


def _on_gpu(device: str) -> bool:
    """Whether the engine will run on a GPU, known before any library is loaded."""
    return device.startswith("cuda") or (device == "auto" and nvidia_device_present())


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
        console.print(f"matrix product on the same device: {matrix:.3g} TFLOP/s (100 % in column share)", markup=False)
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
