"""Handicap: the stored records, and from them to whether an arm's own settings make it slow.

    DIR/handicap.json   HandicapRecord   rewritten after each pair of servers
    DIR/handicap/…      the blocks of each pair

With cold starts, those of the arm and of its plain server took turns as well (`ServerStart.plain`); their figure is the
time to ready of the arm over that of the plain server.

A pair is two servers of one arm, loaded in interleaved rounds: `tuned` with the settings that only affect its speed, or
with one of them, and `plain` without any. The figure is the throughput of the plain server over that of the tuned one,
per round.

An arm is slow if even the lower bound of the ratio exceeds 1 + δ, the margin of the comparison. The interval is
Student's t on the log ratios of the rounds at 99.5 %, since the rounds end once it decides, which asks several times:
simulated, at most 3 loads in 1,000 of identical servers are called slow with up to 20 % of noise between rounds, and
4 in 100 if successive rounds correlate by 0.5. Assumption: the log ratios are about normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from loadgen.metrics.comparisons import side_by_side
from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import BlockSummary, summarise_blocks
from loadgen.records.probes import ServerStart
from loadgen.records.run import Found, Label, Pairing, Record, Workload
from loadgen.stats.estimates import t_estimate
from loadgen.stats.ratios import error_of_mean

TUNED: Label = "tuned"
PLAIN: Label = "plain"
BESIDE = Pairing(TUNED, PLAIN)
"""Ratios are those of the plain server over the tuned one."""


class HandicapPair(Record, frozen=True, kw_only=True):
    """One pair of servers of an arm, and the loads under which they ran."""

    number: int
    label: Label
    setting: str | None
    """The only setting that the tuned server has; None: the arm itself with all of its settings."""
    loads: tuple[Workload, ...]
    reason: str | None = None
    """Why a single setting could not be measured; None where it was."""

    @property
    def folder(self) -> str:
        """Where its blocks are, relative to DIR."""
        return f"handicap/{self.number:02d}-{self.label}"


class ArmTuning(Record, frozen=True, kw_only=True):
    """What tunes one arm."""

    label: Label
    settings: dict[str, str]
    """Settings that only affect its speed and differ from the server's defaults, with their values."""
    reason: str | None = None
    """Why it was not compared with its plain server, as the end of a sentence about the arm; None where it was, or
    where it has no such setting."""


class HandicapRecord(Record, frozen=True, kw_only=True):
    """DIR/handicap.json."""

    FILE = "handicap.json"
    arms: tuple[ArmTuning, ...] = ()
    probes: tuple[HandicapPair, ...] = ()
    """Those that have run, the arm's own before those of single settings."""


MIN_ROUNDS = 4
SIGNIFICANCE = 0.005
SHOWN_SHARE = 0.5
"""A single setting explains the loss if it causes at least this share of it, on the log scale."""
LARGEST_HIDDEN = 1.25
"""While it is not decided whether an arm is slower, the check passes if the interval excludes a loss above this."""


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
    logs = [math.log(ratio) for ratio in ratios]
    of_logs = t_estimate(math.fsum(logs) / len(logs), *error_of_mean(logs), SIGNIFICANCE)
    value, low, high = map(math.exp, msgspec.structs.astuple(of_logs))
    return PlainRatio(ratio=value, low=low, high=high, rounds=len(logs))


def ratios_of(blocks: Sequence[BlockSummary], load: str) -> list[float]:
    """Plain over tuned throughput in each round of a load that both completed without errors."""
    rates = {
        (block.round, block.label): block.throughput_per_s
        for block in blocks
        if block.workload == load and block.complete and not block.errors and block.throughput_per_s
    }
    return [plain / tuned for _, tuned, plain in side_by_side(rates, BESIDE)]


class LoadHandicap(Record, frozen=True, kw_only=True):
    """One arm beside its plain server under one load."""

    label: Label
    load: str
    users: int
    """0: it is a start."""
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
    """The handicap of every arm and load that was measured."""
    stored, margin = facts.run.record_of(HandicapRecord), facts.run.experiment.equivalence_margin
    if stored is None:
        return HandicapsFound()
    measured = [pair for pair in stored.probes if pair.reason is None]
    blocks = {pair.number: summarise_blocks(facts.run.blocks_in(pair.folder, pair.loads)) for pair in measured}
    settings = {arm.label: arm.settings for arm in stored.arms}

    def ratio(pair: HandicapPair, load: str) -> PlainRatio | None:
        return estimate(ratios_of(blocks[pair.number], load))

    handicaps = []
    for pair in measured:
        for load in pair.loads if pair.setting is None else ():
            whole = ratio(pair, load.name)
            if whole is None:
                continue
            slower = whole.slower(margin)
            alone = [
                (single.setting, part)
                for single in measured
                if single.label == pair.label
                and single.setting is not None
                and (part := ratio(single, load.name)) is not None
            ]
            causes = [(name, part) for name, part in alone if _explains(part, whole)]
            if slower and len(settings[pair.label]) == 1:
                causes = [(name, whole) for name in settings[pair.label]]
            handicaps.append(
                LoadHandicap(
                    label=pair.label,
                    load=load.name,
                    users=load.concurrency,
                    ratio=whole,
                    slower=slower,
                    explained_by=tuple(sorted(causes, key=lambda cause: -cause[1].ratio)) if slower else (),
                )
            )
    starts = facts.run.records_of(ServerStart)
    of_starts = (_of_starts(arm, starts, margin) for arm in stored.arms)
    return HandicapsFound(loads=(*handicaps, *filter(None, of_starts)))


def _of_starts(arm: ArmTuning, starts: Sequence[ServerStart], margin: float) -> LoadHandicap | None:
    """How an arm's starts compare with those of its plain server; None where too few of both got ready."""
    own = [start for start in starts if start.label == arm.label and start.caches == "cached" and start.error is None]
    plain_ns = {start.repetition: start.ready_ns for start in own if start.plain}
    ratios = [
        start.ready_ns / plain
        for start in own
        if not start.plain and start.ready_ns and (plain := plain_ns.get(start.repetition))
    ]
    ratio = estimate(ratios)
    if ratio is None:
        return None
    slower = ratio.slower(margin)
    causes = tuple((name, ratio) for name in arm.settings) if slower and len(arm.settings) == 1 else ()
    return LoadHandicap(label=arm.label, load="cold-start", users=0, ratio=ratio, slower=slower, explained_by=causes)


def _explains(part: PlainRatio, whole: PlainRatio) -> bool:
    return part.low > 1.0 and math.log(part.ratio) >= SHOWN_SHARE * math.log(whole.ratio)
