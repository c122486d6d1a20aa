"""From the settings of a matrix to its configurations, and the order in which they are measured; computes only.

What an engine offers, and whether this machine can measure a configuration, is asked of `servers.measuring.worker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from loadgen.experiment.matrix import ALL, AUTO, NO_BASELINE, MatrixSettings
from loadgen.experiment.plan import PlanError, unknown
from loadgen.records.matrix import NO_MODEL, Configuration, MatrixPlan, RefusedCombination, Shape
from loadgen.records.targets import Kind

BATCHES = {"cpu": (1, 4, 8), "cuda": (1, 8, 32, 128)}
BASELINE_PRECISION = "fp32"


class Offers(msgspec.Struct, frozen=True):
    """What this machine offers: the device in effect, and the GPUs as gpu-info shows them."""

    device: str
    modes: dict[str, dict[str, tuple[str, ...]]]
    """By engine and by kind of device, cpu or cuda."""
    precisions: dict[str, dict[str, tuple[str, ...]]]
    gpu: dict[str, Any]

    @property
    def place(self) -> str:
        return "cpu" if self.device == "cpu" else "cuda"


class CombinationCheck(msgspec.Struct, frozen=True):
    """The worker's answer to one combination; see `servers.measuring.request`."""

    reason: str | None
    wrong: bool
    precision: str
    mode: str
    device: str
    threads: int | None
    lengths: tuple[int | None, ...]
    too_long: str | None


class PlannedVisit(NamedTuple):
    """One visit to make: its number, and its cells in their order."""

    number: int
    round: int
    configuration: int
    cells: tuple[Shape, ...]


def expand(settings: MatrixSettings, offers: Offers) -> dict[Configuration, bool]:
    """Every combination of the axes, in the order of the settings; then the baselines. False: only a baseline of the
    speed-ups, not asked for. Precision and mode may be auto, and 0 threads are all cores. Raises `PlanError` for a name
    that no engine knows."""
    kind, offered = offers.place, offers.modes
    base = settings.chosen_baseline
    modes = {mode for offer in offers.modes.values() for of_kind in offer.values() for mode in of_kind}
    precisions = {name for offer in offers.precisions.values() for of_kind in offer.values() for name in of_kind}
    _check("--engines", settings.chosen_engines, (*offered, ALL))
    _check("--modes", settings.modes, (AUTO, ALL, *sorted(modes)))
    _check("--precisions", settings.precisions, (AUTO, ALL, *sorted(precisions)))
    engines = _with_all(
        settings.chosen_engines, (name for name in offered if kind in offered[name] and name != NO_MODEL)
    )
    threads = settings.threads if kind == "cpu" else (0,)
    combinations: dict[Configuration, bool] = {}

    def add(model: str, engine: str, precision: str, mode: str, count: int, *, asked: bool) -> None:
        combination = Configuration(
            model=model, engine=engine, precision=precision, mode=mode, device=offers.device, threads=count
        )
        combinations.setdefault(combination, asked)

    for model, engine in product(settings.models, engines):
        axis_precisions = _with_all(settings.precisions, offers.precisions[engine].get(kind, (AUTO,)))
        axis_modes = _with_all(settings.modes, offers.modes[engine].get(kind, (AUTO,)))
        for precision, mode, count in product(axis_precisions, axis_modes, threads):
            add(model, engine, precision, mode, count, asked=True)
    if base != NO_BASELINE:
        engine, _, mode = base.partition("/")
        _check("--baseline", (engine,), tuple(offered))
        _check("--baseline", (mode,), sorted({mode for modes in offered[engine].values() for mode in modes}))
        of_baseline = {Kind.TENSORS: (BASELINE_PRECISION,), Kind.TOKENS: settings.precisions}[settings.kind]
        for model, precision, count in product(settings.models, of_baseline, threads):
            add(model, engine, precision, mode, count, asked=False)
    return combinations


def requests_of(
    settings: MatrixSettings, combinations: Iterable[Configuration], offers: Offers
) -> list[dict[str, Any]]:
    """The combinations as the worker takes them."""
    batches, content = batches_of(settings, offers), settings.content()
    return [request_of(combination, content, batches, settings.sequence_lengths) for combination in combinations]


def request_of(
    configuration: Configuration,
    settings: Mapping[str, Any],
    batches: Sequence[int],
    lengths: Sequence[int | None],
    **more: object,
) -> dict[str, Any]:
    """One configuration as the worker takes it, see `servers.measuring.request`; `settings` are the stored ones."""
    return {
        **asdict(configuration),
        "threads": configuration.threads or 0,
        "batches": batches,
        "lengths": lengths,
        "payload": settings.get("payload") or "",
        "weights": settings.get("weights"),
        "artefacts": settings.get("artefacts", ""),
        "profile": bool(settings.get("profile")),
        **more,
    }


def batches_of(settings: MatrixSettings, offers: Offers) -> tuple[int, ...]:
    """The batch sizes, ascending."""
    return tuple(sorted(set(settings.batches))) or BATCHES[offers.place]


def make_plan(
    settings: MatrixSettings,
    offers: Offers,
    combinations: Mapping[Configuration, bool],
    checks: Sequence[CombinationCheck],
) -> MatrixPlan:
    """The configurations that can be measured and those that are refused. Raises `PlanError` for a model or weights
    that do not exist, and where nothing can be measured."""
    configurations: dict[Configuration, None] = {}
    refused: dict[RefusedCombination, None] = {}
    lengths: dict[str, tuple[int | None, ...]] = {}
    reasons: dict[str | None, None] = {}
    for (combination, asked), check in zip(combinations.items(), checks, strict=True):
        if check.wrong:
            raise PlanError(f"--models {combination.model}: {check.reason}")
        configuration = replace(
            combination,
            precision=check.precision or combination.precision,
            mode=check.mode or _first_mode(combination, offers),
            threads=check.threads,
        )
        if check.reason is None:
            configurations[configuration] = None
            lengths[combination.model] = check.lengths
        if asked:
            reasons[check.reason] = None
            if (reason := check.reason or check.too_long) is not None:
                refused[RefusedCombination(configuration=configuration, reason=reason)] = None
    if None not in reasons:
        raise PlanError(f"nothing can be measured: {'; '.join(map(str, [*reasons][:3]))}")
    if settings.sequence_lengths and all(of_model == (None,) for of_model in lengths.values()):
        raise PlanError("--sequence-lengths: none of the models has an axis of variable size; leave the option out")
    return MatrixPlan(
        settings=settings.content(),
        sha256=settings.sha256(),
        seed=settings.seed,
        rounds=settings.rounds,
        processes=settings.processes,
        configurations=tuple(configurations),
        refused=tuple(refused),
        batches=batches_of(settings, offers),
        lengths=lengths,
        baseline=settings.chosen_baseline,
        min_cosine=settings.min_cosine,
        min_top1=settings.min_top1,
    )


def schedule(plan: MatrixPlan) -> tuple[PlannedVisit, ...]:
    """Every visit in its order: in each round every configuration once, in random order. With processes "kept" all
    rounds of a model come before those of the next."""
    places = range(len(plan.configurations))
    groups: list[list[int]] = [list(places)]
    if plan.processes == "kept":
        models = dict.fromkeys(configuration.model for configuration in plan.configurations)
        groups = [[place for place in places if plan.configurations[place].model == model] for model in models]
    return tuple(turn for group in groups for number in range(plan.rounds) for turn in _round(plan, number, group))


def _round(plan: MatrixPlan, number: int, places: Sequence[int]) -> Iterator[PlannedVisit]:
    for place in _shuffled(places, f"{plan.seed} round {number}"):
        cells = product(plan.batches, plan.lengths[plan.configurations[place].model])
        order = _shuffled(list(cells), f"{plan.seed} round {number} configuration {place}")
        yield PlannedVisit(number * len(plan.configurations) + place, number, place, tuple(order))


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The values that differ: "rounds 5 instead of 10"."""
    names = sorted({*before, *now})
    return ", ".join(
        f"{name} {_shown(before.get(name))} instead of {_shown(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    )


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


def _shuffled(values: Sequence[Any], seed: str) -> list[Any]:
    return Random(seed).sample(values, len(values))


def _check(option: str, values: Iterable[str], known: Sequence[str]) -> None:
    for value in values:
        if value not in known:
            raise PlanError(unknown(option, value, known))


def _with_all(values: Sequence[str], every: Iterable[str]) -> tuple[str, ...]:
    """The values, with `all` replaced by every value."""
    every = tuple(every)
    return tuple(dict.fromkeys(name for value in values for name in (every if value == ALL else (value,))))


def _first_mode(combination: Configuration, offers: Offers) -> str:
    """The mode of a refused combination, where the engine's first was asked for."""
    if combination.mode != AUTO:
        return combination.mode
    modes = offers.modes[combination.engine]
    return next(iter(modes.get(offers.place) or next(iter(modes.values()), ())), AUTO)
