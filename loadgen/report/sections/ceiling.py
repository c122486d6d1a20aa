"""Sections of the ceilings: what each engine does without its server."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.base.quantities import number, share
from loadgen.findings.ceiling import CeilingsFound
from loadgen.records.run import shown
from loadgen.report.charts import rate_unit
from loadgen.verdict.result import Result

CAPTION = (
    "Each engine was measured alone when the servers were stopped, copies included, by `abserve engine`. Batch: the "
    "items of a request, or ~ the measured size nearest to the mean executed batch."
)


OPEN_LOOP = " In an open loop the requested rate limits the share."


def ceilings(result: Result) -> doc.Section | None:
    """Each engine's ceiling, the share of it that is served, and why a ceiling is missing."""
    finding, unit = result.of(CeilingsFound), rate_unit(result)
    rows = [
        (
            entry.workload,
            shown(entry.label),
            f"{'~ ' if entry.batch_origin == 'mean executed batch' else ''}{entry.batch}",
            number(entry.engine_images_per_s),
            number(entry.served_images_per_s),
            share(entry.share),
        )
        for entry in finding.shares
    ]
    sentences = []
    for label in result.experiment.labels:
        shares = [entry for entry in finding.shares if entry.label == label]
        # Prefer a closed loop: in an open loop the rate, not the server, decides the served throughput.
        if shares:
            closed = [entry for entry in shares if not entry.offered]
            sentences.append(max(closed or shares, key=lambda entry: entry.served_images_per_s).sentence)
    for gap in finding.missing:
        where = "" if gap.workload is None else f" in {gap.workload}"
        sentences.append(f"{result.names[gap.label]}{where} has no ceiling: {gap.reason}.")
    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers("batch", f"engine alone, {unit}", f"served, {unit}", "share"),
    )
    caption = CAPTION + (OPEN_LOOP if any(entry.offered for entry in finding.shares) else "")
    return doc.section(
        "Engine ceilings",
        doc.Table(columns, rows, caption=caption, grouped=True),
        doc.Items([doc.Item(text) for text in sentences]),
    )


SECTIONS = {"Detail": (ceilings,)}
