"""What the engines alone can do and what is served of that, as rows of text."""

from __future__ import annotations

from loadgen.analysis.ceilings import EngineShare
from loadgen.analysis.result import Result
from loadgen.quantities import number, share

TITLE = "What the engines alone can do"
CEILING_HEADINGS = ("scenario", "arm", "batch", "engine alone, images/s", "served, images/s", "share")
NUMBERS = (2, 3, 4, 5)
"""Columns of numbers."""
CAPTION = (
    "Each engine measured by itself when the servers were stopped, copies included, by `abserve engine`. Batch: the "
    "items of a request, or ~ the measured size nearest to the mean executed batch."
)
OPEN_LOOP = "In an open loop the rate that was asked for decides the share."


def ceiling_rows(result: Result) -> list[tuple[str, ...]]:
    """One row a scenario and arm."""
    return [
        (
            one.cell,
            one.label.upper(),
            f"{'~ ' if one.batch_origin == 'mean executed batch' else ''}{one.batch}",
            number(one.engine_images_per_s),
            number(one.served_images_per_s),
            share(one.share),
        )
        for one in result.ceilings
    ]


def ceiling_caption(result: Result) -> str:
    """How to read the rows."""
    return f"{CAPTION} {OPEN_LOOP}" if any(one.offered for one in result.ceilings) else CAPTION


def ceiling_sentences(result: Result) -> list[str]:
    """Of each arm the cell in which it serves most, then what is missing and why."""
    said = [
        max(own, key=lambda one: one.served_images_per_s).sentence
        for label in ("a", "b")
        if (own := _most_telling([one for one in result.ceilings if one.label == label]))
    ]
    for gap in result.ceilings_missing:
        where = "" if gap.cell is None else f" in {gap.cell}"
        said.append(f"{gap.label.upper()}{where} has no ceiling: {gap.reason}.")
    return said


def _most_telling(shares: list[EngineShare]) -> list[EngineShare]:
    """Closed loops, where the server decides how much is served; open ones where there is nothing else."""
    return [one for one in shares if not one.offered] or shares
