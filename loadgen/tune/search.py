"""Decides what a tuning measures next and who wins, from the scores so far; pure: no server, no clock, no file.

What comes next is a function of the seed, the contenders named so far and the runs told so far. So a tuning that
resumes gives those to a new `Search` and goes on as if nothing had happened.

**Suggestions.** The first contenders of a target are in turn the defaults with one setting changed, since defaults are
seldom bad, and those that show most values of settings together that no contender had before, up to three at a time, so
that settings which pay only together are seen. The next are those that are
expected to improve most on the best, by a regression of all scores (`loadgen.stats.regression`). Once all contenders
are measured, those that may be the best are measured again. A contender that is out counts as one with the worst score,
so that what it shares with others loses its promise.

**Standings.** A contender races as long as the upper end of its interval reaches the lower end of another of its
target. The finalists are the best that race. Their fresh runs alone choose the winner, by generalised least squares:
with τ the spread between starts, two scores of a run have the variance 2τ² + e² and the covariance τ² + e²/2, since
they share the anchor. If the time did not suffice for fresh runs, the estimates of the screenings choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import scipy

from loadgen.records.run import Label
from loadgen.records.tuning import Contender, OverLimit, Score, Space, Stage, TuningRun
from loadgen.stats.estimates import Estimate
from loadgen.stats.ratios import Values
from loadgen.stats.regression import Codes, Grid, Observations, Regression, expected_gain
from loadgen.tune.space import canonical, every_contender, size

START_SPREAD = 0.02
"""Standard deviation of the log of what a start of a server changes, before the tuning has seen some."""
FIRST = 10
"""Contenders of a target before the regression suggests."""
ALTERNATE = 24
"""Contenders of a target from which every second one is again one that shows settings together, not one that the
regression suggests: what pays only together and was never seen cannot be suggested."""
TOGETHER = 3
"""Settings whose values the first contenders combine."""
CHOICE_MARGIN = 0.01
"""Finalists whose measured difference to the best is below this are equal; the one nearest to the defaults wins."""
TYPICAL_ERROR = 0.03
"""Standard error of a score within a run, for contenders that are about to be measured."""
OUT_ERROR = 0.05
"""Spread about the worst score at which the regression places contenders that are out."""
EXACT = 1e-4
MOST_LISTED = 4096
"""Contenders of a space that are considered; of a larger space so many are drawn."""
WIDEST_LIMIT = 1e3
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Standing:
    """What the runs of a stage show of one contender."""

    contender: Contender
    times: int
    """Runs that measured it."""
    log_ratio: float | None = None
    """log of how many times better than the anchor it is; None if no run measured it. In screenings it is what the
    scores of all contenders of the target together make likely, so that the best of many does not look too good."""
    error: float = math.inf
    """Standard error of that, with what a start of the servers changes."""
    limits: Mapping[str, OverLimit] = field(default_factory=dict)
    """By the name of each limited metric."""
    out: str | None = None
    """Why it is out for good, in one sentence."""
    racing: bool = False
    """Whether it may still be the best of its target within the limit."""

    @property
    def may_win(self) -> bool:
        """Whether neither a fault nor the limit excludes it."""
        return self.out is None and not self.beyond_limit

    @property
    def is_safe(self) -> bool:
        """Whether its whole interval is within every limit."""
        return all(high <= 1.0 for _, _, high in self.limits.values())

    @property
    def beyond_limit(self) -> bool:
        """Whether its interval lies above a limit."""
        return any(low > 1.0 for _, low, _ in self.limits.values())

    @property
    def over_limit(self) -> float:
        """By how much its values exceed the limit that they exceed most, or keep least; 0 without a limit."""
        return max((value for value, _, _ in self.limits.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class RaceLead:
    """How far the search of one target is."""

    target: str
    tried: int
    """Contenders that were measured or are out."""
    out: tuple[tuple[Contender, str], ...] = ()
    """Contenders that are out, and why."""
    best: Standing | None = None
    """The best of the screenings; None before anything was measured, and where nothing keeps the limit."""
    gain: Estimate | None = None
    """How many times better it is than the target's defaults; None if those were not measured, or are the best."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner of one target, see `Search.winners`."""

    target: str
    winner: Contender | None = None
    """None if no finalist was measured, or none meets the limit."""
    equals: tuple[Contender, ...] = ()
    """The other finalists whose measured difference to the best is below the margin."""
    nearest: Contender | None = None
    """The finalist nearest to the limit, if none meets it."""


class Search:
    """The search over the spaces of all targets. Every run measures the anchor, which is the default of the first."""

    def __init__(
        self,
        spaces: Sequence[Space],
        seed: int,
        *,
        contenders: Sequence[Contender] = (),
        runs: Sequence[TuningRun] = (),
    ) -> None:
        """`contenders` and `runs` are those of a tuning that is resumed."""
        self.spaces = {space.target: space for space in spaces}
        self._fields = {space.target: _Field(space, seed) for space in spaces}
        self.anchor: Label = f"{spaces[0].target}-0"
        """The contender that is the anchor of every run, so that it is never one of its contenders."""
        self._contenders: dict[Label, Contender] = {}
        self._by_settings: dict[tuple[str, _Settings], Contender] = {}
        self._runs: list[TuningRun] = []
        self._outlooks: dict[str, _Outlook] = {}
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
        self._outlooks.clear()

    def next_screening(self, places: int) -> list[Contender]:
        """At most so many contenders besides the anchor: first those that were named and not measured, then of the
        targets in turn what promises most. Empty if everything is measured and nothing is worth measuring again."""
        measured = {self.anchor, *(score.contender for score in self._scores("screening")), *self._out}
        chosen = [contender for contender in self.contenders if contender.name not in measured][:places]
        tried = {target: sum(c.target == target for c in self.contenders) for target in self.spaces}
        turns = [self._suggestions(target) for target in sorted(self.spaces, key=lambda target: tried[target])]
        while turns and len(chosen) < places:
            turn = turns.pop(0)
            contender = next((c for c in turn if c not in chosen), None)
            if contender is not None:
                chosen.append(contender)
                turns.append(turn)
        return chosen

    def standings(self, target: str, stage: Stage = "screening") -> list[Standing]:
        """Best first; then those beyond the limit, those that were not measured, and those that are out."""
        estimates = self._estimates(target, stage)
        scores, out = self._scores(stage), self._out
        standings = []
        for contender in self.contenders:
            if contender.target == target:
                name = contender.name
                times = sum(score.contender == name for score in scores)
                log_ratio, error = (estimates.of(name) if times else None) or (None, math.inf)
                limits = pooled_limits([score for score in scores if score.contender == name])
                standings.append(Standing(contender, times, log_ratio, error, limits, out.get(name)))
        lows = [s.log_ratio - Z95 * s.error for s in standings if s.log_ratio is not None and s.may_win and s.is_safe]
        reached = max(lows, default=-math.inf)
        raced = [
            replace(s, racing=s.may_win and s.log_ratio is not None and s.log_ratio + Z95 * s.error >= reached)
            for s in standings
        ]
        return sorted(raced, key=_rank)

    def _estimates(self, target: str, stage: Stage) -> Estimates:
        if stage == "screening":
            return self._outlook(target).estimates().with_exact(self.anchor)
        return least_squares(self._that_count(stage), self.start_spread).with_exact(self.anchor)

    def gain(self, one: Contender, other: Contender, stage: Stage = "screening") -> Estimate | None:
        """How many times better one contender of a target is than another, by the runs of a stage; None if these did
        not measure both."""
        measured = {score.contender for score in self._scores(stage)}
        if not {one.name, other.name} <= measured:
            return None
        found = self._estimates(one.target, stage).difference(one.name, other.name)
        return None if found is None else factor_of(*found)

    def lead(self, target: str) -> RaceLead:
        """Where the race of a target stands."""
        standings = self.standings(target)
        tried = sum(standing.times > 0 or standing.out is not None for standing in standings)
        out = tuple((standing.contender, standing.out) for standing in standings if standing.out is not None)
        best = next((standing for standing in standings if standing.racing and standing.times), None)
        default = next((standing for standing in standings if not standing.contender.settings), None)
        if best is None or default is None or best is default:
            return RaceLead(target, tried, out, best)
        return RaceLead(target, tried, out, best, self.gain(best.contender, default.contender))

    def finalists(self, each: int = 3) -> list[Contender]:
        """The best so many of every target, for fresh runs of the stage `finalists`. With a limit those whose value is
        within it come first, and the last is the best whose whole interval is."""
        chosen = []
        for target in self.spaces:
            racing = [standing for standing in self.standings(target) if standing.racing]
            best = sorted(racing, key=lambda s: s.over_limit > 1.0)[:each]
            safe = next((s for s in self.standings(target) if s.may_win and s.times and s.is_safe), None)
            if safe is not None and not any(standing.is_safe for standing in best):
                best[each - 1 :] = [safe]
            chosen += [standing.contender for standing in best]
        return chosen

    def winners(self) -> tuple[Choice, ...]:
        """One per target, in the order of the spaces, from the runs of the stage `finalists` alone; of a target of
        which these measured nothing, from the screenings."""
        return tuple(self._choice(target) for target in self.spaces)

    def runner_up(self, target: str) -> Contender | None:
        """The best that was measured of those that change a setting: a finalist, else one of the screenings."""
        standings = [*self.standings(target, "finalists"), *self.standings(target)]
        return next((s.contender for s in standings if s.times and s.out is None and s.contender.settings), None)

    def put_back(self, contender: Contender) -> dict[str, Contender]:
        """The contender with one of its settings at the default each, by the name of that setting, for runs of the
        stage `settings`."""
        space = self.spaces[contender.target]
        lesser = {name: {n: v for n, v in contender.settings.items() if n != name} for name in contender.settings}
        return {name: self._name(space.target, canonical(space, settings)) for name, settings in lesser.items()}

    @property
    def start_spread(self) -> float:
        """τ, the standard deviation of the log of what a start of a server changes, by the screenings of all
        targets."""
        spreads = [self._outlook(target).start_spread for target in self.spaces]
        return math.fsum(spreads) / len(spreads)

    def _choice(self, target: str) -> Choice:
        own = {contender.name for contender in self.contenders if contender.target == target} - {self.anchor}
        is_fresh = any(score.contender in own for score in self._scores("finalists"))
        standings = self.standings(target, "finalists" if is_fresh else "screening")
        measured = [s for s in standings if s.log_ratio is not None and s.out is None]
        able = [s for s in measured if s.is_safe] or [s for s in measured if s.over_limit <= 1.0]
        if not able:
            nearest = min(measured, key=lambda s: s.over_limit, default=None)
            return Choice(target, nearest=None if nearest is None else nearest.contender)
        best = max(_value(s) for s in able)
        equal = [s for s in able if _value(s) >= best - CHOICE_MARGIN]
        winner = min(equal, key=lambda s: (len(s.contender.settings), -_value(s))).contender
        return Choice(target, winner, tuple(s.contender for s in equal if s.contender != winner))

    def _suggestions(self, target: str) -> Iterator[Contender]:
        """Of one target, what promises most first. Each counts as measured for the next."""
        field, outlook = self._fields[target], self._outlook(target)
        while (row := outlook.next_new()) is not None:
            yield self._name(target, field.settings[row])
        racing = [s for s in self.standings(target) if s.racing and s.contender.name != self.anchor]
        if len(racing) > 1:
            yield from (s.contender for s in sorted(racing, key=lambda s: -_value(s) - s.error))

    def _outlook(self, target: str) -> _Outlook:
        """What is known of one target; made anew after every run."""
        if target not in self._outlooks:
            rows = {
                contender.name: row
                for contender in self.contenders
                if contender.target == target
                and (row := self._fields[target].rows.get(_settings(contender.settings))) is not None
            }
            anchor = rows.get(self.anchor)
            outlook = _Outlook(self._fields[target], rows, self._that_count("screening"), self._out, anchor)
            self._outlooks[target] = outlook
        return self._outlooks[target]

    @property
    def _out(self) -> dict[Label, str]:
        return {name: why for run in self._runs for name, why in run.out.items()}

    def _that_count(self, stage: Stage) -> list[TuningRun]:
        return [run for run in self._runs if run.stage == stage and run.problem is None]

    def _scores(self, stage: Stage) -> list[Score]:
        """Of all contenders, the anchor's among them."""
        runs = self._that_count(stage)
        return [score for run in runs for score in (*run.scores, run.anchor) if score is not None]

    def _name(self, target: str, settings: Mapping[str, str]) -> Contender:
        """The contender with these settings, which gets a name if it is new."""
        known = self._by_settings.get((target, _settings(settings)))
        if known is None:
            count = sum(contender.target == target for contender in self.contenders)
            known = Contender(name=f"{target}-{count}", target=target, settings=dict(settings))
            self._add(known)
        return known

    def _add(self, contender: Contender) -> None:
        self._contenders.setdefault(contender.name, contender)
        self._by_settings.setdefault((contender.target, _settings(contender.settings)), contender)


_Settings = frozenset[tuple[str, str]]


def _settings(settings: Mapping[str, str]) -> _Settings:
    return frozenset(settings.items())


def factor_of(log_ratio: float, error: float) -> Estimate:
    """A log ratio as a factor, with its 95 % interval."""
    return Estimate(log_ratio, log_ratio - Z95 * error, log_ratio + Z95 * error).exp()


def _value(standing: Standing) -> float:
    return -math.inf if standing.log_ratio is None else standing.log_ratio


def _rank(standing: Standing) -> tuple[bool, bool, float]:
    return standing.out is not None, standing.beyond_limit, -_value(standing)


class _Field:
    """All contenders of a target, one per row."""

    def __init__(self, space: Space, seed: int) -> None:
        self.target, self.seed = space.target, seed
        self.settings = _listed(space, seed)
        self.rows = {_settings(settings): row for row, settings in enumerate(self.settings)}
        codes = [
            [s.values.index(settings.get(s.name, s.default)) for s in space.settings] for settings in self.settings
        ]
        self.codes: Codes = np.array(codes, dtype=np.int64).reshape(len(codes), len(space.settings))
        self.grid = Grid(self.codes, [setting.ordered for setting in space.settings])
        base = int(self.codes.max(initial=0)) + 1
        groups = (g for count in range(1, TOGETHER + 1) for g in combinations(range(len(space.settings)), count))
        joined = (self.codes[:, group] @ base ** np.arange(len(group)) for group in groups)
        self._together: list[Codes] = [np.unique(values, return_inverse=True)[1] for values in joined]
        """Of every setting, pair and triple of settings the number of each row's values, from 0."""

    def rng(self, number: int) -> np.random.Generator:
        """For the choice with so many contenders named."""
        return np.random.default_rng([self.seed, number, *self.target.encode()])

    def single_changes(self, taken: Sequence[int]) -> Values | None:
        """The promise of each row: of those with one setting changed, to a value that no taken row has, the earlier the
        setting stands in the space the larger; 0 for all others. None without such a row."""
        changed = self.codes != self.codes[0]
        place = changed.argmax(axis=1)
        values = self.codes[np.arange(len(self.codes)), place]
        seen = {(j, value) for row in taken for j, value in enumerate(self.codes[row].tolist())}
        new = np.array([(j, value) not in seen for j, value in zip(place.tolist(), values.tolist(), strict=True)])
        promise = np.where((changed.sum(axis=1) == 1) & new, self.codes.shape[1] - place, 0.0)
        return promise if promise.any() else None

    def unseen(self, taken: Sequence[int]) -> Values:
        """Of each row, how many of its values, pairs and triples of values no row that is taken has."""
        news = np.zeros(len(self.settings))
        for values in self._together:
            is_new = np.ones(values.max() + 1)
            is_new[values[taken]] = 0.0
            news += is_new[values]
        return news


class _Outlook:
    """What the screenings say of the contenders of a target, and which promise most."""

    def __init__(
        self, field: _Field, rows: Mapping[Label, int], runs: Sequence[TuningRun], out: Mapping[Label, str],
        anchor: int | None,
    ) -> None:  # fmt: skip
        """`rows` are those of the contenders with a name."""
        self._field, self._rows = field, rows
        self.taken = set(rows.values())
        scores = [
            (number, rows[s.contender], s) for number, run in enumerate(runs) for s in run.scores if s.contender in rows
        ]
        self._measured = sorted({row for _, row, score in scores} - {rows[name] for name in out if name in rows})
        self._regression: Regression | None = None
        self._limits: list[Regression] = []
        if self._measured:
            values = [score.log_ratio for _, _, score in scores]
            worst = min(values)
            known = [(row, number, score.log_ratio, score.error) for number, row, score in scores]
            known += [(rows[name], -1, worst, OUT_ERROR) for name in out if name in rows]
            known += [] if anchor is None else [(anchor, -1, 0.0, EXACT)]
            self._regression = Regression(field.grid, _observations(known))
            for name in dict.fromkeys(name for _, _, score in scores for name in score.limits):
                limited = [
                    (row, -1, *_log_limit(score.limits[name])) for _, row, score in scores if name in score.limits
                ]
                self._limits.append(Regression(field.grid, _observations(limited)))

    def estimates(self) -> Estimates:
        """Of every contender that was measured."""
        measured = {name: row for name, row in self._rows.items() if row in set(self._measured)}
        if self._regression is None:
            return Estimates((), np.zeros(0), np.zeros((0, 0)))
        rows = np.array([*measured.values()], dtype=np.int64)
        return Estimates(tuple(measured), self._regression.means[rows], self._regression.covariance(rows))

    @property
    def start_spread(self) -> float:
        return START_SPREAD if self._regression is None else self._regression.start_spread

    def next_new(self) -> int | None:
        """The row of the contender without a name that promises most, None if all have one. It counts as measured
        for the next."""
        if len(self.taken) == len(self._field.settings):
            return None
        number, promise = len(self.taken), None
        if number < FIRST and number % 2:
            promise = self._field.single_changes(sorted(self.taken))
        if promise is None and (self._regression is None or number < FIRST or (number >= ALTERNATE and number % 2)):
            promise = self._field.unseen(sorted(self.taken))
        if self._regression is not None and (promise is None or not promise.any()):
            promise = self._gain(self._regression)
        assert promise is not None
        promise[list(self.taken)] = -math.inf
        best = np.flatnonzero(promise >= promise.max() * (1.0 - 1e-6))
        row = int(self._field.rng(len(self.taken)).choice(best))
        self.taken.add(row)
        if self._regression is not None:
            self._regression.assume(row, math.hypot(TYPICAL_ERROR, math.sqrt(2.0) * self.start_spread))
        return row

    def _gain(self, regression: Regression) -> Values:
        """Expected improvement of each row on the best within the limit, times the chance that it keeps the limit
        (Gardner et al., Bayesian optimization with inequality constraints, ICML 2014)."""
        if not self._limits:
            best = regression.means[self._measured].max()
            return expected_gain(regression.means, regression.spreads, best)
        keeps: Values = np.asarray(
            np.prod([scipy.special.ndtr(-limit.means / limit.spreads) for limit in self._limits], axis=0)
        )
        within = [row for row in self._measured if keeps[row] >= 0.5]
        if not within:
            return keeps
        return keeps * expected_gain(regression.means, regression.spreads, regression.means[within].max())


def _observations(known: Sequence[tuple[int, int, float, float]]) -> Observations:
    rows, runs, values, errors = zip(*known, strict=True)
    return Observations(np.array(rows), np.array(runs), np.array(values), np.array(errors), START_SPREAD)


def _log_limit(limit: OverLimit) -> tuple[float, float]:
    """The log of a limited metric over its limit, and its standard error with what a start changes."""
    value, low, high = (min(max(number, 1.0 / WIDEST_LIMIT), WIDEST_LIMIT) for number in limit)
    return math.log(value), math.hypot((math.log(high) - math.log(low)) / (2.0 * Z95), START_SPREAD)


def pooled_limits(scores: Sequence[Score]) -> dict[str, OverLimit]:
    """Each limited metric over its limit by all these scores, weighted by their certainty, with its 95 % interval."""
    pooled = {}
    for name in dict.fromkeys(name for score in scores for name in score.limits):
        logs = [_log_limit(score.limits[name]) for score in scores if name in score.limits]
        weight = math.fsum(error**-2 for _, error in logs)
        mean, half = math.fsum(log / error**2 for log, error in logs) / weight, Z95 * weight**-0.5
        pooled[name] = math.exp(mean), math.exp(mean - half), math.exp(mean + half)
    return pooled


@dataclass(frozen=True, slots=True)
class Estimates:
    """Log ratios of contenders to the anchor, whose errors they share."""

    names: tuple[Label, ...]
    means: Values
    covariance: Values

    def with_exact(self, anchor: Label) -> Estimates:
        """With the anchor, which is 0 by definition."""
        if anchor in self.names:
            return self
        padded = np.pad(self.covariance, (0, 1))
        padded[-1, -1] = EXACT**2
        return Estimates((*self.names, anchor), np.append(self.means, 0.0), padded)

    def of(self, name: Label) -> tuple[float, float] | None:
        """Log ratio and standard error; None if it was not measured."""
        if name not in self.names:
            return None
        place = self.names.index(name)
        return float(self.means[place]), math.sqrt(self.covariance[place, place])

    def difference(self, one: Label, other: Label) -> tuple[float, float] | None:
        """How much larger one log ratio is than another, and its standard error: what both share drops out of it."""
        if not {one, other} <= {*self.names}:
            return None
        two = [self.names.index(one), self.names.index(other)]
        (a, shared), (_, b) = self.covariance[np.ix_(two, two)].tolist()
        return float(self.means[two[0]] - self.means[two[1]]), math.sqrt(max(a + b - 2.0 * shared, 0.0))


def least_squares(runs: Sequence[TuningRun], start_spread: float) -> Estimates:
    """Of every contender by the runs' scores alone."""
    known = [(number, score) for number, run in enumerate(runs) for score in run.scores]
    names = tuple(dict.fromkeys(score.contender for _, score in known))
    if not names:
        return Estimates((), np.zeros(0), np.zeros((0, 0)))
    observations = _observations([(names.index(s.contender), number, s.log_ratio, s.error) for number, s in known])
    within, starts = observations.noise()
    certainty = np.linalg.inv(within + start_spread**2 * starts)
    belongs = np.eye(len(names))[observations.rows]
    covariance: Values = np.asarray(np.linalg.inv(belongs.T @ certainty @ belongs), dtype=np.float64)
    return Estimates(names, covariance @ belongs.T @ certainty @ observations.values, covariance)


def _listed(space: Space, seed: int) -> list[dict[str, str]]:
    """The settings of all contenders, or of so many at random, the defaults first."""
    if size(space) <= MOST_LISTED:
        return list(every_contender(space))
    rng = np.random.default_rng([seed, *space.target.encode()])
    drawn: dict[_Settings, dict[str, str]] = {_settings({}): {}}
    for _ in range(4 * MOST_LISTED):
        values = {s.name: s.values[rng.integers(len(s.values))] for s in space.settings}
        settings = canonical(space, values)
        drawn.setdefault(_settings(settings), settings)
    return list(drawn.values())[:MOST_LISTED]
