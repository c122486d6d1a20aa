"""A calibration of the load generator, for the terminal."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.quantities import number, share
from loadgen.records.machine import CEILING_SHARE_LIMIT, Calibration, CalibrationCell, TimingError

HEADINGS = ("images\n/s", "users", "CPU\nµs", "core", "idle\np50", "\np99", "load\np50", "\np99", "\nat")
"""In two lines each: then a row fits in 80 columns."""


def calibration_document(calibration: Calibration) -> doc.Document:
    """One row for each transport, payload and batch size, then what the columns mean."""
    host = calibration.host
    found = doc.section(
        f"The load generator on {host.get('cpu_model')}, {host.get('cpu_count')} cores, kernel {host.get('kernel')}, "
        f"Python {host.get('python')}; {calibration.made_at}",
        doc.Table((*doc.names("cell"), *doc.numbers(*HEADINGS)), [_row(cell) for cell in calibration.cells]),
        *(doc.Text(note) for note in notes(calibration)),
    )
    return doc.Document("Calibration", (doc.Chapter("", (found,) if found else ()),))


def _row(cell: CalibrationCell) -> tuple[str, ...]:
    idle, loaded = (*cell.timing, None, None)[:2]
    return (
        f"{cell.transport} {cell.payload} ×{cell.batch_size}",
        number(cell.images_per_s) + ("" if cell.limited_by == "generator" else "*"),
        str(cell.concurrency),
        number(cell.cpu_us_per_request),
        share(cell.generator_cpu_share),
        *_errors(idle),
        *_errors(loaded),
        "–" if loaded is None else share(loaded.ceiling_share),
    )


def _errors(timing: TimingError | None) -> tuple[str, str]:
    if timing is None:
        return "–", "–"
    p50, p99 = ("–" if value is None else _signed(value / 1000.0) for value in (timing.p50_us, timing.p99_us))
    return p50, p99


def _signed(value: float) -> str:
    return ("+" if value >= 0.0 else "−") + number(abs(value), 2)


def notes(calibration: Calibration) -> list[str]:
    """What a reader must know to use the figures."""
    lines = [
        "Images/s: the ceiling of one generator process with so many users; abserve compare flags a cell above "
        f"{share(CEILING_SHARE_LIMIT)} of it. CPU: the generator's, a request; core: of one, at the ceiling.",
        "Idle, loaded: timing error in ms, which is reported latency less the time for which the server kept the "
        "request, carrying both ways included; with one user, and under load at that share of the ceiling.",
    ]
    if any(cell.limited_by != "generator" for cell in calibration.cells):
        lines.append(
            "* The generator used less than 90 % of a core: the sink or other programs gave the limit, so the true "
            "ceiling is higher. Close other programs and calibrate again for a sharper figure."
        )
    return lines + [f"Not measured: {problem}" for problem in calibration.problems]
