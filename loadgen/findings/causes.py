"""Causes: the stored ablations, and how much each cause contributes to the difference between two arms.

    DIR/causes.json   Explanation   rewritten after each ablation
    DIR/causes/…      the blocks of each ablation

An ablation runs one arm twice: with one cause and without it. In its folder the blocks are labelled `as-is` and
`without`; they are interleaved like those of the arms.

    difference arm − baseline = Σ causes + unattributed     a cause: its cost to the arm − its cost to the baseline

All in mean request times: shares of a difference add up in means only. A cause counts if its 95 % interval excludes 0;
a cause within the noise stays in the unattributed rest. The intervals are not adjusted for the number of causes.

The unit is the pair of adjacent blocks. Assumption: the differences of the pairs are independent and about normal
(Student's t). Sums of independent differences have the degrees of freedom of Welch and Satterthwaite (Biometrics
Bulletin 2, 1946).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import numpy as np

from loadgen.base.quantities import number, signed_ms
from loadgen.metrics.breakdown import LatencyBreakdown
from loadgen.metrics.claims import place
from loadgen.metrics.comparisons import Comparison, leading_comparisons, side_by_side
from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import BlockSummary, summarise_blocks
from loadgen.records.probes import Variant
from loadgen.records.run import Experiment, Found, Label, Pairing, Record, Workload, shown
from loadgen.stats.estimates import t_estimate
from loadgen.stats.ratios import estimate_ratio

CauseName = Literal[
    "payload", "transfer", "queue_delay", "compute",
    "protocol", "server", "engine", "front_ends", "prompt_pieces", "graphs",
]  # fmt: skip
"""Causes. Of tensors: a payload unlike the other arm's; tensors sent over a socket; waiting for a batch; executing the
model. Of tokens: longer events than another protocol's; the server around the engine; the engine; processes of their
own for HTTP; prompts that are read in several steps; CUDA graphs."""
AS_IS: Label = "as-is"
WITHOUT: Label = "without"
BESIDE = Pairing(WITHOUT, AS_IS)


class Ablation(Record, frozen=True, kw_only=True):
    """One cause removed from one arm, in all workloads that are explained."""

    number: int
    cause: CauseName
    label: Label
    changed: str
    """The change as text: "max-queue-delay-us 10000 → 0"."""
    as_is: Variant
    """With the cause. If two causes depend on each other, the second starts from the arm without the first."""
    without: Variant
    workloads: tuple[Workload, ...]

    @property
    def folder(self) -> str:
        """Where its blocks are, relative to DIR."""
        return f"causes/{self.number:02d}-{self.cause}-{self.label}"


class Untested(Record, frozen=True, kw_only=True):
    """A cause that was not removed from an arm, and why."""

    cause: CauseName
    label: Label
    reason: str
    moot: bool = False
    """The arm does not have the cause, so it explains nothing and needs no ablation."""
    not_measurable: bool = False
    """The ablation contradicts itself, so the cause has no share, on the other arm neither."""


class Explanation(Record, frozen=True, kw_only=True):
    """DIR/causes.json, rewritten after each ablation."""

    FILE = "causes.json"
    schema: Literal["abserve.causes/2"] = "abserve.causes/2"
    workloads: tuple[str, ...]
    """Workloads whose difference is explained."""
    left_out: tuple[str, ...]
    """Workloads with a difference, for which the time was too short."""
    done: tuple[Ablation, ...]
    untested: tuple[Untested, ...]


CAUSES: tuple[CauseName, ...] = get_args(CauseName)
CAUSE_TITLES: dict[CauseName, str] = {
    "payload": "payload format",
    "transfer": "payload transfer",
    "queue_delay": "queue delay",
    "compute": "compute",
    "protocol": "protocol",
    "server": "serving layer",
    "engine": "engine",
    "front_ends": "front-end processes",
    "prompt_pieces": "prompts in pieces",
    "graphs": "CUDA graphs",
}
STAGES_OF: dict[CauseName, tuple[str, ...]] = {
    "transfer": ("send_delay", "receive", "encode", "read_answer", "unattributed"),
    "queue_delay": ("queue",),
    "compute": ("compute_input", "compute_infer", "compute_output"),
}
"""Stages of the latency breakdown that belong to a cause, for a cause without an ablation; others have none."""
WORK: tuple[CauseName, ...] = ("compute",)
"""Causes whose ablation only leaves work out: no arm can be slower without it."""
DRIFT_LIMIT = 1.15
"""A note says so when an arm took this many times its earlier time during the ablations, or the inverse."""

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """A mean difference. `variance` is that of the mean; None for a single pair, which shows no spread."""

    mean_ms: float
    variance: float | None
    degrees: float

    @property
    def ci95_ms(self) -> tuple[float, float] | None:
        """Student's t interval; None with fewer than two pairs."""
        if self.variance is None:
            return None
        if self.variance == 0.0:
            return (self.mean_ms, self.mean_ms)
        return t_estimate(self.mean_ms, math.sqrt(self.variance), max(1, math.floor(self.degrees))).interval

    @property
    def seen(self) -> bool:
        """Whether the interval excludes 0; False without an interval."""
        bounds = self.ci95_ms
        return bounds is not None and (bounds[0] > 0.0 or bounds[1] < 0.0)


def difference(pairs: Pairs) -> MeanDifference | None:
    """Second minus first over the pairs; None without pairs."""
    if not pairs:
        return None
    values = [second - first for first, second in pairs]
    variance = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else None
    return MeanDifference(float(np.mean(values)), variance, len(values) - 1.0)


def combine(parts: Iterable[tuple[float, MeanDifference]]) -> MeanDifference:
    """Σ weight · difference of independent differences; without parts it is known to be 0."""
    mean, variance, denominator = 0.0, 0.0, 0.0
    has_variance = True
    for weight, part in parts:
        mean += weight * part.mean_ms
        if part.variance is None:
            has_variance = False
        elif (weighted := weight * weight * part.variance) > 0.0:
            variance += weighted
            denominator += weighted * weighted / part.degrees
    degrees = variance * variance / denominator if denominator > 0.0 else math.inf
    return MeanDifference(mean, variance if has_variance else None, degrees if math.isfinite(degrees) else 1e9)


def mean_pairs(workload: str, blocks: Sequence[BlockSummary], pairing: Pairing) -> list[tuple[float, float]]:
    """Mean request times in ms of two arms in each round of a workload that both completed, the baseline's first."""
    means = {
        (block.round, block.label): mean_ms
        for block in blocks
        if block.workload == workload and block.complete and (mean_ms := block.latency_ms("mean")) is not None
    }
    return [(base, arm) for _, base, arm in side_by_side(means, pairing)]


class CauseEffect(Record, frozen=True, kw_only=True):
    """One ablation in one workload: mean request times of the arm with and without the cause, in ms."""

    label: Label
    changed: str
    """What was changed."""
    as_is_ms: float
    without_ms: float
    saved_ms: float
    """Time with minus time without: the cost of the cause to this arm. Negative if the arm is slower without it."""
    ci95_ms: tuple[float, float] | None
    """95 % interval of `saved_ms`."""
    ratio: float | None
    """Time with the cause over the time without it, the geometric mean over the pairs."""
    ratio_ci95: tuple[float, float] | None
    pairs: int
    folder: str
    """Its blocks, relative to the run's folder."""


@dataclass(frozen=True, slots=True)
class MeasuredEffect:
    """The stored effect with its unrounded difference, of which sums are made."""

    cause: CauseName
    effect: CauseEffect
    saved: MeanDifference


def measure_effect(ablation: Ablation, workload: str, blocks: Sequence[BlockSummary]) -> MeasuredEffect | Untested:
    """Compute an effect; untested, with a reason, if a request failed, no pair of blocks is complete, or the arm was
    slower although it had less to do."""
    of_workload = [block for block in blocks if block.workload == workload]
    pairs = mean_pairs(workload, of_workload, BESIDE)
    failed = sum(block.errors for block in of_workload)
    saved = difference(pairs)
    if failed or saved is None:
        requests = sum(block.requests for block in of_workload)
        reason = f"{failed} of {requests} requests failed" if failed else "no pair of blocks is complete"
        return Untested(cause=ablation.cause, label=ablation.label, reason=reason)
    if ablation.cause in WORK and saved.seen and saved.mean_ms < 0.0:
        reason = f"requests took {number(-saved.mean_ms)} ms longer without this work, so more than it was changed"
        return Untested(cause=ablation.cause, label=ablation.label, reason=reason, not_measurable=True)
    ratio = estimate_ratio([as_is / without for without, as_is in pairs], 1.0)
    without_ms, as_is_ms = np.mean(pairs, axis=0).tolist()
    effect = CauseEffect(
        label=ablation.label,
        changed=ablation.changed,
        as_is_ms=as_is_ms,
        without_ms=without_ms,
        saved_ms=saved.mean_ms,
        ci95_ms=saved.ci95_ms,
        ratio=ratio.ratio,
        ratio_ci95=ratio.ci95,
        pairs=len(pairs),
        folder=ablation.folder,
    )
    return MeasuredEffect(ablation.cause, effect, saved)


class Cause(Record, frozen=True, kw_only=True):
    """One cause in one workload."""

    name: CauseName
    title: str
    difference_ms: float | None
    """Its cost to the arm minus its cost to the baseline; from the other arm alone if one is untested; None if both
    are, or one is not measurable."""
    ci95_ms: tuple[float, float] | None
    share: float | None
    """Share of the difference between the arms; negative where the cause works against it."""
    found: bool
    """Whether the interval excludes 0."""
    effects: tuple[CauseEffect, ...]
    """At most one per arm."""
    untested: tuple[Untested, ...]
    inferred_ms: float | None = None
    """Arm minus baseline in the stages of the latency breakdown that belong to the cause; only where an arm is
    untested. An inference, which no ablation confirms."""


class WorkloadCauses(Record, frozen=True, kw_only=True):
    """Why two arms differ in one workload. Times are means per request; `causes` the largest first."""

    workload: str
    baseline: Label
    arm: Label
    baseline_ms: float
    arm_ms: float
    difference_ms: float
    """Arm minus baseline."""
    ci95_ms: tuple[float, float] | None
    slower: Label
    ratio: float
    """The slower arm's time over the other's."""
    causes: tuple[Cause, ...]
    unattributed_ms: float
    """Difference minus the causes that were found."""
    unattributed_ci95_ms: tuple[float, float] | None
    unattributed_share: float | None
    sentence: str
    """Calls an arm faster only if the verdict does; see `with_verdicts`."""
    notes: tuple[str, ...]
    """Causes within the noise, untested causes and what the latency breakdown suggests for them, drift."""

    @property
    def pairing(self) -> Pairing:
        """The two arms."""
        return Pairing(self.baseline, self.arm)


def rank_causes(
    workload: Workload,
    pairing: Pairing,
    pairs: Pairs,
    effects: Sequence[MeasuredEffect],
    untested: Sequence[Untested],
    breakdown: LatencyBreakdown | None,
    names: Mapping[Label, str] | None = None,
) -> WorkloadCauses | None:
    """Rank the causes, without the sentence, which needs the verdicts. `pairs`: mean request times of both arms per
    round, the baseline's first; None without pairs. `names` replaces labels."""
    names = names or {label: shown(label) for label in pairing}
    gap = difference(pairs)
    if gap is None or gap.mean_ms == 0.0:
        return None
    ranked: list[tuple[Cause, MeanDifference | None]] = []
    for name in CAUSES:
        by_label = {
            measured.effect.label: measured
            for measured in effects
            if measured.cause == name and measured.effect.label in pairing
        }
        missing = tuple(
            entry for entry in untested if entry.cause == name and entry.label in set(pairing) - by_label.keys()
        )
        if by_label or missing:
            ranked.append(_cause(name, pairing, gap, by_label, missing, breakdown))
    ranked.sort(key=lambda entry: (not entry[0].found, -abs(entry[0].difference_ms or 0.0)))
    rest = combine([(1.0, gap), *((-1.0, part) for cause, part in ranked if cause.found and part is not None)])
    causes = tuple(cause for cause, _ in ranked)
    baseline_ms, arm_ms = np.mean(pairs, axis=0).tolist()
    ratio = max(baseline_ms, arm_ms) / min(baseline_ms, arm_ms)
    rest_share = rest.mean_ms / gap.mean_ms if gap.seen else None
    return WorkloadCauses(
        workload=workload.name,
        baseline=pairing.baseline,
        arm=pairing.arm,
        baseline_ms=baseline_ms,
        arm_ms=arm_ms,
        difference_ms=gap.mean_ms,
        ci95_ms=gap.ci95_ms,
        slower=pairing.arm if gap.mean_ms > 0.0 else pairing.baseline,
        ratio=ratio,
        causes=causes,
        unattributed_ms=rest.mean_ms,
        unattributed_ci95_ms=rest.ci95_ms,
        unattributed_share=rest_share,
        sentence="",
        notes=(
            *_notes(causes, pairing, names),
            *_drifts(causes, {pairing.baseline: baseline_ms, pairing.arm: arm_ms}, names),
        ),
    )


def _sentence(
    causes: WorkloadCauses,
    workload: Workload,
    leading: Comparison | None,
    names: Mapping[Label, str],
    *,
    comparable: bool,
) -> str:
    """The difference and the shares of its causes. The arm with the shorter requests is called faster if it wins the
    leading comparison; arms that are not `comparable` are not called faster, their requests are."""
    base, arm = (names[label] for label in causes.pairing)
    faster = next(label for label in causes.pairing if label != causes.slower)
    winner = None if leading is None else leading.winner
    if winner == faster:
        subjects = (f"{names[faster]} is", names[causes.slower])
        if not comparable:
            subjects = (f"Requests to {names[faster]} are", f"requests to {names[causes.slower]}")
        gain = f"{number(abs(causes.difference_ms))} ms less per {workload.kind.value}"
        if (token_ms := per_token(workload, abs(causes.difference_ms))) is not None:
            gain += f", {number(token_ms)} ms per token"
        lead = f"{subjects[0]} {causes.ratio:.2f}× faster than {subjects[1]} {place(workload)} ({gain})"
    else:
        no_verdict = leading is None or leading.verdict == "invalid"
        means = f"{number(causes.baseline_ms)} ms on {base} and {number(causes.arm_ms)} ms on {arm}"
        outcome = "No verdict" if no_verdict else "No winner" if winner is None else f"{names[winner]} wins"
        lead = f"{outcome} {place(workload)}; {workload.kind.value}s took {means} on average"
    return lead + _shares(causes.causes, causes.unattributed_share, names)


def per_token(workload: Workload, answer_ms: float) -> float | None:
    """The part of each token in a time of whole answers, their first token's included; None where answers have other
    lengths or no tokens."""
    return None if workload.output_tokens is None or workload.replayed else answer_ms / workload.output_tokens


def with_verdicts(
    finding: CausesFound,
    experiment: Experiment,
    leading: Sequence[Comparison],
    names: Mapping[Label, str] | None = None,
) -> CausesFound:
    """The causes with sentences that follow the verdicts of the leading comparisons."""
    by_name = experiment.by_name
    verdicts = {(comparison.workload, comparison.pairing): comparison for comparison in leading}

    def judged(causes: WorkloadCauses) -> WorkloadCauses:
        comparable = len({experiment.payload_of(experiment.arm(label)) for label in causes.pairing}) == 1
        leads = verdicts.get((causes.workload, causes.pairing))
        called = names or {label: shown(label) for label in causes.pairing}
        text = _sentence(causes, by_name[causes.workload], leads, called, comparable=comparable)
        return msgspec.structs.replace(causes, sentence=text)

    return msgspec.structs.replace(finding, workloads=tuple(map(judged, finding.workloads)))


def _cause(
    name: CauseName,
    pairing: Pairing,
    gap: MeanDifference,
    by_label: Mapping[Label, MeasuredEffect],
    missing: tuple[Untested, ...],
    breakdown: LatencyBreakdown | None,
) -> tuple[Cause, MeanDifference | None]:
    barred = any(not cause.moot for cause in missing)
    part: MeanDifference | None = None
    if (by_label or not barred) and not any(cause.not_measurable for cause in missing):
        part = combine([(1.0 if label == pairing.arm else -1.0, effect.saved) for label, effect in by_label.items()])
    inferred_ms = None
    if barred and breakdown is not None and breakdown.differences and name in STAGES_OF:
        inferred_ms = math.fsum(d.difference_ms for d in breakdown.differences if d.stage in STAGES_OF[name])
    cause = Cause(
        name=name,
        title=CAUSE_TITLES[name],
        difference_ms=None if part is None else part.mean_ms,
        ci95_ms=None if part is None else part.ci95_ms,
        share=part.mean_ms / gap.mean_ms if part is not None and gap.seen else None,
        found=part is not None and part.seen,
        effects=tuple(by_label[label].effect for label in pairing if label in by_label),
        untested=missing,
        inferred_ms=inferred_ms,
    )
    return cause, part


def _shares(causes: Sequence[Cause], unattributed: float | None, names: Mapping[Label, str]) -> str:
    """The end of the sentence: the share of each cause that was found, the largest first."""
    counting = sorted((cause for cause in causes if cause.found), key=lambda cause: -(cause.share or 0.0))
    if unattributed is None:
        return ", which is within the noise, so no cause has a share of it."
    if not any(cause.effects for cause in causes):
        return ": no cause was tested."
    if not counting:
        return ": none of the tested causes explains it."
    parts = [f"{percent(cause.share)} {_described(cause, names)}" for cause in counting]
    return f": {', '.join(parts)}, {percent(unattributed)} unattributed."


def _described(cause: Cause, names: Mapping[Label, str]) -> str:
    """Name the arm that pays for a cause, if only one does: a cause of the arm with the shorter requests works against
    the difference."""
    whose = f" of {names[cause.effects[0].label]}" if len(cause.effects) == 1 else ""
    what = f" ({cause.effects[0].changed.partition(',')[0]})" if cause.name in ("payload", "engine") else ""
    return cause.title + whose + what


def _notes(causes: Sequence[Cause], pairing: Pairing, names: Mapping[Label, str]) -> list[str]:
    notes = []
    against = [cause.title for cause in causes if cause.found and (cause.share or 0.0) < 0.0]
    if against:
        notes.append(
            f"Negative share ({', '.join(against)}): it costs the arm with the shorter requests more and hides some "
            "difference."
        )
    noise = [cause.title for cause in causes if cause.effects and not cause.found and cause.difference_ms is not None]
    if noise:
        notes.append(f"Within the noise: {', '.join(noise)}.")
    for cause in causes:
        reasons = [f"{names[untested.label]}: {untested.reason}" for untested in cause.untested if not untested.moot]
        if reasons:
            failed = any(untested.not_measurable for untested in cause.untested)
            note = f"Not {'measurable' if failed else 'tested'}: {cause.title} ({'; '.join(reasons)})."
            if cause.inferred_ms is not None:
                suggested = f"{signed_ms(cause.inferred_ms)} on {names[pairing.arm]}"
                note += f" The latency breakdown suggests {suggested}; no ablation confirms it."
            notes.append(note)
    return notes


def _drifts(causes: Sequence[Cause], own_ms: Mapping[Label, float], names: Mapping[Label, str]) -> list[str]:
    """A note if an unchanged arm ran at another speed than in its own blocks. Transfer ablations of an arm whose
    payload was changed first start from the changed arm and say nothing about drift."""
    changed = {effect.label for cause in causes if cause.name == "payload" for effect in cause.effects}
    drifts: dict[Label, list[float]] = {}
    for cause in causes:
        for effect in cause.effects:
            if cause.name != "transfer" or effect.label not in changed:
                drifts.setdefault(effect.label, []).append(effect.as_is_ms / own_ms[effect.label])
    drifted = [
        f"{names[label]}: {_span(ratios)}× its earlier time"
        for label, ratios in sorted(drifts.items())
        if min(ratios) < 1.0 / DRIFT_LIMIT or max(ratios) > DRIFT_LIMIT
    ]
    if not drifted:
        return []
    return [f"The machine's speed drifted while the ablations ran ({', '.join(drifted)}). Treat the shares as rough."]


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low}–{high}"


def percent(value: float | None) -> str:
    """A share of 1 in whole per cent: "−34 %"; "<1 %" for a smaller one, "12×" from 1,000 % on."""
    if value is None:
        return "–"
    size = f"{abs(value):.0f}×" if abs(value) >= 10.0 else f"{abs(value) * 100:.0f} %"
    if size == "0 %":
        return "<1 %" if abs(value) >= 0.0005 else size
    return f"−{size}" if value < 0 else size


class CausesFound(Found, frozen=True, kw_only=True):
    """Why arms differ from the baseline."""

    STUDY = "causes"
    workloads: tuple[WorkloadCauses, ...] = ()
    """One entry per arm and workload that was explained."""
    explained: tuple[str, ...] | None = None
    """Workloads to explain; None if no ablation was requested or the run ended before."""
    left_out: tuple[str, ...] = ()
    """Workloads for which the time was too short."""


def conclude(finding: CausesFound, facts: Facts) -> CausesFound:
    """The causes with their sentences."""
    return with_verdicts(finding, facts.run.experiment, leading_comparisons(facts.comparisons), facts.names)


def analyse(facts: Facts) -> CausesFound:
    """The causes in every workload that was explained."""
    explanation, experiment = facts.run.record_of(Explanation), facts.run.experiment
    if explanation is None:
        return CausesFound()
    done = [
        (ablation, summarise_blocks(facts.run.blocks_in(ablation.folder, ablation.workloads)))
        for ablation in explanation.done
    ]
    breakdowns = {(breakdown.workload, breakdown.baseline, breakdown.arm): breakdown for breakdown in facts.breakdowns}
    explained: list[WorkloadCauses] = []
    by_name = experiment.by_name
    for workload in (by_name[name] for name in explanation.workloads if name in by_name):
        measured = [measure_effect(ablation, workload.name, blocks) for ablation, blocks in done]
        effects = [effect for effect in measured if isinstance(effect, MeasuredEffect)]
        untested = [*explanation.untested, *(effect for effect in measured if isinstance(effect, Untested))]
        for pairing in experiment.pairings:
            pairs = mean_pairs(workload.name, facts.blocks, pairing)
            breakdown = breakdowns.get((workload.name, *pairing))
            causes = rank_causes(workload, pairing, pairs, effects, untested, breakdown, facts.names)
            if causes is not None:
                explained.append(causes)
    return CausesFound(workloads=tuple(explained), explained=explanation.workloads, left_out=explanation.left_out)
