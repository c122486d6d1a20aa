"""Mounts the commands of the server side; their modules import torch and its like only inside the functions, so that
the command line answers at once."""

from __future__ import annotations

import typer

from servers.doctor import doctor
from servers.engines.command import engine
from servers.export.command import export, triton_repo
from servers.gpu.command import gpu_exporter, gpu_info
from servers.models.command import samples
from servers.native.command import serve_native
from servers.triton.command import serve_triton


def commands(app: typer.Typer) -> None:
    """Add `doctor`, `engine`, `export`, `gpu-info`, `gpu-exporter`, `serve native`, `serve triton`, `samples` and
    `triton-repo` to the command line."""
    app.command("doctor")(doctor)
    app.command("engine")(engine)
    app.command("export")(export)
    app.command("gpu-info")(gpu_info)
    app.command("gpu-exporter")(gpu_exporter)
    serve = typer.Typer(help="Run one server in the foreground.", no_args_is_help=True)
    serve.command("native", short_help="The native server, with PyTorch or ONNX Runtime inside.")(serve_native)
    serve.command("triton", short_help="A real tritonserver, no container.")(serve_triton)
    app.add_typer(serve, name="serve")
    app.command("samples", hidden=True)(samples)
    app.command("triton-repo", hidden=True)(triton_repo)
