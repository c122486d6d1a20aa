"""Where the time of a request goes, as rows of text."""

from __future__ import annotations

import math

from loadgen.analysis.result import Result
from loadgen.analysis.stages import STAGES, TITLES
from loadgen.quantities import share

FOLDED = "folded"
FOLDED_NOTE = (
    "folded: only one arm reports this stage, so its time is counted where the other arm keeps it: decoding under "
    "preparing the batch, receiving and encoding under what is outside "
    "the server's account (network, protocol, client)."
)


def stage_rows(result: Result, cell: str) -> list[tuple[str, ...]]:
    """(stage, A, B, B − A, share of the difference) with the total last; empty where no arm reports stages."""
    account = next((account for account in result.stages if account.cell == cell), None)
    if account is None or (account.a is None and account.b is None):
        return []
    differences = {d.stage: d for d in account.differences}
    arms = [arm for arm in (account.a, account.b) if arm]
    decimals = max(0, 3 - math.floor(math.log10(max(arm.client_total_ms for arm in arms))))
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        values = [arm.stages_ms.get(stage) if arm else None for arm in (account.a, account.b)]
        if values == [None, None] or (stage == "send_delay" and not any(values)):
            continue
        difference = differences.get(stage)
        rows.append(
            (
                f"{TITLES[stage]} ({stage})",
                *("–" if value is None else f"{value:.{decimals}f} ms" for value in values),
                _signed(difference.b_minus_a_ms, decimals) if difference else FOLDED if differences else "–",
                _signed_share(difference.share) if difference else "–",
            )
        )
    totals = [f"{arm.client_total_ms:.{decimals}f} ms" if arm else "–" for arm in (account.a, account.b)]
    total = account.total_b_minus_a_ms
    shares = ("–", "–") if total is None else (_signed(total, decimals), "100 %")
    rows.append(("client total", *totals, *shares))
    return rows


def _signed(value: float, decimals: int) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value):.{decimals}f} ms"


def _signed_share(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) < 0.0005:
        return "0 %"
    return share(value) if value >= 0 else f"−{share(-value)}"
