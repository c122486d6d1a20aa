"""What the arms serve of what their engines do alone, as a table."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.quantities import number, share
from loadgen.records.run import shown
from loadgen.result.result_file import Result
from loadgen.studies.ceiling.analyse import CeilingsFound, EngineShare

CEILING_CAPTION = (
    "Each engine measured by itself when the servers were stopped, copies included, by `abserve engine`. Batch: the "
    "items of a request, or ~ the measured size nearest to the mean executed batch."
)
OPEN_LOOP = " In an open loop the rate that was asked for decides the share."


def ceilings(result: Result) -> doc.Section | None:
    """What each engine does alone, what is served of that, and where there is no such figure."""
    rows = [
        (
            one.cell,
            shown(one.label),
            f"{'~ ' if one.batch_origin == 'mean executed batch' else ''}{one.batch}",
            number(one.engine_images_per_s),
            number(one.served_images_per_s),
            share(one.share),
        )
        for one in result.of(CeilingsFound).shares
    ]
    said = [
        max(own, key=lambda one: one.served_images_per_s).sentence
        for label in result.experiment.labels
        if (own := _most_telling([one for one in result.of(CeilingsFound).shares if one.label == label]))
    ]
    for gap in result.of(CeilingsFound).missing:
        where = "" if gap.cell is None else f" in {gap.cell}"
        said.append(f"{shown(gap.label)}{where} has no ceiling: {gap.reason}.")
    caption = CEILING_CAPTION + (OPEN_LOOP if any(one.offered for one in result.of(CeilingsFound).shares) else "")
    columns = (
        *doc.names("scenario", "arm"),
        *doc.numbers("batch", "engine alone, images/s", "served, images/s", "share"),
    )
    return doc.section(
        "What the engines alone can do",
        doc.Table(columns, rows, caption=caption, grouped=True),
        doc.Items([doc.Item(text) for text in said]),
    )


def _most_telling(shares: list[EngineShare]) -> list[EngineShare]:
    """Closed loops, where the server decides how much is served; open ones where there is nothing else."""
    return [one for one in shares if not one.offered] or shares


SECTIONS = {"Detail": (ceilings,)}
