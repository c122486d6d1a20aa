"""Ends a command with an error message, and writes a record as JSON to the file of `--json`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import typer

EXIT_USAGE = 2


def fail(message: str, status: int = EXIT_USAGE) -> NoReturn:
    """End the command with one sentence on standard error."""
    complain(message)
    raise typer.Exit(status)


def complain(message: str, style: str = "bold red", kind: str = "error") -> None:
    """Print one sentence on standard error."""
    from loadgen.report.renderers.terminal import make_console

    make_console(sys.stderr).print(f"{kind}: {message}", style=style, soft_wrap=True)


def check_files(files: Mapping[str, str | Path | None]) -> None:
    """End the command before it measures if a file to write, by its option, has no folder; `-` is standard output."""
    for option, given in files.items():
        path = None if given in (None, "-") else Path(str(given))
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            fail(f"{option} {path}: give the path of a file in a folder that exists")


def write_json(document: object, target: str | None) -> None:
    """Write to the file `target`; `-` is standard output, None is nowhere. A file that cannot be written ends the
    command."""
    import msgspec

    if target is None:
        return
    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    if target == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return
    try:
        Path(target).write_bytes(text)
    except OSError as exc:
        fail(f"--json {target} cannot be written: {exc.strerror or exc}")
