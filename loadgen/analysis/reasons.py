"""What the servers' own account says about a difference, in words: which stages it is in, whether batches formed."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.stages import TITLES, StageAccount
from loadgen.analysis.summaries import CellSummary
from loadgen.quantities import number, sentence, share, signed_ms
from loadgen.records.run import Cell

MIN_STAGE_SHARE = 0.05
MAX_STAGES = 3


def explain_stages(account: StageAccount) -> list[str]:
    """Which stages make up the difference of the mean latencies, the largest first; empty without both accounts."""
    if account.a is None or account.b is None or account.total_b_minus_a_ms is None:
        return []
    total = account.total_b_minus_a_ms
    larger = max(account.a.client_total_ms, account.b.client_total_ms)
    means = f"{number(account.a.client_total_ms)} ms on A and {number(account.b.client_total_ms)} ms on B"
    if abs(total) < 0.01 * larger:
        return [f"Requests take the same time on both arms ({means})."]
    parts = [
        f"{TITLES[d.stage]} {signed_ms(d.b_minus_a_ms)}" + (f" ({_percent(d.share)})" if d.share is not None else "")
        for d in account.differences[:MAX_STAGES]
        if abs(d.b_minus_a_ms) >= MIN_STAGE_SHARE * abs(total)
    ]
    return [f"Requests take {means} on average. B's {signed_ms(total)} are: {'; '.join(parts)}."]


def _percent(value: float) -> str:
    return share(value) if value >= 0 else f"−{share(-value)}"


def explain_saturation(summaries: Sequence[CellSummary]) -> list[str]:
    """Which arm did not sustain the rate of an open loop."""
    return [
        sentence(f"{summary.label.upper()} was {summary.open_loop.saturation}")
        for summary in summaries
        if summary.open_loop is not None and summary.open_loop.saturation
    ]


def explain_batching(cell: Cell, summaries: Sequence[CellSummary]) -> list[str]:
    if cell.concurrency <= 1:
        return []
    means = {s.label.upper(): s.executed_batch_mean for s in summaries if s.executed_batch_mean is not None}
    if not means:
        return []
    text = ", ".join(f"{number(mean)} on {label}" for label, mean in sorted(means.items()))
    idle = [label for label, mean in sorted(means.items()) if mean < 1.1 * cell.batch_size]
    return [f"Mean executed batch: {text}" + (f"; batching never formed on {' and '.join(idle)}." if idle else ".")]
