"""Checks on how far the figures carry: what the servers' own statistics are worth, what the intervals cover, what was
served."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.comparison.claims import join
from loadgen.comparison.comparisons import Comparison, leading_comparisons
from loadgen.comparison.facts import Facts, cell_scope
from loadgen.comparison.stages import OVERLAP_LIMIT
from loadgen.quantities import number, share
from loadgen.records.run import shown
from loadgen.result.checks.registry import Outcome, check, leading_by_scenario
from loadgen.result.noise_floor import is_self_comparison
from loadgen.studies.ceiling.analyse import CeilingsFound
from loadgen.studies.load.analyse import FORMED_FACTOR

QUEUE_SHARE_LIMIT = 0.05
UNATTRIBUTED_LIMIT = 0.25
"""Ours: beyond it a quarter of a request, more than most causes make, is in no stage."""
LARGEST_SHARE = 1.05
"""Of an engine's ceiling. What is above is no noise of two medians: it was measured under other conditions."""
COVERING_RESTARTS = 5
"""With fewer, Student's t asks for so much that little is ever decided."""


@check(
    title="dynamic batching formed batches",
    severity="informs",
    remedy="Raise the concurrency or the queue delay if batches are wanted.",
)
def batching_formed(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        if load.cell.concurrency <= 1:
            continue
        known = {s.label: s.executed_batch_mean for s in load.summaries if s.executed_batch_mean is not None}
        least, limit = min(known.values(), default=None), FORMED_FACTOR * load.cell.batch_size
        silent = [shown(label) for label in facts.run.experiment.labels if label not in known]
        if silent:
            detail = f"executed batches are unknown: {join(silent)} did not report them"
            yield Outcome(None, detail, least, limit, load.scope)
            continue
        idle = [shown(label) for label, mean in known.items() if mean < limit]
        detail = "mean executed batch: " + ", ".join(f"{shown(k)} {number(v)}" for k, v in known.items())
        if idle:
            detail += f"; batching never formed on {join(idle)}"
        yield Outcome(not idle, detail, least, limit, load.scope)


@check(
    title="no arm serves more than its engine does alone",
    severity="warns",
    remedy="That ceiling was not one: it was measured under other conditions. Let nothing else use the machine and run "
    "again; a server with several instances calls its engine otherwise than the ceiling does.",
)
def engine_ceiling(facts: Facts) -> Iterator[Outcome]:
    if not facts.of(CeilingsFound).shares:
        return
    highest = max(facts.of(CeilingsFound).shares, key=lambda one: one.share)
    detail = (
        f"at most {share(highest.share)} of what the engine does alone, by {shown(highest.label)} in {highest.cell} "
        f"at batch {highest.batch}"
    )
    yield Outcome(highest.share <= LARGEST_SHARE, detail, round(highest.share, 4), LARGEST_SHARE)


@check(
    title="serial load did not wait for a batch",
    severity="informs",
    remedy="Set the queue delay to 0 for serial load: nobody else's request will come.",
)
def queue_delay(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        if load.cell.concurrency > 1:
            continue
        waits = {
            arm.label: (wait_ms, wait_ms / arm.client_total_ms)
            for arm in load.stages
            if not arm.contradictions and (wait_ms := arm.stages_ms["queue"]) is not None
        }
        if waits:
            worst = max(waits, key=lambda label: waits[label][1])
            wait_ms, part = waits[worst]
            detail = f"{shown(worst)} waited {number(wait_ms)} ms in its queue, {share(part)} of a request"
            yield Outcome(part <= QUEUE_SHARE_LIMIT, detail, part, QUEUE_SHARE_LIMIT, load.scope)


@check(
    title="the account of time adds up",
    severity="informs",
    remedy="Read the stages with care: the server's own times exceed the client's, count other requests, or leave much "
    "to the network, the protocol and the client; --explain shows what the transfer takes.",
)
def stage_account(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        arms = load.stages
        if not arms:
            yield Outcome(None, "no server reports stages", scope=load.scope)
            continue
        faults = [f"{shown(arm.label)}: {text}" for arm in arms for text in arm.contradictions]
        contradicted = bool(faults)
        largest = max((arm.stages_ms["unattributed"] or 0.0) / arm.client_total_ms for arm in arms)
        for arm in arms:
            label, rest_ms = shown(arm.label), arm.stages_ms["unattributed"] or 0.0
            rest = rest_ms / arm.client_total_ms
            if rest > UNATTRIBUTED_LIMIT:
                faults.append(f"{share(rest)} of a request to {label} ({number(rest_ms)} ms) is in no stage")
            if arm.requests != arm.client_requests and not arm.contradictions:
                faults.append(f"{label} counted {arm.requests:,} requests, the client {arm.client_requests:,} answers")
        yield Outcome(
            not faults,
            "; ".join(faults) or f"{share(largest)} of a request at most is unattributed",
            largest,
            f"−{share(OVERLAP_LIMIT)} to {share(UNATTRIBUTED_LIMIT)} unattributed, same requests",
            load.scope,
            "warns" if contradicted else None,
        )


@check(
    title="the run can see a difference of δ",
    severity="informs",
    remedy="Ask for more pairs or longer blocks, or quieten the machine, to see smaller differences.",
)
def sensitivity(facts: Facts) -> Iterator[Outcome]:
    margin = facts.run.experiment.equivalence_margin
    for scenario, leading in leading_by_scenario(facts.comparisons).items():
        effects = [one.minimal_detectable_effect for one in leading]
        effect = None if None in effects else max(one for one in effects if one is not None)
        detail = "the smallest difference that it can see is unknown"
        if effect is not None:
            detail = f"a true difference of {share(effect)} would be named in 80 % of such runs (δ is {share(margin)})"
        ok = None if effect is None else effect <= margin
        yield Outcome(ok, detail, effect, margin, cell_scope(scenario))


def _leading_loads(facts: Facts) -> list[Comparison]:
    names = {load.cell.name for load in facts.planned}
    return [leading for leading in leading_comparisons(facts.comparisons) if leading.scenario in names]


@check(
    title="the intervals cover restarts of the servers",
    severity="informs",
    remedy="Ask for --restarts 5 or more: each is a fresh start of the servers with its share of the pairs.",
)
def restarts(facts: Facts) -> Iterator[Outcome]:
    loads, starts = _leading_loads(facts), facts.run.experiment.restarts
    if not loads:
        return
    effects = [c.restart_effect for c in loads if c.restart_effect is not None]
    detail = "the servers were started once: what a restart changes is in no interval"
    if starts > 1:
        detail = f"{starts} starts of the servers"
        if effects:
            detail += f"; a restart changes the ratio by {share(max(effects))} (standard deviation) at most"
    yield Outcome(starts >= COVERING_RESTARTS, detail, starts, COVERING_RESTARTS)


@check(
    title="the noise floor of this machine is known",
    severity="informs",
    remedy="Run `abserve noise-floor` once on this machine: it compares an arm with itself.",
)
def noise_floor(facts: Facts) -> Iterator[Outcome]:
    loads = _leading_loads(facts)
    if not loads or is_self_comparison(facts.run.experiment):
        return
    floors = [c.noise_floor for c in loads if c.noise_floor is not None]
    if not floors:
        yield Outcome(None, "never measured on this machine")
        return
    detail = f"identical arms differ by up to {share(max(floors))} on this machine"
    within = dict.fromkeys(c.scenario for c in loads if c.reason is not None and "noise floor" in c.reason)
    if within:
        detail += f"; no verdict for it on {', '.join(within)}"
    yield Outcome(True, detail, max(floors))


@check(
    title="trained weights",
    severity="informs",
    caveat=True,
    remedy="Speed does not depend on the values of the weights; use --weights with a trained set for meaningful "
    "answers.",
)
def trained_weights(facts: Facts) -> Iterator[Outcome]:
    """By what each server reports; of a server that this tool has started with its weights, by what it was given."""
    experiment = facts.run.experiment
    told = {arm.label: str(w) for arm in facts.run.arms if (w := arm.in_effect.get("weights")) is not None}
    for request in experiment.arms:
        if request.embedded and experiment.deployment == "embedded":
            told[request.label] = experiment.weights
    silent = [shown(label) for label in experiment.labels if label not in told]
    named = ", ".join(dict.fromkeys(told.values()))
    random = next((name for name in told.values() if name.startswith("random")), None)
    detail = f"weights: {named}" if named else "weights unknown"
    if random is not None:
        detail = f"random weights ({random}): the speed is real, the embeddings mean nothing"
    if silent:
        missing = f"{join(silent)} {'do' if len(silent) > 1 else 'does'} not report them"
        detail += f"; {missing}" if named else f": {missing}"
    ok = False if random is not None else None if silent else True
    yield Outcome(ok, detail, random or named or None, "trained")


@check(
    title="Triton runs a native backend",
    severity="informs",
    caveat=True,
    remedy="Compare with a Triton container to learn about its onnxruntime and tensorrt backends.",
)
def native_backend(facts: Facts) -> Iterator[Outcome]:
    for arm in facts.run.arms:
        if (arm.model_config or {}).get("backend") == "python":
            detail = (
                f"{shown(arm.label)} is Triton {arm.server_version or ''} with its python backend: this says nothing "
                "about Triton's native onnxruntime and tensorrt backends"
            )
            yield Outcome(False, detail, "python", "onnxruntime or tensorrt")
