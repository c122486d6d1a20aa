"""Which ablations to run: a pure function of the request, the settings in effect and the measurements.

The causes of an arm are removed one at a time. Payload and transfer depend on each other, so they are removed one after
the other: first an arm that was sent more gets the smallest payload of all (or every arm, where all were sent JPEG
files, decoded pictures), and from there every arm gets these tensors through shared memory. Their effects add up by
construction; those of the others need not where causes interact, and the unattributed rest shows by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.client.connection import Address
from loadgen.comparison.summaries import BlockSummary
from loadgen.experiment.schedule import load_workloads
from loadgen.probes.causes.analyse import Pairs, difference, mean_pairs
from loadgen.probes.causes.records import Ablation, CauseName, Untested, Variant
from loadgen.records.payloads import BACKEND_ENDINGS
from loadgen.records.run import PLAIN, ArmRecord, ArmRequest, Experiment, Label, Workload, asked_for, setting_key, shown

MIN_PAIRS, MAX_PAIRS = 3, 6
"""Pairs of blocks per ablation and workload: as many as the workload has, within these limits."""
SERVER_SECONDS = 15.0
"""Seconds planned for starting a server and warming it up."""
BETWEEN_BLOCKS_SECONDS = 0.5


def plan_ablations(
    experiment: Experiment, arms: Mapping[Label, ArmRecord], payload_bytes: Mapping[Label, float]
) -> tuple[list[Ablation], list[Untested]]:
    """Every cause of all arms, without workloads yet. `payload_bytes`: mean size of a request's tensors, by arm."""
    requests = experiment.arms
    own = {request.label: experiment.payload_of(request) for request in requests}
    common = dict(own)
    found: list[Ablation | Untested] = []
    if len(set(own.values())) > 1:
        smallest = own[min(requests, key=lambda request: payload_bytes.get(request.label, 0.0)).label]
        why = "as the other arm is sent" if len(requests) == 2 else "the smallest payload of all arms"
        larger = [request for request in requests if own[request.label] != smallest]
        found += [_payload(experiment, request, smallest, why) for request in larger]
        common = dict.fromkeys(own, smallest)
    elif experiment.payload_of(experiment.baseline) == "jpeg":  # the cost of decoding for each arm
        found += [_payload(experiment, request, "uint8", "decoded beforehand") for request in requests]
        common = dict.fromkeys(own, "uint8")
    found += [_queue_delay(experiment, request, arms[request.label]) for request in requests]
    found += [_transfer(experiment, request, common[request.label]) for request in requests]
    found += [_compute(experiment, request, arms[request.label]) for request in requests]
    plan = [one for one in found if isinstance(one, Ablation)]
    numbered = [msgspec.structs.replace(one, number=number) for number, one in enumerate(plan)]
    return numbered, [one for one in found if isinstance(one, Untested)]


def workloads_worth_explaining(experiment: Experiment, blocks: Sequence[BlockSummary]) -> list[Workload]:
    """Workloads in which an arm's mean request time differs from the baseline's beyond the noise and beyond δ.

    The most loaded comes first, then the lightest, whose latency breakdown is the simplest, then the others.
    """
    margin = experiment.equivalence_margin
    found = [
        workload
        for workload in load_workloads(experiment.workloads)
        if any(_differs(mean_pairs(workload.name, blocks, two), margin) for two in experiment.pairings)
    ]
    found.sort(key=lambda workload: (-workload.concurrency, -workload.batch_size))
    return found if len(found) < 3 else [found[0], found[-1], *found[1:-1]]


def _differs(pairs: Pairs, margin: float) -> bool:
    gap = difference(pairs)
    if gap is None or not gap.seen:
        return False
    smaller = min(sum(a for a, _ in pairs), sum(b for _, b in pairs)) / len(pairs)
    return abs(gap.mean_ms) > margin * smaller


def fit_into(
    budget_s: float, plan: Sequence[Ablation], workloads: Sequence[Workload], block_seconds: Mapping[str, float]
) -> tuple[list[Workload], list[Workload]]:
    """The workloads for which the budget lasts, with the rounds of an ablation, and the workloads that are left out.

    `block_seconds`: how long one block of a workload took. The first workload always fits: when a budget is too small,
    the run ends the phase and reports the rest as not tested.
    """
    left_s = budget_s - seconds_needed(plan, [], block_seconds)
    chosen: list[Workload] = []
    left_out: list[Workload] = []
    for workload in workloads:
        shortened = msgspec.structs.replace(workload, rounds=rounds_of(workload))
        needed_s = seconds_needed(plan, [shortened], block_seconds) - seconds_needed(plan, [], block_seconds)
        if chosen and needed_s > left_s:
            left_out.append(workload)
        else:
            chosen.append(shortened)
            left_s -= needed_s
    return chosen, left_out


def seconds_needed(
    plan: Sequence[Ablation], workloads: Sequence[Workload], block_seconds: Mapping[str, float]
) -> float:
    """How long the plan takes in these workloads, by their rounds."""
    blocks_s = sum(
        2 * workload.rounds * (block_seconds.get(workload.name, workload.seconds) + BETWEEN_BLOCKS_SECONDS)
        for workload in workloads
    )
    return len(plan) * (SERVER_SECONDS + blocks_s)


def rounds_of(workload: Workload) -> int:
    """How many rounds an ablation gets in a workload."""
    return max(MIN_PAIRS, min(MAX_PAIRS, workload.rounds))


def _ablation(
    experiment: Experiment,
    request: ArmRequest,
    cause: CauseName,
    changed: str,
    *,
    from_payload: str | None = None,
    **removed: Any,
) -> Ablation:
    """`removed`: fields of `Variant` that remove the cause."""
    payload = from_payload or experiment.payload_of(request)
    as_is = Variant(payload=payload, transport=experiment.transport, settings={})
    without = msgspec.structs.replace(as_is, **removed)
    return Ablation(
        number=0, cause=cause, label=request.label, changed=changed, as_is=as_is, without=without, workloads=()
    )


def _fixed_settings(experiment: Experiment, request: ArmRequest) -> str | None:
    """Why an arm's settings cannot be changed; None where they can."""
    if not request.embedded:
        return f"{shown(request.label)} is at {request.target}, and abserve did not start that server"
    if experiment.deployment == "compose":
        return f"{shown(request.label)} runs in the compose stack, which sets its own options"
    if request.own_repository:
        return f"{shown(request.label)} serves your own repository, which sets its own options"
    return None


def _payload(experiment: Experiment, request: ArmRequest, other: str, why: str) -> Ablation | Untested:
    if experiment.deployment == "compose" and request.embedded:
        reason = f"{_fixed_settings(experiment, request)}; start the stack with {other} among its payloads"
        return Untested(cause="payload", label=request.label, reason=reason)
    changed = f"{experiment.payload_of(request)} → {other}, {why}"
    return _ablation(experiment, request, "payload", changed, payload=other)


def _queue_delay(experiment: Experiment, request: ArmRequest, arm: ArmRecord) -> Ablation | Untested:
    delay = arm.in_effect.get("max_queue_delay_us")
    if delay == 0:
        return Untested(cause="queue_delay", label=arm.label, reason="its queue delay is 0 already", moot=True)
    if delay is None and arm.in_effect.get("dynamic_batching") is False:
        return Untested(cause="queue_delay", label=arm.label, reason="it has no dynamic batcher", moot=True)
    if (reason := _fixed_settings(experiment, request)) is not None:
        return Untested(cause="queue_delay", label=arm.label, reason=reason)
    before = asked_for(request.settings, "max_queue_delay_us") or "unknown" if delay is None else str(delay)
    changed = f"max-queue-delay-us {before} → 0"
    return _ablation(experiment, request, "queue_delay", changed, settings={"max-queue-delay-us": "0"})


def _transfer(experiment: Experiment, request: ArmRequest, payload: str) -> Ablation | Untested:
    if experiment.transport == "shm":
        reason = "its tensors go through shared memory already"
        return Untested(cause="transfer", label=request.label, reason=reason, moot=True)
    if request.target in PLAIN:
        reason = f"the {request.target} server takes tensors over HTTP only"
        return Untested(cause="transfer", label=request.label, reason=reason)
    if experiment.deployment == "compose" and request.embedded:
        reason = f"{shown(request.label)} runs in a container, which does not share this machine's memory"
        return Untested(cause="transfer", label=request.label, reason=reason)
    if not request.embedded and not Address.parse(request.target).is_local:
        reason = f"{request.target} is on another machine, so it cannot share this one's memory"
        return Untested(cause="transfer", label=request.label, reason=reason)
    changed = f"{payload} over {experiment.transport} → through shared memory"
    return _ablation(experiment, request, "transfer", changed, from_payload=payload, transport="shm")


def _compute(experiment: Experiment, request: ArmRequest, arm: ArmRecord) -> Ablation | Untested:
    engine = str(arm.in_effect.get("engine") or asked_for(request.settings, "engine") or "unknown engine")
    if engine == "null":
        return Untested(cause="compute", label=arm.label, reason="its engine, null, computes nothing", moot=True)
    if (reason := _fixed_settings(experiment, request)) is not None:
        return Untested(cause="compute", label=arm.label, reason=reason)
    if request.target in PLAIN:
        return Untested(cause="compute", label=arm.label, reason=f"the {request.target} server cannot leave it out")
    if (backend := arm.in_effect.get("backend")) in BACKEND_ENDINGS:
        return Untested(cause="compute", label=arm.label, reason=f"Triton's {backend} backend cannot leave it out")
    null = {"engine": "null", "device": "", "mode": "", "precision": "", "spinning": ""}
    if (fronts := arm.in_effect.get("fronts")) is not None:  # its default is another one without a GPU
        null["fronts"] = str(fronts)
    changed = f"engine {engine} → null, which computes nothing"
    return _ablation(experiment, request, "compute", changed, settings=null)


def changed_settings(settings: Mapping[str, str], variant: Variant) -> dict[str, str]:
    """An arm's options with those of a variant, whose empty values remove an option."""
    changed = {setting_key(name) for name in variant.settings}
    kept = {name: value for name, value in settings.items() if setting_key(name) not in changed}
    return kept | {name: value for name, value in variant.settings.items() if value}
