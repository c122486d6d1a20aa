"""`abserve calibrate`: options in, generator measured, table and file out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from loadgen.cli.output import announce, check_files, console_for, fail, print_report, write_json
from loadgen.experiment.plan import unknown
from loadgen.experiment.settings import LOAD, MEASUREMENT, OUTPUT
from loadgen.records.payloads import IMAGE_PAYLOADS
from loadgen.records.targets import TRANSPORTS

HELP_GROUP = "Machine"

EXIT_FAILED = 1
_LOAD, _MEASUREMENT, _OUTPUT = (partial(typer.Option, rich_help_panel=panel) for panel in (LOAD, MEASUREMENT, OUTPUT))
T = TypeVar("T", bound=str)


def calibrate(
    transports: Annotated[str, _LOAD(metavar="LIST", help="Transports to measure.")] = ",".join(TRANSPORTS),
    payloads: Annotated[str, _LOAD(metavar="LIST", help="Payloads to measure.")] = ",".join(IMAGE_PAYLOADS),
    batch_sizes: Annotated[
        str, _LOAD(metavar="LIST", help="Batch sizes to measure; others are interpolated.")
    ] = "1,32",
    concurrency: Annotated[int, _LOAD(min=1, max=1000, metavar="N", help="Users at batch size 1.")] = 16,
    seconds: Annotated[
        float, _MEASUREMENT(min=0.05, max=600.0, metavar="NUMBER", help="Seconds per measurement of the ceiling.")
    ] = 2.0,
    quick: Annotated[
        bool, _MEASUREMENT("--quick", help="Take a tenth of the time and the smallest batch size, for rough figures.")
    ] = False,
    out: Annotated[Path | None, _OUTPUT(metavar="FILE", help="Store the calibration here, not in the cache.")] = None,
    json_file: Annotated[
        str | None, _OUTPUT("--json", metavar="FILE", help="Also write it as JSON; - is standard output.")
    ] = None,
) -> None:
    """Measure the load generator against a server that does nothing: its ceiling, timing error and CPU per request.

    Stored in $XDG_CACHE_HOME/abserve for this machine and these versions, where `abserve compare` finds it.
    """
    chosen = _chosen(transports, TRANSPORTS, "--transports")
    kinds = _chosen(payloads, IMAGE_PAYLOADS, "--payloads")
    sizes = _sizes(batch_sizes)
    check_files({"--out": out, "--json": json_file})
    announce("starting the load generator and a server that does nothing")
    # After the argument checks: grpc takes half a second to import.
    from loadgen.measure.calibrate import calibrate as measure
    from loadgen.measure.interruption import interruptible
    from loadgen.measure.machine import MachineRecordError, cache_path, store_record
    from loadgen.report.contents import calibration_document

    errors = console_for(errors=True)
    try:
        with interruptible():
            calibration = measure(
                lambda text: errors.print(text, style="dim", soft_wrap=True),
                transports=chosen,
                payloads=kinds,
                batch_sizes=sizes[:1] if quick else sizes,
                concurrency=concurrency,
                seconds=seconds / 10 if quick else seconds,
            )
        stored = out or cache_path("calibration", calibration.fingerprint)
        store_record(stored, calibration, "choose another --out")
    except MachineRecordError as exc:
        fail(str(exc), EXIT_FAILED)
    except OSError as exc:
        fail(f"no temporary files: {exc.strerror or exc}; set TMPDIR to a folder with 500 MB free", EXIT_FAILED)
    print_report(calibration_document(calibration), json_file)
    if stored is not None:
        console_for(json_file).print(f"stored in {stored}", soft_wrap=True)
    write_json(calibration, json_file)


def _chosen(text: str, choices: tuple[T, ...], option: str) -> tuple[T, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if wrong := [name for name in names if name not in choices]:
        fail(unknown(option, wrong[0], choices))
    if not names:
        fail(f"{option}: give at least one of {', '.join(choices)}")
    return tuple(choice for name in names for choice in choices if choice == name)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        fail(f"--batch-sizes {text}: give whole numbers from 1 separated by commas, as in 1,32")
    return sizes
