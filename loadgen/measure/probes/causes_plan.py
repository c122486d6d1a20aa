"""Which ablations a run gets: every cause of all arms, by what was asked for and what is in effect; and what fits into
the time.

**Tensors.** The causes of an arm are removed one at a time. Payload and transfer depend on each other, so they are
removed one after the other: first an arm that was sent more gets the smallest payload of all (or every arm, where all
were sent JPEG files, decoded pictures), and from there every arm gets these tensors through shared memory. Their
effects add up by construction; those of the others need not where causes interact, and the unattributed rest shows by
how much.

**Tokens.** The causes are in `_OF_TOKENS`. Each is a part that arms have and that an option takes away. A part that all
arms have alike explains nothing, so it is not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.experiment.schedule import load_workloads
from loadgen.findings.causes import Ablation, CauseName, Pairs, Untested, difference, mean_pairs
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.model_config import whole
from loadgen.records.payloads import BACKEND_ENDINGS
from loadgen.records.probes import Variant
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, Label, Workload, asked_for, setting_key
from loadgen.records.targets import ROUTES, TARGETS, Kind, TokenTransport, Transport

MIN_PAIRS, MAX_PAIRS = 3, 6
"""Pairs of blocks per ablation and workload: as many as the workload has, within these limits."""
SERVER_SECONDS = 15.0
"""Seconds planned for starting a server and warming it up."""
BETWEEN_BLOCKS_SECONDS = 0.5


def plan_ablations(
    experiment: Experiment, records: Mapping[Label, ArmRecord], payload_bytes: Mapping[Label, float]
) -> tuple[list[Ablation], list[Untested]]:
    """Every cause of all arms, without workloads yet. `payload_bytes`: mean size of a request's tensors, by arm."""
    arms = [_Arm(experiment, request, records[request.label].in_effect) for request in experiment.arms]
    causes = _token_causes(arms) if experiment.kind is Kind.TOKENS else _tensor_causes(arms, payload_bytes)
    plan = [cause for cause in causes if isinstance(cause, Ablation)]
    numbered = [msgspec.structs.replace(ablation, number=place) for place, ablation in enumerate(plan)]
    return numbered, [cause for cause in causes if isinstance(cause, Untested)]


def _tensor_causes(arms: Sequence[_Arm], payload_bytes: Mapping[Label, float]) -> list[Ablation | Untested]:
    common: str | None = None
    causes: list[Ablation | Untested] = []
    if len({arm.payload for arm in arms}) > 1:
        common = min(arms, key=lambda arm: payload_bytes.get(arm.request.label, 0.0)).payload
        why = "as the other arm is sent" if len(arms) == 2 else "the smallest payload of all arms"
        causes += [_payload(arm, common, why) for arm in arms if arm.payload != common]
    elif arms[0].payload == "jpeg":  # the cost of decoding for each arm
        common = "uint8"
        causes += [_payload(arm, common, "decoded beforehand") for arm in arms]
    causes += [_queue_delay(arm) for arm in arms]
    causes += [_transfer(arm, common or arm.payload) for arm in arms]
    causes += [_compute(arm) for arm in arms]
    return causes


def workloads_worth_explaining(experiment: Experiment, blocks: Sequence[BlockSummary]) -> list[Workload]:
    """Workloads in which an arm's mean request time differs from the baseline's beyond the noise and beyond δ. The most
    loaded comes first, then the lightest, whose latency breakdown is the simplest, then the others."""
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
    the run ends the phase and reports the rest as not tested."""
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


@dataclass(frozen=True, slots=True)
class _Arm:
    """One arm, as asked for and in effect."""

    experiment: Experiment
    request: ArmRequest
    in_effect: Mapping[str, object]

    @property
    def payload(self) -> str:
        """What it is sent."""
        return self.experiment.payload_of(self.request)

    @property
    def transport(self) -> Transport:
        """How it is sent."""
        return self.experiment.transport_of(self.request)

    @property
    def is_in_stack(self) -> bool:
        """Whether its server is a container that abserve does not configure."""
        return self.experiment.deployment == "compose" and self.request.embedded

    @property
    def fixed(self) -> str | None:
        """Why its settings cannot be changed; None where they can."""
        if not self.request.embedded:
            return f"it is at {self.request.target}, and abserve did not start that server"
        if self.is_in_stack:
            return "it runs in the compose stack, which sets its own options"
        if self.request.own_repository:
            return "it serves your own repository, which sets its own options"
        return None

    @property
    def engine(self) -> str:
        """One of abserve's engines, or what else executes its model."""
        return str(self.in_effect.get("engine") or asked_for(self.request.settings, "engine") or "unknown")

    @property
    def has_own_engine(self) -> bool:
        """Whether the engine is one of abserve's, which the native server runs, too."""
        return self.request.target in ("native", "triton")

    @property
    def piece(self) -> int | None:
        """The most tokens of a prompt in one step; None if that is not known."""
        return whole(self.in_effect.get("prefill_chunk") or asked_for(self.request.settings, "prefill_chunk"))

    @property
    def has_graphs(self) -> bool:
        """Whether it replays CUDA graphs that an option turns off."""
        if not str(self.in_effect.get("device")).startswith("cuda"):
            return False
        if self.request.target == "vllm":
            return self.in_effect.get("eager") != "True"
        settings = self.request.settings
        off = asked_for(settings, "no_graphs") is not None or asked_for(settings, "graphs") == "false"
        return self.engine in ("slots", "continuous") and not off

    def ablation(
        self, cause: CauseName, changed: str, *, from_payload: str | None = None, **removed: Any
    ) -> Ablation | Untested:
        """`removed`: fields of `Variant` that remove the cause, from the arm with that payload."""
        if removed.keys() & {"target", "settings"} and self.fixed is not None:
            return self.untested(cause, self.fixed)
        as_is = Variant(payload=from_payload or self.payload, transport=self.transport, settings={})
        return Ablation(
            number=0, cause=cause, label=self.request.label, changed=changed, as_is=as_is,
            without=msgspec.structs.replace(as_is, **removed), workloads=(),
        )  # fmt: skip

    def untested(self, cause: CauseName, reason: str) -> Untested:
        return Untested(cause=cause, label=self.request.label, reason=reason)

    def without(self, cause: CauseName, reason: str) -> Untested:
        """The arm has no such part."""
        return Untested(cause=cause, label=self.request.label, reason=reason, moot=True)

    def on_native(self, engine: str) -> dict[str, str]:
        """The settings of a native server with this engine that works like the arm's own."""
        foreign = {name: "" for name in self.request.settings if setting_key(name) not in _OF_ENGINES}
        return foreign | {"engine": engine}


def _payload(arm: _Arm, other: str, why: str) -> Ablation | Untested:
    if arm.is_in_stack:
        return arm.untested("payload", f"{arm.fixed}; start the stack with {other} among its payloads")
    return arm.ablation("payload", f"{arm.payload} → {other}, {why}", payload=other)


def _queue_delay(arm: _Arm) -> Ablation | Untested:
    delay = arm.in_effect.get("max_queue_delay_us")
    if delay == 0:
        return arm.without("queue_delay", "its queue delay is 0 already")
    if delay is None and arm.in_effect.get("dynamic_batching") is False:
        return arm.without("queue_delay", "it has no dynamic batcher")
    before = asked_for(arm.request.settings, "max_queue_delay_us") or "unknown" if delay is None else str(delay)
    return arm.ablation("queue_delay", f"max-queue-delay-us {before} → 0", settings={"max-queue-delay-us": "0"})


def _transfer(arm: _Arm, payload: str) -> Ablation | Untested:
    from loadgen.client.connection import Address

    target = arm.request.target
    if ROUTES[arm.experiment.transport].shares_memory:
        return arm.without("transfer", "its tensors go through shared memory already")
    if arm.request.embedded and "shm" not in TARGETS[target].transports:
        return arm.untested("transfer", f"the {target} server takes tensors over HTTP only")
    if arm.is_in_stack:
        return arm.untested("transfer", "it runs in a container, which does not share this machine's memory")
    if not arm.request.embedded and not Address.parse(target).is_local:
        return arm.untested("transfer", f"{target} is on another machine, so it cannot share this one's memory")
    changed = f"{payload} over {arm.experiment.transport} → through shared memory"
    return arm.ablation("transfer", changed, from_payload=payload, transport="shm")


def _compute(arm: _Arm) -> Ablation | Untested:
    if arm.engine == "null":
        return arm.without("compute", "its engine, null, computes nothing")
    if arm.fixed is not None:
        return arm.untested("compute", arm.fixed)
    if TARGETS[arm.request.target].is_plain:
        return arm.untested("compute", f"the {arm.request.target} server cannot leave it out")
    if (backend := arm.in_effect.get("backend")) in BACKEND_ENDINGS:
        return arm.untested("compute", f"Triton's {backend} backend cannot leave it out")
    null = {"engine": "null", "device": "", "mode": "", "precision": "", "spinning": ""}
    if (fronts := arm.in_effect.get("fronts")) is not None:  # its default is another one without a GPU
        null["fronts"] = str(fronts)
    return arm.ablation("compute", f"engine {arm.engine} → null, which computes nothing", settings=null)


# The parts of a server of tokens


def _token_causes(arms: Sequence[_Arm]) -> list[Ablation | Untested]:
    """What is to be tested of every part, in their order; no part that all arms have alike, and none that can be taken
    from no arm, but the engine: that it was not tested is worth knowing."""
    causes: list[Ablation | Untested] = []
    for alike, make in _OF_TOKENS:
        if len({alike(arm) for arm in arms}) == 1:
            continue
        of_part = [make(arm, arms) for arm in arms]
        if any(isinstance(cause, Ablation) or (cause.cause == "engine" and not cause.moot) for cause in of_part):
            causes += of_part
    return causes


def _protocol(arm: _Arm, _: Sequence[_Arm]) -> Ablation | Untested:
    transport = arm.transport
    if transport == SHORTEST[0]:
        return arm.without("protocol", "its protocol has the shortest events already")
    if not arm.request.embedded:
        return arm.untested("protocol", f"what else the server at {arm.request.target} speaks is not known")
    shortest = next((protocol for protocol in SHORTEST if protocol in TARGETS[arm.request.target].protocols), transport)
    if shortest == transport:
        return arm.untested("protocol", f"{arm.request.target} speaks {transport} only")
    return arm.ablation("protocol", f"{transport} → {shortest}", transport=shortest)


def _server(arm: _Arm, _: Sequence[_Arm]) -> Ablation | Untested:
    target = arm.request.target
    if target == "native":
        return arm.without("server", "it is the native server")
    if arm.request.embedded and TARGETS[target].is_plain:
        return arm.without("server", f"only the {target} server runs {_engine_title(arm)}")
    changed = f"{target} → native, with the same engine {arm.engine}"
    return arm.ablation("server", changed, target="native", settings=arm.on_native(arm.engine))


def _engine(arm: _Arm, arms: Sequence[_Arm]) -> Ablation | Untested:
    """The baseline's engine takes the place of the others, or the default one if abserve has no such engine."""
    chosen = arms[0].engine if arms[0].has_own_engine else DEFAULT_ENGINE
    if arm.has_own_engine and arm.engine == chosen:
        return arm.without("engine", f"its engine is {chosen} already")
    if arm.has_own_engine or not arm.request.embedded:
        return arm.ablation("engine", f"{arm.engine} → {chosen}", settings={"engine": chosen})
    if arm.request.target != "fastapi":
        return arm.untested("engine", f"only the {arm.request.target} server runs its engine")
    changed = f"{_engine_title(arm)} behind fastapi → {chosen} behind native"
    return arm.ablation("engine", changed, target="native", settings=arm.on_native(chosen))


def _front_ends(arm: _Arm, _: Sequence[_Arm]) -> Ablation | Untested:
    fronts, least = whole(arm.in_effect.get("fronts")), 1 if arm.request.target == "vllm" else 0
    if arm.request.embedded and (arm.request.target not in ("native", "vllm") or fronts == least):
        return arm.without("front_ends", "its server has no such processes")
    before = "unknown" if fronts is None else fronts
    return arm.ablation("front_ends", f"fronts {before} → {least}", settings={"fronts": str(least)})


def _prompt_pieces(arm: _Arm, arms: Sequence[_Arm]) -> Ablation | Untested:
    longest = max((load.prompt_tokens or 0 for load in arm.experiment.workloads), default=0)
    if not arm.has_own_engine and arm.request.embedded:
        if arm.piece is None or arm.piece >= longest:
            return arm.without("prompt_pieces", "it reads whole prompts")
        return arm.untested("prompt_pieces", f"abserve leaves that number to {arm.request.target}")
    piece = arm.piece or next((other.piece for other in arms if other.engine == arm.engine and other.piece), None)
    if piece is not None and piece >= longest:
        return arm.without("prompt_pieces", "it reads whole prompts")
    before = "its default" if arm.piece is None else f"{arm.piece:,}"
    changed = f"prefill-chunk {before} → {longest:,}, whole prompts"
    return arm.ablation("prompt_pieces", changed, settings={"prefill-chunk": str(longest)})


def _graphs(arm: _Arm, _: Sequence[_Arm]) -> Ablation | Untested:
    if arm.request.embedded and not arm.has_graphs:
        return arm.without("graphs", "it replays none, or the engine alone decides")
    return arm.ablation("graphs", "CUDA graphs → none", settings={"no-graphs": "true"})


def _engine_title(arm: _Arm) -> str:
    return "generate()" if arm.engine == "generate" else arm.engine


SHORTEST: tuple[TokenTransport, ...] = ("generate_stream", "completions")
"""Protocols of ids, the one with the shortest events first."""
DEFAULT_ENGINE = "slots"
_OF_ENGINES = (
    "device", "precision", "threads", "spinning", "weights", "model", "slots", "max_length", "prefill_chunk", "graphs",
    "no_graphs",
)  # fmt: skip
"""Settings of any server that say what its engine does, and how."""
_OF_TOKENS: Sequence[tuple[Callable[[_Arm], object], Callable[[_Arm, Sequence[_Arm]], Ablation | Untested]]] = (
    (lambda arm: (arm.request.target, arm.transport), _protocol),
    (lambda arm: arm.request.target, _server),
    (lambda arm: arm.engine if arm.request.embedded else arm.request.target, _engine),
    (lambda arm: (arm.request.target, arm.in_effect.get("fronts")), _front_ends),
    (lambda arm: (arm.engine, asked_for(arm.request.settings, "prefill_chunk")), _prompt_pieces),
    (lambda arm: (arm.engine, arm.has_graphs), _graphs),
)
"""Of each part that a server of tokens has: what is alike in two arms that have it alike, and how it is taken away."""
