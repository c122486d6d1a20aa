"""What taking one cause away from one arm changes in one cell, from the stored blocks of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.analysis.causes.differences import Difference, difference, mean_pairs
from loadgen.analysis.summaries import summarise_blocks
from loadgen.records.causes import CauseName, Counterfactual, Untested
from loadgen.records.run import Label, Record
from loadgen.statistics.ratios import estimate_ratio
from loadgen.storage.stored_run import StoredBlock


class CauseEffect(Record, frozen=True, kw_only=True):
    """One arm in one cell, as it is against without the cause: mean request times in ms."""

    label: Label
    changed: str
    """What was done."""
    as_is_ms: float
    without_ms: float
    saved_ms: float
    """As it is minus without: what the cause costs this arm. Negative where the arm is slower without it."""
    ci95_ms: tuple[float, float] | None
    """Of `saved_ms`."""
    ratio: float | None
    """As it is over without, the geometric mean over the pairs."""
    ratio_ci95: tuple[float, float] | None
    pairs: int
    folder: str
    """Of the blocks that show it, relative to the run's folder."""


@dataclass(frozen=True, slots=True)
class MeasuredEffect:
    """The record with the figures that it was made of."""

    cause: CauseName
    effect: CauseEffect
    saved: Difference


def measure_effects(
    counterfactual: Counterfactual, blocks: Sequence[StoredBlock]
) -> dict[str, MeasuredEffect | Untested]:
    """By the cell's name; untested where a request failed or a block is missing, with the reason."""
    summaries = summarise_blocks(blocks)
    found: dict[str, MeasuredEffect | Untested] = {}
    for cell in counterfactual.cells:
        own = [summary for summary in summaries if summary.cell == cell.name]
        pairs = mean_pairs(cell.name, own)
        failed = sum(summary.errors for summary in own)
        reason = None
        if failed:
            reason = f"{failed} of {sum(summary.requests for summary in own)} requests of its cell failed"
        elif not pairs:
            reason = "its cell holds no complete pair of blocks"
        saved = difference([(without, as_is) for as_is, without in pairs])
        if reason is not None or saved is None:
            found[cell.name] = Untested(
                cause=counterfactual.cause, label=counterfactual.label, reason=reason or "its cell is empty"
            )
            continue
        ratio = estimate_ratio([as_is / without for as_is, without in pairs], 1.0)
        effect = CauseEffect(
            label=counterfactual.label,
            changed=counterfactual.changed,
            as_is_ms=math.fsum(as_is for as_is, _ in pairs) / len(pairs),
            without_ms=math.fsum(without for _, without in pairs) / len(pairs),
            saved_ms=saved.mean_ms,
            ci95_ms=saved.ci95_ms,
            ratio=ratio.ratio,
            ratio_ci95=ratio.ci95,
            pairs=len(pairs),
            folder=counterfactual.folder,
        )
        found[cell.name] = MeasuredEffect(counterfactual.cause, effect, saved)
    return found
