"""The wall clock beside the monotonic one: every duration is of the latter, so a step of the former is only noted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.analysis.summaries import NS_PER_S
from loadgen.storage.stored_run import StoredBlock

STEP_LIMIT_S = 5.0
"""Labels are whole seconds and are taken a moment before a block begins."""


def check_clock(blocks: Sequence[StoredBlock]) -> list[Check]:
    """One check, of runs with two blocks or more; unknown where a label cannot be read."""
    if len(blocks) < 2:
        return []
    try:
        moments = [
            (block.record.index, datetime.fromisoformat(block.record.started_at), block.record.window_start_ns)
            for block in blocks
        ]
        steps = [
            ((after - before).total_seconds() - (after_ns - before_ns) / NS_PER_S, index)
            for (_, before, before_ns), (index, after, after_ns) in pairwise(moments)
        ]
    except (ValueError, TypeError):
        return [make_check(CheckName.WALL_CLOCK, None, threshold=STEP_LIMIT_S, detail="a block's start has no time")]
    step, index = max(steps, key=lambda one: abs(one[0]))
    even = abs(step) <= STEP_LIMIT_S
    return [
        make_check(
            CheckName.WALL_CLOCK,
            even,
            value=round(step, 1),
            threshold=STEP_LIMIT_S,
            detail="both clocks agree to within seconds over the run"
            if even
            else f"the wall clock moved by {step:+,.0f} s against the monotonic clock before block {index}: it was "
            "set, or the machine slept; no latency is measured with it",
        )
    ]
