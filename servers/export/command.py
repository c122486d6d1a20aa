"""`abserve export` and `abserve triton-repo`: make what servers execute and what configures them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from servers.engines.interface import EngineError
from servers.export.errors import ExportError
from servers.models.atomic_folder import FolderError
from servers.models.registry import DEFAULT_MODEL, SPECIFICATIONS, UnknownModelError, get_specification, get_variant
from servers.models.weights import WeightsError, parse_weights

if TYPE_CHECKING:
    from servers.export.artefacts import Artefact


class Target(StrEnum):
    """What `abserve export --to` makes."""

    ONNX = "onnx"


def export(
    model: Annotated[
        str, typer.Option("--model", envvar="ABSERVE_EXPORT_MODEL", help="A registered model.")
    ] = DEFAULT_MODEL,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            envvar="ABSERVE_EXPORT_WEIGHTS",
            help="random:SEED, a pretrained tag or a checkpoint file; the model's default when left out.",
        ),
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload",
            envvar="ABSERVE_EXPORT_PAYLOAD",
            help="fp32 or uint8: what the file takes; that of the model named when left out.",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", envvar="ABSERVE_EXPORT_PRECISION", help="fp32 or fp16: what the file holds.")
    ] = "fp32",
    to: Annotated[Target, typer.Option("--to", envvar="ABSERVE_EXPORT_TO", help="What to make.")] = Target.ONNX,
    artefacts: Annotated[
        Path, typer.Option("--artefacts", envvar="ABSERVE_EXPORT_ARTEFACTS", help="Folder that holds the artefacts.")
    ] = Path(".artefacts"),
    force: Annotated[
        bool, typer.Option("--force", envvar="ABSERVE_EXPORT_FORCE", help="Export even when it is up to date.")
    ] = False,
) -> None:
    """Export a model from torch to ONNX, prove that both compute the same, and write a manifest beside the file."""
    from servers.export.artefacts import ensure_artefact

    console = Console(highlight=False, soft_wrap=True)
    try:
        specification = get_specification(model) if payload is None else get_variant(model, payload)
        source = parse_weights(specification.default_weights if weights is None else weights)
        with console.status("starting") as status:

            def progress(step: str) -> None:
                status.update(step)
                if not console.is_terminal:
                    console.print(step, markup=False, emoji=False)

            artefact = ensure_artefact(
                specification, source, artefacts, precision=precision, force=force, progress=progress
            )
    except (UnknownModelError, WeightsError, EngineError, ExportError, FolderError) as exc:
        Console(stderr=True).print(
            f"error: {exc}", style="bold red", highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        raise typer.Exit(1) from exc
    _show(console, artefact, to)


def triton_repo(
    out: Annotated[
        Path, typer.Option("--out", envvar="ABSERVE_TRITON_REPO_OUT", help="Root of the model repository.")
    ] = Path("triton_model_repo"),
) -> None:
    """Generate config.pbtxt of every registered model for Triton's native backends."""
    from servers.export.model_repository import write_model_repository

    for path in write_model_repository(out, SPECIFICATIONS.values()):
        Console(highlight=False, soft_wrap=True).print(f"wrote {path}", markup=False, emoji=False)


def _show(console: Console, artefact: Artefact, to: Target) -> None:
    manifest = artefact.manifest
    took = f"exported in {manifest.seconds:.1f} s" if artefact.made_now else f"up to date, made {manifest.created_at}"
    lines = {
        to.value: f"{artefact.path} ({took})",
        "model": f"{manifest.model} version {manifest.model_version}, {manifest.precision}, opset {manifest.opset}",
        "weights": manifest.weights,
        "size": f"{manifest.bytes / 1e6:.1f} MB, SHA-256 {manifest.sha256}",
        "parity": "; ".join(
            f"batch {m.batch}: cosine {m.cosine_min:.7f}, max abs {m.max_abs:.2g}" for m in manifest.parity
        ),
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    for name, text in lines.items():
        console.print(f"{name:<9} {text}", markup=False, emoji=False)
