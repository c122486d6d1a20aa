"""From the settings of a matrix to its configurations, and the order in which they are measured; computes only.

What an engine offers, and whether this machine can measure a configuration, is asked of `servers.measuring.worker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, NamedTuple

import msgspec

from loadgen.engine_matrix.records import Configuration, Plan, Refusal
from loadgen.engine_matrix.settings import ALL, AUTO, NO_BASELINE, MatrixSettings
from loadgen.experiment.plan import PlanError, unknown

BATCHES = {"cpu": (1, 4, 8), "cuda": (1, 8, 32, 128)}
BASELINE_PRECISION = "fp32"
NO_MODEL = "null"
"""The engine that computes no model, so that `all` leaves it out and its answers are not compared."""
Cell = tuple[int, int | None]
"""A batch size and a length."""


class EngineOffer(msgspec.Struct, frozen=True):
    """The modes and precisions of an engine by kind of device, cpu or cuda."""

    modes: dict[str, tuple[str, ...]]
    precisions: dict[str, tuple[str, ...]]


class Offers(msgspec.Struct, frozen=True):
    """What this machine offers: the device in effect, all engines, and the GPUs as gpu-info shows them."""

    device: str
    engines: dict[str, EngineOffer]
    gpu: dict[str, Any]

    @property
    def place(self) -> str:
        return "cpu" if self.device == "cpu" else "cuda"


class Wanted(NamedTuple):
    """One combination of the axes; precision and mode may be auto, and 0 threads are all cores."""

    model: str
    engine: str
    precision: str
    mode: str
    threads: int
    asked: bool = True
    """False for a baseline that only the speed-ups need."""


class Checked(msgspec.Struct, frozen=True):
    """The worker's answer to one combination; see `servers.measuring.request`."""

    reason: str | None
    wrong: bool
    precision: str
    mode: str
    device: str
    threads: int | None
    lengths: tuple[int | None, ...]
    too_long: str | None


class Turn(NamedTuple):
    """One visit to make: its number, and its cells in their order."""

    number: int
    round: int
    configuration: int
    cells: tuple[Cell, ...]


def expand(settings: MatrixSettings, offers: Offers) -> tuple[Wanted, ...]:
    """Every combination of the axes, each once, in the order of the settings; then the baselines. Raises `PlanError`
    for a name that no engine knows."""
    place, known = offers.place, offers.engines
    modes = {mode for one in known.values() for some in one.modes.values() for mode in some}
    precisions = {name for one in known.values() for some in one.precisions.values() for name in some}
    _check("--engines", settings.engines, (*known, ALL))
    _check("--modes", settings.modes, (AUTO, ALL, *sorted(modes)))
    _check("--precisions", settings.precisions, (AUTO, ALL, *sorted(precisions)))
    engines = _with_all(settings.engines, (name for name in known if place in known[name].modes and name != NO_MODEL))
    threads = settings.threads if place == "cpu" else (0,)
    wanted: dict[Wanted, None] = {}
    for model, engine in product(settings.models, engines):
        offer = known[engine]
        axes = (
            _with_all(settings.precisions, offer.precisions.get(place, (AUTO,))),
            _with_all(settings.modes, offer.modes.get(place, (AUTO,))),
            threads,
        )
        wanted |= dict.fromkeys(Wanted(model, engine, *combination) for combination in product(*axes))
    if settings.baseline != NO_BASELINE:
        engine, _, mode = settings.baseline.partition("/")
        _check("--baseline", (engine,), tuple(known))
        own = {mode for some in known[engine].modes.values() for mode in some}
        _check("--baseline", (mode,), tuple(sorted(own)))
        baselines = (Wanted(model, engine, BASELINE_PRECISION, mode, n) for model in settings.models for n in threads)
        wanted |= dict.fromkeys(one._replace(asked=False) for one in baselines if one not in wanted)
    return tuple(wanted)


def requests_of(settings: MatrixSettings, wanted: Sequence[Wanted], offers: Offers) -> list[dict[str, Any]]:
    """The combinations as the worker takes them."""
    shared: dict[str, Any] = {
        "payload": settings.payload or "",
        "weights": settings.weights,
        "device": offers.device,
        "batches": batches_of(settings, offers),
        "lengths": settings.sequence_lengths,
        "artefacts": settings.artefacts,
        "profile": settings.profile,
    }
    return [
        {
            **shared,
            "model": one.model,
            "engine": one.engine,
            "precision": one.precision,
            "mode": one.mode,
            "threads": one.threads,
        }
        for one in wanted
    ]


def batches_of(settings: MatrixSettings, offers: Offers) -> tuple[int, ...]:
    """The batch sizes, ascending."""
    return tuple(sorted(set(settings.batches))) or BATCHES[offers.place]


def make_plan(settings: MatrixSettings, offers: Offers, wanted: Sequence[Wanted], checked: Sequence[Checked]) -> Plan:
    """The configurations that can be measured and those that are refused. Raises `PlanError` for a model or weights
    that do not exist, and where nothing can be measured."""
    configurations: dict[Configuration, None] = {}
    refused: dict[Refusal, None] = {}
    lengths: dict[str, tuple[int | None, ...]] = {}
    for one, found in zip(wanted, checked, strict=True):
        if found.wrong:
            raise PlanError(f"--models {one.model}: {found.reason}")
        configuration = Configuration(
            model=one.model,
            engine=one.engine,
            precision=found.precision or one.precision,
            mode=found.mode or _first_mode(one, offers),
            device=offers.device,
            threads=found.threads,
        )
        if found.reason is None:
            configurations[configuration] = None
            lengths[one.model] = found.lengths
        if one.asked and (reason := found.reason or found.too_long) is not None:
            refused[Refusal(configuration=configuration, reason=reason)] = None
    if not any(found.reason is None and one.asked for one, found in zip(wanted, checked, strict=True)):
        reasons = dict.fromkeys(str(found.reason) for one, found in zip(wanted, checked, strict=True) if one.asked)
        raise PlanError(f"nothing can be measured: {'; '.join(list(reasons)[:3])}")
    if settings.sequence_lengths and all(some == (None,) for some in lengths.values()):
        raise PlanError("--sequence-lengths: none of the models has an axis of variable size; leave the option out")
    return Plan(
        settings=settings.content(),
        sha256=settings.sha256(),
        seed=settings.seed,
        rounds=settings.rounds,
        processes=settings.processes,
        configurations=tuple(configurations),
        refused=tuple(refused),
        batches=batches_of(settings, offers),
        lengths=lengths,
        baseline=settings.baseline,
        min_cosine=settings.min_cosine,
        min_top1=settings.min_top1,
    )


def schedule(plan: Plan) -> tuple[Turn, ...]:
    """Every visit in its order: in each round every configuration once, in random order. With processes "kept" all
    rounds of a model come before those of the next."""
    places = range(len(plan.configurations))
    groups: list[list[int]] = [list(places)]
    if plan.processes == "kept":
        models = dict.fromkeys(one.model for one in plan.configurations)
        groups = [[place for place in places if plan.configurations[place].model == model] for model in models]
    return tuple(turn for group in groups for number in range(plan.rounds) for turn in _round(plan, number, group))


def _round(plan: Plan, number: int, places: Sequence[int]) -> Iterator[Turn]:
    for place in _shuffled(places, f"{plan.seed} round {number}"):
        cells = product(plan.batches, plan.lengths[plan.configurations[place].model])
        order = _shuffled(list(cells), f"{plan.seed} round {number} configuration {place}")
        yield Turn(number * len(plan.configurations) + place, number, place, tuple(order))


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The values that differ: "rounds 5 instead of 10"."""
    names = sorted({*before, *now})
    return ", ".join(
        f"{name} {_shown(before.get(name))} instead of {_shown(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    )


def _shown(value: object) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _shuffled(values: Sequence[Any], seed: str) -> list[Any]:
    return Random(seed).sample(values, len(values))


def _check(option: str, given: Iterable[str], known: Sequence[str]) -> None:
    for value in given:
        if value not in known:
            raise PlanError(unknown(option, value, known))


def _with_all(given: Sequence[str], every: Iterable[str]) -> tuple[str, ...]:
    """The values given, with `every` in the place of all."""
    every = tuple(every)
    return tuple(dict.fromkeys(one for value in given for one in (every if value == ALL else (value,))))


def _first_mode(one: Wanted, offers: Offers) -> str:
    """The mode of a refused combination, where the engine's first was asked for."""
    if one.mode != AUTO:
        return one.mode
    modes = offers.engines[one.engine].modes
    return next(iter(modes.get(offers.place) or next(iter(modes.values()), ())), AUTO)
