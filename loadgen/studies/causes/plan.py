"""Which counterfactual cells to run: a pure function of what was asked for, what is in effect and what was measured.

The causes of an arm are taken away one at a time. Payload and transfer depend on each other, so they are taken away one
after the other: first an arm that was sent more gets the smallest payload of all (or all, where they were sent JPEG
files, decoded pictures), and from there every arm gets their tensors through shared memory. Their effects add up by
construction; those of the others need not where causes interact, and what is left over says by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loadgen.comparison.summaries import BlockSummary
from loadgen.experiment.schedule import load_cells
from loadgen.records.run import ArmRecord, ArmRequest, Cell, Experiment, Label, asked_for, setting_key, shown
from loadgen.studies.causes.analyse import Pairs, difference, mean_pairs
from loadgen.studies.causes.records import CauseName, Counterfactual, Untested, Variant
from loadgen.transport.requests import Address

MIN_PAIRS, MAX_PAIRS = 3, 6
"""Of a counterfactual in a cell: as many as the cell itself has, within these."""
SERVER_SECONDS = 15.0
"""Allowed for starting a server and warming it."""
BETWEEN_BLOCKS_SECONDS = 0.5


def plan_counterfactuals(
    experiment: Experiment, arms: Mapping[Label, ArmRecord], payload_bytes: Mapping[Label, float]
) -> tuple[list[Counterfactual], list[Untested]]:
    """Every cause of all arms, without cells yet. `payload_bytes` are of a request's tensors, as they were sent."""
    plan: list[Counterfactual] = []
    untested: list[Untested] = []

    def add(found: Counterfactual | Untested) -> None:
        if isinstance(found, Untested):
            untested.append(found)
        else:
            plan.append(msgspec.structs.replace(found, number=len(plan)))

    requests = experiment.arms
    own = {request.label: experiment.payload_of(request) for request in requests}
    common = dict(own)
    if len(set(own.values())) > 1:
        smallest = own[min(requests, key=lambda request: payload_bytes.get(request.label, 0.0)).label]
        for request in requests:
            if own[request.label] != smallest:
                common[request.label] = smallest
                what = "as the other arm is sent" if len(requests) == 2 else "the smallest that an arm is sent"
                add(_payload(experiment, request, smallest, what))
    elif experiment.payload_of(experiment.baseline) == "jpeg":  # what decoding costs each arm
        for request in requests:
            common[request.label] = "uint8"
            add(_payload(experiment, request, "uint8", "decoded beforehand"))
    for request in requests:
        add(_queue_delay(experiment, request, arms[request.label]))
    for request in requests:
        add(_transfer(experiment, request, common[request.label]))
    for request in requests:
        add(_compute(experiment, request, arms[request.label]))
    return plan, untested


def cells_worth_explaining(experiment: Experiment, blocks: Sequence[BlockSummary]) -> list[Cell]:
    """Those in which an arm's mean request time differs from the baseline's beyond the noise and beyond δ; the most
    loaded first, then the lightest load, whose account is the simplest, then the others."""
    margin = experiment.equivalence_margin
    found = [
        cell
        for cell in load_cells(experiment.cells)
        if any(_differs(mean_pairs(cell.name, blocks, two), margin) for two in experiment.pairings)
    ]
    found.sort(key=lambda cell: (-cell.concurrency, -cell.batch_size))
    return found if len(found) < 3 else [found[0], found[-1], *found[1:-1]]


def _differs(pairs: Pairs, margin: float) -> bool:
    gap = difference(pairs)
    if gap is None or not gap.seen:
        return False
    smaller = min(sum(a for a, _ in pairs), sum(b for _, b in pairs)) / len(pairs)
    return abs(gap.mean_ms) > margin * smaller


def fit_into(
    budget_s: float, plan: Sequence[Counterfactual], cells: Sequence[Cell], block_seconds: Mapping[str, float]
) -> tuple[list[Cell], list[Cell]]:
    """The cells that all counterfactuals of the plan can be run in, in their order, and those that are left out.

    `block_seconds`: how long one block of a cell has taken. The first cell always fits: a budget that is too small
    ends the phase, and what is not done then is said to be untested.
    """
    left_s = budget_s - SERVER_SECONDS * len(plan)
    chosen: list[Cell] = []
    left_out: list[Cell] = []
    for cell in cells:
        shortened = msgspec.structs.replace(cell, rounds=rounds_of(cell))
        needed_s = seconds_needed(plan, [shortened], block_seconds) - SERVER_SECONDS * len(plan)
        if chosen and needed_s > left_s:
            left_out.append(cell)
            continue
        chosen.append(shortened)
        left_s -= needed_s
    return chosen, left_out


def seconds_needed(plan: Sequence[Counterfactual], cells: Sequence[Cell], block_seconds: Mapping[str, float]) -> float:
    """How long the plan takes in these cells, by their rounds."""
    blocks_s = sum(
        2 * cell.rounds * (block_seconds.get(cell.name, cell.seconds) + BETWEEN_BLOCKS_SECONDS) for cell in cells
    )
    return len(plan) * (SERVER_SECONDS + blocks_s)


def rounds_of(cell: Cell) -> int:
    """How many rounds a counterfactual gets in a cell."""
    return max(MIN_PAIRS, min(MAX_PAIRS, cell.rounds))


def out_of_reach(experiment: Experiment, request: ArmRequest) -> str | None:
    """Why an arm's settings cannot be changed; None where they can."""
    if not request.embedded:
        return f"{shown(request.label)} is at {request.target}, which is not started by us"
    if experiment.deployment == "compose":
        return f"{shown(request.label)} runs in the compose stack, whose settings are its own"
    return None


def _make(experiment: Experiment, request: ArmRequest, cause: CauseName, changed: str, *, payload: str | None = None,
          without: Variant) -> Counterfactual:  # fmt: skip
    as_is = Variant(payload=payload or experiment.payload_of(request), transport=experiment.transport, settings={})
    return Counterfactual(
        number=0, cause=cause, label=request.label, changed=changed, as_is=as_is, without=without, cells=()
    )


def _payload(experiment: Experiment, request: ArmRequest, other: str, why: str) -> Counterfactual | Untested:
    if experiment.deployment == "compose" and request.embedded:
        reason = f"{out_of_reach(experiment, request)}; bring it up with {other} among its payloads"
        return Untested(cause="payload", label=request.label, reason=reason)
    without = Variant(payload=other, transport=experiment.transport, settings={})
    own = experiment.payload_of(request)
    return _make(experiment, request, "payload", f"{own} → {other}, {why}", without=without)


def _queue_delay(experiment: Experiment, request: ArmRequest, arm: ArmRecord) -> Counterfactual | Untested:
    delay = arm.in_effect.get("max_queue_delay_us")
    ensemble = arm.in_effect.get("platform") == "ensemble"  # its steps queue, and it does not tell their settings
    if delay == 0:
        return Untested(cause="queue_delay", label=arm.label, reason="its queue delay is 0 already", moot=True)
    if delay is None and arm.in_effect.get("dynamic_batching") is False and not ensemble:
        return Untested(cause="queue_delay", label=arm.label, reason="it has no dynamic batcher", moot=True)
    barred = out_of_reach(experiment, request)
    if barred is not None:
        return Untested(cause="queue_delay", label=arm.label, reason=barred)
    payload = experiment.payload_of(request)
    without = Variant(payload=payload, transport=experiment.transport, settings={"max-queue-delay-us": "0"})
    told = asked_for(request.settings, "max_queue_delay_us") if delay is None else str(delay)
    return _make(experiment, request, "queue_delay", f"max-queue-delay-us {told or 'unknown'} → 0", without=without)


def _transfer(experiment: Experiment, request: ArmRequest, payload: str) -> Counterfactual | Untested:
    if experiment.transport == "shm":
        reason = "its tensors go through shared memory already"
        return Untested(cause="transfer", label=request.label, reason=reason, moot=True)
    if experiment.deployment == "compose" and request.embedded:
        reason = f"{shown(request.label)} runs in a container, which does not share this machine's memory"
        return Untested(cause="transfer", label=request.label, reason=reason)
    if not request.embedded and not Address.parse(request.target).is_local:
        reason = f"{request.target} is not on this machine, whose memory it cannot share"
        return Untested(cause="transfer", label=request.label, reason=reason)
    without = Variant(payload=payload, transport="shm", settings={})
    changed = f"{payload} over {experiment.transport} → through shared memory"
    return _make(experiment, request, "transfer", changed, payload=payload, without=without)


def _compute(experiment: Experiment, request: ArmRequest, arm: ArmRecord) -> Counterfactual | Untested:
    engine = str(arm.in_effect.get("engine") or asked_for(request.settings, "engine") or "unknown engine")
    if engine == "null":
        return Untested(cause="compute", label=arm.label, reason="it computes nothing: engine null", moot=True)
    barred = out_of_reach(experiment, request)
    if barred is not None:
        return Untested(cause="compute", label=arm.label, reason=barred)
    settings = {"engine": "null", "device": "", "mode": "", "precision": ""}
    payload = experiment.payload_of(request)
    without = Variant(payload=payload, transport=experiment.transport, settings=settings)
    return _make(experiment, request, "compute", f"engine {engine} → null, which computes nothing", without=without)


def changed_settings(settings: Mapping[str, str], variant: Variant) -> dict[str, str]:
    """An arm's options with those of a variant; one whose value there is empty is left out."""
    changed = {setting_key(name) for name in variant.settings}
    kept = {name: value for name, value in settings.items() if setting_key(name) not in changed}
    return kept | {name: value for name, value in variant.settings.items() if value}
