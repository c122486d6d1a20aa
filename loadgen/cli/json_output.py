"""A record as JSON, where `--json` says."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

EXIT_USAGE = 2


def write_json(document: object, target: str | None) -> None:
    """To the file `target`; `-` is standard output, None is nowhere. Ends the command, with one sentence, where the
    file cannot be written."""
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
        typer.echo(f"error: --json {target} cannot be written: {exc.strerror or exc}", err=True)
        raise typer.Exit(EXIT_USAGE) from exc
