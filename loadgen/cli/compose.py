"""`abserve compose init`: writes the compose files for an installed abserve without a checkout."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

HELP_GROUP = "Serve"

STACK = ("docker", "docker-compose.yml", ".env.example", "triton_model_repo", "pyproject.toml", "README.md", "LICENSE")
SOURCES = ("servers", "loadgen", "abserve")
"""The images are built from these packages."""

compose = typer.Typer(help="Run both servers, Prometheus, Grafana and Locust in containers.")


@compose.command("init")
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")]) -> None:
    """Write the compose file to DIR, with everything that it mounts or builds from."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"{folder} is not an empty folder; choose a new one.")
    try:
        write_stack(folder)
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written ({error.strerror}); choose another folder.") from error
    typer.echo(
        f"Wrote {folder}. Nothing has to be set; .env.example lists what can be.\n\n"
        f"  cd {folder}\n"
        "  docker compose up --wait                  # with an NVIDIA GPU\n"
        "  docker compose --profile cpu up --wait    # without one"
    )


def write_stack(folder: Path) -> None:
    """Write everything that `docker compose up` needs into `folder`. Raises OSError."""
    packages = {name: Path(str(files(name))) for name in SOURCES}
    root = packages["loadgen"] / "stack"
    if not root.is_dir():
        root = packages["loadgen"].parent  # of a checkout
    sources = {name: root / name for name in STACK} | packages
    left_out = shutil.ignore_patterns("__pycache__", "stack", "_packages", "*.onnx")
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=left_out)
        else:
            shutil.copy2(source, folder / name)
