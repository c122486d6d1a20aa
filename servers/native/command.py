"""`abserve serve native`: checks the options, finds the artefact, and becomes the server process or prints its plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servers.defaults import ARTEFACTS
from servers.native.settings import NativeSettings
from servers.options import takes_settings

if TYPE_CHECKING:
    from servers.models.specification import ModelSpecification
    from servers.native.launch import Launch


@takes_settings(NativeSettings)
def serve_native(
    artefacts: Annotated[
        Path,
        typer.Option(envvar="ABSERVE_NATIVE_ARTEFACTS", help="Folder of exported files; created if missing."),
    ] = Path(ARTEFACTS),
    print_launch: Annotated[
        bool, typer.Option(help="Print how the server process is started, as one line of JSON, and exit.")
    ] = False,
    **options: object,
) -> None:
    """Serve a model over the Open Inference Protocol, with PyTorch or ONNX Runtime inside."""
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
    from servers.export.artefacts import executed_file
    from servers.export.errors import ExportError
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
