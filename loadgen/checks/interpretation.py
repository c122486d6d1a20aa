"""Checks of how far the figures can be trusted: server statistics, coverage of the intervals, the weights served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.base.quantities import detectable, do_not, join, number, share
from loadgen.checks.noise_floor import is_self_comparison, unknown_floor
from loadgen.checks.registry import Judgement, check, of_tensors, per_comparison, per_load
from loadgen.findings.ceiling import CeilingsFound
from loadgen.findings.load import FORMED_FACTOR, LoadFound
from loadgen.metrics.breakdown import OVERLAP_LIMIT, Stalls, find_stalls
from loadgen.metrics.comparisons import Comparison, leading_comparisons
from loadgen.metrics.facts import Facts, WorkloadFacts
from loadgen.records.checks import Severity
from loadgen.records.model_config import POLICY_EFFECT, executed_models, queue_policy_of
from loadgen.records.payloads import BACKEND_ENDINGS
from loadgen.records.run import MODEL_WEIGHTS, ArmRecord

QUEUE_SHARE_LIMIT = 0.05
UNATTRIBUTED_LIMIT = 0.25
"""Largest unattributed share of a request's time; more is larger than the effect of most causes."""
LARGEST_SHARE = 1.05
"""Largest share of an engine's ceiling. More is not noise: the ceiling was measured under other conditions."""
COVERING_RESTARTS = 5
"""With fewer restarts, Student's t is so wide that little is ever decided."""


@of_tensors(
    "dynamic batching merged requests",
    "Dynamic batching did not merge requests",
    "informs",
    "If you want batches, raise the concurrency or the queue delay.",
)
@per_load
def batching_formed(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    if load.workload.concurrency <= 1:
        return None
    names, batches = facts.names, facts.of(LoadFound).of_workload(load.workload.name)
    means = {names[arm.label]: arm.mean for arm in batches if arm.mean is not None and arm.formed is not None}
    least = min(means.values(), default=None)
    limit = FORMED_FACTOR * max((arm.request_items for arm in batches), default=load.workload.batch_size)
    if silent := [name for label in facts.run.experiment.loaded(load.workload) if (name := names[label]) not in means]:
        return Judgement(None, f"{do_not(silent, 'report')} executed batches", least, limit)
    detail = "mean executed batch: " + ", ".join(f"{label} {number(mean)}" for label, mean in means.items())
    idle = [names[arm.label] for arm in batches if arm.formed is False]
    if idle:
        detail += f", so {join(idle)} did not merge requests"
    return Judgement(not idle, detail, least, limit)


@check(
    "no arm exceeds its engine ceiling",
    "An arm exceeds its engine ceiling",
    "warns",
    "Stop other programs and run again; with several instances per server the ceiling does not apply.",
    threshold=LARGEST_SHARE,
)
def engine_ceiling(facts: Facts) -> Iterator[Judgement]:
    names = facts.names
    if not facts.of(CeilingsFound).shares:
        return
    highest = max(facts.of(CeilingsFound).shares, key=lambda ceiling: ceiling.share)
    ok = highest.share <= LARGEST_SHARE
    detail = (
        f"the served throughput of {names[highest.label]} in {highest.workload} is {share(highest.share)} of the "
        f"engine ceiling at batch {highest.batch}"
    )
    if not ok:
        detail += ", so the ceiling is not reliable"
    yield Judgement(ok, detail, round(highest.share, 4))


@of_tensors(
    "serial requests did not wait in the queue",
    "Serial requests waited in the queue",
    "informs",
    "Set the queue delay to 0 for serial load: no other request can join the batch.",
    threshold=QUEUE_SHARE_LIMIT,
)
@per_load
def queue_delay(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    waits = [
        (wait_ms / arm.client_total_ms, wait_ms, arm.label)
        for arm in load.stages
        if not arm.contradictions and (wait_ms := arm.stages_ms["queue"]) is not None
    ]
    if load.workload.concurrency > 1 or not waits:
        return None
    part, wait_ms, worst = max(waits)
    detail = (
        f"requests waited {number(wait_ms)} ms in the queue of {facts.names[worst]}, {share(part)} of their latency"
    )
    return Judgement(part <= QUEUE_SHARE_LIMIT, detail, part)


@of_tensors(
    "no request stalled for 0.5 s",
    "Requests stalled for 0.5 s",
    "warns",
    "Look for a timer of 0.5 s in the server that is named.",
    threshold=0,
)
@per_load
def half_second_stalls(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Skipped in an open loop, whose latencies include the wait for a connection."""
    names = facts.names
    if load.workload.is_open:
        return None
    arms = [arm for arm in facts.run.arms if arm.label in facts.run.experiment.loaded(load.workload)]
    blocks_of = {arm.label: [block for block in load.stored if block.record.label == arm.label] for arm in arms}
    if any(not any(block.has_samples for block in blocks) for blocks in blocks_of.values()):
        return Judgement(None, "no samples")
    judged = [(arm, stalls) for arm in arms if (stalls := find_stalls(blocks_of[arm.label])) is not None]
    if not judged:
        return None
    if stalled := [(arm, stalls) for arm, stalls in judged if stalls.stalled]:
        return Judgement(
            False,
            "; ".join(_stall_words(names[arm.label], arm, stalls) for arm, stalls in stalled),
            max(stalls.stalled for _, stalls in stalled),
            remedy=" ".join(dict.fromkeys(_stall_remedy(names[arm.label], arm) for arm, _ in stalled)),
        )
    return Judgement(True, f"no cluster of requests to {join([names[arm.label] for arm, _ in judged])} waited 0.5 s", 0)


def _stall_words(name: str, arm: ArmRecord, stalls: Stalls) -> str:
    detail = (
        f"{stalls.stalled:,} of {stalls.requests:,} requests to {name} "
        f"({share(stalls.stalled / stalls.requests)}) waited about 0.5 s, where the median of the others is "
        f"{number(stalls.median_ms)} ms; they make its mean latency {number(stalls.factor)} times as long"
    )
    if stalls.refused:
        detail += f", and {stalls.refused:,} of them were refused as unavailable (503)"
    if policy := queue_policy_of(arm):
        return f"{detail}: {policy} {POLICY_EFFECT}"
    if arm.server_name == "triton" and arm.model_config is not None:
        detail += ", and no queue policy in its configuration explains that"
    return detail


def _stall_remedy(name: str, arm: ArmRecord) -> str:
    if policy := queue_policy_of(arm):
        return f"Remove {policy} from dynamic_batching in the config.pbtxt of {name}."
    return f"Look for a timer of 0.5 s in the server of {name}."


@of_tensors(
    "the latency breakdown adds up",
    "The latency breakdown does not add up",
    "informs",
    "Do not rely on the latency breakdown; --explain measures the transfer separately.",
    threshold=f"−{share(OVERLAP_LIMIT)} to {share(UNATTRIBUTED_LIMIT)} unattributed, same requests",
)
@per_load
def latency_breakdown(load: WorkloadFacts, facts: Facts) -> Judgement:
    names = facts.names
    arms = load.stages
    if not arms:
        return Judgement(None, "no server reports stages")
    faults = [f"{names[arm.label]}: {text}" for arm in arms for text in arm.contradictions]
    severity: Severity | None = "warns" if faults else None
    rests = {arm.label: (arm.stages_ms["unattributed"] or 0.0) / arm.client_total_ms for arm in arms}
    for arm in arms:
        label, rest = names[arm.label], rests[arm.label]
        if rest > UNATTRIBUTED_LIMIT:
            rest_ms = number(arm.stages_ms["unattributed"] or 0.0)
            faults.append(f"{share(rest)} of a request to {label} ({rest_ms} ms) is unattributed")
        if arm.requests != arm.client_requests and not arm.contradictions:
            faults.append(f"{label} counted {arm.requests:,} requests, the client {arm.client_requests:,} responses")
    largest = max(rests.values())
    detail = "; ".join(faults) or f"at most {share(largest)} of a request is unattributed"
    return Judgement(not faults, detail, largest, severity=severity)


@check(
    "the run can detect a difference as small as the margin",
    "The run cannot detect a difference as small as the margin",
    "informs",
    "Ask for more rounds or longer blocks, or stop other programs.",
)
@per_comparison
def sensitivity(leading: Sequence[Comparison], facts: Facts) -> Judgement:
    margin, effects = (
        facts.run.experiment.equivalence_margin,
        [comparison.minimal_detectable_effect for comparison in leading],
    )
    measured = [effect for effect in effects if effect is not None]
    if len(measured) < len(effects):
        return Judgement(None, "the smallest difference that the run can detect is unknown", None, margin)
    effect = max(measured)
    detail = (
        f"80 % of such runs detect a difference of {detectable(effect)} or more (the margin is ±{100.0 * margin:g} %)"
    )
    return Judgement(effect <= margin, detail, effect, margin)


def _leading_loads(facts: Facts) -> list[Comparison]:
    names = {load.workload.name for load in facts.planned}
    return [leading for leading in leading_comparisons(facts.comparisons) if leading.workload in names]


@check(
    "the intervals cover server restarts",
    "The intervals do not cover server restarts",
    "informs",
    "Ask for --restarts 5 or more: each starts the servers afresh for its share of the rounds.",
    threshold=COVERING_RESTARTS,
)
def restarts(facts: Facts) -> Iterator[Judgement]:
    loads, starts = _leading_loads(facts), max(len({block.record.restart for block in facts.run.blocks}), 1)
    if not loads:
        return
    effects = [c.restart_effect for c in loads if c.restart_effect is not None]
    detail = "the servers were started once, so the intervals do not include what a restart changes"
    if starts > 1:
        detail = f"the servers were started {starts} times"
        if effects:
            detail += f"; a restart changes the ratio by up to {share(max(effects))} (standard deviation)"
    yield Judgement(starts >= COVERING_RESTARTS, detail, starts)


@check(
    "the noise floor of this machine is known",
    "The noise floor of this machine is not known",
    "informs",
    "Run `abserve noise-floor` here with the model, payload and transport of this run: it compares an arm with itself.",
)
def noise_floor(facts: Facts) -> Iterator[Judgement]:
    loads = _leading_loads(facts)
    if not loads or is_self_comparison(facts.run.experiment):
        return
    floors = [c.noise_floor for c in loads if c.noise_floor is not None]
    if not floors:
        yield Judgement(None, unknown_floor(facts.run.noise_floors))
        return
    detail = f"identical arms differ by up to {share(max(floors))} on this machine"
    within = dict.fromkeys(c.workload for c in loads if c.reason is not None and "noise floor" in c.reason)
    if within:
        detail += f", so there is no verdict on {', '.join(within)}"
    if lacking := dict.fromkeys(c.workload for c in loads if c.noise_floor is None):
        detail += f"; not measured in {', '.join(lacking)}"
    yield Judgement(True, detail, max(floors))


@check(
    "the weights are trained",
    "The weights are not trained",
    "informs",
    "Use --weights with a trained set for meaningful outputs; speed does not depend on the values.",
    threshold="trained",
    caveat=("failed", "unknown"),
)
def trained_weights(facts: Facts) -> Iterator[Judgement]:
    """Judge by each server's report; an embedded server was given the experiment's weights."""
    names = facts.names
    experiment = facts.run.experiment
    weights = {arm.label: str(w) for arm in facts.run.arms if (w := arm.in_effect.get("weights")) is not None}
    if experiment.deployment == "embedded" and experiment.weights != MODEL_WEIGHTS:
        weights |= {arm.label: experiment.weights for arm in experiment.arms if arm.embedded}
    silent = [names[label] for label in experiment.labels if label not in weights]
    named = ", ".join(dict.fromkeys(weights.values()))
    random = next((name for name in weights.values() if name.startswith("random")), None)
    parts = [f"weights: {named}"] if named else []
    if random is not None:
        parts = [f"the weights are random ({random}): the speed is real, the outputs mean nothing"]
    if silent:
        parts.append(f"{do_not(silent, 'report')} the weights")
    yield Judgement(
        False if random is not None else None if silent else True, "; ".join(parts), random or named or None
    )


@check(
    "every Triton uses its onnxruntime or tensorrt backend",
    "A Triton uses its python backend",
    "informs",
    "Give a tritonserver that has them with --tritonserver DIR, or compare with a Triton container.",
    threshold="onnxruntime or tensorrt",
    caveat=("failed",),
)
def native_backend(facts: Facts) -> Iterator[Judgement]:
    """One outcome per version of Triton whose python backend executes a model."""
    names = facts.names
    executed = {
        arm.label: {(model.model_config or {}).get("backend") for model in executed_models(arm)}
        for arm in facts.run.arms
    }
    backends = {label: next(iter(used)) if len(used) == 1 else None for label, used in executed.items()}
    others = [
        f"{names[label]} measures the {backend} backend"
        for label, backend in backends.items()
        if backend in BACKEND_ENDINGS
    ]
    in_python = [arm for arm in facts.run.arms if backends[arm.label] == "python"]
    for version in dict.fromkeys(arm.server_version for arm in in_python):
        labels = [names[arm.label] for arm in in_python if arm.server_version == version]
        triton = f"Triton {version}" if version else "Triton"
        detail = (
            f"{join(labels)} {'use' if len(labels) > 1 else 'uses'} the python backend of {triton}: "
            "this does not measure Triton's onnxruntime and tensorrt backends"
        )
        yield Judgement(False, "; ".join([detail, *others]), "python")
