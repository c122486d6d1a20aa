"""`abserve engine`: one engine measured in process, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from pydantic import Field
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from servers.commands.serving import failing
from servers.engines.factory import check_engine, enter, environment_of
from servers.engines.interface import EngineError
from servers.engines.options import EngineOptions
from servers.engines.processors import nvidia_device_present, wait_policy
from servers.engines.settings import EngineSettings, parse_spinning, resolved_device
from servers.language.engine import DEFAULT_ENGINE, GenerationSettings, generating_environment
from servers.language.specification import is_language_model, language_model
from servers.measuring.measurement import (
    EngineTimes,
    artefact,
    batch_row,
    loaded_engine,
    matrix_tflops,
    quiet_profiler,
    references_of,
)
from servers.models.registry import get_variant
from servers.models.specification import ModelSpecification
from servers.options.command_line import checked, counted, fail, flag_of, is_chosen, settings_of, takes_settings

HELP_GROUP = "Explore"

SCHEMA = "abserve.engine/2"


class MeasurementSettings(EngineOptions):
    """Every field is an option of `abserve engine` and a variable ABSERVE_ENGINE_…"""

    model_config = settings_of("ABSERVE_ENGINE_")

    payload: str = Field("", description="fp32 or uint8, for a model of images: the engine's input.")
    sequence_length: str = Field(
        "", description="Lengths to measure, for a model of sequences; default: the model's. As in 32,128,512."
    )
    batches: str = Field("", description="Batch sizes to measure; default: 1 to 128, on a CPU to 8.")
    max_batch_size: int = Field(0, ge=0, description="Largest batch, as for a server; 0: the largest of --batches.")
    seconds: float = Field(1.0, ge=0.01, le=600, description="Time spent on each batch size.")
    profile: bool = Field(False, description="Then also show the time per kernel.")


@takes_settings(MeasurementSettings)
def engine(
    json: Annotated[Path | None, typer.Option("--json", help="Also write all results to this file.")] = None,
    **options: object,
) -> None:
    """Measure an engine in process: latency, items/s, TFLOP/s, and its share of a matrix product on the same card.

    Of a language model: tokens/s for prompts and for answers, and the share of the memory's bandwidth.
    """
    settings = checked(MeasurementSettings, options)
    console = Console(highlight=False)
    if json is not None and not json.absolute().parent.is_dir():
        fail(f"--json {json}: give the path of a file in a folder that exists", status=2)
    os.environ.update(wait_policy(parse_spinning(settings.spinning)))
    if is_language_model(settings.model):
        _measure_language(settings, json)
        return
    on_cpu = resolved_device(settings.device) == "cpu"
    with failing(2):
        specification = get_variant(settings.model, settings.payload)
        sizes, lengths = _sizes(settings), _lengths(specification, settings)
        requested = settings.engine_settings(settings.max_batch_size or max(sizes))
        requested = replace(requested, pad_to=tuple(sorted({length for along in lengths for length in along.values()})))
        check_engine(specification, requested)
        if settings.device != "auto" or not nvidia_device_present():
            requested.mode_on("cpu" if on_cpu else "cuda")
        enter(environment_of(settings.engine))
        settings = settings.model_copy(update={"weights": specification.pinned(settings.weights).text})
    if settings.profile and on_cpu:
        quiet_profiler()
    with failing(1, OSError), console.status("") as status:

        def say(text: str) -> None:
            if console.is_terminal:
                status.update(text)
            else:
                typer.echo(text, err=True)

        document, profile = _measure(specification, settings, requested, sizes, lengths, say)
    _show(console, specification, document)
    if profile is not None:
        from servers.measuring.profile import show_profile

        show_profile(console, profile)
    if json is not None:
        _write(json, document)
    if wrong := [row for row in document["batches"] if row["fault"] is not None and settings.engine != "null"]:
        for row in wrong:
            console.print(f"WRONG ANSWERS at batch {row['batch']}: {row['fault']}", style="bold red", markup=False)
        raise typer.Exit(1)


def _measure(
    specification: ModelSpecification,
    settings: MeasurementSettings,
    requested: EngineSettings,
    sizes: list[int],
    lengths: list[dict[str, int]],
    say: Callable[[str], None],
) -> tuple[dict[str, Any], list[dict[str, Any]] | str | None]:
    """The document of all results, and the profile of a run that asks for one."""
    weights = specification.pinned(settings.weights)
    say(f"loading {specification.title} into {requested.kind}")
    path, _ = artefact(specification, weights, requested, settings.artefacts)
    references = references_of(specification, weights, lengths)
    with loaded_engine(specification, weights, requested, path, sizes) as (measured, load_seconds):
        device = measured.engine.describe().device
        matrix = None if settings.engine == "null" else matrix_tflops(device, requested.precision)
        times: list[EngineTimes] = []
        for reference, batch in product(references, sizes):
            say(f"measuring batch {batch}, {len(times) + 1} of {len(references) * len(sizes)}")
            times.append(measured.measure(batch, reference, settings.seconds))
        document = {
            "schema": SCHEMA,
            "model": specification.name,
            "item": specification.item,
            "flops_per_item": specification.flops_per_item,
            "engine": asdict(measured.engine.describe()),
            "matrix_product_tflops": matrix,
            "load_seconds": load_seconds,
            "batches": [batch_row(of_batch, specification, matrix) for of_batch in times],
        }
        if not settings.profile:
            return document, None
        from servers.measuring.profile import profile_engine

        profile = profile_engine(measured.engine, specification, times)  # last: it slows everything after it
    if isinstance(profile, str):
        return document | {"profile": [], "profile_missing": profile}, profile
    return document | {"profile": profile}, profile


def _write(path: Path, document: Mapping[str, object]) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2) + b"\n")
    except OSError as exc:
        fail(f"cannot write {path}: {exc.strerror or exc}; choose another file", exc)


def _measure_language(settings: MeasurementSettings, json: Path | None) -> None:
    """Measure an engine that generates tokens: prompts and decoding, by batch and length of the prompt."""
    from servers.measuring.generation import measure_generation, table_of

    for option in ("payload", "mode", "max_batch_size", "seconds", "profile"):
        if is_chosen(settings, option):
            fail(f"{flag_of(option)} has no effect on a language model; leave it out", status=2)
    on_cpu = resolved_device(settings.device) == "cpu"
    name = settings.engine if is_chosen(settings, "engine") else DEFAULT_ENGINE
    with failing(2):
        batches = _numbers("--batches", settings.batches or ("1,4,16" if on_cpu else "1,4,16,64"), "1,8,32")
        lengths = _numbers("--sequence-length", settings.sequence_length or "128", "32,128,512")
        engine = GenerationSettings(
            name, settings.device, settings.precision, slots=max(batches), threads=settings.threads
        )
        engine.check()
        model = language_model(settings.model, settings.weights)
        enter(generating_environment(name))
    with failing():
        document = measure_generation(model, engine, batches, lengths, say=lambda text: typer.echo(text, err=True))
    typer.echo("\n".join(table_of(document)))
    if json is not None:
        _write(json, document)


def _sizes(settings: MeasurementSettings) -> list[int]:
    text, largest = settings.batches, settings.max_batch_size
    if not text:
        sizes = [1, 2, 4, 8, 16, 32, 64, 128] if resolved_device(settings.device) != "cpu" else [1, 2, 4, 8]
        return [size for size in sizes if size <= largest] if largest else sizes
    sizes = _numbers("--batches", text, "1,8,32")
    if 0 < largest < max(sizes):
        raise EngineError(
            f"--max-batch-size {largest} is below {max(sizes)} of --batches: raise it or leave that size out"
        )
    return sizes


def _lengths(specification: ModelSpecification, settings: MeasurementSettings) -> list[dict[str, int]]:
    """The sizes of the model's axis to measure, one mapping from its name per size; an empty one: the defaults."""
    axis, text = specification.main_axis, settings.sequence_length
    if axis is None:
        if text:
            raise EngineError(f"--sequence-length {text}: {specification.name} has no axis of variable size")
        return [{}]
    lengths = _numbers("--sequence-length", text, "32,128,512") if text else [axis.default]
    if max(lengths) > axis.largest:
        raise EngineError(f"--sequence-length {max(lengths)}: {specification.name} takes at most {axis.largest}")
    if settings.profile and len(lengths) > 1:
        raise EngineError(f"--profile takes one --sequence-length, not {text}")
    return [specification.along(length) for length in lengths]


def _numbers(option: str, text: str, example: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise EngineError(f"{option} {text}: give whole numbers from 1 up, as in {example}")
    return [int(part) for part in parts]


def _show(console: Console, specification: ModelSpecification, document: Mapping[str, Any]) -> None:
    engine, matrix = document["engine"], document["matrix_product_tflops"]
    threads, details = engine["threads"], engine["details"]
    console.print(f"{specification.title}, {engine['weights']}", markup=False)
    console.print(
        f"{engine['kind']} {engine['version']}, {engine['precision']}, mode {engine['mode']}, "
        f"{details.get('device_name', engine['device'])}"
        f"{'' if threads is None else ', ' + counted(threads, 'thread')}, loaded in {document['load_seconds']:.1f} s",
        markup=False,
    )
    for key in ("kernels", "plans", "gelu", "nodes_by_provider"):
        if details.get(key):
            console.print(f"{key.replace('_', ' ')}: {details[key]}", markup=False)
    if matrix is not None:
        console.print(f"matrix product on the same device: {matrix:.3g} TFLOP/s (100 % in column share)", markup=False)
    columns = _columns(specification, engine["kind"] == "null", document["batches"])
    table = Table(box=SIMPLE, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console.print(table)


def _columns(specification: ModelSpecification, null: bool, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The cells of the table by column, without empty columns.

    The null engine computes nothing that could be counted or compared.
    """

    def cells(key: str, form: Callable[[float], str], *, computed: bool = False) -> list[str]:
        values = [None if computed and null else row[key] for row in rows]
        return ["–" if value is None else form(value) for value in values]

    def milliseconds(value_ns: float) -> str:
        return f"{value_ns / 1e6:.3f}"

    def rate(value: float) -> str:
        return f"{value:,.{0 if value >= 100 else 2}f}"

    # The share of the engine's own rate that is left with the copies of two batches in flight.
    in_flight = [(row["flights_items_per_second"], row["items_per_second"]) for row in rows]
    columns = {"batch": [str(row["batch"]) for row in rows]}
    for axis in {name: None for row in rows for name in row["sizes"]}:
        columns[axis] = [str(row["sizes"][axis]) for row in rows]
    columns |= {
        "exec ms": cells("execution_ns", milliseconds),
        "call ms": cells("call_ns", milliseconds),
        "p99 ms": cells("call_p99_ns", milliseconds),
        "start ms": cells("start_ns", milliseconds),
        "alone ms": cells("alone_ns", milliseconds),
        f"{specification.item}s/s": cells("items_per_second", rate),
        "in flight/s": cells("flights_items_per_second", rate),
        "ratio": ["–" if flights is None else f"{flights / alone:.1%}" for flights, alone in in_flight],
        "tokens/s": cells("tokens_per_second", rate),
        "TFLOP/s": cells("tflops", "{:.3g}".format, computed=True),
        "share": cells("share_of_matrix_product", "{:.0%}".format, computed=True),
    }
    if "embedding" in specification.kinds.values():
        columns["cosine"] = cells("cosine_to_fp32", "{:.6f}".format, computed=True)
    else:
        columns["error"] = cells("relative_error_to_fp32", "{:.1e}".format, computed=True)
    return {name: column for name, column in columns.items() if set(column) != {"–"}}
