"""Engine ceilings and the share of them that the arms serve, as a table."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.probes.ceiling.analyse import CeilingsFound
from loadgen.quantities import number, share
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
    found, unit = result.of(CeilingsFound), rate_unit(result)
    rows = [
        (
            one.workload,
            shown(one.label),
            f"{'~ ' if one.batch_origin == 'mean executed batch' else ''}{one.batch}",
            number(one.engine_images_per_s),
            number(one.served_images_per_s),
            share(one.share),
        )
        for one in found.shares
    ]
    said = []
    for label in result.experiment.labels:
        own = [one for one in found.shares if one.label == label]
        # Prefer a closed loop: in an open loop the rate, not the server, decides the served throughput.
        if own:
            closed = [one for one in own if not one.offered]
            said.append(max(closed or own, key=lambda one: one.served_images_per_s).sentence)
    for gap in found.missing:
        where = "" if gap.workload is None else f" in {gap.workload}"
        said.append(f"{shown(gap.label)}{where} has no ceiling: {gap.reason}.")
    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers("batch", f"engine alone, {unit}", f"served, {unit}", "share"),
    )
    caption = CAPTION + (OPEN_LOOP if any(one.offered for one in found.shares) else "")
    return doc.section(
        "Engine ceilings",
        doc.Table(columns, rows, caption=caption, grouped=True),
        doc.Items([doc.Item(text) for text in said]),
    )


SECTIONS = {"Detail": (ceilings,)}
