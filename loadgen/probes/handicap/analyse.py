"""From the blocks of a probe to whether the settings make the arm slow: the throughput of the plain server over that of
the tuned one, per round.

An arm is slow if even the lower bound of the ratio exceeds 1 + δ, the margin of the comparison. The interval is
Student's t on the log ratios of the rounds at 99.5 %, since the rounds end once it decides, which asks several times:
simulated, at most 3 loads in 1,000 of identical servers are called slow with up to 20 % of noise between rounds, and
4 in 100 if successive rounds correlate by 0.5. Assumption: the log ratios are about normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.metrics.comparisons import side_by_side
from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import BlockSummary, summarise_blocks
from loadgen.probes.handicap.records import BESIDE, HandicapProbes, Probe
from loadgen.records.run import Found, Label, Record
from loadgen.stats.ratios import critical_t

MIN_ROUNDS = 4
SIGNIFICANCE = 0.005
SHOWN_SHARE = 0.5
"""A single setting explains the loss if it causes at least this share of it, on the log scale."""
LARGEST_HIDDEN = 1.25
"""Without a decision the check passes only if the interval excludes a larger loss than this."""


class PlainRatio(Record, frozen=True, kw_only=True):
    """The plain server's throughput over the tuned one's under one load."""

    ratio: float
    low: float
    high: float
    """The 99.5 % interval."""
    rounds: int

    def slower(self, margin: float) -> bool | None:
        """Whether the tuned server is slower by more than the margin; None: not decided."""
        if self.low > 1.0 + margin:
            return True
        return False if self.high < 1.0 + margin else None


def estimate(ratios: Sequence[float]) -> PlainRatio | None:
    """None with fewer than `MIN_ROUNDS` rounds."""
    if len(ratios) < MIN_ROUNDS:
        return None
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    half = critical_t(len(logs) - 1, SIGNIFICANCE) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    centre = float(logs.mean())
    return PlainRatio(
        ratio=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half), rounds=len(logs)
    )


def ratios_of(blocks: Sequence[BlockSummary], load: str) -> list[float]:
    """Plain over tuned throughput in each round of a load that both completed without errors."""
    rates = {
        (block.round, block.label): block.throughput_per_s
        for block in blocks
        if block.workload == load and block.complete and not block.errors and block.throughput_per_s
    }
    return [plain / tuned for _, tuned, plain in side_by_side(rates, BESIDE)]


class LoadHandicap(Record, frozen=True, kw_only=True):
    """One arm under one load of the probe."""

    label: Label
    load: str
    users: int
    ratio: PlainRatio
    slower: bool | None
    """Whether the arm is slower than its plain server by more than the margin; None: not decided."""
    explained_by: tuple[tuple[str, PlainRatio], ...] = ()
    """The settings that, alone, cause most of the loss, with what each costs by itself; the largest first."""


class HandicapsFound(Found, frozen=True, kw_only=True):
    """Arms that were compared with their plain servers."""

    STUDY = "handicap"
    loads: tuple[LoadHandicap, ...] = ()


def analyse(facts: Facts) -> HandicapsFound:
    """The handicap of every arm and load that was probed."""
    stored, margin = facts.run.one(HandicapProbes), facts.run.experiment.equivalence_margin
    if stored is None:
        return HandicapsFound()
    blocks = {probe.number: summarise_blocks(facts.run.blocks_in(probe.folder, probe.loads)) for probe in stored.probes}
    settings = {arm.label: arm.settings for arm in stored.arms}

    def ratio(probe: Probe, load: str) -> PlainRatio | None:
        return estimate(ratios_of(blocks[probe.number], load))

    found = []
    for probe in (one for one in stored.probes if one.setting is None):
        for load in probe.loads:
            whole = ratio(probe, load.name)
            if whole is None:
                continue
            slower = whole.slower(margin)
            alone = [
                (one.setting, part)
                for one in stored.probes
                if one.label == probe.label and one.setting is not None and (part := ratio(one, load.name)) is not None
            ]
            causes = [(name, part) for name, part in alone if _explains(part, whole)]
            if slower and len(settings[probe.label]) == 1:
                causes = [(name, whole) for name in settings[probe.label]]
            found.append(
                LoadHandicap(
                    label=probe.label,
                    load=load.name,
                    users=load.concurrency,
                    ratio=whole,
                    slower=slower,
                    explained_by=tuple(sorted(causes, key=lambda one: -one[1].ratio)) if slower else (),
                )
            )
    return HandicapsFound(loads=tuple(found))


def _explains(part: PlainRatio, whole: PlainRatio) -> bool:
    return part.low > 1.0 and math.log(part.ratio) >= SHOWN_SHARE * math.log(whole.ratio)
