"""From effects to causes: how much of the difference between the arms each one makes, the largest first.

    difference arm − baseline = Σ causes + unattributed       a cause: what it costs the arm minus the baseline's

All in means of request times. A cause counts where its 95 % interval excludes 0; what lies within the noise counts for
nothing and stays in what is unattributed. The intervals are of one cause each, not adjusted for their number.

Means, because the mean of a sum is the sum of the means: shares of a difference add up only in means. The unit is the
pair of adjacent blocks. Assumption: the differences of the pairs are independent and about normal (Student's t). Sums
of independent differences have the degrees of freedom of Welch and Satterthwaite (Biometrics Bulletin 2, 1946).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from loadgen.comparison.claims import place
from loadgen.comparison.facts import Facts
from loadgen.comparison.pairs import side_by_side
from loadgen.comparison.stages import StageAccount
from loadgen.comparison.summaries import BlockSummary, summarise_blocks
from loadgen.quantities import signed_ms
from loadgen.records.run import Cell, Found, Label, Pairing, Record, shown
from loadgen.statistics.ratios import SIGNIFICANCE, critical_t, estimate_ratio
from loadgen.storage.stored_run import StoredBlock, StoredRun
from loadgen.studies.causes.records import BESIDE, CauseName, Counterfactual, Untested

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """`variance` is that of the mean, None where one pair shows no spread."""

    mean_ms: float
    variance: float | None
    degrees: float
    pairs: int

    @property
    def ci95_ms(self) -> tuple[float, float] | None:
        """Student's t interval; None with fewer than two pairs."""
        if self.variance is None:
            return None
        if self.variance == 0.0:
            return (self.mean_ms, self.mean_ms)
        half = critical_t(max(1, math.floor(self.degrees)), SIGNIFICANCE) * math.sqrt(self.variance)
        return (self.mean_ms - half, self.mean_ms + half)

    @property
    def seen(self) -> bool:
        """Whether the interval excludes 0; never without an interval."""
        bounds = self.ci95_ms
        return bounds is not None and (bounds[0] > 0.0 or bounds[1] < 0.0)


NOTHING = Difference(0.0, 0.0, math.inf, 0)
"""Known to be 0 without measuring."""


def difference(pairs: Pairs) -> Difference | None:
    """Second minus first over the pairs; None without any."""
    values = [second - first for first, second in pairs]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Difference(mean, None, 0.0, 1)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Difference(mean, spread / len(values), len(values) - 1.0, len(values))


def combine(parts: Iterable[tuple[float, Difference]]) -> Difference:
    """Σ weight · difference, taken as independent."""
    mean, variance, denominator, pairs = 0.0, 0.0, 0.0, 0
    known = True
    for weight, part in parts:
        mean += weight * part.mean_ms
        pairs = max(pairs, part.pairs)
        if part.variance is None:
            known = False
            continue
        own = weight * weight * part.variance
        variance += own
        if own > 0.0:
            denominator += own * own / part.degrees
    degrees = variance * variance / denominator if denominator > 0.0 else math.inf
    return Difference(mean, variance if known else None, degrees if math.isfinite(degrees) else 1e9, pairs)


def mean_pairs(cell: str, blocks: Sequence[BlockSummary], pairing: Pairing) -> list[tuple[float, float]]:
    """Mean request times in ms of two arms in each round of a cell that both completed, the baseline's first."""
    means = {
        (block.round, block.label): block.latency.mean_ms
        for block in blocks
        if block.cell == cell and block.complete and block.latency.mean_ms is not None
    }
    return [(base, arm) for _, base, arm in side_by_side(means, pairing)]


class CauseEffect(Record, frozen=True, kw_only=True):
    """One arm in one cell, as it is against without the cause: mean request times in ms."""

    label: Label
    changed: str
    """What was done."""
    as_is_ms: float
    without_ms: float
    saved_ms: float
    """As it is minus without: what the cause costs this arm. Negative where the arm is slower without it."""
    ci95_ms: tuple[float, float] | None
    """Of `saved_ms`."""
    ratio: float | None
    """As it is over without, the geometric mean over the pairs."""
    ratio_ci95: tuple[float, float] | None
    pairs: int
    folder: str
    """Of the blocks that show it, relative to the run's folder."""


@dataclass(frozen=True, slots=True)
class MeasuredEffect:
    """The record with the figures that it was made of."""

    cause: CauseName
    effect: CauseEffect
    saved: Difference


def measure_effects(
    counterfactual: Counterfactual, blocks: Sequence[StoredBlock]
) -> dict[str, MeasuredEffect | Untested]:
    """By the cell's name; untested where a request failed or a block is missing, with the reason."""
    summaries = summarise_blocks(blocks)
    found: dict[str, MeasuredEffect | Untested] = {}
    for cell in counterfactual.cells:
        own = [summary for summary in summaries if summary.cell == cell.name]
        pairs = mean_pairs(cell.name, own, BESIDE)
        failed = sum(summary.errors for summary in own)
        reason = None
        if failed:
            reason = f"{failed} of {sum(summary.requests for summary in own)} requests of its cell failed"
        elif not pairs:
            reason = "its cell holds no complete pair of blocks"
        saved = difference(pairs)
        if reason is not None or saved is None:
            found[cell.name] = Untested(
                cause=counterfactual.cause, label=counterfactual.label, reason=reason or "its cell is empty"
            )
            continue
        ratio = estimate_ratio([as_is / without for without, as_is in pairs], 1.0)
        effect = CauseEffect(
            label=counterfactual.label,
            changed=counterfactual.changed,
            as_is_ms=math.fsum(as_is for _, as_is in pairs) / len(pairs),
            without_ms=math.fsum(without for without, _ in pairs) / len(pairs),
            saved_ms=saved.mean_ms,
            ci95_ms=saved.ci95_ms,
            ratio=ratio.ratio,
            ratio_ci95=ratio.ci95,
            pairs=len(pairs),
            folder=counterfactual.folder,
        )
        found[cell.name] = MeasuredEffect(counterfactual.cause, effect, saved)
    return found


CAUSES: tuple[CauseName, ...] = get_args(CauseName)
CAUSE_TITLES: dict[CauseName, str] = {
    "payload": "the payload",
    "transfer": "payload transfer",
    "queue_delay": "queue delay",
    "compute": "compute",
}
STAGES_OF: dict[CauseName, tuple[str, ...]] = {
    "payload": (),
    "transfer": ("send_delay", "receive", "encode", "read_answer", "unattributed"),
    "queue_delay": ("queue",),
    "compute": ("compute_input", "compute_infer", "compute_output"),
}
"""Where the account of time keeps what a cause costs, for causes that no cell has shown."""
DRIFT_LIMIT = 1.15
"""An arm as it is may take so many times the time of its own blocks, or the inverse, before that is said."""


class Cause(Record, frozen=True, kw_only=True):
    """One cause in one cell."""

    name: CauseName
    title: str
    difference_ms: float | None
    """What it costs the arm minus what it costs the baseline; of the tested arms alone where one is untested, None
    where both are."""
    ci95_ms: tuple[float, float] | None
    share: float | None
    """Of the difference between the arms; negative where it works against it."""
    found: bool
    """Whether the interval excludes 0."""
    effects: tuple[CauseEffect, ...]
    """By the arm, each with the cell that shows it."""
    untested: tuple[Untested, ...]
    inferred_ms: float | None = None
    """Arm minus baseline in the stages that belong to it, by the servers' own account; only where an arm is untested.
    An inference: no cell has shown it."""


class CellCauses(Record, frozen=True, kw_only=True):
    """Why two arms differ in one cell. Times are means a request; `causes` the largest first."""

    cell: str
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
    """What is left of the difference after the causes that were found."""
    unattributed_ci95_ms: tuple[float, float] | None
    unattributed_share: float | None
    sentence: str
    notes: tuple[str, ...]
    """What was within the noise, what was not tested and what the account of time suggests for that."""

    @property
    def pairing(self) -> Pairing:
        """The two arms."""
        return Pairing(self.baseline, self.arm)


def rank_causes(
    cell: Cell,
    pairing: Pairing,
    pairs: Pairs,
    effects: Sequence[MeasuredEffect],
    untested: Sequence[Untested],
    account: StageAccount | None,
    *,
    comparable: bool,
) -> CellCauses | None:
    """`pairs` are the mean request times of both arms in each round of the cell, the baseline's first; None without
    any.

    Not `comparable` arms are not called slower: their requests took longer.
    """
    gap = difference(pairs)
    if gap is None or gap.mean_ms == 0.0:
        return None
    causes: list[Cause] = []
    parts: dict[CauseName, Difference] = {}
    for name in CAUSES:
        cause, part = _cause(name, pairing, gap, effects, untested, account)
        if cause is None:
            continue
        causes.append(cause)
        if cause.found and part is not None:
            parts[name] = part
    causes.sort(key=lambda cause: (not cause.found, -abs(cause.difference_ms or 0.0)))
    rest = combine([(1.0, gap), *((-1.0, part) for part in parts.values())])
    baseline_ms, arm_ms = (math.fsum(pair[index] for pair in pairs) / len(pairs) for index in (0, 1))
    found = CellCauses(
        cell=cell.name,
        baseline=pairing.baseline,
        arm=pairing.arm,
        baseline_ms=baseline_ms,
        arm_ms=arm_ms,
        difference_ms=gap.mean_ms,
        ci95_ms=gap.ci95_ms,
        slower=pairing.arm if gap.mean_ms > 0.0 else pairing.baseline,
        ratio=max(baseline_ms, arm_ms) / min(baseline_ms, arm_ms),
        causes=tuple(causes),
        unattributed_ms=rest.mean_ms,
        unattributed_ci95_ms=rest.ci95_ms,
        unattributed_share=rest.mean_ms / gap.mean_ms if gap.seen else None,
        sentence="",
        notes=(
            *_notes(causes, pairing),
            *_drifts(causes, {pairing.baseline: baseline_ms, pairing.arm: arm_ms}),
        ),
    )
    return _with_sentence(found, place(cell), comparable)


def _cause(
    name: CauseName,
    pairing: Pairing,
    gap: Difference,
    effects: Sequence[MeasuredEffect],
    untested: Sequence[Untested],
    account: StageAccount | None,
) -> tuple[Cause | None, Difference | None]:
    own = {one.effect.label: one for one in effects if one.cause == name and one.effect.label in pairing}
    missing = tuple(one for one in untested if one.cause == name and one.label in set(pairing) - own.keys())
    if not own and not missing:
        return None, None
    barred = tuple(one for one in missing if not one.moot)
    part: Difference | None = None
    if own:
        part = combine([(1.0 if label == pairing.arm else -1.0, effect.saved) for label, effect in own.items()])
    elif not barred:
        part = NOTHING
    cause = Cause(
        name=name,
        title=CAUSE_TITLES[name],
        difference_ms=None if part is None else part.mean_ms,
        ci95_ms=None if part is None else part.ci95_ms,
        share=part.mean_ms / gap.mean_ms if part is not None and gap.seen else None,
        found=part is not None and part.seen,
        effects=tuple(own[label].effect for label in pairing if label in own),
        untested=missing,
        inferred_ms=_inferred(name, account) if barred else None,
    )
    return cause, part


def _inferred(name: CauseName, account: StageAccount | None) -> float | None:
    if account is None or not account.differences or not STAGES_OF[name]:
        return None
    return math.fsum(d.difference_ms for d in account.differences if d.stage in STAGES_OF[name])


def _with_sentence(causes: CellCauses, where: str, comparable: bool) -> CellCauses:
    slower = shown(causes.slower)
    faster = shown(next(label for label in causes.pairing if label != causes.slower))
    gap = signed_ms(abs(causes.difference_ms))
    if comparable:
        text = f"{slower} is {causes.ratio:.2f}× slower {where} ({gap} a request)"
    else:
        text = f"Requests to {slower} take {causes.ratio:.2f}× as long as to {faster} {where} ({gap})"
    found = sorted((cause for cause in causes.causes if cause.found), key=lambda cause: -(cause.share or 0.0))
    if causes.unattributed_share is None:
        text += ", which is within the noise: no share of it can be named."
    elif not any(cause.effects for cause in causes.causes):
        text += ": no cause was tested."
    elif not found:
        text += ": no cause that was tested explains it."
    else:
        parts = [f"{percent(cause.share)} {_described(cause)}" for cause in found]
        text += f": {', '.join(parts)}, {percent(causes.unattributed_share)} unattributed."
    return msgspec.structs.replace(causes, sentence=text)


def _described(cause: Cause) -> str:
    """With the arms that pay for it: a cause of the faster arm works against the difference."""
    if cause.name == "payload" and cause.effects:
        effect = cause.effects[0]
        whose = f" of {shown(effect.label)}" if len(cause.effects) == 1 else ""
        return f"{cause.title}{whose} ({effect.changed.partition(',')[0]})"
    labels = [shown(effect.label) for effect in cause.effects]
    return cause.title + (f" of {labels[0]}" if len(labels) == 1 else "")


def _notes(causes: Sequence[Cause], pairing: Pairing) -> tuple[str, ...]:
    notes = []
    against = [cause.title for cause in causes if cause.found and (cause.share or 0.0) < 0.0]
    if against:
        named = ", ".join(against)
        notes.append(f"With a minus ({named}): it costs the faster arm more, and hides a part of the difference.")
    noise = [cause.title for cause in causes if cause.effects and not cause.found]
    if noise:
        notes.append(f"Within the noise: {', '.join(noise)}.")
    for cause in causes:
        barred = [one for one in cause.untested if not one.moot]
        if not barred:
            continue
        reasons = "; ".join(f"{shown(one.label)}: {one.reason}" for one in barred)
        note = f"Not tested: {cause.title} ({reasons})."
        if cause.inferred_ms is not None:
            note += (
                f" The account of time suggests {signed_ms(cause.inferred_ms)} on {shown(pairing.arm)}; "
                "no cell has shown that."
            )
        notes.append(note)
    return tuple(notes)


def _drifts(causes: Sequence[Cause], own_ms: Mapping[Label, float]) -> list[str]:
    """Where an arm as it is was another speed than in its own blocks; not for an arm that had left its payload."""
    changed = {effect.label for cause in causes if cause.name == "payload" for effect in cause.effects}
    drifts: dict[Label, list[float]] = {}
    for cause in causes:
        for effect in cause.effects:
            if cause.name != "transfer" or effect.label not in changed:
                drifts.setdefault(effect.label, []).append(effect.as_is_ms / own_ms[effect.label])
    told = [
        f"{shown(label)} took {_span(found)}× the time of its own blocks"
        for label, found in sorted(drifts.items())
        if min(found) < 1.0 / DRIFT_LIMIT or max(found) > DRIFT_LIMIT
    ]
    if not told:
        return []
    return [f"The machine changed its speed: as it is, {', '.join(told)} while causes were tested. Shares are rough."]


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low}–{high}"


def percent(value: float | None) -> str:
    """A share of 1 in whole per cent: "−34 %"; a share of a difference carries no more digits."""
    if value is None:
        return "–"
    rounded = round(abs(value) * 100)
    return f"{'−' if value < 0 and rounded else ''}{rounded} %"


class CausesFound(Found, frozen=True, kw_only=True):
    """Why arms differ from the baseline."""

    STUDY = "causes"
    cells: tuple[CellCauses, ...] = ()
    """One entry an arm and cell that was explained."""
    explained: tuple[str, ...] | None = None
    """Cells whose difference was to be explained; None where the run did not get there, or was not to."""
    left_out: tuple[str, ...] = ()
    """Cells whose difference there was no time to explain."""


def analyse(facts: Facts) -> CausesFound:
    """Of every cell that was explained."""
    explanation = facts.run.explanation
    return CausesFound(
        cells=find_causes(facts.run, facts.blocks, facts.accounts),
        explained=explanation.cells if explanation else None,
        left_out=explanation.left_out if explanation else (),
    )


def find_causes(
    run: StoredRun, blocks: Sequence[BlockSummary], accounts: Sequence[StageAccount]
) -> tuple[CellCauses, ...]:
    """Of every cell that was explained; empty where nothing was. `blocks` are the arms' own."""
    explanation, experiment = run.explanation, run.experiment
    if explanation is None:
        return ()
    effects: dict[str, list[MeasuredEffect]] = {cell: [] for cell in explanation.cells}
    untested: dict[str, list[Untested]] = {cell: list(explanation.untested) for cell in explanation.cells}
    for counterfactual, stored in zip(explanation.done, run.counterfactual_blocks, strict=True):
        for cell, measured in measure_effects(counterfactual, stored).items():
            if isinstance(measured, Untested):
                untested[cell].append(measured)
            else:
                effects[cell].append(measured)
    cells = {cell.name: cell for cell in experiment.cells}
    by_pairing = {(account.cell, account.baseline, account.arm): account for account in accounts}
    found = (
        rank_causes(
            cells[name],
            pairing,
            mean_pairs(name, blocks, pairing),
            effects[name],
            untested[name],
            by_pairing.get((name, *pairing)),
            comparable=len({experiment.payload_of(experiment.arm(label)) for label in pairing}) == 1,
        )
        for name in explanation.cells
        if name in cells
        for pairing in experiment.pairings
    )
    return tuple(one for one in found if one is not None)
