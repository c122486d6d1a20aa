"""Decides what a tuning measures next and who wins, from the scores so far; pure: no server, no clock, no file.

What comes next is a function of the seed, the contenders named so far and the runs told so far. So a tuning that
resumes gives those to a new `Search` and goes on as if nothing had happened.

**Scores.** The log ratio of a contender in a run is what it is, plus what the starts of its server and of the anchor
changed, plus the error within the run. The anchor's share is the same for all contenders of the run. With τ² the
variance of a start, two scores of a run have the variance 2τ² + error² and the covariance τ² + error²/2; the pooled
score is the generalised least squares estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.quantities import Interval
from loadgen.records.run import Label
from loadgen.tune.records import Contender, Score, Space, Stage, TuningRun

Settings = Mapping[str, str]
START_SPREAD = 0.02
"""Standard deviation of the log of what a start of a server changes."""
CHOICE_MARGIN = 0.01
"""Finalists whose measured difference to the best is below this are equal; the one nearest to the defaults wins."""
Z95 = 1.96
MOST_LISTED = 5000
"""Contenders of a space that are listed; of larger spaces so many are drawn."""


class SearchError(Exception):
    """The search cannot go on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the runs of a stage show of one contender."""

    contender: Contender
    times: int
    """Runs that measured it."""
    log_ratio: float | None = None
    """log of how many times better than the anchor it is; None if no run measured it."""
    error: float = math.inf
    """Standard error of that, with what a start of the servers changes."""
    limit: tuple[float, float, float] | None = None
    """The limited metric over its limit, and the 95 % interval of that. None without a limit."""
    out: str | None = None
    """Why it is out for good, in one sentence."""
    racing: bool = False
    """Whether it may still be the best of its target within the limit."""

    @property
    def ci95(self) -> Interval | None:
        """95 % interval of how many times better than the anchor it is."""
        if self.log_ratio is None:
            return None
        return math.exp(self.log_ratio - Z95 * self.error), math.exp(self.log_ratio + Z95 * self.error)

    @property
    def beyond_limit(self) -> bool:
        """Whether its interval lies above the limit."""
        return self.limit is not None and self.limit[1] > 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner of one target, chosen from the finalists' fresh runs alone."""

    target: str
    winner: Contender | None = None
    """None if no finalist was measured, or none meets the limit."""
    equals: tuple[Contender, ...] = ()
    """The other finalists whose measured difference to the best is below the margin."""
    certain: bool = True
    """Whether the winner's whole interval is within the limit, not just its value; true without a limit."""
    nearest: Contender | None = None
    """The finalist nearest to the limit, if none meets it."""


class Search:
    """The search over the spaces of all targets. Every run measures the anchor, which is the default of native."""

    def __init__(
        self,
        spaces: Sequence[Space],
        seed: int,
        *,
        contenders: Sequence[Contender] = (),
        runs: Sequence[TuningRun] = (),
        again: int = 1,
    ) -> None:
        """`contenders` and `runs` are those of a tuning that is resumed; at most `again` survivors of a target are
        measured again in a screening."""
        self.spaces = {space.target: space for space in spaces}
        self.seed, self.again = seed, again
        self._contenders: dict[Label, Contender] = {}
        self._named: dict[tuple[str, tuple[tuple[str, str], ...]], Contender] = {}
        self._runs: list[TuningRun] = []
        for space in spaces:
            self._name(space.target, {})
        for contender in contenders:
            self._add(contender)
        for run in runs:
            self.tell(run)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All that were named so far, in order: what `Tuning.contenders` stores."""
        return tuple(self._contenders.values())

    def tell(self, run: TuningRun) -> None:
        """Add a run of any stage. Of a run with a `problem` only `out` counts."""
        self._runs.append(run)

    def next_screening(self, places: int) -> list[Contender]:
        """At most so many contenders besides the anchor: first those that were named and never measured, then survivors
        again and new ones, the targets in turn. Empty if every contender is measured and none is worth measuring
        again."""
        out, measured = self._out(), {score.contender for score in self._scores("screening")}
        waiting = [c for c in self.contenders if c.name not in measured and c.name not in out]
        chosen = waiting[:places]
        turns = [self._turn(target) for target in self.spaces]
        rest = places - len(chosen)
        while rest > 0 and turns:
            turn = turns.pop(0)
            contender = next(turn, None)
            if contender is not None:
                chosen.append(contender)
                turns.append(turn)
                rest -= 1
        return chosen

    def _turn(self, target: str) -> Iterator[Contender]:
        """What to measure next of a target, best idea first."""
        standings = self.standings(target)
        survivors = [s for s in standings if s.racing and s.times]
        for standing in survivors[: self.again]:
            yield standing.contender
        space = self.spaces[target]
        taken = {settings for named, settings in self._named if named == target}
        rng = np.random.default_rng([self.seed, len(taken), len(self._runs), *target.encode()])
        fresh = [settings for settings in contenders_of(space) if key(settings) not in taken]
        for place in rng.permutation(len(fresh)):
            yield self._name(target, fresh[place])

    def standings(self, target: str, stage: Stage = "screening") -> list[Standing]:
        """Best first; then those beyond the limit, then those that are out."""
        out = self._out()
        pooled = pool(self._scores(stage))
        standings = []
        for contender in self.contenders:
            if contender.target != target:
                continue
            times, log_ratio, error, limit = pooled.get(contender.name, (0, None, math.inf, None))
            standings.append(Standing(contender, times, log_ratio, error, limit, out.get(contender.name)))
        able = [s for s in standings if s.out is None and s.log_ratio is not None and not s.beyond_limit]
        floor = max((s.log_ratio - Z95 * s.error for s in able if s.log_ratio is not None), default=-math.inf)
        return sorted(
            (
                Standing(
                    s.contender, s.times, s.log_ratio, s.error, s.limit, s.out,
                    s in able and s.log_ratio is not None and s.log_ratio + Z95 * s.error >= floor,
                )
                for s in standings
            ),
            key=lambda s: (s.out is not None, s.beyond_limit, -(s.log_ratio if s.log_ratio is not None else -math.inf)),
        )  # fmt: skip

    def finalists(self, each: int = 3) -> list[Contender]:
        """The best so many of every target, for fresh runs of the stage `finalists`."""
        return [s.contender for target in self.spaces for s in [s for s in self.standings(target) if s.racing][:each]]

    def winners(self) -> tuple[Choice, ...]:
        """One per target, in the order of the spaces, from the runs of the stage `finalists` alone."""
        return tuple(self._choice(target) for target in self.spaces)

    def _choice(self, target: str) -> Choice:
        measured = [s for s in self.standings(target, "finalists") if s.times and s.out is None]
        able = [s for s in measured if s.limit is None or s.limit[2] <= 1.0]
        certain = bool(able)
        able = able or [s for s in measured if s.limit is not None and s.limit[0] <= 1.0]
        if not able:
            nearest = min(measured, key=lambda s: s.limit[0] if s.limit else 0.0, default=None)
            return Choice(target, nearest=None if nearest is None else nearest.contender)
        best = max(s.log_ratio or 0.0 for s in able)
        equal = [s for s in able if (s.log_ratio or 0.0) >= best - CHOICE_MARGIN]
        winner = min(equal, key=lambda s: (len(s.contender.settings), -(s.log_ratio or 0.0))).contender
        return Choice(target, winner, tuple(s.contender for s in equal if s.contender != winner), certain)

    def put_back(self, contender: Contender) -> dict[str, Contender]:
        """The contender with one of its settings at the default each, by the name of that setting, for runs of the
        stage `settings`."""
        space = self.spaces[contender.target]
        return {
            name: self._name(space.target, canonical_settings(space, without(contender.settings, name)))
            for name in contender.settings
        }

    def _out(self) -> dict[Label, str]:
        return {name: why for run in self._runs for name, why in run.out.items()}

    def _scores(self, stage: Stage) -> list[Score]:
        return [score for run in self._runs if run.stage == stage and run.problem is None for score in run.scores]

    def _name(self, target: str, settings: Settings) -> Contender:
        """The contender with these settings, which gets a name if it is new."""
        known = self._named.get((target, key(settings)))
        if known is not None:
            return known
        count = sum(contender.target == target for contender in self._contenders.values())
        contender = Contender(name=f"{target}-{count}", target=target, settings=dict(settings))
        self._add(contender)
        return contender

    def _add(self, contender: Contender) -> None:
        self._contenders.setdefault(contender.name, contender)
        self._named.setdefault((contender.target, key(contender.settings)), contender)


def pool(scores: Iterable[Score]) -> dict[Label, tuple[int, float, float, tuple[float, float, float] | None]]:
    """Of each contender how often it was measured, its pooled log ratio, the error of that, and its pooled limit."""
    grouped: dict[Label, list[Score]] = {}
    for score in scores:
        grouped.setdefault(score.contender, []).append(score)
    pooled = {}
    for name, own in grouped.items():
        weights = [1.0 / (score.error**2 + 2.0 * START_SPREAD**2) for score in own]
        mean = math.fsum(w * s.log_ratio for w, s in zip(weights, own, strict=True)) / math.fsum(weights)
        pooled[name] = (len(own), mean, math.fsum(weights) ** -0.5, own[-1].limit)
    return pooled


def key(settings: Settings) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))


def without(settings: Settings, name: str) -> dict[str, str]:
    return {other: value for other, value in settings.items() if other != name}


def canonical_settings(space: Space, values: Settings) -> dict[str, str]:
    """What differs from the defaults, of the settings that apply."""
    effective: dict[str, str] = {}
    for setting in space.settings:
        if all(effective.get(other) in allowed for other, allowed in setting.when.items()):
            effective[setting.name] = values.get(setting.name, setting.default)
    defaults = {setting.name: setting.default for setting in space.settings}
    return {name: value for name, value in effective.items() if value != defaults[name]}


def contenders_of(space: Space) -> list[dict[str, str]]:
    """The settings of all contenders, each once."""
    partial: list[dict[str, str]] = [{}]
    for setting in space.settings:
        partial = [
            {**values, setting.name: value}
            for values in partial
            for value in (
                setting.values
                if all(values.get(other) in allowed for other, allowed in setting.when.items())
                else ("",)
            )
        ]
    return [canonical_settings(space, values) for values in partial]
