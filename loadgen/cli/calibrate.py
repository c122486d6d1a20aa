"""`abserve calibrate`: options in, generator measured, table and file out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from loadgen.cli.json_output import write_json
from loadgen.records.payloads import PAYLOADS
from loadgen.records.run import Transport

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_TRANSPORTS = ("http", "grpc", "shm")


def calibrate(
    transports: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(_TRANSPORTS),
    payloads: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(PAYLOADS),
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas; others are interpolated.")] = "1,32",
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="Users at batch size 1.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.05, max=600.0, help="Of each measurement of the ceiling.")] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the time and no larger batches: a look.")] = False,
    out: Annotated[Path | None, typer.Option(help="File to store it in, in place of the cache.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write it as JSON there too; - is standard output.")
    ] = None,
) -> None:
    """Measure the load generator itself against a server that does nothing: ceiling, timing error, CPU a request.

    Stored in $XDG_CACHE_HOME/abserve for this machine and these versions, where `abserve compare` finds it.
    """
    from loadgen.report.console import make_console

    errors = make_console(sys.stderr)
    try:
        chosen = _known(transports, _TRANSPORTS, "transports")
        kinds = _known(payloads, PAYLOADS, "payloads")
        sizes = _sizes(batch_sizes)
    except ValueError as exc:
        errors.print(f"error: {exc}", style="bold red", soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from exc
    # Behind the argument checks: grpc takes half a second to import.
    from loadgen.bench.interruption import interruptible
    from loadgen.calibration.measurement import CalibrationRequest
    from loadgen.calibration.measurement import calibrate as measure
    from loadgen.machine.calibration import CalibrationError, default_path, write_calibration
    from loadgen.report.calibration import calibration_document
    from loadgen.report.renderers.terminal import print_document

    request = CalibrationRequest(
        transports=tuple(cast("Transport", name) for name in chosen),
        payloads=kinds,
        batch_sizes=sizes[:1] if quick else sizes,
        concurrency=concurrency,
        seconds=seconds / 10 if quick else seconds,
    )
    try:
        with interruptible():
            calibration = measure(request, lambda text: errors.print(text, style="dim", soft_wrap=True))
        stored = out or default_path(calibration.fingerprint)
        write_calibration(calibration, stored)
    except CalibrationError as exc:
        errors.print(f"error: {exc}", style="bold red", soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from exc
    except OSError as exc:
        remedy = "set TMPDIR to a folder with some hundred MB of room"
        errors.print(f"error: no temporary files: {exc.strerror or exc}; {remedy}", style="bold red", soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from exc
    console = make_console(sys.stderr if json_file == "-" else sys.stdout)
    print_document(calibration_document(calibration), console)
    if stored is not None:
        console.print(f"stored in {stored}", soft_wrap=True, markup=False)
    write_json(calibration, json_file)


def _known(given: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise ValueError(f"--{option} {','.join(wrong) or '(empty)'}: there are {', '.join(known)}")
    return names


def _sizes(given: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in given.split(",") if part.strip()}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise ValueError(f"--batch-sizes {given}: give whole numbers from 1 separated by commas, as in 1,32")
    return sizes
