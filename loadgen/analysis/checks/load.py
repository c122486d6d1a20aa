"""Checks on the load of each cell: errors, completeness, the generator, warm-up, batching, the account of time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadgen.analysis.checks.generator import check_generator
from loadgen.analysis.checks.outcome import Check, CheckName, cell_scope, make_check
from loadgen.analysis.checks.stages import check_stages
from loadgen.analysis.stages import StageAccount
from loadgen.analysis.summaries import BlockSummary, CellSummary
from loadgen.quantities import share
from loadgen.records.run import Cell, Label
from loadgen.records.samples import good
from loadgen.storage.stored_run import StoredRun

LABELS: tuple[Label, Label] = ("a", "b")
LEAST_ANSWER_SHARE = 0.5
"""Of the largest answer's bytes, headers included."""
WARM_UP_LIMIT = 0.02
WARM_UP_ERRORS = 4.0


def check_load(
    run: StoredRun,
    blocks: Sequence[BlockSummary],
    cells: Sequence[CellSummary],
    accounts: Sequence[StageAccount],
) -> list[Check]:
    """All checks of one cell after the other; of a cell in which no block ran, that it is not complete."""
    checks: list[Check] = []
    for cell in run.experiment.cells:
        if not cell.has_blocks:
            continue
        own = [block for block in blocks if block.cell == cell.name]
        if not own:
            checks.append(_complete(run, cell, own))
            continue
        summaries = {summary.label: summary for summary in cells if summary.cell == cell.name}
        checks += [
            _errors(run, cell, own),
            _whole_answers(run, cell),
            _complete(run, cell, own),
            _samples(run, cell),
            *check_generator(run.experiment, run.calibration, cell, own, list(summaries.values())),
            _warm_up(cell, own),
            _payload(cell, list(summaries.values())),
        ]
        checks += check_stages(cell, list(summaries.values()), accounts)
    return checks


def _errors(run: StoredRun, cell: Cell, blocks: Sequence[BlockSummary]) -> Check:
    requests = sum(block.requests for block in blocks)
    errors = sum(block.errors for block in blocks)
    messages = [m for block in run.blocks if block.record.cell == cell.name for m in block.record.error_messages]
    detail = f"{errors:,} of {requests:,} requests failed" + (f"; first message: {messages[0]}" if messages else "")
    silent = [label.upper() for label in LABELS if not sum(b.requests for b in blocks if b.label == label)]
    if silent:
        detail = f"no request was sent to {' and '.join(silent)}"
    return make_check(
        CheckName.REQUEST_ERRORS,
        False if errors else None if silent else True,
        scope=cell_scope(cell.name),
        value=errors / requests if requests else None,
        threshold=0,
        detail=detail,
    )


def _whole_answers(run: StoredRun, cell: Cell) -> Check:
    """Under load answers are counted and not read. Those of the models that we serve have one size; those of somebody
    else's may differ, so there it is only said."""
    shares: dict[Label, float] = {}
    small: dict[Label, int] = {}
    for label in LABELS:
        own = [b.samples for b in run.blocks if (b.record.cell, b.record.label) == (cell.name, label)]
        parts = [good(samples)["response_bytes"] for samples in own if samples is not None]
        sizes = np.concatenate(parts) if parts else np.empty(0)
        largest = float(sizes.max()) if len(sizes) else 0.0
        if largest > 0.0:
            shares[label] = float(sizes.min()) / largest
            small[label] = int((sizes < LEAST_ANSWER_SHARE * largest).sum())
    told = [
        f"{count:,} answers of {label.upper()} are less than {share(LEAST_ANSWER_SHARE)} of its largest"
        for label, count in small.items()
        if count
    ]
    worst = min(shares, key=lambda label: shares[label], default=None)
    detail = "no good answer"
    if worst is not None:
        detail = "; ".join(told) or f"the smallest answer is {share(shares[worst])} of the largest, on {worst.upper()}"
    check = make_check(
        CheckName.WHOLE_ANSWERS,
        None if worst is None else not told,
        scope=cell_scope(cell.name),
        value=None if worst is None else shares[worst],
        threshold=LEAST_ANSWER_SHARE,
        detail=detail,
    )
    ours = all(arm.launched for arm in run.arms if small.get(arm.label))
    return check if ours or not told else msgspec.structs.replace(check, severity="warns")


def _complete(run: StoredRun, cell: Cell, blocks: Sequence[BlockSummary]) -> Check:
    planned = 2 * cell.pairs
    complete = [block for block in blocks if block.complete]
    notes = [f"block {block.index}: {block.note}" for block in blocks if not block.complete and block.note]
    detail = f"{len(complete)} of {planned} blocks are complete"
    if notes:
        detail += f"; {notes[0]}"
    elif len(complete) < planned and run.partial_blocks:
        detail += f"; {sum(p.requests for p in run.partial_blocks):,} requests of an unfinished block are not compared"
    return make_check(
        CheckName.BLOCKS_COMPLETE,
        len(complete) >= planned and len(complete) == len(blocks),
        scope=cell_scope(cell.name),
        value=len(complete),
        threshold=planned,
        detail=detail,
    )


def _samples(run: StoredRun, cell: Cell) -> Check:
    problems = [block.problem for block in run.blocks if block.record.cell == cell.name and block.problem]
    own = [block for block in run.blocks if block.record.cell == cell.name]
    return make_check(
        CheckName.SAMPLES_COMPLETE,
        None if not own else not problems,
        scope=cell_scope(cell.name),
        value=len(problems) if own else None,
        threshold=0,
        detail=problems[0] if problems else f"{len(own)} sample files agree with their records",
    )


def _warm_up(cell: Cell, blocks: Sequence[BlockSummary]) -> Check:
    """The mean cost over an arm's blocks, against the limit and against the noise: both must be exceeded."""
    costs: dict[str, tuple[float, float]] = {}
    for label in ("a", "b"):
        own = [b for b in blocks if b.label == label and b.complete]
        lost = [b.warm_up_share for b in own if b.warm_up_share is not None]
        errors = [b.warm_up_error_share for b in own if b.warm_up_error_share is not None]
        if lost:
            costs[label] = (float(np.mean(lost)), float(np.sqrt(np.sum(np.square(errors)))) / len(errors))
    worst = max(costs, key=lambda label: costs[label][0] - WARM_UP_ERRORS * costs[label][1], default=None)
    if worst is None:
        return make_check(
            CheckName.WARM_UP,
            None,
            scope=cell_scope(cell.name),
            threshold=WARM_UP_LIMIT,
            detail="requests of an open loop queue behind each other, which looks the same"
            if cell.is_open
            else "too few requests to tell",
        )
    cost, error = costs[worst]
    slow = cost > WARM_UP_LIMIT and cost > WARM_UP_ERRORS * error
    noisy = "" if slow or cost <= WARM_UP_LIMIT else f", within the noise (standard error {share(error)})"
    return make_check(
        CheckName.WARM_UP,
        not slow,
        scope=cell_scope(cell.name),
        value=cost,
        threshold=WARM_UP_LIMIT,
        detail=f"slow first requests cost {worst.upper()} {share(max(cost, 0.0))} of its time{noisy}",
    )


def _payload(cell: Cell, summaries: Sequence[CellSummary]) -> Check:
    sizes = {summary.label: summary.request_bytes for summary in summaries if summary.request_bytes is not None}
    limit = "1 % or 512 bytes"
    if len(sizes) < 2:
        return make_check(
            CheckName.SAME_PAYLOAD_BYTES,
            None,
            scope=cell_scope(cell.name),
            threshold=limit,
            detail="not both arms answered",
        )
    apart = abs(sizes["a"] - sizes["b"])
    return make_check(
        CheckName.SAME_PAYLOAD_BYTES,
        apart <= max(512.0, 0.01 * sizes["a"]),
        scope=cell_scope(cell.name),
        value=apart,
        threshold=limit,
        detail=f"a request is {sizes['a']:,.0f} bytes to A and {sizes['b']:,.0f} bytes to B",
    )
