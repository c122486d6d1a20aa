"""The end of every `abserve serve TARGET`: print the launch plan or the space, or become the server."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from pydantic import ValidationError

from servers.engines.settings import EngineError
from servers.export.manifest import ExportError
from servers.models.files import FolderError
from servers.models.specification import UnknownModelError
from servers.models.weights import WeightsError
from servers.options.command_line import fail, validation_sentence
from servers.options.defaults import OptionError
from servers.options.launch import PROGRAM, LaunchPlan

OURS = str(Path(__file__).resolve().parents[2])
"""The folder with our packages."""
ENGINES = frozenset({"torch", "onnxruntime", "openvino", "jax"})
"""Libraries that read the environment once, when they are imported."""
PRINT_SPACE = "Print what a search for the fastest settings tries here, as one line of JSON, and exit."
PrintLaunch = Annotated[
    bool, typer.Option(help="Print how the server process is started, as one line of JSON, and exit.")
]
PrintSpace = Annotated[bool, typer.Option(help=PRINT_SPACE)]


ERRORS = (UnknownModelError, WeightsError, EngineError, OptionError, ExportError, FolderError)
"""What ends a command with one sentence: its options are wrong, or it failed."""


@contextmanager
def failing(status: int = 1, *more: type[Exception]) -> Iterator[None]:
    """One of these errors, or of `more`, in this block ends the command with its sentence and this exit status; 2 is a
    wrong option."""
    errors: tuple[type[Exception], ...] = (*ERRORS, *more)
    try:
        yield
    except errors as exc:
        fail(str(exc), exc, status)


def become(plan: LaunchPlan) -> None:
    """Replace this process, so that the server gets its PID and signals. A program of ours goes on in this one, which
    has imported much of it, unless libraries are imported that read the environment once."""
    typer.echo(f"starting {plan.title} at {plan.http_url}", err=True)
    if plan.examples:
        typer.echo("\n  ".join(["once it is ready, send it a request:", *plan.examples]), err=True)
    sys.stdout.flush()
    if plan.argv[: len(PROGRAM)] == PROGRAM and ENGINES.isdisjoint(sys.modules):
        os.environ.update(plan.env)
        if not sys.flags.safe_path:  # as if this interpreter had been started with -P
            del sys.path[sys.path[0] == OURS]
        sys.path.insert(0, OURS)
        sys.argv = list(plan.argv[len(PROGRAM) :])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.exit()
    os.execve(plan.argv[0], plan.argv, {**os.environ, **plan.env})


def serve(
    plan: Callable[[], LaunchPlan],
    space: Callable[[], bytes],
    *,
    print_launch: bool,
    print_space: bool,
    out: BinaryIO | None = None,
    start: Callable[[LaunchPlan], None] = become,
) -> None:
    """Print what is asked for to standard output or `out`, or start the server. An error ends the command with its one
    sentence, and with exit status 2 if an option is wrong."""
    out = sys.stdout.buffer if out is None else out
    try:
        if print_space:
            out.write(space())
            return
        launch = plan()
    except ValidationError as exc:
        fail(validation_sentence(exc), exc, status=2)
    except (UnknownModelError, WeightsError, EngineError, OptionError) as exc:
        fail(str(exc), exc, status=2)
    except (ExportError, FolderError) as exc:
        fail(str(exc), exc)
    if print_launch:
        out.write(launch.to_json())
    else:
        start(launch)
