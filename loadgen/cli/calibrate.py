"""`abserve calibrate`: options in, generator measured, table and file out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from loadgen.cli.json_output import fail, write_json
from loadgen.experiment.plan import unknown
from loadgen.records.payloads import PAYLOADS
from loadgen.transport.transports import TRANSPORTS

EXIT_FAILED = 1
_LOAD = "Load"
T = TypeVar("T", bound=str)


def calibrate(
    transports: Annotated[
        str, typer.Option(metavar="LIST", help="Transports to measure.", rich_help_panel=_LOAD)
    ] = ",".join(TRANSPORTS),
    payloads: Annotated[
        str, typer.Option(metavar="LIST", help="Payloads to measure.", rich_help_panel=_LOAD)
    ] = ",".join(PAYLOADS),
    batch_sizes: Annotated[
        str,
        typer.Option(metavar="LIST", help="Batch sizes to measure; others are interpolated.", rich_help_panel=_LOAD),
    ] = "1,32",
    concurrency: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Users at batch size 1.", rich_help_panel=_LOAD)
    ] = 16,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.05,
            max=600.0,
            metavar="NUMBER",
            help="Seconds per measurement of the ceiling.",
            rich_help_panel="Measurement",
        ),
    ] = 2.0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Take a tenth of the time and the smallest batch size only, for rough figures.",
            rich_help_panel="Measurement",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Store the calibration here, not in the cache.", rich_help_panel="Output"),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Also write it as JSON; - is standard output.", rich_help_panel="Output"
        ),
    ] = None,
) -> None:
    """Measure the load generator against a server that does nothing: its ceiling, timing error and CPU per request.

    Stored in $XDG_CACHE_HOME/abserve for this machine and these versions, where `abserve compare` finds it.
    """
    chosen = _known(transports, TRANSPORTS, "--transports")
    kinds = _known(payloads, PAYLOADS, "--payloads")
    sizes = _sizes(batch_sizes)
    # Behind the argument checks: grpc takes half a second to import.
    from loadgen.bench.interruption import interruptible
    from loadgen.calibration.measurement import CalibrationRequest
    from loadgen.calibration.measurement import calibrate as measure
    from loadgen.machine.calibration import CalibrationError, default_path, write_calibration
    from loadgen.report.calibration import calibration_document
    from loadgen.report.console import make_console
    from loadgen.report.renderers.terminal import print_document

    request = CalibrationRequest(
        transports=chosen,
        payloads=kinds,
        batch_sizes=sizes[:1] if quick else sizes,
        concurrency=concurrency,
        seconds=seconds / 10 if quick else seconds,
    )
    errors = make_console(sys.stderr)
    try:
        with interruptible():
            calibration = measure(request, lambda text: errors.print(text, style="dim", soft_wrap=True))
        stored = out or default_path(calibration.fingerprint)
        write_calibration(calibration, stored)
    except CalibrationError as exc:
        fail(str(exc), EXIT_FAILED)
    except OSError as exc:
        fail(f"no temporary files: {exc.strerror or exc}; set TMPDIR to a folder with 500 MB free", EXIT_FAILED)
    console = make_console(sys.stderr if json_file == "-" else sys.stdout)
    print_document(calibration_document(calibration), console)
    if stored is not None:
        console.print(f"stored in {stored}", soft_wrap=True)
    write_json(calibration, json_file)


def _known(given: str, known: tuple[T, ...], option: str) -> tuple[T, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    if wrong := [name for name in names if name not in known]:
        fail(unknown(option, wrong[0], known))
    if not names:
        fail(f"{option}: give at least one of {', '.join(known)}")
    return tuple(one for name in names for one in known if one == name)


def _sizes(given: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in given.split(",") if part.strip()}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        fail(f"--batch-sizes {given}: give whole numbers from 1 separated by commas, as in 1,32")
    return sizes
