"""What stands beside a lead in the headline: the part of it with a known cause, and settings that differ.

A part is a factor of the lead that was measured: by the ablation of the queue delay; without one, under serial load, by
the time that requests waited in the queue, up to the queue delay; or by the requests that stalled for 0.5 s. It is
named if it is more than half of the lead, in logarithms: 1.6× of 2.4× is 54 %.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loadgen.comparison.claims import join
from loadgen.comparison.comparisons import Comparison, advantage
from loadgen.comparison.facts import Facts, WorkloadFacts
from loadgen.comparison.stages import ArmStages
from loadgen.comparison.stalls import find_stalls
from loadgen.probes.causes_analysis import CauseEffect, CausesFound
from loadgen.quantities import Interval, number, ratio
from loadgen.records.model_config import queue_policy_of, whole
from loadgen.records.run import ArmRecord, Label, shown

NAMED_SHARE = 0.5
"""Share of a lead, in logarithms, above which its cause is named."""
COSTLY: tuple[tuple[str, str], ...] = (
    ("precision", "precision"),
    ("threads", "threads"),
    ("pad_to", "padding"),
    ("spinning", "thread spinning"),
)
"""Settings in effect that change what a request costs, and what they are called."""


class Part(NamedTuple):
    """A measured factor of a lead."""

    factor: float
    cause: str
    ci95: Interval | None = None

    def words(self, lead: float) -> str:
        """ "of which 5.1× is B's queue delay" """
        digits = 2 if self.factor >= 2.0 else 3
        factor = f"{number(self.factor, digits)}×" if self.ci95 is None else ratio(self.factor, self.ci95)
        return (
            f"of which {factor} is {self.cause}" if self.factor < lead else f"all of which is {self.cause} ({factor})"
        )


def beside(facts: Facts, comparison: Comparison) -> str:
    """A clause that follows the claim of a decided comparison, with its comma; empty if nothing is to be named."""
    found, winner, loser = advantage(comparison), comparison.winner, comparison.loser
    if found is None or winner is None or loser is None:
        return ""
    parts: list[Part] = []
    differences = _settings(facts, comparison)
    load = next((one for one in facts.planned if one.workload.name == comparison.scenario), None)
    if comparison.metric == "throughput" and load is not None and not load.workload.is_open:
        delay, stalls = _queue_delay(facts, load, winner, loser), _stalls(load, winner, loser)
        parts = [part for part in (delay, stalls) if part is not None and _explains(part.factor, found.factor)]
        differences += [] if delay else _delays(facts, load, winner, loser, found.factor)
        differences += [] if stalls else _policies(facts, winner, loser)
    clauses = [max(parts).words(found.factor)] if parts else []
    clauses += [f"with {join(differences)}"] if differences else []
    return "".join(f", {clause}" for clause in clauses)


def _explains(factor: float, lead: float) -> bool:
    return factor > 1.0 and lead > 1.0 and math.log(factor) > NAMED_SHARE * math.log(lead)


def _queue_delay(facts: Facts, load: WorkloadFacts, winner: Label, loser: Label) -> Part | None:
    """The factor of the slower arm's queue delay over the faster one's; None if it was not measured."""
    effects = _ablations(facts, load.workload.name)
    cause = f"{shown(loser)}'s queue delay"
    if (own := effects.get(loser)) is not None and own.ratio is not None:
        seen = own.ci95_ms is not None and own.ci95_ms[0] > 0.0
        other = effects[winner].ratio if winner in effects else None
        return Part(own.ratio / (other or 1.0) if seen else 1.0, cause, own.ratio_ci95 if other is None else None)
    if load.workload.concurrency > 1:
        return None
    own_factor, other_factor = (_serial_factor(facts, load, label) for label in (loser, winner))
    return None if own_factor is None or other_factor is None else Part(own_factor / other_factor, cause)


def _serial_factor(facts: Facts, load: WorkloadFacts, label: Label) -> float | None:
    """Mean latency over that without the wait in the queue, up to the queue delay; None if the wait is unknown."""
    held_ms, stages = _held_us(_arm(facts, label)) / 1000.0, _stages(load, label)
    if not held_ms:
        return 1.0
    if stages is None or (waited_ms := stages.stages_ms["queue"]) is None:
        return None
    total_ms = stages.client_total_ms
    return total_ms / (total_ms - min(waited_ms, held_ms, 0.999 * total_ms))


def _ablations(facts: Facts, workload: str) -> dict[Label, CauseEffect]:
    """The ablation of each arm's queue delay in a workload."""
    return {
        effect.label: effect
        for found in facts.of(CausesFound).workloads
        if found.workload == workload
        for cause in found.causes
        if cause.name == "queue_delay"
        for effect in cause.effects
    }


def _stalls(load: WorkloadFacts, winner: Label, loser: Label) -> Part | None:
    """The factor of the slower arm's stalls over the faster one's; None if a stall could not be told apart."""
    own, other = (find_stalls([block for block in load.stored if block.record.label == one]) for one in (loser, winner))
    if own is None:
        return None
    return Part(own.factor / (1.0 if other is None else other.factor), f"stalls of 0.5 s on {shown(loser)}")


def _policies(facts: Facts, winner: Label, loser: Label) -> list[str]:
    own, other = (arm is not None and queue_policy_of(arm) for arm in (_arm(facts, loser), _arm(facts, winner)))
    return [f"a queue policy on {shown(loser)}"] if own and not other else []


def _delays(facts: Facts, load: WorkloadFacts, winner: Label, loser: Label, lead: float) -> list[str]:
    """The queue delays, if the slower arm holds requests for longer and that can be more than half of the lead: a
    request may wait for its own batch and for the one before it."""
    pair = {label: _arm(facts, label) for label in sorted((winner, loser))}
    held_us = {label: _held_us(arm) for label, arm in pair.items()}
    mean_ms = next((one.latency.mean_ms for one in load.summaries if one.label == loser), None)
    if held_us[loser] <= held_us[winner] or mean_ms is None:
        return []
    stages, most_ms = _stages(load, loser), 2.0 * held_us[loser] / 1000.0
    if stages is not None and (waited_ms := stages.stages_ms["queue"]) is not None:
        most_ms = min(most_ms, waited_ms)
    if most_ms < mean_ms and not _explains(mean_ms / (mean_ms - most_ms), lead):
        return []
    return [f"different queue delays ({', '.join(_delay_words(label, arm) for label, arm in pair.items())})"]


def _delay_words(label: Label, arm: ArmRecord | None) -> str:
    delay = None if arm is None else whole(arm.in_effect.get("max_queue_delay_us"))
    return f"{shown(label)} {delay or 0:,} µs" + (", not when idle" if delay and not _held_us(arm) else "")


def _stages(load: WorkloadFacts, label: Label) -> ArmStages | None:
    """An arm's latency breakdown, unless its server contradicts the measurement."""
    return next((arm for arm in load.stages if arm.label == label and not arm.contradictions), None)


def _held_us(arm: ArmRecord | None) -> int:
    """How long an arm holds a request back for others though it could execute it; 0 if that is unknown."""
    if arm is None or arm.in_effect.get("lone_requests_wait") == "false":
        return 0
    return whole(arm.in_effect.get("max_queue_delay_us")) or 0


def _settings(facts: Facts, comparison: Comparison) -> list[str]:
    """The settings of COSTLY that both arms report with other values, the baseline's first."""
    arms = [arm for label in comparison.pairing if (arm := _arm(facts, label)) is not None]
    on_gpu = all(str(arm.in_effect.get("device")).startswith("cuda") for arm in arms)
    found = []
    for name, title in COSTLY:
        values = [str(arm.in_effect[name]) for arm in arms if arm.in_effect.get(name) is not None]
        if len(values) == 2 and values[0].lower() != values[1].lower() and not (on_gpu and name == "threads"):
            texts = [value.upper() if name == "precision" else value for value in values]
            named = ", ".join(f"{shown(arm.label)} {text}" for arm, text in zip(arms, texts, strict=True))
            found.append(f"different {title} ({named})")
    return found


def _arm(facts: Facts, label: Label) -> ArmRecord | None:
    return next((arm for arm in facts.run.arms if arm.label == label), None)
