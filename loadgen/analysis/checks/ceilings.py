"""The check on the engines measured alone: a server cannot serve more than its engine does."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.ceilings import EngineShare
from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.quantities import share

LARGEST_SHARE = 1.05
"""What is above is no noise of two medians: the ceiling was measured under other conditions."""


def check_ceilings(shares: Sequence[EngineShare]) -> list[Check]:
    """One check over all arms and cells; none where no engine was measured alone."""
    if not shares:
        return []
    highest = max(shares, key=lambda one: one.share)
    return [
        make_check(
            CheckName.ENGINE_CEILING,
            highest.share <= LARGEST_SHARE,
            value=round(highest.share, 4),
            threshold=LARGEST_SHARE,
            detail=f"at most {share(highest.share)} of what the engine does alone, by {highest.label.upper()} in "
            f"{highest.cell} at batch {highest.batch}",
        )
    ]
