"""Checks on what the intervals cover: restarts of the servers, and the noise of the machine itself."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.analysis.comparisons import Comparison
from loadgen.analysis.noise_floor import is_self_comparison
from loadgen.quantities import share
from loadgen.storage.stored_run import StoredRun

COVERING_RESTARTS = 5
"""With fewer, Student's t asks for so much that little is ever decided."""


def check_repetition(run: StoredRun, comparisons: Sequence[Comparison]) -> list[Check]:
    """None for a run without load."""
    loads = [c for c in comparisons if c.leading and c.scenario in {cell.name for cell in run.experiment.cells
             if cell.has_blocks}]  # fmt: skip
    if not loads:
        return []
    return [_restarts(run, loads), *([] if is_self_comparison(run.experiment) else [_noise_floor(loads)])]


def _restarts(run: StoredRun, loads: Sequence[Comparison]) -> Check:
    starts = run.experiment.restarts
    effects = [c.restart_effect for c in loads if c.restart_effect is not None]
    detail = "both servers were started once: what a restart changes is in no interval"
    if starts > 1:
        detail = f"{starts} starts of both servers"
        if effects:
            detail += f"; a restart changes the ratio by {share(max(effects))} (standard deviation) at most"
    return make_check(
        CheckName.RESTARTS, starts >= COVERING_RESTARTS, value=starts, threshold=COVERING_RESTARTS, detail=detail
    )


def _noise_floor(loads: Sequence[Comparison]) -> Check:
    floors = [c.noise_floor for c in loads if c.noise_floor is not None]
    within = [c.scenario for c in loads if c.reason is not None and "noise floor" in c.reason]
    detail = "never measured on this machine"
    if floors:
        detail = f"identical arms differ by up to {share(max(floors))} on this machine"
        if within:
            detail += f"; no verdict for it on {', '.join(within)}"
    return make_check(CheckName.NOISE_FLOOR, True if floors else None, value=max(floors, default=None), detail=detail)
