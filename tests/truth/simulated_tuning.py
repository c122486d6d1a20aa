"""Tunings that never happened: planted speeds of settings, measured with noise, searched by the real `Search`.

The speeds have what real servers have: effects of single settings, three settings that pay only together (each two of
them cost 3 %), a cliff where one value of a setting meets one of another, a setting without effect, and a value that
breaks the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import msgspec
import numpy as np

from loadgen.records.run import Label
from loadgen.records.tuning import Contender, Score, Space, Stage, TunableSetting, TuningRun
from loadgen.tune.outcome import P99, TargetOutcome
from loadgen.tune.search import Choice, RaceLead, Search
from loadgen.tune.space import every_contender
from tests.truth.promises import Share
from tests.truth.simulated_runs import experiment, plain, simulate

Settings = Mapping[str, str]
Speed = Callable[[Settings], float]
"""log of how fast a target is with all its settings in effect."""
START = 0.02
"""Standard deviation of what a start adds to the log of a server's speed."""
ERROR = 0.02, 0.04
"""Standard errors of scores within a run: uniform between these."""
MARGIN = 0.05
"""The margin of a comparison by default."""
CLOSE = math.log(1.03)
"""What counts as found."""


def setting(name: str, *values: str, ordered: bool = False, **when: tuple[str, ...]) -> TunableSetting:
    return TunableSetting(name=name, default=values[0], values=values, ordered=ordered, when=when)


def space_of(size: int, target: str = "native") -> Space:
    """A space of 48, 240 or 450 contenders, like those of real servers."""
    batches = {48: ("8", "16", "32"), 240: ("8", "16", "32", "64"), 450: ("8", "16", "32", "64", "128")}[size]
    modes = ("eager", "compile") if size == 48 else ("eager", "compile", "graph")
    return Space(
        target=target,
        settings=(
            setting("engine", "torch", "onnx", "openvino"),
            setting("mode", *modes, engine=("torch",)),
            setting("max-batch-size", *batches, ordered=True),
            *(() if size == 48 else (setting("queue-delay", "0", "1", "4", ordered=True),)),
            setting("fronts", *(("0", "2") if size < 450 else ("0", "1", "2")), ordered=True),
            setting("pinned", "no", "yes"),
        ),
    )


def in_effect(space: Space, settings: Settings) -> dict[str, str]:
    """The value of every setting that applies."""
    values: dict[str, str] = {}
    for item in space.settings:
        if all(values.get(name) in allowed for name, allowed in item.when.items()):
            values[item.name] = settings.get(item.name, item.default)
    return values


@dataclass(frozen=True)
class Planted:
    """What is true of one target."""

    space: Space
    speed: Speed
    broken: Callable[[Settings], bool]
    limit: Speed | None = None
    """log of the limited metric over its limit."""

    def of(self, contender: Contender) -> float:
        return self.speed(in_effect(self.space, contender.settings))

    def is_broken(self, settings: Settings) -> bool:
        return self.broken(in_effect(self.space, settings))

    def over_limit(self, settings: Settings) -> float:
        return -1.0 if self.limit is None else self.limit(in_effect(self.space, settings))

    def best(self, room: float = 0.0) -> float:
        """Speed of the best contender that is right and within the limit, by so much on the log scale."""
        return max(
            self.speed(in_effect(self.space, settings))
            for settings in every_contender(self.space)
            if not self.is_broken(settings) and self.over_limit(settings) <= -room
        )


def planted(size: int, rng: np.random.Generator, target: str = "native", *, limited: bool = False) -> Planted:
    """A target with random effects; with `limited` the limited metric is larger for larger batches and what is
    faster."""
    space = space_of(size, target)
    by_name = {item.name: item for item in space.settings}
    engines, batches, fronts = (by_name[name].values for name in ("engine", "max-batch-size", "fronts"))
    effects: dict[str, dict[str, float]] = {}
    for item in space.settings[:-1]:
        if item.ordered:
            last, peak, width = len(item.values) - 1, rng.uniform(0, 1), rng.uniform(0.12, 0.5)
            effects[item.name] = {v: -width * (rank / last - peak) ** 2 for rank, v in enumerate(item.values)}
        else:
            effects[item.name] = dict(zip(item.values, rng.normal(0.0, 0.1, len(item.values)).tolist(), strict=True))
    cliff = {"engine": {rng.choice(engines)}, "max-batch-size": {batches[rng.choice([0, -1])]}}
    lower = int(rng.integers(len(batches) - 1))
    paying = {
        "engine": {rng.choice(engines)},
        "max-batch-size": set(batches[lower : lower + 2]),
        "fronts": {rng.choice(fronts)},
    }
    bonus = {3: rng.uniform(0.2, 0.35), 2: -0.03}
    wrong = ("mode", by_name["mode"].values[-1])
    if rng.random() < 0.5 and (others := [engine for engine in engines[1:] if engine not in paying["engine"]]):
        wrong = "engine", str(rng.choice(others))

    def speed(values: Settings) -> float:
        single = sum(effects[name][value] for name, value in values.items() if name in effects)
        fall = 0.5 * (matching(values, cliff) == 2)
        return float(single - fall + bonus.get(matching(values, paying), 0.0))

    def over(values: Settings) -> float:
        return 0.8 * speed(values) + 0.2 * batches.index(values["max-batch-size"]) - middle

    middle = 0.0
    middle = float(np.median([over(in_effect(space, settings)) for settings in every_contender(space)]))
    return Planted(space, speed, lambda values: values.get(wrong[0]) == wrong[1], over if limited else None)


def only_together(size: int, rng: np.random.Generator, target: str = "native") -> Planted:
    """A target of which three settings together pay 25 %, and nothing else matters but that each two cost 3 %."""
    space = space_of(size, target)
    by_name = {item.name: item.values for item in space.settings}
    batch = int(rng.integers(1, len(by_name["max-batch-size"]) - 1))
    paying = {
        "engine": {str(rng.choice(by_name["engine"][1:]))},
        "max-batch-size": set(by_name["max-batch-size"][batch : batch + 2]),
        "fronts": {by_name["fronts"][-1]},
    }
    bonus = {3: 0.25, 2: -0.03}
    return Planted(space, lambda values: bonus.get(matching(values, paying), 0.0), lambda _: False)


def wrong_is_fastest(size: int, rng: np.random.Generator, target: str = "native") -> Planted:
    """A target whose wrong answers come 50 % faster than any right ones."""
    right = planted(size, rng, target)
    return replace(right, speed=lambda values: right.speed(values) + 0.9 * right.broken(values))


def matching(values: Settings, wanted: Mapping[str, set[str]]) -> int:
    """How many of the settings have one of the wanted values."""
    return sum(values.get(name) in allowed for name, allowed in wanted.items())


@dataclass
class Machine:
    """Measures contenders as screenings do: rounds within a run, starts between runs, an anchor in common."""

    targets: Mapping[str, Planted]
    rng: np.random.Generator
    start: float = START
    error: tuple[float, float] = ERROR
    limit_error: float = 0.05
    runs: list[TuningRun] = field(default_factory=list)

    def measure(self, stage: Stage, contenders: Sequence[Contender]) -> TuningRun:
        """One run of contenders beside the anchor, the first target at its defaults."""
        first = next(iter(self.targets.values()))
        anchor = first.speed(in_effect(first.space, {})) + self.rng.normal(0.0, self.start)
        anchor_noise = self.rng.normal(0.0, math.sqrt(0.5))
        scores, out = [], dict[Label, str]()
        for contender in contenders:
            target = self.targets[contender.target]
            if target.is_broken(contender.settings):
                out[contender.name] = "Wrong answers."
                continue
            error = self.rng.uniform(*self.error)
            value = target.of(contender) + self.rng.normal(0.0, self.start) - anchor
            value += error * (self.rng.normal(0.0, math.sqrt(0.5)) - anchor_noise)
            seen = error * math.sqrt(self.rng.chisquare(12) / 12)
            limits = {}
            if target.limit is not None:
                over = target.over_limit(contender.settings) + self.rng.normal(0.0, self.limit_error)
                half = 1.96 * self.limit_error
                limits = {P99.name: (math.exp(over), math.exp(over - half), math.exp(over + half))}
            scores.append(Score(contender=contender.name, log_ratio=value, error=seen, value=1.0, limits=limits))
        self.runs.append(TuningRun(folder="", stage=stage, scores=tuple(scores), out=out))
        return self.runs[-1]


@dataclass(frozen=True)
class PlayedTuning:
    """A whole tuning up to the winners."""

    targets: Mapping[str, Planted]
    choices: tuple[Choice, ...]
    runs: tuple[TuningRun, ...]
    start_spread: float
    """As the search estimates it."""

    def lost(self, choice: Choice, room: float = 0.0) -> float:
        """How much faster the best of a target, `Planted.best`, is than the choice, as a log ratio."""
        target = self.targets[choice.target]
        return math.inf if choice.winner is None else target.best(room) - target.of(choice.winner)


def play(
    targets: Mapping[str, Planted], seed: int, screenings: int, passes: int = 2, places: int = 5,
    kind: type[Search] = Search, start: float = START,
) -> PlayedTuning:  # fmt: skip
    """One tuning of these targets, without its final."""
    machine = Machine(targets, np.random.default_rng([seed, 1]), start=start)
    search = kind([target.space for target in targets.values()], seed)
    screen(search, machine, screenings, places)
    choices = choose(search, machine, passes, places)
    return PlayedTuning(targets, choices, tuple(machine.runs), search.start_spread)


def screen(search: Search, machine: Machine, screenings: int, places: int = 5) -> None:
    """So many screenings, fewer if there is nothing left to measure."""
    for _ in range(screenings):
        contenders = search.next_screening(places)
        if not contenders:
            return
        search.tell(machine.measure("screening", contenders))


def choose(search: Search, machine: Machine, passes: int, places: int = 5) -> tuple[Choice, ...]:
    """Measure the finalists freshly so often, in runs of equal size as the race does."""
    finalists = search.finalists(3)
    count = math.ceil(len(finalists) / places)
    for number in range(passes):
        turned = finalists[number:] + finalists[:number]
        for place in range(count):
            search.tell(machine.measure("finalists", turned[place::count]))
    return search.winners()


def final(
    played: PlayedTuning, rng: np.random.Generator, *, rounds: int, restarts: int, start: float = START
) -> tuple[bool, bool]:
    """The final comparison of the defaults and the winners of two targets: whether it names a winner between the best
    of both, and whether these are the defaults of both."""
    speeds, outcomes = dict[Label, float](), []
    for choice in played.choices:
        target, default = played.targets[choice.target], Contender(name=f"{choice.target}-0", target="", settings={})
        chosen = choice.winner or default
        speeds |= {contender.name: target.of(contender) for contender in (default, chosen)}
        outcomes.append((target, default, chosen))
    plan = experiment(1, rounds, MARGIN, restarts=restarts, arms=len(speeds))
    names = dict(zip(plan.labels, speeds, strict=True))
    effects = {label: math.exp(speeds[name]) for label, name in names.items()}
    compared = {
        frozenset(names[label] for label in c.pairing): msgspec.structs.replace(
            c, baseline=names[c.baseline], arm=names[c.arm]
        )
        for c in simulate(plan, rng, plain, effects, restart_spread=math.sqrt(2.0) * start)
        if c.leading
    }
    error = math.sqrt(2.0) * played.start_spread if restarts == 1 else 0.0
    bests = [
        TargetOutcome(
            place=0, space=target.space, contenders=(), default=default, chosen=chosen, equals=(),
            race=RaceLead("", 0), worth={}, figures={default.name: {}, chosen.name: {}},
            lead=compared.get(frozenset((default.name, chosen.name))), start_error=error,
        ).best
        for target, default, chosen in outcomes
    ]  # fmt: skip
    labels = [best.name for best in bests if best is not None]
    return compared[frozenset(labels)].winner is not None, all(label.endswith("-0") for label in labels)


def found_best(
    plant: Callable[..., Planted], contenders: int, screenings: int, tunings: int, kind: type[Search] = Search
) -> Share:
    """Targets whose chosen settings are within 3 % of the best, of tunings of two targets with so many contenders."""
    lost = []
    for seed in range(tunings):
        rng = np.random.default_rng([seed, contenders])
        targets = {name: plant(contenders, rng, name) for name in ("native", "triton")}
        played = play(targets, seed, screenings, kind=kind)
        lost += [played.lost(choice) for choice in played.choices]
    return Share(sum(loss < CLOSE for loss in lost), len(lost))


@cache
def equals(contenders: int, screenings: int, seed: int) -> PlayedTuning:
    """A tuning of two targets that are equal with any settings."""
    truth = planted(contenders, np.random.default_rng([seed, contenders]))
    equal = replace(truth, space=space_of(contenders, "triton"))
    return play({"native": truth, "triton": equal}, seed, screenings)


def named_among_equals(
    contenders: int, screenings: int, tunings: int, *, finals: int, restarts: int = 5, start: float = START
) -> Share:
    """Finals that name a winner between the best of two targets that are equal with any settings."""
    named = 0
    for seed in range(tunings):
        played = equals(contenders, screenings, seed)
        rngs = (np.random.default_rng([seed, number, 2]) for number in range(finals))
        named += sum(final(played, rng, rounds=15, restarts=restarts, start=start)[0] for rng in rngs)
    return Share(named, tunings * finals)


def changed_without_reason(screenings: int, tunings: int, *, restarts: int, start: float = START) -> Share:
    """Short tunings of two equal targets, no setting of which matters, that change a default of one."""
    changed = 0
    for seed in range(tunings):
        flat = {name: Planted(space_of(48, name), lambda _: 0.0, lambda _: False) for name in ("native", "triton")}
        played = play(flat, seed, screenings, passes=seed % 2, start=start)
        rng = np.random.default_rng([seed, 3])
        changed += not final(played, rng, rounds=15, restarts=restarts, start=start)[1]
    return Share(changed, tunings)
