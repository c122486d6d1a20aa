"""`abserve export` and `abserve triton-repo`: make the files that servers execute and the configurations of Triton."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import Field
from rich.console import Console

from servers.commands.serving import failing
from servers.engines.factory import enter, environment_of
from servers.engines.options import ModelOptions
from servers.engines.settings import EngineSettings
from servers.export.manifest import FUSED, JAX, OPSETS, ExportError, FileForm, executed_form
from servers.export.tensorrt import (
    TENSORRT_RELEASE,
    bindings_version,
    container_command,
    ensure_plan,
    library_version,
)
from servers.models.registry import DEFAULT_MODEL, get_specification, get_variant, payload_variants
from servers.models.specification import choose_from
from servers.options import defaults
from servers.options.command_line import checked, fail, settings_of, takes_settings

if TYPE_CHECKING:
    from servers.export.artefacts import Artefact
    from servers.export.manifest import ParityMeasurement
    from servers.models.specification import ModelSpecification
    from servers.models.weights import WeightsSource

HELP_GROUP = "Serve"


JAX_ENGINE = "onnxruntime-jax"
"""The engine whose libraries make a file with the operators `jax`."""


class ExportSettings(ModelOptions):
    """Every field is an option of `abserve export` and a variable ABSERVE_EXPORT_…"""

    model_config = settings_of("ABSERVE_EXPORT_")

    payload: str = Field("", description="fp32 or uint8: the file's input; default: that of --model.")
    precision: str = Field(
        defaults.PRECISION,
        description="fp32, fp16 or int8: the file's weights; for TensorRT also tf32, for AOTInductor fp32; auto: what "
        "servers here execute by default.",
    )
    operators: str = Field(
        "",
        description="standard, for every runtime, fused, ONNX Runtime's own, or jax, standard ones made from the "
        "model's JAX function; default: fused, and standard for TensorRT.",
    )
    to: Literal["onnx", "tensorrt", "aotinductor"] = Field("onnx", description="The file to make.")
    force: bool = Field(False, description="Export even when it is up to date.")
    max_batch_size: int = Field(defaults.MAX_BATCH_SIZE, ge=1, description="Largest batch of a TensorRT plan.")


@takes_settings(ExportSettings)
def export(**options: object) -> None:
    """Export a model from torch to ONNX, check that both compute the same, and write a manifest beside the file.

    With --to tensorrt also build the plan with TensorRT's Python package or trtexec, and print a container command that
    builds it. With --to aotinductor compile a package for this CPU.
    """
    from servers.export.artefacts import check_form, ensure_artefact

    settings = checked(ExportSettings, options)
    console = Console(highlight=False, soft_wrap=True)
    with failing(2):
        specification = get_variant(settings.model, settings.payload)
        precision, form = _form(settings)
        check_form(specification, form)
        if form.operators == JAX:
            enter(environment_of(JAX_ENGINE))
        source = specification.pinned(settings.weights)
    with failing():
        with console.status("starting") as status:

            def progress(step: str) -> None:
                status.update(step)
                if not console.is_terminal:
                    _print(console, step)

            artefact = ensure_artefact(
                specification, source, settings.artefacts, form=form, force=settings.force, progress=progress
            )
        _show(console, artefact)
        if settings.to == "tensorrt":
            _build_plan(console, specification, source, artefact, precision, settings)


def triton_repo(
    out: Annotated[
        Path, typer.Option("--out", envvar="ABSERVE_TRITON_REPO_OUT", help="Root of the model repository.")
    ] = Path("triton_model_repo"),
    model: Annotated[
        str, typer.Option("--model", envvar="ABSERVE_TRITON_REPO_MODEL", help="The model; see abserve models.")
    ] = DEFAULT_MODEL,
) -> None:
    """Generate config.pbtxt of a model, with each of its payloads, for Triton's native backends."""
    from servers.triton.config import write_model_repository

    with failing(2):
        variants = payload_variants(get_specification(model))
    try:
        written = write_model_repository(out, variants)
    except OSError as exc:
        fail(f"cannot write {exc.filename or out}: {exc.strerror or exc}; choose another --out", exc)
    for path in written:
        _print(Console(highlight=False, soft_wrap=True), f"wrote {path}")


def _form(settings: ExportSettings) -> tuple[str, FileForm]:
    """The precision of the engine that executes the file, and the form of the ONNX file."""
    if settings.to == "aotinductor":
        from servers.export.torch_export import package_target

        if settings.operators:
            raise ExportError("a package of AOTInductor has no ONNX operators; leave --operators out")
        requested = EngineSettings("aotinductor", settings.precision)
        requested.check_here()
        return requested.precision, executed_form("aotinductor", requested.precision, package_target())
    if settings.operators and settings.operators not in OPSETS:
        raise ExportError(f"--operators {settings.operators}: {choose_from(settings.operators, OPSETS)}")
    if settings.to == "tensorrt" and settings.operators == FUSED:
        raise ExportError("TensorRT has none of the fused operators; use --operators standard")
    engine = "onnxruntime" if settings.to == "onnx" else "tensorrt"
    precision = EngineSettings(engine, settings.precision).precision
    if engine == "tensorrt" and precision == "int8":
        raise ExportError("abserve builds no INT8 plan for TensorRT; use --precision fp16, or --to onnx")
    stored = "fp32" if engine == "tensorrt" and precision == "tf32" else precision
    return precision, FileForm(stored, settings.operators or executed_form(engine, precision).operators)


def _build_plan(
    console: Console,
    specification: ModelSpecification,
    weights: WeightsSource,
    artefact: Artefact,
    precision: str,
    settings: ExportSettings,
) -> None:
    """Build the plan for Python's TensorRT, else for an installed Triton's, else for the container's."""
    from servers.export.artefacts import plan_request

    release = bindings_version() or library_version() or TENSORRT_RELEASE
    here = plan_request(
        settings.artefacts, specification, weights, artefact, precision, settings.max_batch_size, release
    )
    here.folder.mkdir(parents=True, exist_ok=True)
    _print(console, f"container {container_command(replace(here, release=TENSORRT_RELEASE))}")
    seconds = ensure_plan(here, lambda step: _print(console, step), force=settings.force)
    size = f"{here.path.stat().st_size / 1e6:.1f} MB"
    took = "kept; --force builds it again" if seconds is None else f"{size}, TensorRT {release}, {seconds:.1f} s"
    _print(console, f"plan      {here.path} ({took})")


def _show(console: Console, artefact: Artefact) -> None:
    manifest = artefact.manifest
    took = f"exported in {manifest.seconds:.1f} s" if artefact.made_now else f"up to date, made {manifest.created_at}"
    operators = f"opset {manifest.opset}, {manifest.operators} operators"
    lines = {
        "file" if manifest.opset is None else "onnx": f"{artefact.path} ({took})",
        "model": f"{manifest.model} version {manifest.model_version}, {manifest.precision}, "
        + (operators if manifest.target is None else f"compiled for {manifest.target}"),
        "weights": manifest.weights + (f", revision {manifest.weights_revision}" if manifest.weights_revision else ""),
        **({} if manifest.quantisation is None else {"int8": manifest.quantisation}),
        "size": f"{manifest.bytes / 1e6:.1f} MB, SHA-256 {manifest.sha256}",
        "parity": "; ".join(map(_parity, manifest.parity)) or "not compared: your file is executed unchanged",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    for name, text in lines.items():
        _print(console, f"{name:<9} {text}")


def _parity(measured: ParityMeasurement) -> str:
    numbers = {
        "cosine": None if measured.cosine_min is None else f"{measured.cosine_min:.7f}",
        "relative error": None if measured.relative_error is None else f"{measured.relative_error:.2g}",
        "max abs": None if measured.max_abs is None else f"{measured.max_abs:.2g}",
        "same highest class": None if measured.top1 is None else f"{measured.top1:.0%}",
    }
    along = "".join(f" × {name} {size}" for name, size in measured.sizes.items())
    shown = ", ".join(f"{name} {number}" for name, number in numbers.items() if number is not None)
    return f"batch {measured.batch}{along}{' padded' if measured.padded else ''}: {shown}"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, emoji=False)
