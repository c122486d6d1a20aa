"""Tunings that never happened: planted speeds of settings, measured with noise, searched by the real `Search`.

The speeds have what real servers have: effects of single settings, three settings that pay only together (each two of
them cost 3 %), a cliff where one value of a setting meets one of another, a setting without effect, and a value that
breaks the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadgen.records.run import Label
from loadgen.tune.records import Contender, Score, Space, Stage, TunableSetting, TuningRun
from loadgen.tune.search import Choice, Search
from loadgen.tune.space import every_contender

Settings = Mapping[str, str]
Speed = Callable[[Settings], float]
"""log of how fast a target is with all its settings in effect."""
START = 0.02
"""Standard deviation of what a start adds to the log of a server's speed."""
ERROR = 0.02, 0.04
"""Standard errors of scores within a run: uniform between these."""
CLOSE = math.log(1.03)
"""What counts as found."""
SIZES = 50, 200, 500
"""Contenders of a target, about."""


def setting(name: str, *values: str, ordered: bool = False, **when: tuple[str, ...]) -> TunableSetting:
    return TunableSetting(name=name, default=values[0], values=values, ordered=ordered, when=when)


def space_of(size: int, target: str = "native") -> Space:
    """A space of 48, 240 or 450 contenders, like those of real servers."""
    batches = {50: ("8", "16", "32"), 200: ("8", "16", "32", "64"), 500: ("8", "16", "32", "64", "128")}[size]
    modes = ("eager", "compile") if size == 50 else ("eager", "compile", "graph")
    return Space(
        target=target,
        settings=(
            setting("engine", "torch", "onnx", "openvino"),
            setting("mode", *modes, engine=("torch",)),
            setting("max-batch-size", *batches, ordered=True),
            *(() if size == 50 else (setting("queue-delay", "0", "1", "4", ordered=True),)),
            setting("fronts", *(("0", "2") if size < 500 else ("0", "1", "2")), ordered=True),
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

    def best(self) -> float:
        """Speed of the best contender that is right and within the limit."""
        return max(
            self.speed(in_effect(self.space, settings))
            for settings in every_contender(self.space)
            if not self.is_broken(settings) and self.over_limit(settings) <= 0.0
        )


def planted(size: int, rng: np.random.Generator, target: str = "native") -> Planted:
    """A target with random effects."""
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
    cliff = {"engine": rng.choice(engines), "max-batch-size": batches[rng.choice([0, -1])]}
    lower = int(rng.integers(len(batches) - 1))
    paying = {
        "engine": {rng.choice(engines)},
        "max-batch-size": set(batches[lower : lower + 2]),
        "fronts": {rng.choice(fronts)},
    }
    bonus = rng.uniform(0.2, 0.35)
    wrong = ("mode", by_name["mode"].values[-1])
    if rng.random() < 0.5 and len(others := [engine for engine in engines[1:] if engine not in paying["engine"]]):
        wrong = "engine", str(rng.choice(others))

    def speed(values: Settings) -> float:
        total = sum(effects[name][value] for name, value in values.items() if name in effects)
        total -= 0.5 * all(values[name] == value for name, value in cliff.items())
        together = sum(values[name] in allowed for name, allowed in paying.items())
        return float(total + {3: bonus, 2: -0.03}.get(together, 0.0))

    return Planted(space, speed, lambda values: values.get(wrong[0]) == wrong[1])


@dataclass
class Machine:
    """Measures contenders as screenings do: rounds within a run, starts between runs, an anchor in common."""

    targets: Mapping[str, Planted]
    rng: np.random.Generator
    start: float = START
    error: tuple[float, float] = ERROR
    limit_error: float = 0.05

    def measure(self, stage: Stage, contenders: Sequence[Contender]) -> TuningRun:
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
            limit = None
            if target.limit is not None:
                over = target.over_limit(contender.settings) + self.rng.normal(0.0, self.limit_error)
                half = 1.96 * self.limit_error
                limit = math.exp(over), math.exp(over - half), math.exp(over + half)
            scores.append(Score(contender=contender.name, log_ratio=value, error=seen, value=1.0, limit=limit))
        return TuningRun(folder="", stage=stage, scores=tuple(scores), out=out)


@dataclass
class PlayedTuning:
    """A whole tuning up to the winners."""

    targets: Mapping[str, Planted]
    search: Search
    choices: tuple[Choice, ...] = ()
    runs: list[TuningRun] = field(default_factory=list)

    def lost(self, choice: Choice) -> float:
        """How much the best of a target is faster than the choice, as a log ratio."""
        target = self.targets[choice.target]
        assert choice.winner is not None
        return target.best() - target.of(choice.winner)


def screen(search: Search, machine: Machine, screenings: int, places: int = 5) -> None:
    for _ in range(screenings):
        contenders = search.next_screening(places)
        if not contenders:
            return
        search.tell(machine.measure("screening", contenders))


def choose(search: Search, machine: Machine, passes: int = 2, places: int = 5) -> tuple[Choice, ...]:
    """Measure the finalists freshly so often, in runs of equal size as the race does."""
    finalists = search.finalists(3)
    count = math.ceil(len(finalists) / places)
    for number in range(passes):
        turned = finalists[number:] + finalists[:number]
        for place in range(count):
            search.tell(machine.measure("finalists", turned[place::count]))
    return search.winners()


def play(targets: Mapping[str, Planted], seed: int, screenings: int, passes: int = 2, places: int = 5) -> PlayedTuning:
    """One tuning of these targets."""
    machine = Machine(targets, np.random.default_rng([seed, 1]))
    search = Search([target.space for target in targets.values()], seed)
    screen(search, machine, screenings, places)
    return PlayedTuning(targets, search, choose(search, machine, passes, places))


def two_targets(size: int, seed: int) -> dict[str, Planted]:
    rng = np.random.default_rng([seed, size])
    return {name: planted(size, rng, name) for name in ("native", "triton")}
