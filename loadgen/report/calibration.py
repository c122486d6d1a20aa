"""A calibration of the load generator, for the terminal."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.quantities import number, share
from loadgen.records.machine import CEILING_SHARE_LIMIT, Calibration, CalibrationWorkload, TimingError

HEADINGS = ("images\n/s", "users", "CPU\nµs", "core", "idle\np50", "\np99", "load\np50", "\np99", "\nat")
"""Headings in two lines, so that a row fits in 80 columns."""


def calibration_document(calibration: Calibration) -> doc.Document:
    """A row per transport, payload and batch size, then the meaning of the columns."""
    host = calibration.host
    section = doc.Section(
        f"The load generator on {host.get('cpu_model')}, {host.get('cpu_count')} cores, kernel {host.get('kernel')}, "
        f"Python {host.get('python')}; {calibration.made_at}",
        (
            doc.Table(
                (*doc.names("workload"), *doc.numbers(*HEADINGS)),
                [_row(workload) for workload in calibration.workloads],
            ),
            *map(doc.Text, notes(calibration)),
        ),
    )
    return doc.Document("Calibration", (doc.Chapter("", (section,)),))


def _row(workload: CalibrationWorkload) -> tuple[str, ...]:
    idle, loaded = (*workload.timing, None, None)[:2]
    return (
        f"{workload.transport} {workload.payload} ×{workload.batch_size}",
        number(workload.images_per_s) + ("" if workload.limited_by == "generator" else "*"),
        str(workload.concurrency),
        number(workload.cpu_us_per_request),
        share(workload.generator_cpu_share),
        *_errors(idle),
        *_errors(loaded),
        "–" if loaded is None else share(loaded.ceiling_share),
    )


def _errors(timing: TimingError | None) -> tuple[str, ...]:
    return tuple(
        "–" if value is None else ("+" if value >= 0.0 else "−") + number(abs(value) / 1000.0, 2)
        for value in ((None, None) if timing is None else (timing.p50_us, timing.p99_us))
    )


def notes(calibration: Calibration) -> list[str]:
    """How to read the figures."""
    lines = [
        "Images/s: the most that one generator process sends with this many users; abserve compare warns above "
        f"{share(CEILING_SHARE_LIMIT)} of it. CPU: the generator's CPU time per request. Core: its share of one core "
        "at that ceiling.",
        "Idle, load: the timing error in ms, which is the reported latency minus the time that the server held the "
        "request, so it includes the way there and back. Idle is with one user, load at that share of the ceiling.",
    ]
    if any(workload.limited_by != "generator" for workload in calibration.workloads):
        lines.append(
            "* The generator used less than 90 % of a core, so the sink or other programs set the limit and the true "
            "ceiling is higher. Close other programs and calibrate again."
        )
    return lines + [f"Not measured: {problem}" for problem in calibration.problems]
