"""Causes: why the arms differ. Plans the ablations, runs them after the load, and shows what each one saves.

An ablation loads an arm with one cause beside the same arm without it, in interleaved rounds, when the arms' own blocks
are done and their servers are still up. A changed setting takes a second server, which runs beside the arm's; only one
of the two is under load at any time. An ablation that cannot be run is stored as untested with its reason, and the run
goes on.

The causes of an arm are removed one at a time. Payload and transfer depend on each other, so they are removed one after
the other: first an arm that was sent more gets the smallest payload of all (or every arm, where all were sent JPEG
files, decoded pictures), and from there every arm gets these tensors through shared memory. Their effects add up by
construction; those of the others need not where causes interact, and the unattributed rest shows by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.experiment.schedule import has_load, interleave, load_workloads
from loadgen.metrics.breakdown import STAGES, TITLES, ArmStages, LatencyBreakdown
from loadgen.metrics.claims import verdict_words
from loadgen.metrics.comparisons import leading_comparisons, winner_of
from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import BlockSummary, summarise_blocks
from loadgen.probes.causes_analysis import (
    AS_IS,
    BESIDE,
    WITHOUT,
    Ablation,
    Cause,
    CauseName,
    CausesFound,
    Explanation,
    Pairs,
    Untested,
    Variant,
    WorkloadCauses,
    analyse,
    difference,
    mean_pairs,
    percent,
    with_verdicts,
)
from loadgen.probes.registry import Probe
from loadgen.quantities import counted, join, number, share, signed_ms
from loadgen.records.payloads import BACKEND_ENDINGS
from loadgen.records.run import (
    PLAIN,
    ArmRecord,
    ArmRequest,
    Experiment,
    Label,
    Pairing,
    Workload,
    asked_for,
    setting_key,
    shown,
)
from loadgen.run.storage import RunStore, read_run
from loadgen.verdict.result import Result
from loadgen.verdict.verdict import ScenarioVerdict

if TYPE_CHECKING:
    from loadgen.run.arms import Arm
    from loadgen.run.context import RunContext

MIN_PAIRS, MAX_PAIRS = 3, 6
"""Pairs of blocks per ablation and workload: as many as the workload has, within these limits."""
SERVER_SECONDS = 15.0
"""Seconds planned for starting a server and warming it up."""
BETWEEN_BLOCKS_SECONDS = 0.5


def wanted(experiment: Experiment) -> bool:
    """Whether ablations are requested, and there is load to explain."""
    return experiment.explain and has_load(experiment)


def conclude(finding: CausesFound, facts: Facts) -> CausesFound:
    """The causes with sentences that follow the verdicts of the leading comparisons."""
    return with_verdicts(finding, facts.run.experiment, leading_comparisons(facts.comparisons))


def plan_ablations(
    experiment: Experiment, arms: Mapping[Label, ArmRecord], payload_bytes: Mapping[Label, float]
) -> tuple[list[Ablation], list[Untested]]:
    """Every cause of all arms, without workloads yet. `payload_bytes`: mean size of a request's tensors, by arm."""
    requests = experiment.arms
    payloads = {request.label: experiment.payload_of(request) for request in requests}
    common = dict(payloads)
    causes: list[Ablation | Untested] = []
    if len(set(payloads.values())) > 1:
        smallest = payloads[min(requests, key=lambda request: payload_bytes.get(request.label, 0.0)).label]
        why = "as the other arm is sent" if len(requests) == 2 else "the smallest payload of all arms"
        larger = [request for request in requests if payloads[request.label] != smallest]
        causes += [_payload(experiment, request, smallest, why) for request in larger]
        common = dict.fromkeys(payloads, smallest)
    elif experiment.payload_of(experiment.baseline) == "jpeg":  # the cost of decoding for each arm
        causes += [_payload(experiment, request, "uint8", "decoded beforehand") for request in requests]
        common = dict.fromkeys(payloads, "uint8")
    causes += [_queue_delay(experiment, request, arms[request.label]) for request in requests]
    causes += [_transfer(experiment, request, common[request.label]) for request in requests]
    causes += [_compute(experiment, request, arms[request.label]) for request in requests]
    plan = [cause for cause in causes if isinstance(cause, Ablation)]
    numbered = [msgspec.structs.replace(ablation, number=place) for place, ablation in enumerate(plan)]
    return numbered, [cause for cause in causes if isinstance(cause, Untested)]


def workloads_worth_explaining(experiment: Experiment, blocks: Sequence[BlockSummary]) -> list[Workload]:
    """Workloads in which an arm's mean request time differs from the baseline's beyond the noise and beyond δ.

    The most loaded comes first, then the lightest, whose latency breakdown is the simplest, then the others.
    """
    margin = experiment.equivalence_margin
    different = [
        workload
        for workload in load_workloads(experiment.workloads)
        if any(_differs(mean_pairs(workload.name, blocks, pairing), margin) for pairing in experiment.pairings)
    ]
    different.sort(key=lambda workload: (-workload.concurrency, -workload.batch_size))
    return different if len(different) < 3 else [different[0], different[-1], *different[1:-1]]


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
    untested = partial(Untested, cause="queue_delay", label=arm.label)
    delay = arm.in_effect.get("max_queue_delay_us")
    if delay == 0:
        return untested(reason="its queue delay is 0 already", moot=True)
    if delay is None and arm.in_effect.get("dynamic_batching") is False:
        return untested(reason="it has no dynamic batcher", moot=True)
    if (reason := _fixed_settings(experiment, request)) is not None:
        return untested(reason=reason)
    before = asked_for(request.settings, "max_queue_delay_us") or "unknown" if delay is None else str(delay)
    changed = f"max-queue-delay-us {before} → 0"
    return _ablation(experiment, request, "queue_delay", changed, settings={"max-queue-delay-us": "0"})


def _transfer(experiment: Experiment, request: ArmRequest, payload: str) -> Ablation | Untested:
    from loadgen.client.connection import Address

    untested = partial(Untested, cause="transfer", label=request.label)
    if experiment.transport == "shm":
        return untested(reason="its tensors go through shared memory already", moot=True)
    if request.target in PLAIN:
        return untested(reason=f"the {request.target} server takes tensors over HTTP only")
    if experiment.deployment == "compose" and request.embedded:
        where = f"{shown(request.label)} runs in a container"
        return untested(reason=f"{where}, which does not share this machine's memory")
    if not request.embedded and not Address.parse(request.target).is_local:
        return untested(reason=f"{request.target} is on another machine, so it cannot share this one's memory")
    changed = f"{payload} over {experiment.transport} → through shared memory"
    return _ablation(experiment, request, "transfer", changed, from_payload=payload, transport="shm")


def _compute(experiment: Experiment, request: ArmRequest, arm: ArmRecord) -> Ablation | Untested:
    untested = partial(Untested, cause="compute", label=arm.label)
    engine = str(arm.in_effect.get("engine") or asked_for(request.settings, "engine") or "unknown engine")
    if engine == "null":
        return untested(reason="its engine, null, computes nothing", moot=True)
    if (reason := _fixed_settings(experiment, request)) is not None:
        return untested(reason=reason)
    if request.target in PLAIN:
        return untested(reason=f"the {request.target} server cannot leave it out")
    if (backend := arm.in_effect.get("backend")) in BACKEND_ENDINGS:
        return untested(reason=f"Triton's {backend} backend cannot leave it out")
    null = {"engine": "null", "device": "", "mode": "", "precision": "", "spinning": ""}
    if (fronts := arm.in_effect.get("fronts")) is not None:  # its default is another one without a GPU
        null["fronts"] = str(fronts)
    changed = f"engine {engine} → null, which computes nothing"
    return _ablation(experiment, request, "compute", changed, settings=null)


def changed_settings(settings: Mapping[str, str], variant: Variant) -> dict[str, str]:
    """An arm's options with those of a variant, whose empty values remove an option."""
    changed = {setting_key(name) for name in variant.settings}
    unchanged = {name: value for name, value in settings.items() if setting_key(name) not in changed}
    return unchanged | {name: value for name, value in variant.settings.items() if value}


def measure(context: RunContext) -> None:
    """Run every ablation for which the time lasts, once all blocks are done; each is stored. Raises `StorageError`."""
    if not context.last:
        return
    context.enter("explaining the differences")
    experiment = context.experiment
    run = read_run(context.store.directory)
    worth = workloads_worth_explaining(experiment, summarise_blocks(run.blocks))
    arms = {record.label: record for record in context.records}
    blocks = [block.record for block in run.blocks]
    payload_bytes = _means((block.label, size) for block in blocks for size in block.body_payload_bytes)
    seconds = _means((block.workload, (block.window_end_ns - block.window_start_ns) / 1e9) for block in blocks)
    plan, untested = plan_ablations(experiment, arms, payload_bytes)
    workloads, left_out = fit_into(experiment.explain_seconds, plan, worth, seconds)
    explanation = Explanation(
        workloads=tuple(workload.name for workload in workloads),
        left_out=tuple(workload.name for workload in left_out),
        done=(),
        untested=tuple(untested),
    )
    context.store.write(explanation)
    if not workloads:
        context.progress.now("the arms' request times do not differ, so there is nothing to explain")
        return
    deadline = monotonic() + experiment.explain_seconds
    needed_s = seconds_needed(plan, workloads, seconds)
    prepared = {arm.body_key for arm in context.arms.values()}
    for done, planned in enumerate(plan):
        ablation = msgspec.structs.replace(planned, workloads=tuple(workloads))
        context.progress.plan(context.forecast.remaining_s() + needed_s * (1 - done / len(plan)))
        context.progress.now(f"ablation {done + 1} of {len(plan)}: {shown(ablation.label)} with {ablation.changed}")
        limit = counted(experiment.explain_seconds / 60, "minute")
        failure: str | None = f"the limit of {limit} is reached; raise --explain-minutes"
        if monotonic() <= deadline:
            failure = context.attempt(partial(_run_ablation, context, ablation, prepared))
        if failure is None:
            explanation = msgspec.structs.replace(explanation, done=(*explanation.done, ablation))
        else:
            reason = failure.replace(f"arm {AS_IS}", "the arm with it").replace(f"arm {WITHOUT}", "the arm without it")
            context.progress.now(f"not tested: {reason}")
            failed = Untested(cause=ablation.cause, label=ablation.label, reason=reason)
            explanation = msgspec.structs.replace(explanation, untested=(*explanation.untested, failed))
        context.store.write(explanation)


def _run_ablation(context: RunContext, ablation: Ablation, prepared: set[str]) -> None:
    """Run one ablation. `prepared`: keys of the bodies that the generator has; new ones are added."""
    seed, workloads = context.experiment.seed, ablation.workloads
    store = RunStore(context.store.directory / ablation.folder)
    with (
        _arm(context, ablation.label, ablation.as_is, store, "as-is") as as_is,
        _arm(context, ablation.label, ablation.without, store, "without") as without,
    ):
        for arm in (as_is, without):
            if arm.body_key not in prepared:
                signature, sizes = arm.endpoint.signature(arm.model), {workload.batch_size for workload in workloads}
                context.generator.prepare(arm.bodies(context.samples_folder, signature, sizes, context.experiment))
                prepared.add(arm.body_key)
        runner = context.load_runner({AS_IS: as_is, WITHOUT: without}, store, watched=False, quiet=True)
        runner.warm_up(workloads)
        blocks = interleave(workloads, BESIDE, seed + ablation.number + 1)
        for place, block in enumerate(blocks, start=1):
            context.progress.now(
                f"{shown(ablation.label)} with {ablation.changed}: block {place} of {len(blocks)}, "
                f"{block.workload.name} {'before' if block.label == AS_IS else 'after'} the change"
            )
            runner.measure(block)


@contextmanager
def _arm(context: RunContext, label: Label, variant: Variant, store: RunStore, name: str) -> Iterator[Arm]:
    """Set up the arm as the variant says: on the running server if its settings fit, else on a new server."""
    running, experiment = context.arms[label], context.experiment
    if (variant.payload, variant.transport) == (running.payload, running.transport) and not variant.settings:
        yield running
        return
    request = varied_request(running.request, variant)
    varied = varied_experiment(experiment, request, variant)
    arm = replace(
        running,
        request=request,
        model=running.model if variant.payload == running.payload else varied.model_of(request) or running.model,
        transport=variant.transport,
        payload=variant.payload,
    )
    if not request.embedded or experiment.deployment == "compose":
        arm.deployment.wait_ready(arm.model, 5.0)
        yield arm
        return
    with context.second_server(arm, varied, store, context.work / store.directory.name / name) as started:
        yield started


def varied_request(request: ArmRequest, variant: Variant) -> ArmRequest:
    """The arm's request, changed as the variant says."""
    return msgspec.structs.replace(
        request, payload=variant.payload, settings=changed_settings(request.settings, variant)
    )


def varied_experiment(experiment: Experiment, request: ArmRequest, variant: Variant) -> Experiment:
    """The experiment with that arm in place of the original."""
    arms = tuple(request if arm.label == request.label else arm for arm in experiment.arms)
    return msgspec.structs.replace(experiment, arms=arms, transport=variant.transport)


def _means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of the values with each name."""
    grouped: dict[str, list[float]] = {}
    for name, value in values:
        grouped.setdefault(name, []).append(value)
    return {name: fmean(several) for name, several in grouped.items()}


FOLDED = "folded"
FOLDED_NOTE = (
    "folded: only one arm reports this stage, so its time is counted in the stage where the other arm includes it"
)


def why(result: Result) -> doc.Section | None:
    """The reasons for the differences: a terminal shows those of the most loaded scenario, a page those of all."""
    main = result.verdict.main_scenario
    # Of a streamed answer nearly all the time is that of reading it, whatever the server does meanwhile.
    breakdowns = [] if result.experiment.is_language else result.stages
    reasons = [verdict for verdict in result.verdict.scenarios if verdict.reasons]
    blocks: list[doc.Items | doc.Text | doc.Table] = [
        doc.Items([_reasons(result, verdict) for verdict in reasons if verdict.scenario == main])
    ]
    for causes in result.of(CausesFound).workloads:
        if causes.workload != main:
            blocks.append(doc.Text(f"{causes.workload}: {causes.sentence}"))
        blocks.append(cause_table(result, causes))
    others: list[doc.Items | doc.Table] = []
    for verdict in reasons:
        if verdict.scenario != main:
            key = (verdict.scenario, verdict.baseline, verdict.arm)
            others.append(doc.Items([_reasons(result, verdict)]))
            others += [
                stage_table(result, breakdown, on=doc.HTML)
                for breakdown in breakdowns
                if (breakdown.workload, breakdown.baseline, breakdown.arm) == key
            ]
    return doc.section(
        "Why",
        *blocks,
        doc.Items([] if main is None else time_spent(result, main)),
        doc.Text(causes_note(result), "note"),
        doc.Text(explain_command(result), "code", on=doc.PAGES),
        *(stage_table(result, breakdown) for breakdown in breakdowns if breakdown.workload == main),
        doc.Fold("The other scenarios", tuple(others)),
        causes_chart(result),
        None if result.experiment.is_language else stages_chart(result),
    )


def _reasons(result: Result, verdict: ScenarioVerdict) -> doc.Item:
    pairing = Pairing(verdict.baseline, verdict.arm)
    better = winner_of(verdict.outcome, pairing)
    style = None if better is None else charts.arm_style(result, better)
    return doc.Item(
        verdict_words(verdict.outcome, pairing), style, verdict.scenario + _which(result, pairing), verdict.reasons
    )


def _which(result: Result, pairing: Pairing) -> str:
    """A sentence part after a scenario, if there are more than two arms: ", C against A"."""
    return f", {shown(pairing.arm)} against {shown(pairing.baseline)}" if charts.several(result) else ""


def cause_table(result: Result, causes: WorkloadCauses) -> doc.Table:
    """One row per ablation, the causes in their order, then the unattributed rest and the whole difference."""
    base, arm = map(shown, causes.pairing)
    rows: list[tuple[str, ...]] = []
    for cause in causes.causes:
        head = (
            _title(cause),
            _ms(cause.difference_ms),
            _interval(cause.ci95_ms if cause.effects else None),
            percent(cause.share if cause.found else None),
        )
        tails = [
            (
                shown(effect.label),
                effect.changed,
                f"{number(effect.as_is_ms)} ms",
                f"{number(effect.without_ms)} ms",
                effect.folder,
            )
            for effect in cause.effects
        ]
        tails += [
            (
                shown(untested.label),
                f"{'does not apply' if untested.moot else 'not tested'}: {untested.reason}",
                "–",
                "–",
                "–",
            )
            for untested in cause.untested
        ]
        rows += [(*(head if place == 0 else ("",) * len(head)), *tail) for place, tail in enumerate(tails)]
    rest = ("unattributed", _ms(causes.unattributed_ms), _interval(causes.unattributed_ci95_ms))
    rows.append((*rest, percent(causes.unattributed_share), "", "", "", "", ""))
    whole = ("the difference", _ms(causes.difference_ms), _interval(causes.ci95_ms), "100 %")
    times = (f"{base} {number(causes.baseline_ms)} ms", f"{arm} {number(causes.arm_ms)} ms")
    rows.append((*whole, "", "", *times, "blocks"))
    return doc.Table(
        (
            *doc.names("cause"),
            *doc.numbers(f"{arm} − {base}", "95 % interval", "share"),
            *doc.names("arm"),
            *doc.texts("change"),
            *doc.numbers("before", "after"),
            *doc.texts("measured in"),
        ),
        rows,
        title=f"Causes of the difference in {causes.workload}{_which(result, causes.pairing)}",
        total=True,
        on=doc.PAGES,
    )


def _title(cause: Cause) -> str:
    return cause.title if cause.found or not cause.effects else f"{cause.title} (within the noise)"


def causes_note(result: Result) -> str:
    """How the causes were found, or what the stages cannot tell without them. Never empty."""
    causes = result.of(CausesFound)
    if causes.workloads:
        base, arm = charts.base_and_arm(result)
        note = (
            "Each ablation removes one cause from one arm, in blocks interleaved with blocks of the unchanged arm. "
            f"Times are means per request. A cause contributes its cost to {arm} minus its cost to {base}. It counts "
            "if its interval excludes 0."
        )
        if result.state is None or result.state.state != "finished":
            note += " The run ended before all ablations were done."
        if causes.left_out:
            note += f" No time was left for {', '.join(causes.left_out)}: raise --explain-minutes."
        return note
    if causes.explained == ():
        return "No mean request times differ by more than the noise and ±δ, so no ablation was run."
    if not any(summary.latency.samples for summary in result.summaries):
        return "No request was measured under load, so there is nothing to explain."
    why = "the run ended before its ablations" if result.experiment.explain else "no ablation was run; add `--explain`"
    if result.experiment.is_language:
        return (
            "The pace is the client's figure, steps and their share of the time are the servers' own. They show where "
            "the time is spent and prove no cause; the same server over another protocol or with another option "
            "(--a-transport, --a-option) does."
        )
    if any(arm and not arm.contradictions for breakdown in result.stages for arm in breakdown.sides):
        return f"The latency breakdown shows in which stage the time is spent, but does not prove a cause: {why}."
    return f"No server reports stages that add up, so where a request spends its time is not known, and {why}."


def explain_command(result: Result) -> str:
    """The command that would find the causes; empty where it was run or there is nothing to explain."""
    command = result.environment.command if result.environment else ""
    measured = any(summary.latency.samples for summary in result.summaries)
    asked = result.of(CausesFound).workloads or result.experiment.explain or result.experiment.is_language
    if asked or not measured or not command:
        return ""
    return f"{command} --explain"


LEAST_SHARE = 0.05
"""A stage with less of a request's time is not named."""
MOST_STAGES = 3
"""Most stages that a line names."""


def time_spent(result: Result, workload: str) -> list[doc.Item]:
    """Where a mean request of each arm spends its time, the largest stages first; a line per measured arm. None of a
    language model, whose time is that of its tokens."""
    if result.experiment.is_language:
        return []
    sides = {
        arm.label: arm
        for breakdown in result.stages
        if breakdown.workload == workload
        for arm in breakdown.sides
        if arm is not None
    }
    means = {s.label: s.latency.mean_ms for s in result.summaries if s.workload == workload}
    return [
        doc.Item(_spent(sides.get(label), mean_ms), charts.arm_style(result, label), shown(label))
        for label in result.experiment.labels
        if (mean_ms := means.get(label)) is not None
    ]


def _spent(arm: ArmStages | None, mean_ms: float) -> str:
    if arm is None:
        return f"{number(mean_ms)} ms per request; its server reports no stages"
    if arm.contradictions:
        return f"{number(mean_ms)} ms per request; its server's stages do not add up to that"
    shares = {stage: (ms or 0.0) / arm.client_total_ms for stage, ms in arm.stages_ms.items()}
    largest = sorted((stage for stage in STAGES if shares.get(stage, 0.0) >= LEAST_SHARE), key=lambda s: -shares[s])
    parts = [f"{share(shares[stage])} {TITLES[stage]}" for stage in largest[:MOST_STAGES]]
    return f"{number(arm.client_total_ms)} ms per request: {', '.join(parts)}"


def causes_chart(result: Result) -> doc.Chart | None:
    """What each cause contributes to the difference, with its interval."""
    explained = result.of(CausesFound).workloads
    if not explained:
        return None
    base, arm = charts.base_and_arm(result)
    data: list[doc.Figure] = []
    views = [
        charts.add_view(
            data,
            workload_causes.workload + _which(result, workload_causes.pairing),
            [_cause_bars(result, workload_causes)],
            xaxis=charts.axis(
                f"{shown(workload_causes.arm)} − {shown(workload_causes.baseline)}, ms per request", zeroline=True
            ),
        )
        for workload_causes in sorted(
            explained, key=lambda workload_causes: workload_causes.workload != result.verdict.main_scenario
        )
    ]
    return doc.Chart(
        "causes",
        "Causes of the difference",
        f"{arm[0].upper()}{arm[1:]} minus {base}, in ms of the mean request time, with 95 % intervals: right of 0 a "
        f"cause makes {arm} slower, left of 0 {base}. The causes and the unattributed rest add up to the difference; a "
        "cause within the noise does not count.",
        data,
        {
            "height": 150 + 34 * (max(len(workload_causes.causes) for workload_causes in explained) + 2),
            "bargap": 0.4,
            "showlegend": False,
            "yaxis": charts.ROWS,
        },
        views,
    )


def _cause_bars(result: Result, causes: WorkloadCauses) -> doc.Figure:
    rows: list[tuple[str, float, tuple[float, float] | None, str]] = [
        ("the difference", causes.difference_ms, causes.ci95_ms, "--ink")
    ]
    for cause in causes.causes:
        if cause.difference_ms is not None and cause.effects:
            slower = causes.arm if cause.difference_ms > 0 else causes.baseline
            bar = charts.colour(result, slower) if cause.found else "--line"
            rows.append((charts.label_text(_title(cause)), cause.difference_ms, cause.ci95_ms, bar))
    rows.append(("unattributed", causes.unattributed_ms, causes.unattributed_ci95_ms, "--muted"))
    labels, values, bounds, colours = zip(*rows, strict=True)
    return charts.bars_across(
        "",
        labels,
        values,
        {"color": list(colours)},
        error_x=charts.errors(values, bounds, color="--ink"),
        customdata=[signed_ms(value) for value in values],
        hovertemplate="%{y}: %{customdata}<extra></extra>",
    )


def stage_table(result: Result, breakdown: LatencyBreakdown, on: doc.Format = doc.PAGES) -> doc.Table:
    """Each stage of a request with the total last; without rows where no arm reports stages that add up."""
    rows = stage_rows(breakdown)
    pairing = Pairing(breakdown.baseline, breakdown.arm)
    base, arm = map(shown, pairing)
    return doc.Table(
        (*doc.names("stage"), *doc.numbers(base, arm, f"{arm} − {base}", "share")),
        rows,
        title=f"Mean latency breakdown in {breakdown.workload}{_which(result, pairing)}",
        caption=" ".join(filter(None, (_folded_note(rows), _ensemble_note(result, breakdown)))),
        total=True,
        on=on,
    )


def _folded_note(rows: Sequence[tuple[str, ...]]) -> str:
    """Where the time of folded stages is counted; empty if none is folded."""
    folded = [row[0] for row in rows if FOLDED in row]
    decoding = "decoding in preparing the batch, " if TITLES["decode"] in folded else ""
    return f"{FOLDED_NOTE}: {decoding}receiving and encoding in network and client." if folded else ""


def _ensemble_note(result: Result, breakdown: LatencyBreakdown) -> str:
    """Which of the arms are ensembles; empty without."""
    labels = {arm.label for arm in breakdown.sides if arm and not arm.contradictions}
    ensembles = [shown(arm.label) for arm in result.arms if arm.steps and arm.label in labels]
    return "" if not ensembles else f"On {join(ensembles)}, an ensemble, a stage is the sum over the steps."


def stage_rows(breakdown: LatencyBreakdown) -> list[tuple[str, ...]]:
    """Rows (stage, baseline, arm, arm − baseline, share of the difference), the total last; empty if no arm reports
    stages that add up."""
    arms = [arm for arm in breakdown.sides if arm and not arm.contradictions]
    if not arms:
        return []
    differences = {d.stage: d for d in breakdown.differences}
    decimals = max(0, 3 - math.floor(math.log10(max(arm.client_total_ms for arm in arms))))
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        values = [arm.stages_ms.get(stage) if arm in arms and arm else None for arm in breakdown.sides]
        if values == [None, None] or (stage == "send_delay" and not any(values)):
            continue
        difference = differences.get(stage)
        rows.append(
            (
                TITLES[stage],
                *("–" if value is None else f"{value:.{decimals}f} ms" for value in values),
                _signed(difference.difference_ms, decimals) if difference else FOLDED if differences else "–",
                percent(difference.share if difference else None),
            )
        )
    totals = [f"{arm.client_total_ms:.{decimals}f} ms" if arm else "–" for arm in breakdown.sides]
    total = breakdown.difference_ms
    shares = ("–", "–") if total is None or not differences else (_signed(total, decimals), "100 %")
    rows.append(("client total", *totals, *shares))
    return rows


def stages_chart(result: Result) -> doc.Chart | None:
    """The arms side by side, one colour per stage."""

    def traces(workload: str) -> list[doc.Figure]:
        by_label = {
            arm.label: arm
            for breakdown in result.stages
            if breakdown.workload == workload
            for arm in breakdown.sides
            if arm
        }
        arms = [arm for arm in by_label.values() if not arm.contradictions]
        return [
            charts.bars_across(
                TITLES[stage],
                [charts.arm_name(result, arm.label) for arm in arms],
                [arm.stages_ms.get(stage) or 0.0 for arm in arms],
                {"color": f"--stage{place}", "line": {"color": "--card", "width": 1}},
                hovertemplate=TITLES[stage] + ": %{x:.3~g} ms<extra></extra>",
            )
            for place, stage in enumerate(STAGES)
            if any(arm.stages_ms.get(stage) for arm in arms)
        ]

    return charts.chart_by_scenario(
        result,
        traces,
        "stages",
        "Latency breakdown",
        "Means per request, in the same stages for all arms. Time outside the servers is network and client; "
        "in a dynamic batch each request is charged the whole execution that it waited for.",
        height=260 + 40 * (len(result.experiment.arms) - 2),
        margin={"b": 96},
        barmode="relative",
        bargap=0.35,
        xaxis=charts.axis("ms per request", rangemode="tozero"),
        yaxis=charts.ROWS,
        legend={**charts.LEGEND_ABOVE, "yref": "container", "y": 0, "traceorder": "normal"},
    )


def _ms(value: float | None) -> str:
    return "–" if value is None else signed_ms(value) if value else "0 ms"


def _interval(bounds: tuple[float, float] | None) -> str:
    return "–" if bounds is None else f"{signed_ms(bounds[0]).removesuffix(' ms')} to {signed_ms(bounds[1])}"


def _signed(value: float, decimals: int) -> str:
    return f"{value:+.{decimals}f} ms".replace("-", "−")


PROBE = Probe(
    wanted=wanted,
    measure=measure,
    records=(Explanation,),
    finding=CausesFound,
    analyse=analyse,
    conclude=conclude,
    sections={"Why": (why,)},
)
