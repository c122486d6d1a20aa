"""`abserve samples`: write a model's sample inputs for a load generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from servers.models.registry import DEFAULT_MODEL, UnknownModelError, get_variant
from servers.options import fail


def samples(
    out: Annotated[Path, typer.Option("--out", envvar="ABSERVE_SAMPLES_OUT", help="Folder to write.")],
    model: Annotated[
        str, typer.Option("--model", envvar="ABSERVE_SAMPLES_MODEL", help="A registered model.")
    ] = DEFAULT_MODEL,
) -> None:
    """Write sample inputs (photographs as FP32, UINT8 and JPEG) and samples.json; does nothing when up to date."""
    from servers.models.atomic_folder import FolderError
    from servers.models.samples import write_samples

    try:
        specification = get_variant(model, "fp32")
    except UnknownModelError as exc:
        fail(str(exc), exc, status=2)
    try:
        written = write_samples(specification, out)
    except FolderError as exc:
        fail(str(exc), exc)
    Console().print(
        f"{'wrote' if written else 'up to date:'} {out}", highlight=False, soft_wrap=True, markup=False, emoji=False
    )
