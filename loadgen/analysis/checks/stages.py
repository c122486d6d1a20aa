"""Checks on what the servers say of a cell: whether batches formed, whether the queue was idle waiting, whether the
account of time adds up."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.outcome import Check, CheckName, cell_scope, make_check
from loadgen.analysis.stages import StageAccount
from loadgen.analysis.summaries import CellSummary
from loadgen.quantities import number, share, signed_ms
from loadgen.records.run import Cell

BATCHED_LIMIT = 1.1
QUEUE_SHARE_LIMIT = 0.05
OVERLAP_LIMIT = -0.02
UNATTRIBUTED_LIMIT = 0.25
"""Ours: beyond it a quarter of a request, more than most causes make, is in no stage."""


def check_stages(cell: Cell, summaries: Sequence[CellSummary], accounts: Sequence[StageAccount]) -> list[Check]:
    """Of one cell that ran; `accounts` are those of all cells."""
    own = [account for account in accounts if account.cell == cell.name]
    return [
        *_batching(cell, summaries),
        *(check for account in own for check in (*_queue_delay(cell, account), *_account(cell, account))),
    ]


def _batching(cell: Cell, summaries: Sequence[CellSummary]) -> list[Check]:
    if cell.concurrency <= 1:
        return []
    means = {s.label: s.executed_batch_mean for s in summaries}
    known = {label: mean for label, mean in means.items() if mean is not None}
    limit = BATCHED_LIMIT * cell.batch_size
    if len(known) < 2:
        ok = None
        detail = "executed batches are unknown: " + (
            " and ".join(label.upper() for label in ("a", "b") if label not in known) + " did not report them"
        )
    else:
        idle = [label.upper() for label, mean in sorted(known.items()) if mean < limit]
        ok = not idle
        detail = "mean executed batch: " + ", ".join(f"{k.upper()} {number(v)}" for k, v in sorted(known.items()))
        if idle:
            detail += f"; batching never formed on {' and '.join(idle)}"
    return [
        make_check(
            CheckName.BATCHING_FORMED,
            ok,
            scope=cell_scope(cell.name),
            value=min(known.values(), default=None),
            threshold=limit,
            detail=detail,
        )
    ]


def _queue_delay(cell: Cell, account: StageAccount) -> list[Check]:
    if cell.concurrency > 1:
        return []
    waits = {arm.label: (arm.stages_ms["queue"] or 0.0, arm.client_total_ms) for arm in (account.a, account.b) if arm}
    if not waits:
        return []
    worst = max(waits, key=lambda label: waits[label][0] / waits[label][1])
    wait_ms, total_ms = waits[worst]
    return [
        make_check(
            CheckName.QUEUE_DELAY,
            wait_ms / total_ms <= QUEUE_SHARE_LIMIT,
            scope=cell_scope(cell.name),
            value=wait_ms / total_ms,
            threshold=QUEUE_SHARE_LIMIT,
            detail=f"{worst.upper()} waited {number(wait_ms)} ms in its queue, "
            f"{share(wait_ms / total_ms)} of a request",
        )
    ]


def _account(cell: Cell, account: StageAccount) -> list[Check]:
    arms = [arm for arm in (account.a, account.b) if arm]
    if not arms:
        return [
            make_check(CheckName.STAGE_ACCOUNT, None, scope=cell_scope(cell.name), detail="no server reports stages")
        ]
    faults = []
    for arm in arms:
        rest_ms = arm.stages_ms["unattributed"] or 0.0
        rest = rest_ms / arm.client_total_ms
        if rest < OVERLAP_LIMIT:
            faults.append(f"the stages of {arm.label.upper()} exceed the client's time by {signed_ms(-rest_ms)}")
        if rest > UNATTRIBUTED_LIMIT:
            faults.append(f"{share(rest)} of a request to {arm.label.upper()} ({number(rest_ms)} ms) is in no stage")
        if arm.requests != arm.client_requests:
            faults.append(
                f"{arm.label.upper()} counted {arm.requests:,} requests, the client {arm.client_requests:,} answers"
            )
    largest = max((arm.stages_ms["unattributed"] or 0.0) / arm.client_total_ms for arm in arms)
    return [
        make_check(
            CheckName.STAGE_ACCOUNT,
            not faults,
            scope=cell_scope(cell.name),
            value=largest,
            threshold=f"−{share(-OVERLAP_LIMIT)} to {share(UNATTRIBUTED_LIMIT)} unattributed, same requests",
            detail="; ".join(faults) if faults else f"{share(largest)} of a request at most is unattributed",
        )
    ]
