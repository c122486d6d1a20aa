"""`abserve serve`: one server in the foreground."""

from __future__ import annotations

import typer

from servers.commands.native import serve_native
from servers.commands.plain import serve_fastapi, serve_litserve
from servers.commands.triton import serve_triton
from servers.commands.vllm import serve_vllm

HELP_GROUP = "Serve"

serve = typer.Typer(help="Run one server in the foreground.")
serve.command("native")(serve_native)
serve.command("triton")(serve_triton)
serve.command("fastapi")(serve_fastapi)
serve.command("litserve")(serve_litserve)
serve.command("vllm")(serve_vllm)
